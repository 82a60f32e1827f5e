"""A swarm that is split: every part goes on, and they mix again when the network is whole."""

from __future__ import annotations

import asyncio

import pytest

from gasloc_p2p.node.events import Left, RoundFinished, Waiting
from gasloc_p2p.simulate.clock import InlineCompute
from gasloc_p2p.simulate.links import parse_partition
from gasloc_p2p.simulate.network import Hub
from gasloc_p2p.testing.clock import in_virtual_time
from gasloc_p2p.testing.peer import SimulatedPeer, verify
from gasloc_p2p.testing.quadratic import NoisyQuadratic
from tests.sim.conftest import quick_config

HEALED_S = 160


def split_swarm(away: int, *, slow: range, pace: str) -> list[SimulatedPeer]:
    """Run 6 peers of which the first `away` are cut off from 20 s to 160 s."""
    timed = (
        *("pace.mode=seconds", "pace.period_s=4", "pace.start_delay_s=2"),
        "pace.exchange_budget_s=3",
    )
    config = quick_config(
        "run.initial_peers=6",
        "run.rounds=200",
        "run.closing_rounds=0",
        "inner.local_steps=2",
        "simulate.step_s=0.5",
        "pace.edge_floor_s=2",
        # It would leave out those who come back from far away, which is not what is tried here.
        "gossip.guard=false",
        *(timed if pace == "seconds" else ()),
    )
    cut = parse_partition(f"20-{HEALED_S}:" + "+".join(str(index) for index in range(away)))

    async def main() -> list[SimulatedPeer]:
        async with Hub(verify=verify, partitions=[cut]) as hub:
            peers = [
                SimulatedPeer(
                    hub,
                    config,
                    index,
                    models=lambda peer_id: NoisyQuadratic(seed=0, peer_id=peer_id),
                    compute=InlineCompute(step_s=0.8 if index in slow else 0.5),
                )
                for index in range(6)
            ]
            async with asyncio.TaskGroup() as tasks:
                for peer in peers:
                    tasks.create_task(peer.run())
                await asyncio.sleep(HEALED_S + 140)
                for peer in peers:
                    peer.leave.set()
        return peers

    return in_virtual_time(main)


@pytest.mark.parametrize(
    ("away", "slow", "pace"),
    [
        pytest.param(away, slow, pace, marks=() if pace == quick else pytest.mark.slow, id=name)
        for pace in ("steps", "seconds")
        for away, slow, quick, name in (
            (3, range(3), "steps", f"half, behind-{pace}"),
            (3, range(3, 6), "seconds", f"half, ahead-{pace}"),
            (1, range(1), "seconds", f"one, behind-{pace}"),
            (1, range(1, 6), "steps", f"one, ahead-{pace}"),
            (2, range(2), "steps", f"two, behind-{pace}"),
            (2, range(2, 6), "seconds", f"two, ahead-{pace}"),
        )
    ],
)
def test_both_parts_go_on_and_mix_again(away: int, slow: range, pace: str) -> None:
    peers = split_swarm(away, slow=slow, pace=pace)
    here, there = peers[:away], peers[away:]
    far = {peer.id for peer in there}
    for peer in peers:
        rounds = [event.report.round for event in peer.of(RoundFinished)]
        assert rounds == sorted(set(rounds)), "no round is applied twice"
    ends = [peer.of(RoundFinished)[-1].report.round for peer in peers]
    assert max(ends) - min(ends) <= 4, "they end up in the same rounds"
    for peer in here:
        tail = [event.report for event in peer.of(RoundFinished)][-12:]
        mixed = [e for report in tail for e in report.edges if e.kind == "applied"]
        assert any(edge.partner in far for edge in mixed), "and mix across what was the split"
        assert len(mixed) >= 8
    assert all(len(peer.of(RoundFinished)) > 60 or pace == "seconds" for peer in peers)
    assert all(peer.of(Left) for peer in peers)


def test_a_part_that_is_ahead_says_that_it_waits() -> None:
    ahead, *_ = split_swarm(1, slow=range(1, 6), pace="steps")
    assert any("lets them catch up" in event.reason for event in ahead.of(Waiting))
