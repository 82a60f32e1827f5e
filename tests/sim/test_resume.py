"""Peers that come back from their checkpoints, alone, together, or to a swarm that went on."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from gasloc_p2p.config import Config
from gasloc_p2p.core.errors import ConfigError, DiskError
from gasloc_p2p.net.identity import Identity
from gasloc_p2p.node.checkpoint import CheckpointStore
from gasloc_p2p.node.events import (
    Jumped,
    Left,
    Notice,
    RoundFinished,
    RoundStarted,
    WorkTold,
)
from gasloc_p2p.node.result import NodeResult
from gasloc_p2p.simulate.network import Hub
from tests.sim.conftest import SimulatedPeer, in_virtual_time, quick_config

STEPS = ("inner.local_steps=2", "simulate.step_s=0.5", "pace.edge_floor_s=2")


def hub() -> Hub:
    return Hub(verify=Identity.verify)


def digests(peers: list[SimulatedPeer]) -> list[str | None]:
    return [peer.of(Left)[-1].report.theta_digest for peer in peers]


async def run_to_the_end(config: Config, homes: Path, count: int) -> list[SimulatedPeer]:
    async with hub() as network, asyncio.TaskGroup() as tasks:
        peers = [
            SimulatedPeer(network, config, index, home=homes / str(index)) for index in range(count)
        ]
        for peer in peers:
            tasks.create_task(peer.run())
    return peers


async def run_and_crash(
    config: Config, homes: Path, count: int, *, round: int
) -> list[SimulatedPeer]:
    """Cancel every peer as soon as one of them has begun `round`."""
    async with hub() as network:
        peers = [
            SimulatedPeer(network, config, index, home=homes / str(index)) for index in range(count)
        ]
        running = [asyncio.ensure_future(peer.run()) for peer in peers]
        await peers[-1].reached(round)
        for task in running:
            task.cancel()
        await asyncio.wait(running)
    return peers


@pytest.mark.parametrize(
    ("count", "every", "topology", "codec"),
    [
        (1, 1, "pairs", "none"),
        pytest.param(1, 3, "pairs", "none", marks=pytest.mark.slow),
        pytest.param(2, 1, "pairs", "none", marks=pytest.mark.slow),
        (2, 3, "pairs", "mod4"),
        pytest.param(4, 3, "pairs", "none", marks=pytest.mark.slow),
        (4, 3, "pairs", "int8"),
        (4, 1, "ring", "none"),
    ],
)
def test_a_swarm_that_crashed_as_a_whole_ends_as_if_it_had_not(
    count: int, every: int, topology: str, codec: str, tmp_path: Path
) -> None:
    config = quick_config(
        *STEPS,
        f"run.initial_peers={count}",
        f"checkpoint.every_rounds={every}",
        f"gossip.topology={topology}",
        f"gossip.codec={codec}",
    )
    whole = in_virtual_time(lambda: run_to_the_end(config, tmp_path / "whole", count))
    in_virtual_time(lambda: run_and_crash(config, tmp_path / "again", count, round=5))
    again = in_virtual_time(lambda: run_to_the_end(config, tmp_path / "again", count))
    assert digests(again) == digests(whole)
    for peer, other in zip(again, whole, strict=True):
        [left], [uninterrupted] = peer.of(Left), other.of(Left)
        assert left.finished
        assert left.report.rounds == uninterrupted.report.rounds
        assert left.report.train_loss == uninterrupted.report.train_loss
        assert left.report.val_loss == uninterrupted.report.val_loss
        assert peer.of(RoundStarted)[0].round in range(6 - 2 * every, 6)
        assert any("resumed from the checkpoint" in notice.text for notice in peer.of(Notice))


def test_closing_rounds_are_resumed_with_what_training_reached(tmp_path: Path) -> None:
    config = quick_config(*STEPS, "run.initial_peers=2", "checkpoint.every_rounds=1")
    whole = in_virtual_time(lambda: run_to_the_end(config, tmp_path / "whole", 2))
    in_virtual_time(lambda: run_and_crash(config, tmp_path / "again", 2, round=10))
    again = in_virtual_time(lambda: run_to_the_end(config, tmp_path / "again", 2))
    assert digests(again) == digests(whole)
    assert [p.of(Left)[0].report.val_loss for p in again] == [
        p.of(Left)[0].report.val_loss for p in whole
    ]


def test_with_overlap_a_peer_goes_on_from_where_it_stood_without_the_mix(tmp_path: Path) -> None:
    config = quick_config(
        *STEPS, "run.initial_peers=4", "checkpoint.every_rounds=1", "gossip.overlap=true"
    )
    crashed = in_virtual_time(lambda: run_and_crash(config, tmp_path, 4, round=5))
    for index, peer in enumerate(crashed):
        saved = CheckpointStore(tmp_path / str(index), keep=3).read_newest().checkpoint
        assert saved is not None
        before = saved.progress.round - 1
        [report] = [e.report for e in peer.of(RoundFinished) if e.report.round == before]
        assert report.under_way > 0, "its outer step is still to come"
        assert torch.equal(saved.theta, peer.life.thetas[before])
    for peer in in_virtual_time(lambda: run_to_the_end(config, tmp_path, 4)):
        assert any("resumed from the checkpoint" in notice.text for notice in peer.of(Notice))
        assert peer.of(Left)[-1].finished


def test_a_finished_run_is_not_run_again(tmp_path: Path) -> None:
    config = quick_config(*STEPS, "run.initial_peers=2")
    first = in_virtual_time(lambda: run_to_the_end(config, tmp_path, 2))
    second = in_virtual_time(lambda: run_to_the_end(config, tmp_path, 2))
    assert digests(second) == digests(first)
    assert [peer.of(RoundStarted) for peer in second] == [[], []]
    assert [peer.of(Left)[0].report for peer in second] == [
        peer.of(Left)[0].report for peer in first
    ]


def test_a_leaver_keeps_the_round_that_it_was_in(tmp_path: Path) -> None:
    config = quick_config(*STEPS, "checkpoint.every_rounds=0")
    whole = in_virtual_time(lambda: run_to_the_end(config, tmp_path / "whole", 1))

    async def leave() -> SimulatedPeer:
        async with hub() as network, asyncio.TaskGroup() as tasks:
            peer = SimulatedPeer(network, config, 0, home=tmp_path / "again" / "0")
            tasks.create_task(peer.run())
            await peer.reached(5)
            peer.leave.set()
        return peer

    left = in_virtual_time(leave)
    assert not left.of(Left)[0].finished
    [again] = in_virtual_time(lambda: run_to_the_end(config, tmp_path / "again", 1))
    assert again.of(RoundStarted)[0].round == 5
    assert digests([again]) == digests(whole)


async def crash_and_come_back(
    config: Config, home: Path, *, away_rounds: int
) -> tuple[SimulatedPeer, list[SimulatedPeer]]:
    async with hub() as network, asyncio.TaskGroup() as tasks:
        crashing = SimulatedPeer(network, config, 0, home=home)
        others = [SimulatedPeer(network, config, index) for index in (1, 2, 3)]
        running = tasks.create_task(crashing.run())
        for peer in others:
            tasks.create_task(peer.run())
        await crashing.reached(4)
        running.cancel()
        await crashing.network.aclose()
        await others[0].reached(4 + away_rounds)
        again = SimulatedPeer(network, config, 0, home=home)
        tasks.create_task(again.run())
    return again, others


def test_after_a_short_absence_a_peer_goes_on_with_its_own_parameters(tmp_path: Path) -> None:
    config = quick_config(*STEPS, "run.initial_peers=4", "run.rounds=30", "gossip.topology=ring")
    again, others = in_virtual_time(lambda: crash_and_come_back(config, tmp_path, away_rounds=1))
    assert again.of(Left)[0].finished
    assert not any("took over" in notice.text for notice in again.of(Notice))
    first = again.of(RoundStarted)[0].round
    assert first <= 8
    for peer in others:
        assert set(peer.peers_by_round().values()) == {4}, "no roster was ever without it"


def test_after_a_long_absence_a_peer_takes_over_a_donors_parameters(tmp_path: Path) -> None:
    config = quick_config(
        *STEPS,
        "run.initial_peers=4",
        "run.rounds=40",
        "gossip.topology=ring",
        "checkpoint.every_rounds=1",
    )
    again, others = in_virtual_time(lambda: crash_and_come_back(config, tmp_path, away_rounds=12))
    assert again.of(Left)[0].finished
    assert any("took over the parameters" in notice.text for notice in again.of(Notice))
    report = again.of(Left)[0].report
    assert report.theta_digest is not None
    rounds = [event.report for event in again.of(RoundFinished) if not event.report.closing]
    earlier = report.rounds - len(rounds)
    assert 1 <= earlier <= 4, "those before its crash, as far as its checkpoint tells"
    assert report.train_s > sum(round.train_s for round in rounds)
    assert again.of(WorkTold)[-1].peers[0].rounds == report.rounds
    for peer in others:
        [told] = [work for work in peer.of(WorkTold)[-1].peers if work.peer_id == again.id]
        assert told.rounds == report.rounds
    for peer in others:
        view = peer.peers_by_round()
        assert view[12] == 3
        assert view[max(view)] == 4


def test_a_peer_goes_on_alone_when_nobody_comes_back(tmp_path: Path) -> None:
    config = quick_config(*STEPS, "run.initial_peers=2", "checkpoint.gather_s=20")
    in_virtual_time(lambda: run_and_crash(config, tmp_path, 2, round=4))
    [alone] = in_virtual_time(lambda: run_to_the_end(config, tmp_path, 1))
    assert alone.of(Left)[0].finished
    assert any("going on without them" in notice.text for notice in alone.of(Notice))


def test_a_damaged_checkpoint_is_passed_over_and_said(tmp_path: Path) -> None:
    config = quick_config(*STEPS, "checkpoint.every_rounds=1")
    whole = in_virtual_time(lambda: run_to_the_end(config, tmp_path / "whole", 1))
    in_virtual_time(lambda: run_and_crash(config, tmp_path / "again", 1, round=5))
    newest = max((tmp_path / "again" / "0").glob("round-*"))
    tensors = newest / "tensors.safetensors"
    data = bytearray(tensors.read_bytes())
    data[len(data) // 2] ^= 1
    tensors.write_bytes(data)
    [again] = in_virtual_time(lambda: run_to_the_end(config, tmp_path / "again", 1))
    assert any("is damaged" in notice.text for notice in again.of(Notice))
    assert digests([again]) == digests(whole)


def test_checkpoints_of_another_run_are_refused(tmp_path: Path) -> None:
    home = tmp_path / "0"
    in_virtual_time(lambda: run_to_the_end(quick_config(*STEPS), tmp_path, 1))
    other = quick_config(*STEPS, "run.id=other")
    with pytest.raises(BaseExceptionGroup) as caught:
        in_virtual_time(lambda: run_to_the_end(other, tmp_path, 1))
    assert caught.value.subgroup(ConfigError) is not None
    assert CheckpointStore(home, keep=3).rounds(), "nothing was removed"


def test_a_peer_that_slept_through_many_rounds_takes_over_a_donors_parameters(
    tmp_path: Path,
) -> None:
    from tests.sim.test_life import StoppableCompute

    config = quick_config(*STEPS, "run.initial_peers=4", "run.rounds=40", "gossip.topology=ring")

    async def main() -> tuple[SimulatedPeer, list[SimulatedPeer]]:
        compute = StoppableCompute(step_s=config.simulate.step_s)
        async with hub() as network, asyncio.TaskGroup() as tasks:
            sleeper = SimulatedPeer(network, config, 0, compute=compute)
            others = [SimulatedPeer(network, config, index) for index in (1, 2, 3)]
            for peer in (sleeper, *others):
                tasks.create_task(peer.run())
            await sleeper.reached(4)
            compute.stop_s = 30
        return sleeper, others

    sleeper, others = in_virtual_time(main)
    assert any("took over the parameters" in notice.text for notice in sleeper.of(Notice))
    [jump] = sleeper.of(Jumped)
    assert jump.to_round > jump.from_round + 4
    rounds = [event.report.round for event in sleeper.of(RoundFinished)]
    assert rounds == sorted(set(rounds))
    tail = [kinds for t, kinds in others[0].edges_by_round().items() if t > jump.to_round + 4]
    assert all(set(kinds) == {"applied"} for kinds in tail)


def test_without_room_for_a_checkpoint_nothing_begins() -> None:
    nowhere = Path("/proc/home")  # a file system on which nothing is free
    if not nowhere.parent.is_dir():
        pytest.skip("there is no /proc")
    config = quick_config(*STEPS)

    async def main() -> SimulatedPeer:
        async with hub() as network:
            peer = SimulatedPeer(network, config, 0, home=nowhere)
            with pytest.raises(DiskError, match="no room for a checkpoint in /proc/home"):
                await peer.run()
        return peer

    assert in_virtual_time(main).events == []


def test_a_last_state_that_could_not_be_saved_is_part_of_the_result(tmp_path: Path) -> None:
    config = quick_config(*STEPS, "checkpoint.every_rounds=2")

    async def main() -> tuple[NodeResult, SimulatedPeer]:
        async with hub() as network, asyncio.TaskGroup() as tasks:
            peer = SimulatedPeer(network, config, 0, home=tmp_path / "home")
            running = tasks.create_task(peer.run())
            await peer.reached(5)
            (tmp_path / "home").rename(tmp_path / "away")
            (tmp_path / "home").touch()
        return running.result(), peer

    result, peer = in_virtual_time(main)
    assert result.finished
    assert isinstance(result.unsaved, DiskError)
    assert "the checkpoint of round 4 stays" in result.unsaved.why
    assert peer.of(RoundFinished)[-1].report.closing, "training went on"
    again = in_virtual_time(lambda: run_to_the_end(config, tmp_path / "other", 1))
    assert digests([peer]) == digests(again)
