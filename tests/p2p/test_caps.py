"""The caps of a node hold over all of its streams together, in both directions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from gasloc_p2p.core.substrate import Stream, StreamHandler
from gasloc_p2p.core.throttle import TokenBucket
from gasloc_p2p.net.capped import BYTES_PER_MBIT
from gasloc_p2p.net.identity import Identity
from gasloc_p2p.net.network import Libp2pNetwork
from gasloc_p2p.net.settings import NetConfig
from gasloc_p2p.testing.promise import read_exactly

pytestmark = [pytest.mark.p2p, pytest.mark.usefixtures("spread")]

PROTOCOL = "gasloc/test-caps/1"
WAIT_S = 20.0
MBIT = 40.0
STREAMS = 4
STREAM_BYTES = 750_000
LISTEN = ("/ip4/127.0.0.1/tcp/0",)


@asynccontextmanager
async def pair(capped: NetConfig) -> AsyncIterator[tuple[Libp2pNetwork, Libp2pNetwork]]:
    """Start a node with these caps and one with none, which has joined through it."""
    async with running(Identity.derived(0, 0), capped) as first:
        config = NetConfig(listen=LISTEN, bootstrap=await first.addresses(), join_attempts=1)
        async with running(Identity.derived(0, 1), config) as second:
            yield first, second


@asynccontextmanager
async def running(identity: Identity, config: NetConfig) -> AsyncIterator[Libp2pNetwork]:
    network = await Libp2pNetwork.create(identity, config)
    try:
        yield network
    finally:
        await network.aclose()


class Meter:
    """Counts bytes, and fails as soon as more have passed than the cap allows."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._bytes = 0

    def passed(self, size_bytes: int) -> None:
        self._bytes += size_bytes
        elapsed_s = time.monotonic() - self._began_s
        rate = MBIT * BYTES_PER_MBIT
        most = rate * elapsed_s * 1.05 + TokenBucket(rate).burst_bytes
        assert self._bytes <= most, f"{self._bytes} bytes in {elapsed_s:.3f} s"


async def count(stream: Stream, size_bytes: int, meter: Meter) -> None:
    while size_bytes:
        piece = await stream.read(min(size_bytes, 1 << 20))
        assert piece
        size_bytes -= len(piece)
        meter.passed(len(piece))


@pytest.mark.parametrize("direction", ["upload", "download"])
@pytest.mark.parametrize("dials", [True, False], ids=["dials", "is dialled"])
async def test_four_streams_share_one_cap(direction: str, dials: bool) -> None:
    config = NetConfig(
        listen=LISTEN,
        upload_mbit=MBIT if direction == "upload" else 0.0,
        download_mbit=MBIT if direction == "download" else 0.0,
    )
    async with pair(config) as (capped, other), asyncio.timeout(WAIT_S):
        accepted: asyncio.Queue[Stream] = asyncio.Queue()
        served, dialling = (other, capped) if dials else (capped, other)
        await served.serve(PROTOCOL, hold_in(accepted))
        dialled = [
            await dialling.open_stream(served.peer_id, PROTOCOL, deadline_s=WAIT_S)
            for _ in range(STREAMS)
        ]
        taken = [await accepted.get() for _ in range(STREAMS)]
        at_capped, at_other = (dialled, taken) if dials else (taken, dialled)
        senders, receivers = (
            (at_capped, at_other) if direction == "upload" else (at_other, at_capped)
        )
        meter = Meter()
        async with asyncio.TaskGroup() as tasks:
            for stream in senders:
                tasks.create_task(stream.write(bytes(STREAM_BYTES)))
            for stream in receivers:
                tasks.create_task(count(stream, STREAM_BYTES, meter))


def hold_in(accepted: asyncio.Queue[Stream]) -> StreamHandler:
    async def hold(stream: Stream) -> None:
        accepted.put_nowait(stream)
        await asyncio.Event().wait()

    return hold


async def test_a_reader_that_is_cancelled_before_its_bytes_are_due_loses_none() -> None:
    sent = bytes(range(256)) * 400

    async def send(stream: Stream) -> None:
        await stream.write(sent)
        await stream.read(1)

    async with (
        pair(NetConfig(listen=LISTEN, download_mbit=1.0)) as (capped, other),
        asyncio.timeout(WAIT_S),
    ):
        await other.serve(PROTOCOL, send)
        stream = await capped.open_stream(other.peer_id, PROTOCOL, deadline_s=WAIT_S)
        received, cancelled = b"", 0
        while len(received) < len(sent):
            try:
                async with asyncio.timeout(0.01):
                    received += await stream.read(10_000)
            except TimeoutError:
                cancelled += 1
        assert received == sent
        assert cancelled > 1
        await stream.aclose()


async def test_a_cap_of_one_direction_leaves_the_other_alone() -> None:
    sent = bytes(8 << 20)

    async def send(stream: Stream) -> None:
        await stream.write(sent)
        await stream.read(1)

    async with (
        pair(NetConfig(listen=LISTEN, upload_mbit=0.1)) as (capped, other),
        asyncio.timeout(WAIT_S),
    ):
        # At the cap of the other direction this would take ten minutes.
        await other.serve(PROTOCOL, send)
        stream = await capped.open_stream(other.peer_id, PROTOCOL, deadline_s=WAIT_S)
        assert await read_exactly(stream, len(sent)) == sent
        await stream.aclose()


async def test_a_write_that_is_cancelled_before_it_was_begun_was_never_made() -> None:
    async with (
        pair(NetConfig(listen=LISTEN, upload_mbit=0.1)) as (capped, other),
        asyncio.timeout(WAIT_S),
    ):
        accepted: asyncio.Queue[Stream] = asyncio.Queue()
        await other.serve(PROTOCOL, hold_in(accepted))
        stream = await capped.open_stream(other.peer_id, PROTOCOL, deadline_s=WAIT_S)
        await stream.write(b"1" * 4096)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await stream.write(b"2" * 4096)
        await stream.write(b"3")
        taken = await accepted.get()
        assert await read_exactly(taken, 4097) == b"1" * 4096 + b"3"
