"""One measured transfer over a byte stream: the order for it, and both ends of it."""

from __future__ import annotations

import asyncio
import enum
import os
import struct
from dataclasses import dataclass
from typing import Final, Protocol

from gasloc_p2p.core.types import BytesLike

PIECE_BYTES: Final = 256 * 1024
"""What is read and written at once, as nodes do."""
MAX_TRANSFER_BYTES: Final = 1 << 32

_ORDER: Final = struct.Struct("<BQ")
_DONE: Final = b"."


class Transport(enum.StrEnum):
    """What carries a stream."""

    TCP = "tcp"
    P2P = "p2p"


class Direction(enum.StrEnum):
    """Which way bytes travel, seen from the process that measures."""

    UP = "up"
    DOWN = "down"
    BOTH = "both"


class ByteStream(Protocol):
    """What `gasloc_p2p.core.substrate.Stream` and plain TCP have in common."""

    async def read(self, max_bytes: int) -> bytes:
        """Return between 1 and `max_bytes` bytes, or b"" once the other end is gone."""
        ...

    async def write(self, data: BytesLike) -> None:
        """Send `data`; return once the send buffer is below its limit."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class TcpStream:
    """A TCP connection of asyncio, as it comes."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def read(self, max_bytes: int) -> bytes:
        """Return between 1 and `max_bytes` bytes, or b"" once the other end is gone."""
        return await self.reader.read(max_bytes)

    async def write(self, data: BytesLike) -> None:
        """Send `data`; return once the send buffer is below its limit."""
        self.writer.write(data)
        await self.writer.drain()


async def transfer(stream: ByteStream, direction: Direction, size_bytes: int) -> None:
    """Move `size_bytes` in one direction, or in each; return once all have arrived.

    Args:
        stream: its other end runs `serve_transfers`.
        direction: which way.
        size_bytes: at most `MAX_TRANSFER_BYTES`.

    Raises:
        ConnectionError: the other end is gone.
    """
    up, down = direction is not Direction.DOWN, direction is not Direction.UP
    flags = up + 2 * down
    await stream.write(_ORDER.pack(flags, size_bytes))
    await _both(stream, outgoing=size_bytes * up, incoming=size_bytes * down)
    await _drop(stream, len(_DONE))


async def serve_transfers(stream: ByteStream) -> None:
    """Do what the other end orders until it is gone.

    Raises:
        ConnectionError: it went in the middle of a transfer, or orders what it may not.
    """
    while first := await stream.read(_ORDER.size):
        order = first
        while len(order) < _ORDER.size:
            order += await _some(stream, _ORDER.size - len(order))
        flags, size_bytes = _ORDER.unpack(order)
        if size_bytes > MAX_TRANSFER_BYTES or not 1 <= flags <= 3:
            raise ConnectionAbortedError("an order for a transfer that nobody makes")
        up, down = flags & 1, flags >> 1
        await _both(stream, outgoing=size_bytes * down, incoming=size_bytes * up)
        await stream.write(_DONE)


async def _both(stream: ByteStream, *, outgoing: int, incoming: int) -> None:
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_send(stream, outgoing))
            tasks.create_task(_drop(stream, incoming))
    except ExceptionGroup as errors:
        _, others = errors.split(ConnectionError)
        if others is not None:
            raise
        raise ConnectionResetError("the other end is gone") from errors


async def _send(stream: ByteStream, size_bytes: int) -> None:
    piece = memoryview(os.urandom(PIECE_BYTES))
    while size_bytes:
        part = piece[:size_bytes]
        await stream.write(part)
        size_bytes -= len(part)


async def _drop(stream: ByteStream, size_bytes: int) -> None:
    while size_bytes:
        size_bytes -= len(await _some(stream, min(size_bytes, PIECE_BYTES)))


async def _some(stream: ByteStream, max_bytes: int) -> bytes:
    data = await stream.read(max_bytes)
    if not data:
        raise ConnectionResetError("the stream ended early")
    return data
