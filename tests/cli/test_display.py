"""What plain lines say of rounds that not every peer completes."""

from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console

from gasloc_p2p.core.types import EdgeKind
from gasloc_p2p.display import LATE_ROUNDS, LiveDisplay, PlainDisplay
from gasloc_p2p.node.events import (
    PeersChanged,
    PeerWork,
    RoundFinished,
    RoundStarted,
    Training,
    Validated,
    WorkTold,
)
from gasloc_p2p.node.report import EdgeReport, round_report
from gasloc_p2p.node.sentences import sentence


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


TOLD = WorkTold(
    peers=(
        PeerWork(
            peer_id="Qm-own", tokens=9600, rounds=8, bytes_sent=2_000_000, steps=10.0, every=1
        ),
        PeerWork(peer_id="Qm-slow", tokens=3200, rounds=2, bytes_sent=300_000, steps=12.5, every=3),
    )
)


def test_who_did_what_is_told_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    with PlainDisplay(peers=1, rounds=40) as display:
        display.observe(0, WorkTold(peers=()))
        display.observe(0, TOLD)
        assert not capsys.readouterr().out
    heading, own, slow = capsys.readouterr().out.splitlines()
    assert heading == "who did what, as everybody tells:"
    assert own == "  Qm-own  9600 tokens in 8 rounds of 10.0 steps, 2.0 MB sent"
    assert slow.split("  ")[-1] == (
        "3200 tokens in 2 rounds of 12.5 steps, one of 3 rounds, 0.3 MB sent"
    )
    for display in (PlainDisplay(peers=2, rounds=40), PlainDisplay(peers=1, rounds=40)):
        with display:
            display.observe(0, TOLD if display._peers == 2 else WorkTold(peers=TOLD.peers[:1]))
    assert not capsys.readouterr().out, "of several peers or of one alone there is nothing to add"


def test_who_did_what_stands_below_the_live_table() -> None:
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=120)
    with LiveDisplay(console, title="a run", peers=1, rounds=40) as display:
        display.observe(0, TOLD)
    shown = text.getvalue()
    assert "who did what" in shown
    assert "one of 3" in shown


def test_all_of_the_live_table_is_legible_in_a_narrow_terminal() -> None:
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, color_system=None, width=80)
    edges = [EdgeKind.APPLIED] * 34 + [EdgeKind.TIMED_OUT, EdgeKind.NOT_PARTNER]
    with LiveDisplay(console, title="a run", peers=4, rounds=1000) as display:
        for index in range(4):
            report = msgspec.structs.replace(
                finished(120).report,
                edges=tuple(EdgeReport(partner="Qm-other", kind=kind) for kind in edges),
                bytes_sent=123_400_000,
                train_loss=2.123,
            )
            display.observe(index, RoundFinished(report=report))
            display.observe(index, Validated(round=120, val_loss=2.2))
            display.observe(
                index,
                RoundStarted(
                    round=121,
                    closing=False,
                    partners=("Qm-one-two", "Qm-three-four"),
                    peers=4,
                    reason="link-bound: 11 of 30 steps",
                ),
            )
    shown = text.getvalue().rpartition("a run")[2]
    assert "\u2026" not in shown, "nothing is cut"
    for told in ("122/1000", "123.4", "34 applied", "1 timed_out", "1 not_partner", "link-bound:"):
        assert shown.count(told) == 4, told


TRAINING = Training(
    model="nano",
    architecture="Llama",
    parameters=29_432_000,
    precision="fp32",
    device="CPU",
    text="shakespeare.txt",
    topology="ring",
    codec="mod4",
)
CHANGED = PeersChanged(round=4, peers=5, joined=1, names={"joined": "12D3-abcdef"})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "exchanges mod4 codes in a random ring"),
        ({"codec": "none", "topology": "pairs"}, "exchanges fp32 parameters in random pairs"),
        ({"topology": "none"}, "exchanges nothing"),
        ({"topology": "mine"}, "exchanges mod4 codes in topology mine"),
    ],
)
def test_what_is_trained_is_told_in_a_line(changes: dict[str, str], words: str) -> None:
    assert sentence(msgspec.structs.replace(TRAINING, **changes)) == (
        "trains nano, a Llama of 29.4 M parameters, in fp32 on CPU; text: shakespeare.txt; " + words
    )


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (CHANGED, "peer abcdef joined (5 peers)"),
        (PeersChanged(round=4, peers=40, joined=12), "12 peers joined (40 peers)"),
        (
            PeersChanged(
                round=4, peers=3, joined=2, left=1, gone=1, names={"left": "a", "gone": "b"}
            ),
            "2 peers joined, peer a left, peer b is gone (3 peers)",
        ),
        (PeersChanged(round=4, peers=1, left=2, gone=3), "2 peers left, 3 peers are gone"),
    ],
)
def test_who_comes_and_goes_is_told_in_a_line(event: PeersChanged, words: str) -> None:
    assert sentence(event) == words


def test_a_node_tells_both_and_a_swarm_on_one_machine_neither(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for peers in (1, 2):
        with PlainDisplay(peers=peers, rounds=40) as display:
            display.observe(0, TRAINING)
            display.observe(0, CHANGED)
        assert len(capsys.readouterr().out.splitlines()) == (2 if peers == 1 else 0)
        text = io.StringIO()
        console = Console(file=text, force_terminal=True, color_system=None, width=200)
        with LiveDisplay(console, title="a run", peers=peers, rounds=40) as live:
            live.observe(0, TRAINING)
            live.observe(0, CHANGED)
        assert ("29.4 M" in text.getvalue()) == ("abcdef" in text.getvalue()) == (peers == 1)
