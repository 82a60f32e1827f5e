"""Donors with faults on an in-memory network, and a joiner that fetches from them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from gasloc_p2p.core.errors import StateError
from gasloc_p2p.core.outlier import Parts, summarise
from gasloc_p2p.core.substrate import Network, Stream
from gasloc_p2p.core.transfer import (
    MAX_HEAD_BYTES,
    STATE_PROTOCOL,
    Offer,
    Refusal,
    Request,
    StateRequest,
    Summary,
    SummaryRequest,
    donor_order,
    pack_message,
    unpack_answer,
    unpack_request,
)
from gasloc_p2p.core.types import BytesLike
from gasloc_p2p.node.donor import Donor
from gasloc_p2p.node.letters import read_message
from gasloc_p2p.node.state import State, fetch_state
from gasloc_p2p.simulate.clock import InlineCompute
from gasloc_p2p.simulate.links import IDEAL, Link, Partition
from gasloc_p2p.simulate.network import Hub
from gasloc_p2p.testing.clock import in_virtual_time

T = TypeVar("T")
PARTS = (60_000, 21_920)
ELEMENTS = sum(PARTS)
STATE_BYTES = 8 * ELEMENTS
REQUEST = StateRequest(run_digest=b"run", schema_digest=b"schema")
SUMMARY_REQUEST = SummaryRequest(run_digest=b"run", schema_digest=b"schema")
COMPUTE = InlineCompute(step_s=0.0)


def state(seed: int = 0, *, theta_scale: float = 1.0, round: int = 0) -> State:
    generator = torch.Generator().manual_seed(seed)
    theta, memory = (torch.randn(ELEMENTS, generator=generator) for _ in range(2))
    return State(theta=theta * theta_scale, memory=memory, round=round)


def same_bits(fetched: State, other: State) -> bool:
    return torch.equal(fetched.theta, other.theta) and torch.equal(fetched.memory, other.memory)


class Server(Protocol):
    async def serve(self, stream: Stream) -> None: ...


def donor(
    current: State | Callable[[], State | None],
    *,
    request: StateRequest = REQUEST,
    val_loss: float | None = None,
    parts: Sequence[int] = PARTS,
    compute: InlineCompute = COMPUTE,
) -> Donor:
    return Donor(
        request=request,
        current=(lambda: current) if isinstance(current, State) else current,
        parts=parts,
        val_loss=lambda: val_loss,
        compute=compute,
    )


@dataclass(kw_only=True)
class Raw:
    """A donor that sends these bytes whatever it is asked for."""

    data: bytes
    stall: bool = False
    served: int = 0

    async def serve(self, stream: Stream) -> None:
        self.served += 1
        await stream.write(self.data)
        if self.stall:
            await asyncio.Event().wait()
        await stream.read(10**6)
        await stream.aclose()


@dataclass(kw_only=True)
class Witness:
    """A peer that hands out no state and tells this of its own."""

    summary: Summary | bytes
    delay_s: float = 0.0

    async def serve(self, stream: Stream) -> None:
        request = unpack_request(await read_message(stream, limit_bytes=4096))
        if isinstance(request, SummaryRequest):
            await asyncio.sleep(self.delay_s)
            told = self.summary
            await stream.write(told if isinstance(told, bytes) else pack_message(told))
        else:
            await stream.write(pack_message(Refusal(reason="a witness only")))
        await stream.aclose()


def summary_of(own: State, val_loss: float | None = None) -> Summary:
    parts = Parts.of(PARTS, memory_elements=ELEMENTS)
    return summarise(own.theta, own.memory, parts, round=own.round, val_loss=val_loss)


@dataclass(kw_only=True)
class Faults:
    """What happens to one stream of a donor, by the bytes that it has written."""

    cut_at: int | None = None
    flip_at: int | None = None
    stall_at: int | None = None


@dataclass(kw_only=True)
class Wired:
    """A donor whose streams are counted and may break.

    Attributes:
        donor: the real one.
        faults: of its first streams; those beyond have none.
        sent: bytes that went out on each stream that was opened.
        most_at_once: the most transfers that were under way together.
        stalled: set once a stream has stalled.
        broke: set once a stream has been cut.
    """

    donor: Server
    faults: Sequence[Faults] = ()
    sent: list[int] = field(default_factory=list)
    most_at_once: int = 0
    transferring: set[int] = field(default_factory=set)
    stalled: asyncio.Event = field(default_factory=asyncio.Event)
    broke: asyncio.Event = field(default_factory=asyncio.Event)

    async def serve(self, stream: Stream) -> None:
        index = len(self.sent)
        self.sent.append(0)
        faults = self.faults[index] if index < len(self.faults) else Faults()
        try:
            await self.donor.serve(_Wire(stream, self, index, faults))
        finally:
            self.transferring.discard(index)


class _Wire:
    """A donor's end of a stream, with its faults."""

    def __init__(self, stream: Stream, wired: Wired, index: int, faults: Faults) -> None:
        self._stream = stream
        self._wired = wired
        self._index = index
        self._faults = faults
        self.peer_id = stream.peer_id
        self.read = stream.read
        self.aclose = stream.aclose

    async def write(self, data: BytesLike) -> None:
        wired, faults = self._wired, self._faults
        begin, end = wired.sent[self._index], wired.sent[self._index] + len(data)
        piece = bytearray(data)
        if faults.flip_at is not None and begin <= faults.flip_at < end:
            piece[faults.flip_at - begin] ^= 1
        if faults.stall_at is not None and end > faults.stall_at:
            wired.stalled.set()
            await asyncio.Event().wait()
        if faults.cut_at is not None:
            del piece[max(0, faults.cut_at - begin) :]
        wired.sent[self._index] += len(piece)
        await self._stream.write(bytes(piece))
        if len(piece) < len(data):
            await self._stream.aclose()
            wired.broke.set()
            raise ConnectionResetError("the stream broke")
        if end > 1000:
            wired.transferring.add(self._index)
            wired.most_at_once = max(wired.most_at_once, len(wired.transferring))


async def ask(
    network: Network, donors: Sequence[str], judge: Callable[[Tensor], float] | None = None
) -> State:
    return await fetch_state(
        network=network,
        compute=COMPUTE,
        request=REQUEST,
        donors=donors,
        elements=ELEMENTS,
        memory_elements=ELEMENTS,
        parts=PARTS,
        judge=judge,
        deadline_s=5.0,
    )


def in_a_swarm(
    donors: Sequence[Server | None],
    scenario: Callable[[Network, list[str], Hub], Awaitable[T]],
    *,
    links: Sequence[Link] = (),
    partitions: Sequence[Partition] = (),
    joiner_link: Link = IDEAL,
) -> T:
    """Run `scenario` with a joiner, and donors in the order in which it prefers them.

    The joiner is peer 0 of partitions, the donors follow; None cannot be reached.
    """

    async def main() -> T:
        async with Hub(
            verify=lambda *_: True, links=[joiner_link, *links], partitions=partitions
        ) as hub:
            joiner = hub.network("joiner", bytes)
            names = donor_order("joiner", [f"donor {index}" for index in range(len(donors))])
            for name, server in zip(names, donors, strict=True):
                network = hub.network(name, bytes)
                if server is not None:
                    await network.serve(STATE_PROTOCOL, server.serve)
            return await scenario(joiner, names, hub)

    return in_virtual_time(main)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a fetch ended, when, and the donors' names in the order of preference."""

    state: State | None
    error: StateError | None
    ended_s: float
    names: list[str]


def fetch(
    *donors: Server | None,
    judge: Callable[[Tensor], float] | None = None,
    links: Sequence[Link] = (),
    partitions: Sequence[Partition] = (),
    joiner_link: Link = IDEAL,
) -> Outcome:
    """Let a joiner fetch from donors that it prefers in this order."""

    async def scenario(joiner: Network, names: list[str], hub: Hub) -> Outcome:
        fetched, error = None, None
        try:
            fetched = await ask(joiner, names, judge)
        except StateError as failure:
            error = failure
        ended_s = asyncio.get_running_loop().time()
        return Outcome(state=fetched, error=error, ended_s=ended_s, names=names)

    return in_a_swarm(donors, scenario, links=links, partitions=partitions, joiner_link=joiner_link)


class Joiners:
    """Anybody who dials the one donor."""

    def __init__(self, hub: Hub, donor_id: str) -> None:
        self._hub = hub
        self._donor_id = donor_id
        self._networks: dict[str, Network] = {}

    def network(self, name: str) -> Network:
        if name not in self._networks:
            self._networks[name] = self._hub.network(name, bytes)
        return self._networks[name]

    async def dial(self, name: str, data: bytes = b"") -> Stream:
        stream = await self.network(name).open_stream(
            self._donor_id, STATE_PROTOCOL, deadline_s=5.0
        )
        if data:
            await stream.write(data)
        return stream

    async def asks(self, name: str, request: Request = REQUEST) -> tuple[Stream, Offer | Summary]:
        stream = await self.dial(name, pack_message(request))
        return stream, unpack_answer(await read_message(stream, limit_bytes=MAX_HEAD_BYTES))

    async def fetches(self, name: str) -> State:
        return await ask(self.network(name), [self._donor_id])


def with_joiners(server: Server, scenario: Callable[[Joiners], Awaitable[T]]) -> T:
    async def run(_: Network, names: list[str], hub: Hub) -> T:
        return await scenario(Joiners(hub, names[0]))

    return in_a_swarm([server], run)
