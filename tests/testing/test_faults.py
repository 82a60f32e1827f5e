"""Random plans are the same every time, keep to their bounds, and contain everything."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter

import pytest

from gasloc_p2p.testing.faults import (
    QUIET_END_ROUNDS,
    QUIET_START_ROUNDS,
    CorruptChunk,
    DropAck,
    FaultPlan,
    Kill,
    LieAboutSchema,
    Partition,
    SkewClock,
    Stall,
)

PEERS, ROUNDS = 16, 40
PLANS = [FaultPlan.random(seed, peers=PEERS, rounds=ROUNDS) for seed in range(200)]


def test_every_kind_is_common_and_plans_differ() -> None:
    counts = Counter(type(fault) for plan in PLANS for fault in plan.faults)
    kinds = {Kill, Stall, CorruptChunk, DropAck, LieAboutSchema, Partition, SkewClock}
    assert set(counts) == kinds
    assert min(counts.values()) > 100
    assert len(set(PLANS)) == len(PLANS)


def test_the_first_and_the_last_rounds_are_spared() -> None:
    end = ROUNDS - QUIET_END_ROUNDS
    for plan in PLANS:
        for fault in plan.faults:
            if isinstance(fault, SkewClock):
                continue
            assert QUIET_START_ROUNDS <= fault.round < end
            if isinstance(fault, Stall | Partition):
                assert 0 < fault.seconds <= end - fault.round
            if isinstance(fault, Kill) and fault.back_after_rounds is not None:
                assert fault.round + fault.back_after_rounds <= end


def test_most_peers_are_never_killed_and_some_come_back_twice() -> None:
    twice = gone = 0
    for plan in PLANS:
        kills = [fault for fault in plan.faults if isinstance(fault, Kill)]
        per_peer = Counter(kill.peer for kill in kills)
        assert len(per_peer) <= PEERS // 4
        assert all(len(partition.peers) <= PEERS // 2 for partition in plan.partitions)
        twice += any(count > 1 for count in per_peer.values())
        gone += any(kill.back_after_rounds is None for kill in kills)
    assert twice > 20
    assert gone > 20


def test_the_same_seed_gives_the_same_plan_in_any_process() -> None:
    program = (
        "from gasloc_p2p.testing.faults import FaultPlan\n"
        f"print(repr(FaultPlan.random(7, peers={PEERS}, rounds={ROUNDS})))"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | {"PYTHONHASHSEED": seed},
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert printed == {repr(PLANS[7])}


def test_a_plan_tells_itself_in_words() -> None:
    plan = FaultPlan(
        faults=(
            Partition(round=9, seconds=4.0, peers=frozenset({2, 0})),
            Kill(peer=3, round=7, after_s=0.25, back_after_rounds=2),
            SkewClock(peer=1, seconds=-2.0),
        )
    )
    assert str(plan).splitlines() == [
        "the clock of peer 1 is -2.0 s off",
        "peer 3 is killed 0.2 s into round 7, and started again in round 9",
        "these peers are cut off for 4.0 s from round 9 on: 0, 2",
    ]
    assert str(FaultPlan()) == "nothing goes wrong"


@pytest.mark.parametrize(("peers", "rounds"), [(1, 40), (4, 17)])
def test_too_small_a_swarm_is_refused(peers: int, rounds: int) -> None:
    with pytest.raises(ValueError, match="at least 2 peers and 18 rounds"):
        FaultPlan.random(0, peers=peers, rounds=rounds)
