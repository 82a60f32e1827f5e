"""A simulated swarm whose peers can be started, stopped and watched one by one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import cache
from typing import Any, TypeVar

import pytest
import torch

from gasloc_p2p.config import Config, assignment_layer, load
from gasloc_p2p.core.manifest import Manifest
from gasloc_p2p.core.substrate import Compute
from gasloc_p2p.founding import found, pace_of
from gasloc_p2p.net.identity import Identity
from gasloc_p2p.node.events import Event, Jumped, RoundFinished, RoundStarted
from gasloc_p2p.node.node import Node
from gasloc_p2p.node.result import NodeResult
from gasloc_p2p.simulate.clock import InlineCompute, VirtualClock, VirtualTimeLoop
from gasloc_p2p.simulate.network import Hub, MemoryNetwork
from gasloc_p2p.simulate.swarm import learner_of
from gasloc_p2p.train.data import Corpus, load_corpus
from gasloc_p2p.train.settings import DataConfig

T = TypeVar("T")
QUICK = (
    "run.id=test",
    "run.rounds=8",
    "inner.local_steps=2",
    "inner.batch_size=2",
    "data.validation_tokens=512",
    "node.validate_every_rounds=0",
)


def quick_config(*assignments: str) -> Config:
    """Settings of a run that takes no time, changed by `section.key=value` texts."""
    return load([assignment_layer([*QUICK, *assignments])]).config


@cache
def corpus() -> Corpus:
    return load_corpus(DataConfig())


def in_virtual_time(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run `main()` to its end on a virtual clock."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main())


class SimulatedPeer:
    """One node of a simulated swarm, with everything that it reported."""

    def __init__(
        self,
        hub: Hub,
        config: Config,
        index: int,
        *,
        manifest: Manifest | None = None,
        compute: Compute | None = None,
    ) -> None:
        self.identity = Identity.derived(config.run.seed, index)
        self.network: MemoryNetwork = hub.network(self.identity.peer_id, self.identity.sign)
        self.events: list[Event] = []
        self.leave = asyncio.Event()
        self._happened = asyncio.Event()
        manifest = manifest or found(config, now_s=0.0)
        self.node = Node(
            config=config,
            manifest=manifest,
            network=self.network,
            clock=VirtualClock(),
            compute=compute or InlineCompute(step_s=config.simulate.step_s),
            learner=learner_of(config, peer_id=self.identity.peer_id, corpus=corpus()),
            pace=pace_of(config, manifest),
            verify=Identity.verify,
            observe=self._observe,
        )

    @property
    def id(self) -> str:
        return self.identity.peer_id

    def _observe(self, event: Event) -> None:
        self.events.append(event)
        self._happened.set()

    async def run(self) -> NodeResult:
        return await self.node.run(self.leave)

    async def reached(self, round: int) -> None:
        """Wait until this peer has begun `round`."""
        while not any(e.round >= round for e in self.of(RoundStarted)):
            self._happened.clear()
            await self._happened.wait()

    def of(self, kind: type[T]) -> list[T]:
        """What it reported of one kind."""
        return [event for event in self.events if isinstance(event, kind)]

    def peers_by_round(self) -> dict[int, int]:
        """How many peers its roster had, by round."""
        return {event.round: event.peers for event in self.of(RoundStarted)}

    def edges_by_round(self) -> dict[int, list[str]]:
        """How its edges ended, by round."""
        return {
            e.report.round: [edge.kind.value for edge in e.report.edges]
            for e in self.of(RoundFinished)
        }

    def jumps(self) -> list[tuple[int, int]]:
        return [(event.from_round, event.to_round) for event in self.of(Jumped)]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
