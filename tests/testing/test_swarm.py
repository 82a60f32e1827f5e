"""Planned faults happen where and when they were planned, and a run is the same every time."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections import Counter
from functools import cache

import pytest

from gasloc_p2p.config import Config
from gasloc_p2p.core.types import EdgeKind
from gasloc_p2p.net.identity import Identity
from gasloc_p2p.node.events import Notice, RoundFinished, RoundStarted
from gasloc_p2p.simulate.clock import LivelockError
from gasloc_p2p.testing.chaos import Case
from gasloc_p2p.testing.faults import (
    CorruptChunk,
    DropAck,
    Fault,
    FaultPlan,
    Kill,
    LieAboutSchema,
    Partition,
    SkewClock,
    Stall,
)
from gasloc_p2p.testing.swarm import VirtualSwarm
from gasloc_p2p.testing.trace import SwarmTrace

PEERS = 4


def config(*settings: str) -> Config:
    return Case(seed=0, peers=PEERS, rounds=16, settings=settings).config()


def run(*faults: Fault, settings: tuple[str, ...] = ()) -> SwarmTrace:
    plan = FaultPlan(faults=faults)
    return VirtualSwarm(config(*settings), peers=PEERS, plan=plan).run()


@cache
def partners(peer: int, round: int) -> int:
    """The partner that a peer has in a round while all are there."""
    [life] = run().lives_of(peer)
    [partner] = next(e.partners for e in life.of(RoundStarted) if e.round == round)
    ids = [Identity.derived(0, index).peer_id for index in range(PEERS)]
    return ids.index(partner)


def edge(trace: SwarmTrace, peer: int, round: int) -> str:
    """How the edge of a peer's round ended."""
    [kind] = [
        edge.kind.value
        for life in trace.lives_of(peer)
        for event in life.of(RoundFinished)
        if event.report.round == round
        for edge in event.report.edges
    ]
    return kind


def test_without_faults_everything_holds() -> None:
    trace = run()
    assert [life.end for life in trace.lives] == ["finished"] * PEERS
    assert trace.training_rounds() == list(range(16))
    assert Counter(kind for counts in trace.edges().values() for kind in counts.elements()) == {
        "applied": PEERS * (16 + 5)
    }
    assert trace.disturbances == []
    assert trace.last_disturbed_round == -1
    trace.assert_all(fault_free=trace)


@pytest.mark.parametrize(
    ("fault", "own", "partners_own"),
    [
        (CorruptChunk(peer=1, round=5), "corrupt", "corrupt"),
        (DropAck(peer=1, round=5), "asymmetric", "applied"),
        (LieAboutSchema(peer=1, round=5), "refused", "refused"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else value,
)
def test_wire_faults_end_one_edge(fault: Fault, own: str, partners_own: str) -> None:
    trace = run(fault)
    other = partners(1, 5)
    assert (edge(trace, 1, 5), edge(trace, other, 5)) == (own, partners_own)
    assert [disturbance.what for disturbance in trace.disturbances] == [str(fault)]
    counts = Counter(kind for kinds in trace.edges().values() for kind in kinds.elements())
    assert counts[EdgeKind.APPLIED] == PEERS * (16 + 5) - [own, partners_own].count(own)


def test_a_killed_peer_says_nothing_and_comes_back_with_its_checkpoint() -> None:
    kill = Kill(peer=2, round=6, after_s=0.5, back_after_rounds=1)
    trace = run(kill, settings=("checkpoint.every_rounds=2",))
    first, second = trace.lives_of(2)
    assert first.end == "killed"
    assert [event.report.round for event in first.of(RoundFinished)] == list(range(6))
    assert first.checkpoints is not None
    assert first.checkpoints.newest == 6
    assert second.end == "finished"
    assert any(event.text.startswith("resumed") for event in second.of(Notice))
    assert second.of(RoundStarted)[0].round >= 7
    assert [d.what for d in trace.disturbances] == [str(kill), "peer 2 is started again"]
    trace.assert_no_checkpoint_lost()


def test_a_peer_killed_for_good_stays_away() -> None:
    trace = run(Kill(peer=2, round=6))
    [life] = trace.lives_of(2)
    assert life.end == "killed"
    assert {life.end for life in trace.lives if life.peer != 2} == {"finished"}
    assert trace.lives_of(0)[0].of(RoundStarted)[-1].peers == PEERS - 1
    trace.assert_nobody_failed()
    trace.assert_no_hang()


def test_a_stall_holds_one_round_up() -> None:
    stall = Stall(peer=0, round=5, seconds=6.0)
    trace = run(stall)
    [life] = trace.lives_of(0)
    began_s = {e.round: at_s for at_s, e in life.log if isinstance(e, RoundStarted)}
    ended_s = {e.report.round: at_s for at_s, e in life.log if isinstance(e, RoundFinished)}
    assert 7.0 <= ended_s[5] - began_s[5] < 7.0 + 5.0
    assert ended_s[4] - began_s[4] < 1.5
    assert [d.what for d in trace.disturbances] == [str(stall), f"over: {stall}"]
    trace.assert_no_hang()


def test_a_partition_lets_no_edge_across() -> None:
    cut = Partition(round=4, seconds=6.0, peers=frozenset({0, 1}))
    trace = run(cut)
    [began, over] = trace.disturbances
    assert (began.what, over.what) == (str(cut), f"over: {cut}")
    assert over.at_s - began.at_s == pytest.approx(6.0)
    ids = [Identity.derived(0, index).peer_id for index in range(PEERS)]
    across = {
        (edge.kind.value, at_s < over.at_s)
        for life in trace.lives
        for at_s, event in life.log
        if isinstance(event, RoundFinished) and at_s > began.at_s + 1.5
        for edge in event.report.edges
        if (life.peer < 2) != (ids.index(edge.partner) < 2)
    }
    assert ("applied", True) not in across
    assert ("applied", False) in across, "the sides meet again"


def test_a_skewed_clock_dates_records_wrongly_and_harms_nobody() -> None:
    trace = run(SkewClock(peer=3, seconds=2.0))
    trace.assert_all(fault_free=run())
    assert trace.digest == run().digest, "rounds by steps do not read the clock"


def test_a_run_is_the_same_every_time_and_in_any_process() -> None:
    case = Case(seed=11, peers=6, rounds=20)
    trace = VirtualSwarm(case.config(), peers=6, plan=case.plan).run()
    again = VirtualSwarm(case.config(), peers=6, plan=case.plan).run()
    other = Case(seed=12, peers=6, rounds=20)
    assert trace.digest == again.digest
    assert trace.digest != VirtualSwarm(other.config(), peers=6, plan=other.plan).run().digest
    for hash_seed in ("1", "2"):
        printed = subprocess.run(
            [sys.executable, *shlex.split(case.command)[1:]],
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            check=False,
        ).stdout
        assert f"digest: {trace.digest}" in printed


def test_a_swarm_that_does_not_end_is_an_error() -> None:
    # Nobody waits for so many, and rounds by steps wait for them without end.
    with pytest.raises(LivelockError, match=r"peer 0: .*wait_until"):
        run(settings=("run.initial_peers=5",))
