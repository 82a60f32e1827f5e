"""A whole swarm in virtual time: the node's own code, while a plan of faults goes on around it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeAlias

import torch

from gasloc_p2p.config import Config
from gasloc_p2p.core.substrate import LocalModel
from gasloc_p2p.core.types import PeerId
from gasloc_p2p.founding import found
from gasloc_p2p.node.checkpoint import CheckpointStore
from gasloc_p2p.node.events import Event, RoundStarted
from gasloc_p2p.node.result import NodeResult
from gasloc_p2p.simulate.links import check_partitions, links_of, parse_partition
from gasloc_p2p.simulate.network import Hub
from gasloc_p2p.testing.clock import ShiftedClock, StallingCompute, in_virtual_time
from gasloc_p2p.testing.faults import Fault, FaultPlan, Kill, SkewClock, Stall
from gasloc_p2p.testing.network import FaultyNetwork
from gasloc_p2p.testing.peer import Life, Saved, SimulatedPeer, verify
from gasloc_p2p.testing.quadratic import NoisyQuadratic
from gasloc_p2p.testing.trace import Limits, SwarmTrace

Models: TypeAlias = Callable[[PeerId], LocalModel]
"""Returns the model of a peer with the run's initial parameters; called for every life anew."""


class VirtualSwarm:
    """A swarm of nodes on a virtual clock and network; `run` runs it to its end.

    Deterministic: the same arguments give a trace with the same digest.

    Args:
        config: settings of every peer; links, partitions and the time of a step are those of its
            section `simulate`, identities follow from `run.seed`.
        peers: how many.
        plan: what goes wrong.
        models: what they train; each a `NoisyQuadratic` when None.
    """

    def __init__(
        self,
        config: Config,
        *,
        peers: int,
        plan: FaultPlan | None = None,
        models: Models | None = None,
    ) -> None:
        self._config = config
        self._plan = FaultPlan() if plan is None else plan
        self._models: Models = models or partial(_quadratic, config.run.seed)
        self._manifest = found(config, now_s=0.0)
        self._links = links_of(config.simulate.links, peers)
        self._partitions = [parse_partition(text) for text in config.simulate.partitions]
        check_partitions(self._partitions, peers)
        self._peers = peers
        self._limits = Limits.of(config)
        self._front = _Front(running=peers)
        self.trace = SwarmTrace(peers=peers, plan=self._plan, limits=self._limits)

    def run(self) -> SwarmTrace:
        """Run the swarm until every peer has finished, failed, or is gone for good.

        What a peer fails with ends that peer alone, and is found in its `Life`.

        Raises:
            DeadlockError: nothing can ever happen again; it names who waits where.
            LivelockError: the swarm does not come to its end; likewise.
        """
        torch.set_num_threads(1)
        rounds = self._config.run.rounds + self._config.run.closing_rounds
        horizon_s = self._limits.joining_s + rounds * self._limits.round_s
        with TemporaryDirectory(prefix="gasloc-testing-") as homes:
            in_virtual_time(partial(self._main, Path(homes)), horizon_s=horizon_s)
        return self.trace

    async def _main(self, homes: Path) -> None:
        hub = Hub(verify=verify, links=self._links, partitions=self._partitions)
        async with hub, asyncio.TaskGroup() as tasks:
            cutting = tasks.create_task(self._cut(hub))
            lives = [
                tasks.create_task(self._lives(hub, index, homes / str(index)))
                for index in range(self._peers)
            ]
            await asyncio.wait(lives)
            cutting.cancel()

    async def _cut(self, hub: Hub) -> None:
        """Carry out the partitions."""
        for partition in self._plan.partitions:
            if not await self._front.reached(partition.round):
                return
            hub.partition(partition.peers, seconds=partition.seconds)
            self._note_while(partition, partition.seconds)

    async def _lives(self, hub: Hub, index: int, home: Path) -> None:
        """Run one peer, and start it again after each crash from which it comes back."""
        store = None
        if self._plan.of(Kill, index):
            # Writing files takes real time, so only those that will read them do.
            store = CheckpointStore(home, keep=self._config.checkpoint.keep)
        left = _Left(kills=self._plan.of(Kill, index), stalls=self._plan.of(Stall, index))
        try:
            while (kill := await self._live(hub, index, store, left)) is not None:
                if kill.back_after_rounds is None:
                    return
                self._front.leave()
                back = await self._front.reached(kill.round + kill.back_after_rounds)
                self._front.enter()
                if not back:
                    return
                self._note(f"peer {index} is started again")
        finally:
            self._front.leave()

    async def _live(
        self, hub: Hub, index: int, store: CheckpointStore | None, left: _Left
    ) -> Kill | None:
        """Run one process of a peer to its end; return what killed it, if it was killed."""
        killed: asyncio.Future[Kill] = asyncio.get_running_loop().create_future()
        peer = self._start(hub, index, store, left, killed)
        self.trace.lives.append(peer.life)
        running = asyncio.create_task(peer.run())
        try:
            await asyncio.wait((running, killed), return_when=asyncio.FIRST_COMPLETED)
            # The network first: what a killed process does while it ends reaches nobody.
            await peer.network.aclose()
        finally:
            running.cancel()
            await asyncio.wait((running,))
        self._end(peer.life, running, store)
        if running.cancelled():
            return killed.result()
        killed.cancel()
        return None

    def _start(
        self,
        hub: Hub,
        index: int,
        store: CheckpointStore | None,
        left: _Left,
        killed: asyncio.Future[Kill],
    ) -> SimulatedPeer:
        config, plan = self._config, self._plan
        compute = StallingCompute(step_s=config.simulate.step_s)
        faults = plan.on_the_wire(index)

        def observe(event: Event) -> None:
            if not isinstance(event, RoundStarted):
                return
            self._front.move(event.round)
            for stall in left.due_stalls(event.round):
                compute.stall_s += stall.seconds
                self._note_while(stall, stall.seconds)
            for kill in left.due_kills(event.round):
                asyncio.get_running_loop().call_later(kill.after_s, self._kill, kill, killed)

        return SimulatedPeer(
            hub,
            config,
            index,
            models=self._models,
            manifest=self._manifest,
            compute=compute,
            clock=ShiftedClock(sum(skew.seconds for skew in plan.of(SkewClock, index))),
            wrap=(
                partial(FaultyNetwork, faults=faults, told=lambda fault: self._note(str(fault)))
                if faults
                else lambda network: network
            ),
            checkpoints=store,
            observe=observe,
        )

    def _kill(self, kill: Kill, killed: asyncio.Future[Kill]) -> None:
        if not killed.done():
            self._note(str(kill))
            killed.set_result(kill)

    def _end(
        self, life: Life, running: asyncio.Task[NodeResult], store: CheckpointStore | None
    ) -> None:
        life.ended_s = asyncio.get_running_loop().time()
        if running.cancelled():
            life.end = "killed"
        elif (error := running.exception()) is not None:
            life.end, life.error = "failed", error
        else:
            life.end = "finished" if running.result().finished else "left"
        if store is not None:
            found = store.read_newest()
            newest = None if found.checkpoint is None else found.checkpoint.progress.round
            life.checkpoints = Saved(newest=newest, problems=found.problems)

    def _note(self, what: str) -> None:
        self.trace.note(asyncio.get_running_loop().time(), self._front.round, what)

    def _note_while(self, fault: Fault, seconds: float) -> None:
        self._note(str(fault))
        asyncio.get_running_loop().call_later(seconds, self._note, f"over: {fault}")


@dataclass(kw_only=True, slots=True)
class _Left:
    """What is still to happen to a peer; each of it once, however often a round begins."""

    kills: list[Kill]
    stalls: list[Stall]

    def due_kills(self, round: int) -> list[Kill]:
        """Take out and return those of `round`."""
        due = [kill for kill in self.kills if kill.round == round]
        self.kills = [kill for kill in self.kills if kill.round != round]
        return due

    def due_stalls(self, round: int) -> list[Stall]:
        """Take out and return those of `round`."""
        due = [stall for stall in self.stalls if stall.round == round]
        self.stalls = [stall for stall in self.stalls if stall.round != round]
        return due


def _quadratic(seed: int, peer_id: PeerId) -> NoisyQuadratic:
    return NoisyQuadratic(seed=seed, peer_id=peer_id)


class _Front:
    """The round of the peer that is furthest ahead, for those who wait for the swarm.

    Attributes:
        round: that round; -1 before any has begun.

    Args:
        running: how many peers run at first.
    """

    def __init__(self, *, running: int) -> None:
        self.round = -1
        self._running = running
        self._moved = asyncio.Event()

    def enter(self) -> None:
        """One more peer runs again."""
        self._running += 1

    def leave(self) -> None:
        """One peer less does."""
        self._running -= 1
        self._moved.set()

    def move(self, round: int) -> None:
        """A peer has begun `round`."""
        self.round = max(self.round, round)
        self._moved.set()

    async def reached(self, round: int) -> bool:
        """Wait for a peer that begins `round`; False when nobody is left who could."""
        while self.round < round:
            if self._running == 0:
                return False
            self._moved.clear()
            await self._moved.wait()
        return True
