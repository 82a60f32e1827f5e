"""Swarms of uneven machines and links: steps and strides follow from how fast they are."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from statistics import median
from typing import SupportsFloat

import pytest

from gasloc_p2p.core.substrate import LocalModel
from gasloc_p2p.net.identity import Identity
from gasloc_p2p.node.events import RoundFinished
from gasloc_p2p.simulate.clock import InlineCompute
from gasloc_p2p.simulate.links import links_of
from gasloc_p2p.simulate.network import Hub
from gasloc_p2p.testing.clock import in_virtual_time
from gasloc_p2p.testing.peer import SimulatedPeer
from gasloc_p2p.testing.quadratic import NoisyQuadratic
from tests.sim.conftest import quick_config

STEP_S = 0.1
H = 10


class ChangingCompute(InlineCompute):
    """Becomes slower or faster from its step number `after` on."""

    def __init__(self, *, step_s: float, after: int = 0, later_s: float = STEP_S) -> None:
        super().__init__(step_s=step_s)
        self._steps_left = after
        self._later_s = later_s

    async def step(self, model: LocalModel, lr: float) -> SupportsFloat:
        if self._steps_left == 0:
            self._step_s = self._later_s
        self._steps_left -= 1
        return await super().step(model, lr)


def swarm(
    *settings: str,
    peers: int,
    computes: Mapping[int, InlineCompute],
    links: Sequence[str] = ("20/20/0.01/0",),
    elements: int = 1000,
) -> list[SimulatedPeer]:
    # Peers that do a tenth of the steps on a quadratic are far away from the others for long.
    config = quick_config(
        f"run.initial_peers={peers}",
        f"inner.local_steps={H}",
        f"simulate.step_s={STEP_S}",
        "gossip.guard=false",
        *settings,
    )

    async def main() -> list[SimulatedPeer]:
        hub = Hub(verify=Identity.verify, links=links_of(links, peers))
        async with hub, asyncio.TaskGroup() as tasks:
            swarm = [
                SimulatedPeer(
                    hub,
                    config,
                    index,
                    models=lambda peer: NoisyQuadratic(seed=0, peer_id=peer, elements=elements),
                    compute=computes.get(index),
                )
                for index in range(peers)
            ]
            for peer in swarm:
                tasks.create_task(peer.run())
        return swarm

    return in_virtual_time(main, horizon_s=5000)


def steps(peer: SimulatedPeer) -> dict[int, int]:
    reports = [event.report for event in peer.of(RoundFinished)]
    return {report.round: report.local_steps for report in reports if not report.closing}


def strides(peer: SimulatedPeer) -> dict[int, int]:
    reports = [event.report for event in peer.of(RoundFinished)]
    return {report.round: report.every for report in reports if not report.closing}


def assert_same_rosters(peers: Sequence[SimulatedPeer], *, since: int) -> None:
    sizes: dict[int, set[int]] = {}
    for peer in peers:
        for t, size in peer.peers_by_round().items():
            sizes.setdefault(t, set()).add(size)
    assert all(len(seen) == 1 for t, seen in sizes.items() if t >= since), sizes


def test_peers_that_become_five_times_as_slow_do_a_fifth_of_the_steps() -> None:
    changed, at = (1, 4, 9), 8
    peers = swarm(
        "run.rounds=16",
        peers=16,
        computes={
            index: ChangingCompute(step_s=STEP_S, after=at * H, later_s=5 * STEP_S)
            for index in changed
        },
    )
    for index, peer in enumerate(peers):
        done = steps(peer)
        assert [done[t] for t in range(at + 1)] == [H] * (at + 1)
        after = [done[t] for t in range(at + 3, 16)]
        assert after == ([2] if index in changed else [H]) * len(after)
    waits_s = [event.report.wait_s for peer in peers for event in peer.of(RoundFinished)]
    assert max(waits_s) < 10, "the deadline of an edge"


def test_of_64_peers_ten_change_their_speed_in_mid_run() -> None:
    slower, faster, at = (3, 17, 30, 44, 61), (0, 11, 25, 40, 52), 6

    def changing(later_s: float) -> ChangingCompute:
        return ChangingCompute(step_s=STEP_S, after=at * H, later_s=later_s)

    peers = swarm(
        "run.rounds=13",
        "run.closing_rounds=0",
        peers=64,
        computes={
            **{index: changing(5 * STEP_S) for index in slower},
            **{index: changing(STEP_S / 5) for index in faster},
        },
        elements=100,
    )
    for index, peer in enumerate(peers):
        done = steps(peer)
        assert [done[t] for t in range(at + 1)] == [H] * (at + 1)
        right = 2 if index in slower else 5 * H if index in faster else H
        assert all(abs(done[t] - right) <= 0.1 * right for t in range(at + 3, 13)), (index, done)
    waits_s = [event.report.wait_s for peer in peers for event in peer.of(RoundFinished)]
    assert max(waits_s) < 10, "the deadline of an edge"


def test_of_two_peers_the_slow_one_skips_rounds_and_nobody_waits() -> None:
    slow_s = 25 * STEP_S
    peers = swarm("run.rounds=48", peers=2, computes={1: InlineCompute(step_s=slow_s)})
    quick, slow = peers
    last = {t: every for t, every in strides(slow).items() if t >= 24}
    assert set(last.values()) == {3}
    assert {t % 3 for t in last} == {min(last) % 3}
    assert not [jump for jump in slow.jumps() if jump[0] >= 9], "its turns are no jumps"
    edges = quick.edges_by_round()
    assert {t for t in range(24, 48) if edges[t] == ["applied"]} == {t for t in last if t < 48}
    assert set(steps(quick).values()) == {H}
    assert all(done in (1, 2) for t, done in steps(slow).items() if t >= 24)
    waits_s = {e.report.round: e.report.wait_s for e in quick.of(RoundFinished)}
    assert sum(waits_s[t] for t in range(24, 48)) < 0.25 * 24 * H * STEP_S
    assert_same_rosters(peers, since=0)


def test_peers_that_skip_rounds_are_in_the_same_rosters_everywhere() -> None:
    computes = {1: InlineCompute(step_s=50 * STEP_S), 2: InlineCompute(step_s=30 * STEP_S)}
    peers = swarm("run.rounds=40", "gossip.topology=ring", peers=5, computes=computes)
    assert_same_rosters(peers, since=12)
    for index, every in ((1, 4), (2, 3)):
        assert {k for t, k in strides(peers[index]).items() if t >= 14} <= {every, every + 1}
        assert not [jump for jump in peers[index].jumps() if jump[0] >= 14]
    sizes = {t: size for t, size in peers[0].peers_by_round().items() if t >= 14}
    assert set(sizes.values()) == {3, 4, 5}
    for peer in peers:
        for t, kinds in peer.edges_by_round().items():
            assert t < 14 or set(kinds) == {"applied"}, (t, kinds)


def test_a_slow_link_costs_rounds_and_holds_up_nobody() -> None:
    link = "0.05/0.05/0.01/0"
    peers = swarm(
        "run.rounds=40",
        peers=6,
        computes={},
        links=["1/1/0.01/0"] * 5 + [link],
        elements=4000,
    )
    slow = peers[5]
    assert {k for t, k in strides(slow).items() if t >= 26} <= {2, 3}
    assert_same_rosters(peers, since=14)
    kinds = [kind for edges in slow.edges_by_round().values() for kind in edges]
    assert kinds.count("applied") >= 0.8 * len(kinds) > 0
    for peer in peers[:5]:
        assert median(steps(peer).values()) == H
    waits_s = [e.report.wait_s for p in peers[:5] for e in p.of(RoundFinished)]
    assert median(waits_s) < 0.1 * H * STEP_S


@pytest.mark.parametrize("overlap", ["false", "true"])
@pytest.mark.parametrize("ceiling_s", [15, 600], ids=["too long", "long enough"])
def test_two_peers_with_extreme_links_exchange_in_the_end(overlap: str, ceiling_s: int) -> None:
    # An exchange takes as long as ten rounds, 10.8 s. The first ones share the link.
    peers = swarm(
        "run.rounds=32",
        f"gossip.overlap={overlap}",
        "outer.rule=local",
        f"pace.edge_ceiling_s={ceiling_s}",
        peers=2,
        computes={},
        links=["0.3/0.3/0.01/0"],
        elements=100_000,
    )
    for peer in peers:
        edges = peer.edges_by_round()
        assert {kind for t in range(26, 32) for kind in edges[t]} == {"applied"}
        assert max(steps(peer).values()) <= H, "neither is faster than the other"
        assert set(strides(peer).values()) == {1}
        assert not peer.jumps()


def test_who_meets_a_slow_peer_first_does_the_usual_steps_with_the_next_one() -> None:
    # At the full rate an exchange takes a tenth of a round's steps. Seeds differ in who meets whom.
    for seed in range(4):
        peers = swarm(
            "run.rounds=9",
            "run.closing_rounds=0",
            f"run.seed={seed}",
            peers=4,
            computes={},
            links=["3.2/3.2/0.01/0"] * 3 + ["0.32/0.32/0.01/0"],
            elements=10_000,
        )
        for peer in peers:
            # Who is paired with the slow one does a step more while the others exchange.
            assert set(steps(peer).values()) <= {H, H + 1}, seed
            assert steps(peer)[0] == H
        assert set(steps(peers[3]).values()) == {H}, seed
