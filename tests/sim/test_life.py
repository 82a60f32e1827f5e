"""Joining late, stopping, crashing and leaving, in virtual time and in both paces."""

from __future__ import annotations

import asyncio
from typing import SupportsFloat, TypeVar

import pytest

from gasloc_p2p.core.errors import IdentityError
from gasloc_p2p.core.substrate import LocalModel
from gasloc_p2p.core.topology import build_graph
from gasloc_p2p.net.identity import Identity
from gasloc_p2p.node.events import (
    Left,
    Notice,
    PeersChanged,
    RoundFinished,
    RoundStarted,
    Waiting,
)
from gasloc_p2p.simulate.clock import InlineCompute
from gasloc_p2p.simulate.network import Hub
from gasloc_p2p.testing.clock import ShiftedClock
from tests.sim.conftest import SimulatedPeer, in_virtual_time, quick_config

T = TypeVar("T")
PACES = {
    "steps": ("run.rounds=14", "inner.local_steps=2", "simulate.step_s=0.5"),
    "seconds": (
        "run.rounds=14",
        "pace.mode=seconds",
        "pace.period_s=6",
        "pace.start_delay_s=2",
        "simulate.step_s=0.5",
    ),
}
CYCLE_S = {"steps": 1.0, "seconds": 6.0}


def hub() -> Hub:
    return Hub(verify=Identity.verify)


class StoppableCompute(InlineCompute):
    """Stands still in the middle of local steps, as a process does between SIGSTOP and SIGCONT."""

    stop_s = 0.0

    async def step(self, model: LocalModel, lr: float) -> SupportsFloat:
        stopped_s, self.stop_s = self.stop_s, 0.0
        await asyncio.sleep(stopped_s)
        return await super().step(model, lr)


@pytest.mark.parametrize("pace", PACES)
def test_a_stopped_peer_jumps_to_the_swarms_round_and_is_paired_again(pace: str) -> None:
    config = quick_config("run.initial_peers=4", "pace.edge_floor_s=2", *PACES[pace])

    async def main() -> list[SimulatedPeer]:
        compute = StoppableCompute(step_s=config.simulate.step_s)
        async with hub() as network, asyncio.TaskGroup() as tasks:
            stopped = SimulatedPeer(network, config, 0, compute=compute)
            others = [SimulatedPeer(network, config, index) for index in (1, 2, 3)]
            for peer in (stopped, *others):
                tasks.create_task(peer.run())
            await stopped.reached(3)
            # Long enough for the others to lose two rounds' edges to it and go on.
            compute.stop_s = 2.5 * max(CYCLE_S[pace], 4.0)
        return [stopped, *others]

    stopped, *others = in_virtual_time(main)
    [(origin, target)] = stopped.jumps()
    assert origin == 3
    assert target >= 5
    last = stopped.of(RoundFinished)[-1].report
    assert last.round == 14 + 4
    for peer in (stopped, *others):
        tail = [kinds for t, kinds in peer.edges_by_round().items() if t > target + 4]
        assert tail == [["applied"]] * len(tail)
        assert peer.edges_by_round().keys() >= {17, 18}


@pytest.mark.parametrize("pace", PACES)
def test_a_crashed_peer_leaves_every_roster_at_the_same_round(pace: str) -> None:
    config = quick_config(
        "run.initial_peers=5", "gossip.topology=ring", "pace.edge_floor_s=2", *PACES[pace]
    )

    async def main() -> list[SimulatedPeer]:
        async with hub() as network, asyncio.TaskGroup() as tasks:
            peers = [SimulatedPeer(network, config, index) for index in range(5)]
            crashed, *_ = [tasks.create_task(peer.run()) for peer in peers]
            await peers[0].reached(4)
            crashed.cancel()
            await peers[0].network.aclose()
        return peers[1:]

    survivors = in_virtual_time(main)
    views = [peer.peers_by_round() for peer in survivors]
    assert all(view == views[0] for view in views)
    # Signed in round 4, the last record holds for four more rounds.
    assert {t: n for t, n in views[0].items() if t in (8, 9)} == {8: 5, 9: 4}
    for peer in survivors:
        assert all(set(kinds) == {"applied"} for t, kinds in peer.edges_by_round().items() if t > 9)


def test_a_leaving_peer_says_goodbye_and_is_gone_from_every_roster_two_rounds_later() -> None:
    config = quick_config("run.initial_peers=4", "pace.edge_floor_s=2", *PACES["steps"])

    async def main() -> tuple[SimulatedPeer, list[SimulatedPeer]]:
        async with hub() as network, asyncio.TaskGroup() as tasks:
            peers = [SimulatedPeer(network, config, index) for index in range(4)]
            for peer in peers:
                tasks.create_task(peer.run())
            await peers[0].reached(4)
            peers[0].leave.set()
        return peers[0], peers[1:]

    gone, others = in_virtual_time(main)
    [left] = gone.of(Left)
    assert not left.finished
    assert left.report.rounds == 4
    for peer in others:
        view = peer.peers_by_round()
        assert (view[6], view[7]) == (4, 3)
        assert peer.of(PeersChanged) == [
            PeersChanged(round=7, peers=3, left=1, names={"left": gone.id})
        ]


@pytest.mark.parametrize("pace", PACES)
def test_a_late_joiner_takes_over_the_swarms_parameters_and_takes_part(pace: str) -> None:
    config = quick_config("run.initial_peers=3", "gossip.topology=complete", *PACES[pace])

    async def main() -> tuple[SimulatedPeer, list[SimulatedPeer]]:
        async with hub() as network, asyncio.TaskGroup() as tasks:
            peers = [SimulatedPeer(network, config, index) for index in range(3)]
            for peer in peers:
                tasks.create_task(peer.run())
            await peers[0].reached(5)
            joiner = SimulatedPeer(network, config, 3)
            tasks.create_task(joiner.run())
        return joiner, peers

    joiner, others = in_virtual_time(main)
    assert [event.reason for event in joiner.of(Waiting)] == [
        "the swarm is in round 5, this peer joins at 8"
    ]
    assert joiner.of(RoundStarted)[0].round == 8
    for peer in others:
        view = peer.peers_by_round()
        assert (view[7], view[8]) == (3, 4)
        assert all(set(kinds) == {"applied"} for kinds in peer.edges_by_round().values())
    first = joiner.of(RoundFinished)[0].report
    before = others[0].of(RoundFinished)[7].report
    assert first.train_loss is not None
    assert before.train_loss is not None
    assert first.train_loss < before.train_loss + 0.5, "it starts from a donor's parameters"


@pytest.mark.parametrize("seed", [27, 3])
def test_peers_that_run_ahead_among_themselves_stay_in_every_roster(seed: int) -> None:
    # Seed 27 pairs the same peers in rounds 0 to 3, seed 3 in rounds 3 to 7, which is longer than
    # a lease; two of them are slow enough to be left behind.
    config = quick_config(
        *PACES["steps"],
        "run.initial_peers=4",
        f"run.seed={seed}",
        "pace.edge_floor_s=100",
        "pace.adapt_steps=false",
    )

    async def main() -> list[SimulatedPeer]:
        async with hub() as network, asyncio.TaskGroup() as tasks:
            peers = [SimulatedPeer(network, config, index) for index in range(4)]
            quick = build_graph(
                "pairs", seed=seed, round=3, peers=[peer.id for peer in peers]
            ).edges[0]
            for index, peer in enumerate(peers):
                if peer.id not in quick:
                    slow = InlineCompute(step_s=10 * config.simulate.step_s)
                    peers[index] = peer = SimulatedPeer(network, config, index, compute=slow)
                tasks.create_task(peer.run())
        return peers

    for peer in in_virtual_time(main):
        assert set(peer.peers_by_round().values()) == {4}
        assert all(edges == ["applied"] for edges in peer.edges_by_round().values())


@pytest.mark.parametrize("goodbye", [True, False])
def test_a_newcomer_joins_the_one_that_others_left_alone(goodbye: bool) -> None:
    config = quick_config(*PACES["steps"], "run.initial_peers=2", "run.rounds=80")

    async def main() -> tuple[SimulatedPeer, SimulatedPeer]:
        async with hub() as network, asyncio.TaskGroup() as tasks:
            survivor, other = [SimulatedPeer(network, config, index) for index in (0, 1)]
            tasks.create_task(survivor.run())
            running = tasks.create_task(other.run())
            await other.reached(4)
            if goodbye:
                other.leave.set()
            else:
                running.cancel()
                await other.network.aclose()
            await survivor.reached(12)
            newcomer = SimulatedPeer(network, config, 2)
            tasks.create_task(newcomer.run())
        return survivor, newcomer

    survivor, newcomer = in_virtual_time(main)
    first = newcomer.of(RoundStarted)[0].round
    # A peer that is merely silent counts for up to 20 s and 8 of its rounds of 1 s.
    assert 12 + 3 <= first <= (12 + 4 if goodbye else 12 + 28)
    assert survivor.edges_by_round()[first + 1] == ["applied"]


def test_a_second_process_with_the_same_identity_is_noticed() -> None:
    config = quick_config("run.initial_peers=2", *PACES["steps"])

    async def main() -> BaseException | None:
        async with hub() as network:
            first = SimulatedPeer(network, config, 0)
            other = SimulatedPeer(network, config, 1)
            tasks = [asyncio.ensure_future(peer.run()) for peer in (first, other)]
            await first.reached(2)
            twin = SimulatedPeer(network, config, 0)
            tasks.append(asyncio.ensure_future(twin.run()))
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        failures = [r for r in results if isinstance(r, BaseExceptionGroup)]
        return failures[0] if failures else None

    failure = in_virtual_time(main)
    assert isinstance(failure, BaseExceptionGroup)
    assert failure.subgroup(IdentityError) is not None


def test_an_identity_may_come_back_after_a_restart() -> None:
    config = quick_config("run.initial_peers=3", "pace.edge_floor_s=2", *PACES["steps"])

    async def main() -> tuple[SimulatedPeer, list[SimulatedPeer]]:
        async with hub() as network, asyncio.TaskGroup() as tasks:
            peers = [SimulatedPeer(network, config, index) for index in range(3)]
            crashed, *_ = [tasks.create_task(peer.run()) for peer in peers]
            await peers[0].reached(3)
            crashed.cancel()
            await peers[0].network.aclose()
            await peers[1].reached(5)
            again = SimulatedPeer(network, config, 0)
            tasks.create_task(again.run())
        return again, peers[1:]

    again, others = in_virtual_time(main)
    [left] = again.of(Left)
    assert left.finished
    for peer in others:
        assert peer.peers_by_round()[18] == 3


def test_a_clock_that_is_behind_is_named_where_it_is() -> None:
    config = quick_config("run.initial_peers=4", *PACES["steps"])

    async def main() -> list[SimulatedPeer]:
        async with hub() as network, asyncio.TaskGroup() as tasks:
            peers = [SimulatedPeer(network, config, index) for index in range(3)]
            peers.append(SimulatedPeer(network, config, 3, clock=ShiftedClock(ahead_s=-7.0)))
            for peer in peers:
                tasks.create_task(peer.run())
        return peers

    *right, slow = in_virtual_time(main)
    texts = [event.text for event in slow.of(Notice)]
    assert any("this machine's clock is about 7 s behind those of" in text for text in texts)
    assert all("clock" not in event.text for peer in right for event in peer.of(Notice))
    assert all(set(kinds) == {"applied"} for kinds in slow.edges_by_round().values())


@pytest.mark.parametrize("stride", [1, 3])
def test_who_is_left_alone_says_so_once_and_trains_on(stride: int) -> None:
    # A partner that only skips rounds is still there.
    config = quick_config(
        "run.initial_peers=2", "run.rounds=40", "simulate.step_s=0.5", "pace.edge_floor_s=2"
    )

    async def main() -> tuple[SimulatedPeer, int]:
        slow = InlineCompute(step_s=0.5 if stride == 1 else 6.0)
        async with hub() as network, asyncio.TaskGroup() as tasks:
            left = SimulatedPeer(network, config, 0)
            gone = SimulatedPeer(network, config, 1, compute=slow)
            tasks.create_task(left.run())
            running = tasks.create_task(gone.run())
            await left.reached(24)
            assert not any("alone" in notice.text for notice in left.of(Notice))
            running.cancel()
            await gone.network.aclose()
        return left, max(report.report.every for report in gone.of(RoundFinished))

    left, every = in_virtual_time(main)
    assert every >= stride
    [change] = left.of(PeersChanged)
    assert (change.peers, change.joined, change.left, change.gone) == (1, 0, 0, 1)
    assert sum("trains on alone" in notice.text for notice in left.of(Notice)) == 1
    assert left.of(Left)[0].finished
