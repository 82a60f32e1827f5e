"""Byte streams to peers, carried by p2pd over a unix socket each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, cast

import base58
from hivemind.p2p.p2p_daemon_bindings.utils import (
    ControlFailure,
    raise_if_failed,
    read_pbmsg_safe,
    write_pbmsg,
)
from hivemind.proto import p2pd_pb2

from gasloc_p2p.core.substrate import PeerUnreachableError
from gasloc_p2p.core.types import BytesLike, PeerId

SLICE_BYTES: Final = 256 * 1024
"""The most that is handed to the transport at once, and so about the most that it buffers."""
LINGER_S: Final = 2.0


class P2PStream:
    """One bidirectional stream; see `gasloc_p2p.core.substrate.Stream`.

    Args:
        peer_id: identity of the other end, as p2pd's hand-shake with it proved.
        reader, writer: this process's end of the unix socket.
        released: called once, when the stream needs no more care.
    """

    def __init__(
        self,
        peer_id: PeerId,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        released: Callable[[P2PStream], None],
    ) -> None:
        self._peer_id = peer_id
        self._reader = reader
        self._writer = writer
        self._released = released
        self._closed = False

    @property
    def peer_id(self) -> PeerId:
        """Identity of the other end, proved by the transport."""
        return self._peer_id

    async def read(self, max_bytes: int) -> bytes:
        """Return between 1 and `max_bytes` bytes, or b"" once either end has closed."""
        if self._closed:
            return b""
        try:
            return await self._reader.read(max_bytes)
        except ConnectionError:
            return b""

    async def write(self, data: BytesLike) -> None:
        """Send `data`, which may be reused afterwards; return once the send buffer is low.

        Raises:
            ConnectionError: the other end is gone, or this one was closed.
        """
        view = memoryview(data).cast("B")
        for start in range(0, len(view), SLICE_BYTES):
            if self._closed or self._writer.is_closing():
                raise ConnectionResetError("the stream is closed")
            # Event loops may keep a reference to what they could not send yet.
            self._writer.write(bytes(view[start : start + SLICE_BYTES]))
            await self._writer.drain()

    async def aclose(self) -> None:
        """Close both directions; what was written still arrives if the other end reads it."""
        self.close()

    def close(self) -> None:
        """Do what `aclose` does, at once."""
        if self._closed:
            return
        self._closed = True
        transport = self._writer.transport
        if self._reader.at_eof() or transport.is_closing():
            transport.close()
        else:
            self._discard_input()
        asyncio.get_running_loop().call_later(LINGER_S, self.abort)

    def _discard_input(self) -> None:
        """Half-close: p2pd then delivers what was written before it ends the stream.

        It resets a stream whose socket is closed on unread bytes, and drops the last words.
        """
        transport = cast("asyncio.Transport", self._writer.transport)
        transport.set_protocol(_Discarding(transport.get_protocol(), self._release))
        self._reader.feed_eof()
        transport.resume_reading()
        try:
            transport.write_eof()
        except OSError:
            transport.abort()

    def abort(self) -> None:
        """Drop the stream and whatever is still to be sent."""
        self._closed = True
        self._writer.transport.abort()
        self._release()

    def _release(self) -> None:
        self._released(self)


class _Discarding(asyncio.Protocol):
    """Takes over a closed stream's socket; what still arrives is dropped."""

    def __init__(self, owner: asyncio.BaseProtocol, ended: Callable[[], None]) -> None:
        self._owner = owner
        self._ended = ended

    def pause_writing(self) -> None:
        self._owner.pause_writing()

    def resume_writing(self) -> None:
        self._owner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        # Wakes whoever still waits in `write`.
        self._owner.connection_lost(exc)
        self._ended()


async def request_stream(
    peer: PeerId,
    protocol: str,
    *,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
) -> None:
    """Ask p2pd, at the other end of a fresh socket, to connect that socket to `peer`.

    hivemind's own call for it leaks the socket when it is cancelled.

    Raises:
        PeerUnreachableError: the peer cannot be reached or does not speak `protocol`.
    """
    try:
        peer_bytes = base58.b58decode(peer)
        request = p2pd_pb2.StreamOpenRequest(peer=peer_bytes, proto=[protocol])
        await write_pbmsg(
            writer, p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_OPEN, streamOpen=request)
        )
        response = p2pd_pb2.Response()
        await read_pbmsg_safe(reader, response)
        raise_if_failed(response)
    except (ControlFailure, ConnectionError, EOFError, ValueError) as error:
        reason = str(error).removeprefix("Connect failed. msg=") or type(error).__name__
        raise PeerUnreachableError(f"{peer}: {reason}") from error
    if response.streamInfo.peer != peer_bytes:
        raise PeerUnreachableError(f"{peer}: another peer answered in its place")
