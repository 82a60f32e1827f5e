"""What plain lines say of rounds that not every peer completes."""

from __future__ import annotations

import pytest

from gasloc_p2p.display import LATE_ROUNDS, PlainDisplay
from gasloc_p2p.node.events import RoundFinished
from gasloc_p2p.node.report import round_report


def finished(round: int, reason: str = "") -> RoundFinished:
    report = round_report(
        round=round,
        closing=False,
        losses=[1.0],
        outcomes=[],
        reverted=False,
        train_s=1.0,
        exchange_s=1.0,
        wait_s=0.0,
        reason=reason,
    )
    return RoundFinished(report=report)


def test_a_round_is_told_once_all_have_it_or_the_first_left_it_behind(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def lines() -> list[str]:
        return [line.partition("  train")[0] for line in capsys.readouterr().out.splitlines()]

    with PlainDisplay(peers=2, rounds=40) as display:
        display.observe(0, finished(0))
        assert lines() == []
        display.observe(1, finished(0))
        assert lines() == ["round 1/40"]
        for round in range(1, LATE_ROUNDS + 1):
            display.observe(0, finished(round))
        assert lines() == []
        display.observe(0, finished(LATE_ROUNDS + 1))
        assert lines() == ["round 2/40  1 of 2 peers"]
        display.observe(1, finished(1))
        display.observe(1, finished(LATE_ROUNDS + 1))
        told = lines()
        assert told[0] == "round 3/40  1 of 2 peers"
        assert told[-1] == f"round {LATE_ROUNDS + 2}/40", "the other one jumped to it"
        display.observe(0, finished(LATE_ROUNDS + 2))
        assert lines() == []
    assert lines() == [f"round {LATE_ROUNDS + 3}/40  1 of 2 peers"], "the rest, at the end"


def test_why_a_peer_does_fewer_steps_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    bound = "link-bound: 11 of 30 steps"
    with PlainDisplay(peers=1, rounds=40) as display:
        display.observe(0, finished(0, bound))
        display.observe(0, finished(1))
    told, untold = capsys.readouterr().out.splitlines()
    assert told.endswith(f"unpaired  {bound}")
    assert untold.endswith("unpaired")
    with PlainDisplay(peers=3, rounds=40) as display:
        for reason in (bound, "compute-bound: 3 of 30 steps", "link-bound: 9 of 30 steps"):
            display.observe(0, finished(0, reason))
    assert capsys.readouterr().out.strip().endswith("unpaired  2 link-bound, 1 compute-bound")
