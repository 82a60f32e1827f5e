"""Byte streams to peers, carried by p2pd over a unix socket each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

import base58
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure, raise_if_failed
from hivemind.proto import p2pd_pb2

from gasloc_p2p.core.substrate import PeerUnreachableError
from gasloc_p2p.core.types import BytesLike, PeerId
from gasloc_p2p.net.capped import Caps
from gasloc_p2p.net.messages import receive_message, send_message
from gasloc_p2p.net.sockets import LocalSocket, until_any

LINGER_S: Final = 2.0


class P2PStream:
    """One bidirectional stream; see `gasloc_p2p.core.substrate.Stream`.

    What has arrived can still be read after a write has failed. When a write is cancelled half-way,
    the next one sends the rest first, so that messages stay whole. The kernel takes at most
    `sockets.SEND_BUFFER_BYTES` off a writer and about as much off p2pd.

    Args:
        peer_id: identity of the other end, as p2pd's hand-shake with it proved.
        connection: this process's end of the unix socket.
        caps: what all streams of this node together may send and receive.
        released: called when the stream needs no more care.
    """

    def __init__(
        self,
        peer_id: PeerId,
        connection: LocalSocket,
        *,
        caps: Caps,
        released: Callable[[P2PStream], None],
    ) -> None:
        self._peer_id = peer_id
        self._connection = connection
        self._caps = caps
        self._released = released
        self._closed = False
        self._reading = asyncio.Lock()
        self._received = b""
        self._due_s = 0.0
        self._writing = asyncio.Lock()
        self._unsent = b""

    @property
    def peer_id(self) -> PeerId:
        """Identity of the other end, proved by the transport."""
        return self._peer_id

    def comes_from(self, peer_id: PeerId) -> None:
        """Say who is at the other end, where that was not known from the start."""
        self._peer_id = peer_id

    @property
    def owes(self) -> bool:
        """Whether a write was cancelled half-way, so that the next one sends the rest first."""
        return bool(self._unsent)

    @property
    def is_readable(self) -> bool:
        """Whether `read` would find bytes, or the end."""
        return bool(self._received) or self._connection.receiving.is_ready

    @property
    def has_room(self) -> bool:
        """Whether `write` would find room for many bytes, or fail."""
        return self._connection.sending.is_ready

    def limit_send_buffer(self, size_bytes: int) -> None:
        """Let the kernel take no more than `size_bytes` off a writer."""
        self._connection.limit_send_buffer(size_bytes)

    def wake(self) -> None:
        """End the waits of `any_readable` and `any_with_room`."""
        self._connection.receiving.wake()
        self._connection.sending.wake()

    async def read(self, max_bytes: int) -> bytes:
        """Return between 1 and `max_bytes` bytes, or b"" once either end has closed."""
        cap = self._caps.download
        async with self._reading:
            if not self._received:
                received = await self._connection.receive(min(max_bytes, cap.slice_bytes))
                # A reader that is cancelled before they are due leaves them to the next one.
                self._received, self._due_s = received, cap.charge(len(received))
            await cap.until(self._due_s)
            if self._closed:
                return b""
            data, self._received = self._received[:max_bytes], self._received[max_bytes:]
        return data

    async def write(self, data: BytesLike) -> None:
        """Send `data`, which may be reused afterwards; return once the send buffer is low.

        Raises:
            ConnectionError: the other end is gone, or this one was closed.
        """
        async with self._writing:
            if unsent := self._unsent:
                await self._push(memoryview(unsent), begun=True)
            await self._push(memoryview(data).cast("B"), begun=False)

    async def _push(self, rest: memoryview, *, begun: bool) -> None:
        """Send `rest`; if that is cancelled after it was begun, keep what is left of it."""
        cap = self._caps.upload
        try:
            while len(rest):
                due_bytes = min(len(rest), cap.slice_bytes)
                await cap.until(cap.charge(due_bytes))
                while due_bytes:
                    sent = await self._connection.send_some(rest[:due_bytes])
                    rest, due_bytes, begun = rest[sent:], due_bytes - sent, True
        except asyncio.CancelledError:
            self._unsent = bytes(rest) if begun else b""
            raise
        self._unsent = b""

    async def aclose(self) -> None:
        """Close both directions; what was written still arrives if the other end reads it."""
        self.close()

    def close(self) -> None:
        """Do what `aclose` does, at once."""
        if self._closed:
            return
        self._closed = True
        asyncio.get_running_loop().call_later(LINGER_S, self.abort)
        self._connection.half_close(self._release)

    def abort(self) -> None:
        """Drop the stream and whatever is still to be sent."""
        self._closed = True
        self._connection.close()
        self._release()

    def _release(self) -> None:
        self._released(self)


async def any_readable(streams: Sequence[P2PStream]) -> None:
    """Wait until one of several streams that nobody else reads is readable or woken."""
    await until_any([stream._connection.receiving for stream in streams])


async def any_with_room(streams: Sequence[P2PStream]) -> None:
    """Wait until one of several streams that nobody else writes to has room or is woken."""
    await until_any([stream._connection.sending for stream in streams])


async def request_stream(peer: PeerId, protocol: str, connection: LocalSocket) -> None:
    """Ask p2pd, at the other end of a fresh socket, to connect that socket to `peer`.

    hivemind's own call for it leaks the socket when it is cancelled.

    Raises:
        PeerUnreachableError: the peer cannot be reached or does not speak `protocol`.
    """
    response = p2pd_pb2.Response()
    try:
        peer_bytes = base58.b58decode(peer)
        request = p2pd_pb2.StreamOpenRequest(peer=peer_bytes, proto=[protocol])
        await send_message(
            connection, p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_OPEN, streamOpen=request)
        )
        await receive_message(connection, response)
        raise_if_failed(response)
    except (ControlFailure, ConnectionError, EOFError, ValueError) as error:
        reason = str(error).removeprefix("Connect failed. msg=") or type(error).__name__
        raise PeerUnreachableError(f"{peer}: {reason}") from error
    if response.streamInfo.peer != peer_bytes:
        raise PeerUnreachableError(f"{peer}: another peer answered in its place")
