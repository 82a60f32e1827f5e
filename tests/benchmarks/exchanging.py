"""One end of exchanges of a whole vector through the node's own edges, on a real p2pd.

Started twice by `tests.benchmarks.averager` and `tests.benchmarks.memory`. It prints where it is,
then a line once it has warmed up with a small exchange; from then on every line that comes in
orders an exchange, whose figures it prints. An exchange is all that a node does between its local
steps and its outer step: the offer, the edges, and the mix.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec
import torch
import uvloop
from torch import Tensor

from gasloc_p2p.commands.compute import ThreadCompute
from gasloc_p2p.core.codecs import Codec, Keys, block_max_difference, codec_named
from gasloc_p2p.core.exchange import Exchange
from gasloc_p2p.core.substrate import Stream
from gasloc_p2p.core.types import EdgeOutcome
from gasloc_p2p.core.wire import PROTOCOL_VERSION, Hello
from gasloc_p2p.net.identity import Identity
from gasloc_p2p.net.network import Libp2pNetwork
from gasloc_p2p.net.settings import NetConfig
from gasloc_p2p.node.edge import Contact, EdgeWork, run_edge
from gasloc_p2p.node.room import Room

PROTOCOL: Final = "gasloc/bench-exchange/1"
DEADLINE_S: Final = 300.0
SPREAD: Final = 0.02
APART: Final = 0.0005
WARM_ELEMENTS: Final = 1 << 18


class Plan(msgspec.Struct, kw_only=True, frozen=True):
    """What one end does.

    Attributes:
        end: 0 or 1.
        listen: multiaddrs at which it listens.
        contact: addresses of end 0, for end 1.
        codec: name of the codec.
        elements: fp32 parameters.
        chunk_bytes: wished size of a chunk of codes.
        edges: how many exchanges at a time, as on a ring.
    """

    end: int
    listen: tuple[str, ...]
    contact: tuple[str, ...] = ()
    codec: str
    elements: int
    chunk_bytes: int
    edges: int = 1


class Measured(msgspec.Struct, kw_only=True, frozen=True):
    """What one exchange took at one end.

    Attributes:
        ended_s: when the mix was done, on the machine's monotonic clock.
        cpu_s: seconds of CPU that this process spent; its p2pd is not counted.
        bytes_sent: over all edges.
        repaired_blocks: over all edges.
        idle_bytes: resident memory before it.
        peak_bytes: the most resident memory until its end.
        code_bytes: size of the codes that one edge receives.
    """

    ended_s: float
    cpu_s: float
    bytes_sent: int
    repaired_blocks: int
    idle_bytes: int
    peak_bytes: int
    code_bytes: int


@dataclass(kw_only=True)
class End:
    """A node's part in the exchanges."""

    plan: Plan
    network: Libp2pNetwork
    partner: str
    codec: Codec
    compute: ThreadCompute
    room: Room = field(default_factory=Room)
    arrived: asyncio.Queue[Stream] = field(default_factory=asyncio.Queue)

    async def serve(self, stream: Stream) -> None:
        """Keep a stream that the partner opened until its edge is over."""
        await self.arrived.put(stream)
        await asyncio.Event().wait()

    async def contact(self) -> Contact:
        """Dial, or wait for the partner to dial."""
        if self.plan.end == 0:
            return Contact(stream=await self.arrived.get())
        opened = await self.network.open_stream(self.partner, PROTOCOL, deadline_s=DEADLINE_S)
        return Contact(stream=opened)

    async def exchange(self, round: int, x: Tensor, motion: Tensor | None) -> list[EdgeOutcome]:
        """Exchange a vector over all edges and mix it."""
        keys = Keys(round=round, own=round + self.plan.end)
        offer = await self.compute.run(
            lambda: self.codec.offer(x, motion=motion, keys=keys, chunk_bytes=self.plan.chunk_bytes)
        )
        layout = offer.layout
        hello = Hello(
            protocol_min=PROTOCOL_VERSION,
            protocol_max=PROTOCOL_VERSION,
            peer_id=self.network.peer_id,
            run_digest=b"run",
            schema_digest=b"schema",
            round=round,
            roster_digest=b"roster",
            codec=self.codec.name,
            code_bytes=layout.code_bytes,
            chunk_bytes=self.plan.chunk_bytes,
            scale_bytes=layout.scale_bytes,
        )
        work = EdgeWork(
            offer=offer, compute=self.compute, clip=lambda length: 1.0, records=lambda records: None
        )
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(
                    run_edge(
                        partner=self.partner,
                        contact=self.contact,
                        exchange=Exchange(
                            hello=hello,
                            layout=layout,
                            scales=offer.scales,
                            partner=self.partner,
                            dialer=self.plan.end == 1,
                            chunk_memory=self.room.memory,
                        ),
                        work=work,
                        deadline_s=DEADLINE_S,
                    )
                )
                for _ in range(self.plan.edges)
            ]
        outcomes = [task.result() for task in running]
        await self.compute.run(lambda: self._mix(x, outcomes))
        return outcomes

    def _mix(self, x: Tensor, outcomes: list[EdgeOutcome]) -> None:
        mixed = self.room.copy(x)
        for outcome in outcomes:
            assert outcome.coder is not None, outcome.reason
            outcome.coder.add_difference(mixed, 0.5)


def vectors(elements: int, end: int, codec: Codec) -> tuple[Tensor, Tensor | None]:
    """Return what an end gives, fp32 [elements], and how far it has moved per block.

    Both ends start from the same normal numbers of deviation `SPREAD` and move by normal numbers of
    deviation `APART` of their own.
    """
    x = torch.randn(elements, generator=torch.Generator().manual_seed(7)) * SPREAD
    own = torch.randn(elements, generator=torch.Generator().manual_seed(end)) * APART
    motion = None
    if codec.checked:
        motion = block_max_difference(own, torch.zeros_like(own), codec.block_elements)
    return x.add_(own), motion


async def take_part(plan: Plan) -> None:
    """Do the exchanges of one end; print where it is, and at last what was measured."""
    torch.set_num_threads(1)
    identities = [Identity.derived(0, index) for index in range(2)]
    network = await Libp2pNetwork.create(
        identities[plan.end], NetConfig(listen=plan.listen, bootstrap=plan.contact)
    )
    end = End(
        plan=plan,
        network=network,
        partner=identities[1 - plan.end].peer_id,
        codec=codec_named(plan.codec),
        compute=ThreadCompute(),
    )
    try:
        await network.serve(PROTOCOL, end.serve)
        print(json.dumps(await network.addresses()), flush=True)
        await end.exchange(0, *vectors(WARM_ELEMENTS, plan.end, end.codec))
        x, motion = vectors(plan.elements, plan.end, end.codec)
        print("ready", flush=True)
        loop = asyncio.get_running_loop()
        round = 0
        while await loop.run_in_executor(None, sys.stdin.readline):
            round += 1
            measured = await _measured(end, round, x, motion)
            print(msgspec.json.encode(measured).decode(), flush=True)
    finally:
        end.compute.close()
        await network.aclose()


async def _measured(end: End, round: int, x: Tensor, motion: Tensor | None) -> Measured:
    idle_bytes = _forget_peak()
    began_cpu_s = _cpu_s()
    edges = await end.exchange(round, x, motion)
    return Measured(
        ended_s=time.monotonic(),
        cpu_s=_cpu_s() - began_cpu_s,
        bytes_sent=sum(edge.bytes_sent for edge in edges),
        repaired_blocks=sum(edge.repaired_blocks for edge in edges),
        idle_bytes=idle_bytes,
        peak_bytes=_status_bytes("VmHWM"),
        code_bytes=end.codec.layout(end.plan.elements, end.plan.chunk_bytes).code_bytes,
    )


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _forget_peak() -> int:
    """Let the peak of resident memory begin anew and return what is resident."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status_bytes("VmRSS")


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(name)


if __name__ == "__main__":
    uvloop.run(take_part(msgspec.json.decode(sys.argv[1], type=Plan)))
