"""Sockets to p2pd: nothing is lost, and nothing is watched longer than somebody waits."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop
from hivemind.proto import p2pd_pb2

from gasloc_p2p.net.messages import receive_message, send_message
from gasloc_p2p.net.sockets import LocalSocket

WAIT_S = 10.0


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two connected unix sockets."""
    own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with own, other:
        yield own, other


async def fill(connection: LocalSocket) -> None:
    while True:
        await connection.send_some(memoryview(bytes(65_536)))


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_socket_is_watched_only_while_somebody_waits(
    run: Callable[[Coroutine[Any, Any, None]], None], ends: tuple[socket.socket, socket.socket]
) -> None:
    own, other = ends

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        connection = LocalSocket(own)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await connection.receive(10)
        assert not loop.remove_reader(own)
        async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
            receiving = tasks.create_task(connection.receive(10))
            await asyncio.sleep(0)
            other.send(b"hello")
        assert receiving.result() == b"hello"
        assert not loop.remove_reader(own)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await fill(connection)
        assert not loop.remove_writer(own)
        connection.close()

    run(scenario())


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
@pytest.mark.parametrize("end", ["close", "half_close"])
def test_its_own_end_wakes_whoever_waits(
    run: Callable[[Coroutine[Any, Any, None]], None],
    end: str,
    ends: tuple[socket.socket, socket.socket],
) -> None:
    own, other = ends

    async def scenario() -> None:
        connection = LocalSocket(own)

        receiving = asyncio.ensure_future(connection.receive(10))
        sending = asyncio.ensure_future(fill(connection))
        await asyncio.wait({receiving, sending}, timeout=0.05)
        ended = asyncio.Event()
        if end == "close":
            connection.close()
        else:
            connection.half_close(ended.set)
        async with asyncio.timeout(WAIT_S):
            assert await receiving == b""
            with pytest.raises(ConnectionError):
                await sending
            assert await connection.receive(10) == b""
            if end == "half_close":
                other.send(b"too late")
                other.shutdown(socket.SHUT_WR)
                await ended.wait()
        assert own.fileno() == -1

    run(scenario())


async def test_what_arrived_is_received_after_a_send_has_failed(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    own, other = ends
    connection = LocalSocket(own)
    await connection.send_some(memoryview(b"unread"))
    other.send(b"last words")
    other.close()
    with pytest.raises(ConnectionError):
        await connection.send_some(memoryview(b"more"))
    assert await connection.receive_exactly(10) == b"last words"
    assert await connection.receive(10) == b""
    with pytest.raises(EOFError):
        await connection.receive_exactly(1)
    connection.close()


async def test_nobody_to_connect_to(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        await LocalSocket.connect(tmp_path / "nobody.sock")


@pytest.mark.parametrize("size", [0, 1, 127, 128, 300, 16_384, 60_000])
async def test_messages_come_back_and_leave_what_follows(
    size: int, ends: tuple[socket.socket, socket.socket]
) -> None:
    own, other = (LocalSocket(end) for end in ends)
    message = p2pd_pb2.StreamInfo(peer=bytes(size), addr=b"a", proto="p")
    received = p2pd_pb2.StreamInfo()
    async with asyncio.timeout(WAIT_S):
        await send_message(own, message)
        await own.send_some(memoryview(b"rest"))
        await receive_message(other, received)
        assert received == message
        assert await other.receive_exactly(4) == b"rest"


async def test_a_message_that_is_far_too_long_is_not_waited_for(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    own, other = ends
    connection = LocalSocket(own)
    other.send(b"\x80\x80\x80\x01")
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(ValueError, match="too long"):
            await receive_message(connection, p2pd_pb2.StreamInfo())
