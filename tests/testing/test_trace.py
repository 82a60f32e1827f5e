"""Each invariant says no to what breaks it, and names it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest
import torch

from gasloc_p2p.core.types import EdgeKind
from gasloc_p2p.node.events import Event, RoundFinished, RoundStarted
from gasloc_p2p.node.report import EdgeReport, RoundReport
from gasloc_p2p.testing.faults import FaultPlan, Stall
from gasloc_p2p.testing.peer import Life, Saved
from gasloc_p2p.testing.trace import InvariantError, Limits, SwarmTrace

LIMITS = Limits(round_s=10.0, joining_s=20.0, checkpoint_rounds=4)
ROUNDS = 24


def finished(round: int, kind: EdgeKind = EdgeKind.APPLIED) -> RoundFinished:
    return RoundFinished(
        report=RoundReport(
            round=round,
            closing=False,
            local_steps=1,
            train_loss=1.0,
            edges=(EdgeReport(partner="other", kind=kind),),
            bytes_sent=0,
            bytes_received=0,
            train_s=0.0,
            exchange_s=0.0,
            wait_s=0.0,
        )
    )


def life_of(peer: int, rounds: Sequence[int] = range(ROUNDS), apart: float = 0.1) -> Life:
    """A life of rounds that take a second each; peers 0 and 1 stay `apart` from their mean."""
    log: list[tuple[float, Event]] = []
    thetas = {}
    for number, round in enumerate(rounds):
        started = RoundStarted(round=round, closing=False, partners=("other",), peers=2)
        log += [(number, started), (number + 1.0, finished(round))]
        thetas[round] = torch.full((4,), apart * (1 - 2 * peer))
    ended_s = float(len(rounds))
    return Life(peer=peer, began_s=0.0, ended_s=ended_s, log=log, thetas=thetas, end="finished")


def trace_of(*lives: Life, plan: FaultPlan | None = None) -> SwarmTrace:
    return SwarmTrace(
        peers=2,
        plan=plan or FaultPlan(),
        limits=LIMITS,
        lives=list(lives) or [life_of(0), life_of(1)],
    )


def late(life: Life, at: int, by_s: float) -> Life:
    """The same life, from its event number `at` on later."""
    log = [(s + by_s * (number >= at), event) for number, (s, event) in enumerate(life.log)]
    return replace(life, log=log, ended_s=life.ended_s + by_s)


def test_a_good_run_passes() -> None:
    trace_of().assert_all(fault_free=trace_of())


def test_failures_are_named() -> None:
    failed = replace(life_of(1), end="failed", error=ExceptionGroup("", [ValueError("no good")]))
    with pytest.raises(InvariantError, match="peer 1 failed: ValueError: no good"):
        trace_of(life_of(0), failed).assert_nobody_failed()
    with pytest.raises(InvariantError, match="peer 1 left"):
        trace_of(life_of(0), replace(life_of(1), end="left")).assert_nobody_failed()
    trace_of(life_of(0), replace(life_of(1), end="killed")).assert_nobody_failed()


@pytest.mark.parametrize(
    ("at", "by_s", "complaint"),
    [
        (0, 21.0, "joining of peer 1 took 21.0 s, at most 20.0 s"),
        (7, 9.5, "round 3 of peer 1 took 10.5 s, at most 10.0 s"),
        (8, 21.0, "the time after round 3 of peer 1 took 21.0 s, at most 20.0 s"),
        (2 * ROUNDS, 21.0, f"the time after round {ROUNDS - 1} of peer 1 took 21.0 s"),
    ],
)
def test_hangs_are_found_wherever_they_are(at: int, by_s: float, complaint: str) -> None:
    with pytest.raises(InvariantError, match=complaint):
        trace_of(life_of(0), late(life_of(1), at, by_s)).assert_no_hang()
    trace_of(life_of(0), late(life_of(1), at, by_s - 2.0)).assert_no_hang()


def test_a_planned_stall_is_no_hang_and_an_unfinished_round_may_be_one() -> None:
    held_up = late(life_of(1), 7, 12.0)
    plan = FaultPlan(faults=(Stall(peer=1, round=3, seconds=5.0),))
    trace_of(life_of(0), held_up, plan=plan).assert_no_hang()
    cut = life_of(1)
    cut.log.pop()
    cut.ended_s += 10.0
    with pytest.raises(InvariantError, match=f"round {ROUNDS - 1} of peer 1 took 11.0 s"):
        trace_of(life_of(0), cut).assert_no_hang()


def test_numbers_that_are_none_are_found() -> None:
    bad = life_of(1)
    bad.thetas[5][2] = float("nan")
    with pytest.raises(InvariantError, match="peer 1 is not finite after round 5"):
        trace_of(life_of(0), bad).assert_finite()
    bad = life_of(1)
    report = msgspec.structs.replace(finished(0).report, train_loss=float("inf"))
    bad.log[1] = (1.0, RoundFinished(report=report))
    with pytest.raises(InvariantError, match="peer 1 has loss inf in round 0"):
        trace_of(life_of(0), bad).assert_finite()


def test_a_round_done_twice_is_found_within_one_life_only() -> None:
    with pytest.raises(InvariantError, match="peer 1 did round 3 after 3"):
        trace_of(life_of(0), life_of(1, [0, 1, 2, 3, 3])).assert_rounds_rise()
    trace_of(life_of(0), life_of(1, [0, 1, 2, 3]), life_of(1, [3, 4])).assert_rounds_rise()


@pytest.mark.parametrize(
    ("saved", "complaint"),
    [
        (Saved(newest=None, problems=()), "peer 1 left no checkpoint"),
        (Saved(newest=20, problems=()), "4 rounds since the checkpoint of round 20"),
        (Saved(newest=24, problems=("that of round 21 is damaged",)), "round 21 is damaged"),
    ],
)
def test_lost_checkpoints_are_found(saved: Saved, complaint: str) -> None:
    with pytest.raises(InvariantError, match=complaint):
        trace_of(life_of(0), replace(life_of(1), checkpoints=saved)).assert_no_checkpoint_lost()
    recent = replace(life_of(1), checkpoints=Saved(newest=21, problems=()))
    trace_of(life_of(0), recent).assert_no_checkpoint_lost()


def test_peers_that_stay_apart_are_found() -> None:
    fault_free, apart = trace_of(), trace_of(life_of(0, apart=0.25), life_of(1, apart=0.25))
    assert fault_free.disagreement(3) == pytest.approx(0.2)
    apart.note(8.0, 8, "something")
    with pytest.raises(InvariantError, match=r"after round 18 is 0.5, 2.5 times .* 10 rounds"):
        apart.assert_absorbed(fault_free)
    apart.assert_absorbed(fault_free, factor=3.0)
    for life in apart.lives:
        for round in range(18, ROUNDS):
            life.thetas[round] *= 0.5
    apart.assert_absorbed(fault_free)
    apart.note(15.0, 15, "something else")
    with pytest.raises(InvariantError, match="too late to tell"):
        apart.assert_absorbed(fault_free)


def test_edges_that_go_on_failing_are_found() -> None:
    failing = life_of(1)
    for number, (at_s, event) in enumerate(failing.log):
        if isinstance(event, RoundFinished) and event.report.round in (3, 20, 22):
            kind = EdgeKind.TIMED_OUT
            failing.log[number] = (at_s, finished(event.report.round, kind))
    trace = trace_of(life_of(0), failing)
    trace.assert_edges_work()
    trace.note(8.0, 8, "something")
    with pytest.raises(InvariantError, match=r"of the 12 edges from round 18 on, .* only 10"):
        trace.assert_edges_work()
    assert trace.edges()[20] == {EdgeKind.APPLIED: 1, EdgeKind.TIMED_OUT: 1}


def test_the_digest_covers_events_moments_and_parameters() -> None:
    digest = trace_of().digest
    assert trace_of().digest == digest
    others = [late(life_of(1), 5, 0.5), life_of(1, apart=0.2), replace(life_of(1), end="killed")]
    digests = {trace_of(life_of(0), other).digest for other in others}
    assert len(digests | {digest}) == 4


def test_lives_are_told_in_words() -> None:
    first = replace(life_of(0, [0, 1, 2, 5, 7, 8]), end="killed")
    told = trace_of(first, life_of(1)).tell().splitlines()
    assert told == [
        "peer 0: from 0.0 to 6.0 s, rounds 0-2, 5, 7-8; edges 6 applied; killed",
        "peer 1: from 0.0 to 24.0 s, rounds 0-23; edges 24 applied; finished",
    ]
