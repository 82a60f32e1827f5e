"""The two processes at the ends of an emulated link, which exchange bytes both ways at once.

Started by `tests.benchmarks.link`; each end is a node with a p2pd of its own, or plain TCP. The
clock of both is the machine's, so that each end can say when it has received the last byte.
"""

from __future__ import annotations

import asyncio
import json
import math
import struct
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, Protocol

import msgspec
import uvloop

PROTOCOL: Final = "gasloc/bench-link/1"
PORT: Final = 4001
PIECE_BYTES: Final = 256 * 1024
DEADLINE_S: Final = 300.0
_REQUEST: Final = struct.Struct("<dQ")
_ANSWER: Final = struct.Struct("<d")


class Plan(msgspec.Struct, kw_only=True, frozen=True):
    """What the ends do.

    Attributes:
        transport: plain, tcp, quic, or node: TCP with a stream as a node has it.
        addresses: the IPv4 address of the end that is dialled, and of the other.
        streams: how many share an exchange.
        exchange_bytes: bytes in each direction.
        exchanges: how many, one after the other.
        pause_s: seconds between them.
        keep: whether streams stay open between exchanges.
        cap_mbit: upload cap of both ends; 0 for none.
    """

    transport: str
    addresses: tuple[str, str]
    streams: int
    exchange_bytes: int
    exchanges: int
    pause_s: float
    keep: bool
    cap_mbit: float

    def listen(self, end: int) -> str:
        """Return the multiaddr at which an end listens."""
        ip = f"/ip4/{self.addresses[end]}"
        return f"{ip}/udp/{PORT}/quic-v1" if self.transport == "quic" else f"{ip}/tcp/{PORT}"


class Timing(msgspec.Struct, kw_only=True, frozen=True):
    """Seconds from the start of an exchange until the last byte has arrived, at each end."""

    up_s: float
    down_s: float


class Channel(Protocol):
    """What both a stream of a node and a plain connection are."""

    async def read(self, max_bytes: int) -> bytes: ...

    async def write(self, data: bytes) -> None: ...

    async def aclose(self) -> None: ...


class PlainChannel:
    """A plain TCP connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def read(self, max_bytes: int) -> bytes:
        return await self._reader.read(max_bytes)

    async def write(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def aclose(self) -> None:
        self._writer.close()


Handler = Callable[[Channel], Coroutine[Any, Any, None]]
Dial = Callable[[], Awaitable[Channel]]


@asynccontextmanager
async def place(plan: Plan, end: int, handler: Handler, contact: str) -> AsyncIterator[Dial]:
    """Be at one end, and yield how the other end is dialled; `contact` is what end 0 printed."""
    if plan.transport == "plain":

        async def dial_plainly() -> Channel:
            return PlainChannel(*await asyncio.open_connection(plan.addresses[0], PORT))

        async with asyncio.TaskGroup() as tasks:
            server = await asyncio.start_server(
                lambda r, w: tasks.create_task(handler(PlainChannel(r, w))),
                plan.addresses[end],
                PORT,
            )
            announce([plan.addresses[end]])
            yield dial_plainly
            server.close()
        return

    # It loads torch, which plain TCP need not wait for.
    from gasloc_p2p.net import lanes
    from gasloc_p2p.net.identity import Identity
    from gasloc_p2p.net.network import Libp2pNetwork
    from gasloc_p2p.net.settings import NetConfig

    identities = [Identity.derived(0, index) for index in range(2)]
    config = NetConfig(
        listen=(plan.listen(end),),
        bootstrap=tuple(json.loads(contact)) if contact else (),
        upload_mbit=plan.cap_mbit,
    )
    if plan.transport != "node":
        lanes.LONG_ROUND_TRIP_S = math.inf
    network = await Libp2pNetwork.create(identities[end], config)
    try:
        await network.serve(PROTOCOL, handler)
        announce(await network.addresses())

        async def dial() -> Channel:
            peer = identities[1 - end].peer_id
            return await network.open_stream(peer, PROTOCOL, deadline_s=DEADLINE_S)

        yield dial
    finally:
        await network.aclose()


def announce(addresses: Sequence[str]) -> None:
    """Tell the parent that this end is there."""
    print(json.dumps(list(addresses)), flush=True)


async def push(channel: Channel, size_bytes: int) -> None:
    """Send so many bytes."""
    piece = bytes(PIECE_BYTES)
    for start in range(0, size_bytes, PIECE_BYTES):
        await channel.write(piece[: min(PIECE_BYTES, size_bytes - start)])


async def pull(channel: Channel, size_bytes: int) -> bytes:
    """Receive so many bytes and return the last piece of them; b"" at the end of the stream."""
    piece = b""
    while size_bytes:
        piece = await channel.read(min(size_bytes, PIECE_BYTES))
        if not piece:
            return b""
        size_bytes -= len(piece)
    return piece


async def exactly(channel: Channel, size_bytes: int) -> bytes:
    """Receive a few bytes; fewer at the end of the stream."""
    received = b""
    while len(received) < size_bytes:
        piece = await channel.read(size_bytes - len(received))
        if not piece:
            break
        received += piece
    return received


async def answer_once(channel: Channel) -> bool:
    """Take part in one exchange; False when there is none any more."""
    async with asyncio.timeout(DEADLINE_S):
        request = await exactly(channel, _REQUEST.size)
        if len(request) < _REQUEST.size:
            return False
        _, size_bytes = _REQUEST.unpack(request)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(push(channel, size_bytes))
            await pull(channel, size_bytes)
            received_s = time.monotonic()
        await channel.write(_ANSWER.pack(received_s))
    return True


async def answer(channel: Channel) -> None:
    """Take part in the exchanges of one stream that the other end has opened."""
    while await answer_once(channel):
        pass
    await channel.aclose()


async def take_part(channel: Channel, size_bytes: int, began_s: float) -> Timing:
    """Do an exchange over one stream and return when its bytes had arrived."""
    await channel.write(_REQUEST.pack(began_s, size_bytes))
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(push(channel, size_bytes))
        await pull(channel, size_bytes)
        down_s = time.monotonic() - began_s
    [received_s] = _ANSWER.unpack(await exactly(channel, _ANSWER.size))
    return Timing(up_s=received_s - began_s, down_s=down_s)


async def exchange(plan: Plan, dial: Dial, channels: list[Channel | None]) -> Timing:
    """Do one exchange over all streams together, which are opened first where there are none."""
    began_s = time.monotonic()
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:

        async def one(index: int) -> Timing:
            if channels[index] is None:
                channels[index] = await dial()
            channel = channels[index]
            assert channel is not None
            return await take_part(channel, plan.exchange_bytes // plan.streams, began_s)

        parts = [tasks.create_task(one(index)) for index in range(plan.streams)]
    timings = [part.result() for part in parts]
    if not plan.keep:
        await close_all(channels)
    return Timing(
        up_s=max(timing.up_s for timing in timings),
        down_s=max(timing.down_s for timing in timings),
    )


async def close_all(channels: list[Channel | None]) -> None:
    """Close what is open."""
    for index, channel in enumerate(channels):
        if channel is not None:
            await channel.aclose()
        channels[index] = None


async def dialling_end(plan: Plan, contact: str) -> list[Timing]:
    """Do all exchanges, as the end that dials."""
    timings: list[Timing] = []
    channels: list[Channel | None] = [None] * plan.streams
    async with place(plan, 1, answer, contact) as dial:
        for _ in range(plan.exchanges):
            timings.append(await exchange(plan, dial, channels))
            await asyncio.sleep(plan.pause_s)
        await close_all(channels)
    return timings


async def dialled_end(plan: Plan) -> None:
    """Answer until standard input closes."""
    async with place(plan, 0, answer, ""):
        await asyncio.to_thread(sys.stdin.read)


def main() -> None:
    """Be an end: arguments are the plan as JSON, the end and, for end 1, what end 0 printed."""
    plan = msgspec.json.decode(sys.argv[1], type=Plan)
    if sys.argv[2] == "0":
        uvloop.run(dialled_end(plan))
    else:
        print(msgspec.json.encode(uvloop.run(dialling_end(plan, sys.argv[3]))).decode())


if __name__ == "__main__":
    main()
