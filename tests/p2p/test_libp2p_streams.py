"""Streams between two nodes: whole, in order, bounded in memory, and prompt about their end."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import uvloop

from gasloc_p2p.core.substrate import PeerUnreachableError, Stream
from gasloc_p2p.net import network as network_module
from gasloc_p2p.net.identity import Identity
from gasloc_p2p.net.network import Libp2pNetwork
from gasloc_p2p.testing.promise import read_exactly
from tests.p2p.real import stop_process

pytestmark = [pytest.mark.p2p, pytest.mark.usefixtures("spread")]

StartNode: TypeAlias = Callable[..., Awaitable[Libp2pNetwork]]
PROTOCOL = "gasloc/test/1"
WAIT_S = 10.0


@pytest.fixture
async def pair(start_node: StartNode) -> tuple[Libp2pNetwork, Libp2pNetwork]:
    """Two nodes, the second joined through the first."""
    first = await start_node(0)
    return first, await start_node(1, await first.addresses())


async def write_forever(stream: Stream) -> None:
    while True:
        await stream.write(bytes(65_536))


async def between_two_nodes(
    nodes: Callable[[], AbstractAsyncContextManager[StartNode]],
    scene: Callable[[Libp2pNetwork, Libp2pNetwork], Awaitable[None]],
) -> None:
    async with nodes() as start_node:
        first = await start_node(0)
        await scene(first, await start_node(1, await first.addresses()))


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_writer_waits_for_a_slow_reader_and_its_buffer_may_be_reused(
    run: Callable[[Coroutine[Any, Any, None]], None],
    nodes: Callable[[], AbstractAsyncContextManager[StartNode]],
) -> None:
    run(between_two_nodes(nodes, push_to_a_slow_reader))


async def push_to_a_slow_reader(first: Libp2pNetwork, second: Libp2pNetwork) -> None:
    read_on, received = asyncio.Event(), asyncio.get_running_loop().create_future()
    piece_bytes, pieces = 1 << 20, 64

    async def slow(stream: Stream) -> None:
        await read_on.wait()
        received.set_result(await read_exactly(stream, piece_bytes * pieces))
        await stream.aclose()

    await first.serve(PROTOCOL, slow)
    stream = await second.open_stream(first.peer_id, PROTOCOL, deadline_s=WAIT_S)
    written = 0

    async def push() -> None:
        nonlocal written
        buffer = bytearray(piece_bytes)
        for index in range(pieces):
            buffer[:] = bytes([index]) * piece_bytes
            await stream.write(buffer)
            written += 1

    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        pushing = group.create_task(push())
        stalled_at = -1
        # It has stalled once a stretch of time, long against a write, moves nothing.
        while stalled_at != written:
            stalled_at = written
            await asyncio.wait({pushing}, timeout=0.5)
        assert written < pieces
        read_on.set()
        data = await received
    assert written == pieces
    assert data == b"".join(bytes([index]) * piece_bytes for index in range(pieces))


async def test_the_end_of_a_partners_p2pd_ends_the_read_at_once(
    pair: tuple[Libp2pNetwork, Libp2pNetwork],
) -> None:
    first, second = pair

    async def greet(stream: Stream) -> None:
        await stream.write(b"hello")
        await asyncio.Event().wait()

    await first.serve(PROTOCOL, greet)
    stream = await second.open_stream(first.peer_id, PROTOCOL, deadline_s=WAIT_S)
    assert await read_exactly(stream, 5) == b"hello"
    os.kill(first.daemon.pid, signal.SIGKILL)
    async with asyncio.timeout(2.0):
        assert await stream.read(1) == b""
        with pytest.raises(ConnectionError):
            await write_forever(stream)
    await stream.aclose()


async def test_a_peer_that_cannot_be_reached_is_named(
    pair: tuple[Libp2pNetwork, Libp2pNetwork],
) -> None:
    first, second = pair
    stranger = Identity.derived(0, 9).peer_id
    for peer, why in (
        (first.peer_id, "protocols not supported"),
        (stranger, "not found"),
        ("junk", ""),
    ):
        with pytest.raises(PeerUnreachableError, match=f"{peer}: .*{why}"):
            await second.open_stream(peer, "gasloc/unknown/1", deadline_s=WAIT_S)
    os.kill(second.daemon.pid, signal.SIGKILL)
    await second.daemon.exited()
    with pytest.raises(PeerUnreachableError):
        await second.open_stream(first.peer_id, PROTOCOL, deadline_s=WAIT_S)


async def test_an_answer_that_does_not_come_ends_at_the_deadline(
    pair: tuple[Libp2pNetwork, Libp2pNetwork],
) -> None:
    first, second = pair
    stop_process(second.daemon.pid)
    with pytest.raises(TimeoutError):
        await second.open_stream(first.peer_id, PROTOCOL, deadline_s=0.2)
    assert await second.fetch_records("run", deadline_s=0.2) == []
    os.kill(second.daemon.pid, signal.SIGCONT)


async def test_streams_beyond_the_limit_are_closed_at_once(
    pair: tuple[Libp2pNetwork, Libp2pNetwork], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network_module, "MAX_INBOUND_STREAMS", 2)
    first, second = pair
    release = asyncio.Event()

    async def hold(stream: Stream) -> None:
        await stream.write(b"in")
        await release.wait()
        await stream.aclose()

    await first.serve(PROTOCOL, hold)
    streams = [
        await second.open_stream(first.peer_id, PROTOCOL, deadline_s=WAIT_S) for _ in range(3)
    ]
    async with asyncio.timeout(WAIT_S):
        assert sorted([await stream.read(2) for stream in streams]) == [b"", b"in", b"in"]
        release.set()
        for stream in streams:
            while await stream.read(2):
                pass
        again = await second.open_stream(first.peer_id, PROTOCOL, deadline_s=WAIT_S)
        assert await again.read(2) == b"in"


async def test_a_failing_handler_is_logged_and_its_stream_closed(
    pair: tuple[Libp2pNetwork, Libp2pNetwork], caplog: pytest.LogCaptureFixture
) -> None:
    first, second = pair

    async def fail(stream: Stream) -> None:
        raise ZeroDivisionError("handler at fault")

    await first.serve(PROTOCOL, fail)
    with caplog.at_level(logging.ERROR):
        stream = await second.open_stream(first.peer_id, PROTOCOL, deadline_s=WAIT_S)
        async with asyncio.timeout(WAIT_S):
            assert await stream.read(1) == b""
    assert "handler at fault" in caplog.text
    assert second.peer_id in caplog.text


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_last_words_are_read_after_a_write_has_failed(
    run: Callable[[Coroutine[Any, Any, None]], None],
    nodes: Callable[[], AbstractAsyncContextManager[StartNode]],
) -> None:
    run(between_two_nodes(nodes, push_at_one_who_refuses))


async def push_at_one_who_refuses(first: Libp2pNetwork, second: Libp2pNetwork) -> None:
    refusal = b"R" * 1000

    async def refuse(stream: Stream) -> None:
        await stream.read(1000)
        await stream.write(refusal)
        await stream.aclose()

    await first.serve(PROTOCOL, refuse)
    for _ in range(5):
        stream = await second.open_stream(first.peer_id, PROTOCOL, deadline_s=WAIT_S)
        async with asyncio.timeout(WAIT_S):
            with pytest.raises(ConnectionError):
                await stream.write(bytes(50 << 20))
            assert await read_exactly(stream, len(refusal)) == refusal
            assert await stream.read(1) == b""
        await stream.aclose()


async def test_what_is_left_of_a_cancelled_write_goes_out_before_the_next(
    pair: tuple[Libp2pNetwork, Libp2pNetwork],
) -> None:
    first, second = pair
    read_on, received = asyncio.Event(), asyncio.get_running_loop().create_future()
    half, dropped, last = b"h" * (32 << 20), b"d" * 1000, b"l" * 1000

    async def slow(stream: Stream) -> None:
        await read_on.wait()
        received.set_result(await read_exactly(stream, len(half + last)))
        await stream.aclose()

    await first.serve(PROTOCOL, slow)
    stream = await second.open_stream(first.peer_id, PROTOCOL, deadline_s=WAIT_S)
    async with asyncio.timeout(30):
        for data in (half, dropped):
            # Nobody reads, so neither can be sent to its end.
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(2):
                    await stream.write(data)
        read_on.set()
        await stream.write(last)
        assert await received == half + last
        assert await stream.read(1) == b""
    await stream.aclose()


async def test_many_small_reads_and_writes_leave_others_their_turn(
    pair: tuple[Libp2pNetwork, Libp2pNetwork],
) -> None:
    first, second = pair
    turns = 0

    async def send(stream: Stream) -> None:
        await stream.write(bytes(100_000))
        await stream.read(1)

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    await first.serve(PROTOCOL, send)
    stream = await second.open_stream(first.peer_id, PROTOCOL, deadline_s=WAIT_S)
    async with asyncio.timeout(WAIT_S):
        await read_exactly(stream, 1000)
        counting = asyncio.create_task(count())
        for _ in range(1000):
            await stream.read(1)
        counting.cancel()
    assert turns >= 5
    await stream.aclose()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
async def test_last_words_arrive_although_the_node_leaves_at_once(
    pair: tuple[Libp2pNetwork, Libp2pNetwork],
) -> None:
    first, second = pair
    words = bytes(range(256)) * 128
    heard = asyncio.get_running_loop().create_future()

    async def listen(stream: Stream) -> None:
        heard.set_result(await read_exactly(stream, len(words)))

    await first.serve(PROTOCOL, listen)
    stream = await second.open_stream(first.peer_id, PROTOCOL, deadline_s=WAIT_S)
    pid = second.daemon.pid
    stop_process(pid)
    await stream.write(words)
    await stream.aclose()
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
        tasks.create_task(second.aclose())
        # A p2pd that finds itself told to end when it goes on hands on nothing, or not all.
        await asyncio.to_thread(told_to_end, pid, within_s=1.5)
        os.kill(pid, signal.SIGCONT)
        assert await heard == words


def told_to_end(pid: int, *, within_s: float) -> bool:
    """Wait until a stopped process has been sent SIGTERM, but not for long."""
    term, until_s = 1 << (signal.SIGTERM - 1), time.monotonic() + within_s
    status = Path(f"/proc/{pid}/status")
    while time.monotonic() < until_s:
        if int(status.read_text().split("ShdPnd:")[1].split()[0], 16) & term:
            return True
        time.sleep(0.01)
    return False
