"""One peer of a simulated swarm that can be started, stopped, killed and watched."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, TypeVar

from torch import Tensor

from gasloc_p2p.config import Config
from gasloc_p2p.core.manifest import Manifest
from gasloc_p2p.core.outer import OuterRule
from gasloc_p2p.core.records import Verify
from gasloc_p2p.core.substrate import Clock, Compute, LocalModel, Network
from gasloc_p2p.core.types import PeerId
from gasloc_p2p.founding import found, pace_of
from gasloc_p2p.net.identity import Identity
from gasloc_p2p.node.checkpoint import CheckpointStore
from gasloc_p2p.node.events import Event, Jumped, RoundFinished, RoundStarted
from gasloc_p2p.node.node import Node
from gasloc_p2p.node.result import NodeResult
from gasloc_p2p.simulate.clock import InlineCompute
from gasloc_p2p.simulate.network import Hub, MemoryNetwork
from gasloc_p2p.testing.clock import ShiftedClock, act_as

T = TypeVar("T")

verify: Final[Verify] = lru_cache(maxsize=1 << 14)(Identity.verify)
"""Checks a record's signature, each record once for all the peers of the process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """The checkpoints that a process left behind.

    Attributes:
        newest: round of the newest whole one; None when there is none.
        problems: one sentence for each damaged one.
    """

    newest: int | None
    problems: tuple[str, ...]


@dataclass(kw_only=True, slots=True)
class Life:
    """What one process of a peer did, from its start to its end.

    Attributes:
        peer: its index.
        began_s: virtual second of its start.
        ended_s: virtual second of its end.
        log: all that it reported, with the virtual second.
        thetas: its parameters at the end of each round, [P] fp32.
        end: how it ended: "finished", "left", "killed" or "failed"; empty while it runs.
        error: what it failed with.
        checkpoints: what was found in its folder after its end; None if it kept none.
    """

    peer: int
    began_s: float
    ended_s: float = 0.0
    log: list[tuple[float, Event]] = field(default_factory=list)
    thetas: dict[int, Tensor] = field(default_factory=dict)
    end: str = ""
    error: BaseException | None = None
    checkpoints: Saved | None = None

    def of(self, kind: type[T]) -> list[T]:
        """Return what it reported of one kind."""
        return [event for _, event in self.log if isinstance(event, kind)]


class SimulatedPeer:
    """One node of a simulated swarm, with everything that it reported.

    Its identity is `Identity.derived(config.run.seed, index)`.

    Args:
        hub: what it is plugged into.
        config: its settings.
        index: its place in the swarm.
        models: returns the model of a peer, with the run's initial parameters.
        manifest: of the run; that of `config` when None.
        compute: where it computes; at once and inline when None.
        clock: its wall clock; the virtual one when None.
        wrap: puts something in front of its network.
        checkpoints: where it keeps its state; nowhere when None.
        rule: what it sends and how it steps; as the settings say when None.
        observe: told what happens, after it was noted.
    """

    def __init__(
        self,
        hub: Hub,
        config: Config,
        index: int,
        *,
        models: Callable[[PeerId], LocalModel],
        manifest: Manifest | None = None,
        compute: Compute | None = None,
        clock: Clock | None = None,
        wrap: Callable[[Network], Network] = lambda network: network,
        checkpoints: CheckpointStore | None = None,
        rule: OuterRule | None = None,
        observe: Callable[[Event], None] = lambda event: None,
    ) -> None:
        self.identity = Identity.derived(config.run.seed, index)
        self.network: MemoryNetwork = hub.network(self.identity.peer_id, self.identity.sign)
        self.life = Life(peer=index, began_s=asyncio.get_running_loop().time())
        self.leave = asyncio.Event()
        self._happened = asyncio.Event()
        self._tell = observe
        self._model = models(self.id)
        manifest = manifest or found(config, now_s=0.0)
        self.node = Node(
            config=config,
            manifest=manifest,
            network=wrap(self.network),
            clock=clock or ShiftedClock(),
            compute=compute or InlineCompute(step_s=config.simulate.step_s),
            learner=self._model,
            pace=pace_of(config, manifest),
            verify=verify,
            observe=self._observe,
            checkpoints=checkpoints,
            rule=rule,
        )

    @property
    def id(self) -> PeerId:
        """Its peer id."""
        return self.identity.peer_id

    @property
    def events(self) -> list[Event]:
        """All that it reported so far."""
        return [event for _, event in self.life.log]

    def _observe(self, event: Event) -> None:
        self.life.log.append((asyncio.get_running_loop().time(), event))
        if isinstance(event, RoundFinished):
            self.life.thetas[event.report.round] = self._model.theta()
        self._happened.set()
        self._tell(event)

    async def run(self) -> NodeResult:
        """Take part until the run ends or `leave` is set."""
        act_as(f"peer {self.life.peer}")
        return await self.node.run(self.leave)

    async def reached(self, round: int) -> None:
        """Wait until it has begun `round`."""
        while not any(event.round >= round for event in self.of(RoundStarted)):
            self._happened.clear()
            await self._happened.wait()

    def of(self, kind: type[T]) -> list[T]:
        """Return what it reported of one kind."""
        return self.life.of(kind)

    def peers_by_round(self) -> dict[int, int]:
        """Return how many peers its roster had, by round."""
        return {event.round: event.peers for event in self.of(RoundStarted)}

    def edges_by_round(self) -> dict[int, list[str]]:
        """Return how its edges ended, by round."""
        return {
            event.report.round: [edge.kind.value for edge in event.report.edges]
            for event in self.of(RoundFinished)
        }

    def jumps(self) -> list[tuple[int, int]]:
        """Return from which round to which it jumped."""
        return [(event.from_round, event.to_round) for event in self.of(Jumped)]
