"""The two directions of an in-memory stream: at once on ideal links, in virtual time on others."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from gasloc_p2p.core.types import BytesLike

PIPE_BYTES: Final = 1 << 20
PIECE_BYTES: Final = 1 << 16
"""The most that one stream puts on an uplink before another one has its turn."""

WINDOW_RATE_BYTES_S: Final = 1.25e9
"""10 Gbit/s: no link counts as faster when the bytes in flight are limited."""


class Pipe:
    """One direction of a stream, with a byte limit; bytes are there as soon as they are sent."""

    def __init__(self) -> None:
        self._pieces: deque[bytes] = deque()
        self._buffered_bytes = 0
        self._closed = False
        self._changed = asyncio.Event()

    async def put(self, data: BytesLike) -> None:
        """Send `data` once the other end has read enough of what came before.

        Raises:
            ConnectionResetError: one end has closed the stream.
        """
        while self._buffered_bytes >= PIPE_BYTES and not self._closed:
            self._changed.clear()
            await self._changed.wait()
        if self._closed:
            raise ConnectionResetError("the other end closed the stream")
        self._pieces.append(bytes(data))
        self._buffered_bytes += len(data)
        self._changed.set()

    async def get(self, max_bytes: int) -> bytes:
        """Return up to `max_bytes` bytes, or b"" once there will be no more."""
        while not self._pieces and not self._closed:
            self._changed.clear()
            await self._changed.wait()
        if not self._pieces:
            return b""
        piece = self._pieces.popleft()
        if len(piece) > max_bytes:
            self._pieces.appendleft(piece[max_bytes:])
            piece = piece[:max_bytes]
        self._buffered_bytes -= len(piece)
        self._changed.set()
        return piece

    def finish(self) -> None:
        """The writing end has closed."""
        self._close()

    def abandon(self) -> None:
        """The reading end has closed and will read no more."""
        self._pieces.clear()
        self._close()

    def _close(self) -> None:
        self._closed = True
        self._changed.set()


class Lane:
    """One direction of a peer's link, which carries one piece after the other.

    Args:
        bytes_s: its rate; infinite for one that holds nothing up.
    """

    def __init__(self, bytes_s: float) -> None:
        self._bytes_s = bytes_s
        self.free_s = 0.0

    def time_s(self, size: int) -> float:
        """Return the seconds that `size` bytes take."""
        return size / self._bytes_s

    def carry(self, size: int, from_s: float) -> float:
        """Take `size` bytes at `from_s` or once the lane is free; return when they are over it."""
        self.free_s = max(from_s, self.free_s) + self.time_s(size)
        return self.free_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Path:
    """The way from a sender to a receiver.

    Attributes:
        uplink: the sender's, which all its streams share.
        downlink: the receiver's, which all its streams share.
        latency_s: seconds one way.
        stream_bytes_s: the most that loss lets one stream carry.
        window_bytes: what one stream may have under way and unread.
        connected_from_s: given a time, the first moment from then on at which the path is not cut.
    """

    uplink: Lane
    downlink: Lane
    latency_s: float
    stream_bytes_s: float
    window_bytes: int
    connected_from_s: Callable[[float], float]


def window_bytes(rate_bytes_s: float, latency_s: float) -> int:
    """Return how many bytes a stream may have under way and unread.

    `PIPE_BYTES` covers what is being sent, what is being received and what the reader leaves
    lying; what fills a path at `rate_bytes_s` comes on top, or long paths would be slower than
    their links. Room is free again as soon as the other end has read.
    """
    return PIPE_BYTES + int(min(rate_bytes_s, WINDOW_RATE_BYTES_S) * latency_s)


class SlowPipe(Pipe):
    """One direction of a stream over real links: bytes need time, and wait while the path is cut.

    No byte is lost or overtaken. Needs no task: timers carry what was written to the other end,
    also after the writer has closed.

    Args:
        path: the way that the bytes take.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.opposite: SlowPipe | None = None
        self._path = path
        self._unsent: deque[bytes] = deque()
        self._travelling: deque[tuple[float, bytes]] = deque()
        self._busy = False
        self._finished = False

    async def put(self, data: BytesLike) -> None:
        """Send `data`; return once what is under way and unread is below the path's window.

        Raises:
            ConnectionResetError: this end has closed, or the other one's close has arrived.
        """
        view = memoryview(data).cast("B")
        for start in range(0, len(view), PIECE_BYTES):
            while self._buffered_bytes >= self._path.window_bytes and not self._finished:
                self._changed.clear()
                await self._changed.wait()
            if self._finished:
                raise ConnectionResetError("the stream is closed")
            piece = bytes(view[start : start + PIECE_BYTES])
            self._buffered_bytes += len(piece)
            self._unsent.append(piece)
            self._send()

    def finish(self) -> None:
        """The writing end has closed; the other one learns of it after all that was written."""
        if not self._finished:
            self._finished = True
            self._unsent.append(b"")
            self._changed.set()
            self._send()

    def _reset(self) -> None:
        """The reading end is known to be gone; what has not left yet never will."""
        self._finished = True
        self._unsent.clear()
        self._changed.set()

    def _send(self) -> None:
        """Put the next piece on the uplink; other streams' pieces may come before the one after."""
        if self._busy or not self._unsent:
            return
        self._busy = True
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        begins_s = self._path.connected_from_s(now_s)
        if begins_s > now_s:
            loop.call_at(begins_s, self._resume)
            return
        piece = self._unsent.popleft()
        begins_s = max(now_s, self._path.uplink.free_s)
        leaves_s = max(
            self._path.uplink.carry(len(piece), now_s),
            begins_s + len(piece) / self._path.stream_bytes_s,
        )
        loop.call_at(leaves_s, self._sent, begins_s, leaves_s, piece)

    def _resume(self) -> None:
        self._busy = False
        self._send()

    def _sent(self, begins_s: float, leaves_s: float, piece: bytes) -> None:
        downlink = self._path.downlink
        # Its first bytes arrive while the last ones are still to leave.
        arrives_s = max(begins_s, leaves_s - downlink.time_s(len(piece)))
        received_s = downlink.carry(len(piece), arrives_s)
        self._travelling.append((received_s + self._path.latency_s, piece))
        if len(self._travelling) == 1:
            self._await_arrival()
        self._resume()

    def _await_arrival(self) -> None:
        # One timer at a time: the loop does not keep the order of timers for the same moment.
        asyncio.get_running_loop().call_at(self._travelling[0][0], self._arrive)

    def _arrive(self) -> None:
        _, piece = self._travelling.popleft()
        if self._travelling:
            self._await_arrival()
        if not piece:
            assert self.opposite is not None
            self.opposite._reset()
            self._close()
        elif not self._closed:
            self._pieces.append(piece)
            self._changed.set()
