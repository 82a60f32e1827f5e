"""Real nodes for tests: processes with p2pd and a DHT on loopback, watched event by event."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

from gasloc_p2p.commands.child import Child
from gasloc_p2p.node.events import (
    Event,
    Invitation,
    Left,
    Online,
    RoundFinished,
    RoundStarted,
    Validated,
)

T = TypeVar("T")
PATIENCE_S = 90.0
QUICK = (
    "run.rounds=10",
    "run.closing_rounds=2",
    "inner.local_steps=10",
    "inner.batch_size=4",
    "data.validation_tokens=512",
    "node.validate_every_rounds=0",
    "pace.edge_floor_s=3",
    "pace.edge_ceiling_s=30",
    # Nodes on one machine hinder each other; tests/netns has those that differ.
    "pace.adapt_steps=false",
)


class RealNode:
    """One `gasloc` process, everything that it has reported, and when, on the loop's clock."""

    def __init__(self, child: Child) -> None:
        self.child = child
        self.events: list[Event] = []
        self.times_s: list[float] = []
        self._happened = asyncio.Condition()

    async def follow(self) -> None:
        async for event in self.child.events():
            async with self._happened:
                self.events.append(event)
                self.times_s.append(asyncio.get_running_loop().time())
                self._happened.notify_all()

    async def until(self, holds: Callable[[], T | None]) -> T:
        """Wait for an event after which `holds()` returns something."""
        async with asyncio.timeout(PATIENCE_S), self._happened:
            while (value := holds()) is None:
                await self._happened.wait()
            return value

    async def first(self, kind: type[T]) -> T:
        return await self.until(lambda: next(iter(self.of(kind)), None))

    async def reached(self, round: int) -> None:
        """Wait until it has begun `round`."""
        await self.until(
            lambda: True if any(e.round >= round for e in self.of(RoundStarted)) else None
        )

    async def ended(self) -> int:
        async with asyncio.timeout(PATIENCE_S):
            return await self.child.wait()

    def of(self, kind: type[T]) -> list[T]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def peer_id(self) -> str:
        return self.of(Online)[0].peer_id

    def edges(self) -> dict[int, list[tuple[str, str]]]:
        """Kind and reason of each edge, by round."""
        return {
            e.report.round: [(edge.kind.value, edge.reason) for edge in e.report.edges]
            for e in self.of(RoundFinished)
        }

    def partners(self) -> set[str]:
        return {edge.partner for e in self.of(RoundFinished) for edge in e.report.edges}

    def peers_by_round(self) -> dict[int, int]:
        return {event.round: event.peers for event in self.of(RoundStarted)}

    def val_loss_of(self, round: int) -> float:
        """Its own validation loss after `round`."""
        [event] = [event for event in self.of(Validated) if event.round == round]
        return event.val_loss

    def left(self) -> Left:
        return self.of(Left)[0]

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.child.pid, number)


class RealSwarm:
    """Processes of one test, all ended when it is over."""

    def __init__(self, folder: Path, tasks: asyncio.TaskGroup) -> None:
        self._folder = folder
        self._tasks = tasks
        self.nodes: list[RealNode] = []

    async def bootstrap(self) -> Sequence[str]:
        """Start a bootstrap and return its addresses."""
        node = await self.launch("bootstrap", "bootstrap")
        return (await node.first(Online)).addresses

    async def found(self, name: str, bootstrap: Sequence[str], *settings: str) -> RealNode:
        """Start the founder of a run."""
        entry = f"net.bootstrap={json.dumps(list(bootstrap))}"
        return await self.launch(name, "start", *sets(entry, f"run.id={name}", *settings))

    async def join(self, name: str, founder: RealNode, *settings: str) -> RealNode:
        """Start a node that joins by the founder's invite."""
        invite = (await founder.first(Invitation)).invite
        local = [s for s in settings if s.startswith(("node.", "data.", "net.", "device."))]
        return await self.launch(name, "join", invite, *sets(*local))

    async def launch(
        self, name: str, *arguments: str, address: str = "127.0.0.1", before: Sequence[str] = ()
    ) -> RealNode:
        """Start a process that listens at this IPv4 address; `before`: see `Child.start`."""
        listen = f'net.listen=["/ip4/{address}/tcp/0"]'
        command = [*arguments, *sets(f"node.home={self._folder / name}", listen)]
        node = RealNode(await Child.start(name, command, folder=self._folder, before=before))
        self.nodes.append(node)
        self._tasks.create_task(node.follow())
        return node

    async def nodes_of_run(
        self, name: str, bootstrap: Sequence[str], count: int, *settings: str
    ) -> list[RealNode]:
        """Start a whole run: a founder and those who join it."""
        settings = (*QUICK, f"run.initial_peers={count}", *settings)
        founder = await self.found(name, bootstrap, *settings)
        joiners = [
            await self.join(f"{name}-{index}", founder, *settings) for index in range(1, count)
        ]
        return [founder, *joiners]


def stop_process(pid: int) -> None:
    """Stop a child of this process; return once it stands still, which a signal alone is not."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)


def sets(*assignments: str) -> list[str]:
    """Return the `--set` options for these assignments."""
    return [part for assignment in assignments for part in ("--set", assignment)]


@asynccontextmanager
async def real_swarm(folder: Path) -> AsyncIterator[RealSwarm]:
    """Provide a swarm, and end every process of it."""
    async with asyncio.TaskGroup() as tasks:
        swarm = RealSwarm(folder, tasks)
        try:
            yield swarm
        finally:
            async with asyncio.TaskGroup() as stops:
                for node in swarm.nodes:
                    stops.create_task(_end(node))


async def _end(node: RealNode) -> None:
    if node.child.exit_code is None:
        node.signal(signal.SIGCONT)
    await node.child.stop()


def read_json(path: Path) -> dict[str, object]:
    """Read a report."""
    value = msgspec.json.decode(path.read_bytes())
    assert isinstance(value, dict)
    return value
