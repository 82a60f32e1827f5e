"""Unix sockets to p2pd without a buffer of our own between them and whoever reads and writes.

Event loops read ahead into a buffer and drop it when a write fails; what a partner said last would
be lost. Here bytes that are not read yet stay with the kernel, however a write ends.
"""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

SEND_BUFFER_BYTES: Final = 512 * 1024
"""What the kernel takes off a writer at most, its own book-keeping included."""
TURN_BYTES: Final = 512 * 1024
"""What is moved at most before others on the event loop have a turn."""
_OPERATION_BYTES: Final = 4 * 1024
"""What a call counts for at least, so that many small ones give others a turn too."""
END_DELAY_S: Final = 0.05
_DISCARD_BYTES: Final = 256 * 1024

_Watch: TypeAlias = Callable[..., Any]


class LocalSocket:
    """One end of a connected unix socket; one task at a time may receive, and one send.

    Whoever is cancelled in the meantime loses no bytes, and has sent none.

    Args:
        raw: the socket, which from here on is closed through this object alone.

    Attributes:
        receiving, sending: what `until_any` waits for.
    """

    def __init__(self, raw: socket.socket) -> None:
        raw.setblocking(False)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        loop = asyncio.get_running_loop()
        self._raw = raw
        self.receiving: Final = Direction(
            raw, select.POLLIN, watch=loop.add_reader, unwatch=loop.remove_reader
        )
        self.sending: Final = Direction(
            raw, select.POLLOUT, watch=loop.add_writer, unwatch=loop.remove_writer
        )
        self._at_end = False
        self._stopped = False

    @classmethod
    async def connect(cls, path: Path) -> LocalSocket:
        """Connect to the unix socket at `path`.

        Raises:
            OSError: nobody listens there.
        """
        raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connected = False
        try:
            itself = cls(raw)
            await asyncio.get_running_loop().sock_connect(raw, str(path))
            connected = True
        finally:
            if not connected:
                raw.close()
        return itself

    def limit_send_buffer(self, size_bytes: int) -> None:
        """Let the kernel take no more than `size_bytes` off a writer."""
        if not self._stopped:
            self._raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size_bytes)

    async def receive(self, max_bytes: int) -> bytes:
        """Return between 1 and `max_bytes` bytes, or b"" at the end or once this end is closed."""
        await self.receiving.turn.over()
        while not self._stopped:
            try:
                data = self._raw.recv(max_bytes)
            except (BlockingIOError, InterruptedError):
                await self.receiving.ready()
            except ConnectionError:
                break
            else:
                self.receiving.turn.moved(len(data))
                self._at_end = not data
                return data
        return b""

    async def receive_exactly(self, size_bytes: int) -> bytes:
        """Return the next `size_bytes` bytes.

        Raises:
            EOFError: the other end is gone, or this one is closed.
        """
        received = b""
        while len(received) < size_bytes:
            piece = await self.receive(size_bytes - len(received))
            if not piece:
                raise EOFError("the connection ended")
            received += piece
        return received

    async def send_some(self, data: memoryview) -> int:
        """Hand the kernel a part of `data`, which is not empty, and return how many bytes it took.

        Raises:
            ConnectionError: the other end is gone, or this one is closed.
        """
        await self.sending.turn.over()
        while not self._stopped:
            try:
                sent = self._raw.send(data)
            except (BlockingIOError, InterruptedError):
                await self.sending.ready()
            else:
                self.sending.turn.moved(sent)
                return sent
        raise ConnectionResetError("the stream is closed")

    def half_close(self, ended: Callable[[], None]) -> None:
        """Send no more, drop what still arrives, and close and call `ended` at the end of it.

        p2pd resets a stream whose socket is closed on unread bytes, and drops the last words. It
        also drops some of them, if seldom, when it finds the end right behind them.
        """
        self._stop()
        asyncio.get_running_loop().call_later(END_DELAY_S, self._end, ended)

    def _end(self, ended: Callable[[], None]) -> None:
        try:
            self._raw.shutdown(socket.SHUT_WR)
            over = self._at_end
        except OSError:
            over = True

        def discard() -> None:
            if not self._discard():
                self.close()
                ended()

        if over:
            self.close()
            ended()
        else:
            asyncio.get_running_loop().add_reader(self._raw, discard)

    def _discard(self) -> bool:
        """Drop some of what has arrived; False at the end."""
        try:
            return bool(self._raw.recv(_DISCARD_BYTES))
        except (BlockingIOError, InterruptedError):
            return True
        except OSError:
            return False

    def close(self) -> None:
        """Close the socket at once; safe to call twice."""
        self._stop()
        if self._raw.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._raw)
            self._raw.close()

    def _stop(self) -> None:
        """Wake whoever waits; nothing more is received or sent."""
        self._stopped = True
        self.receiving.stop()
        self.sending.stop()


class Turn:
    """What somebody may move before others on the event loop run."""

    def __init__(self) -> None:
        self._moved_bytes = 0

    def moved(self, size_bytes: int) -> None:
        """Count what was moved without a wait."""
        self._moved_bytes += max(size_bytes, _OPERATION_BYTES)

    def waited(self) -> None:
        """Begin again, since others have run."""
        self._moved_bytes = 0

    async def over(self) -> None:
        """Let others run if much was moved without a wait."""
        if self._moved_bytes >= TURN_BYTES:
            self._moved_bytes = 0
            await asyncio.sleep(0)


class Direction:
    """What one direction of a socket waits for.

    Attributes:
        turn: what it moves between its waits.
    """

    def __init__(self, raw: socket.socket, event: int, *, watch: _Watch, unwatch: _Watch) -> None:
        self._raw = raw
        self._event = event
        self._watch = watch
        self._unwatch = unwatch
        self._waiter: asyncio.Future[None] | None = None
        self._stopped = False
        self.turn: Final = Turn()

    @property
    def is_ready(self) -> bool:
        """Whether the kernel has bytes, or much room for some, or nothing more will come of it."""
        if self._stopped:
            return True
        poll = select.poll()
        poll.register(self._raw, self._event)
        return bool(poll.poll(0))

    async def ready(self) -> None:
        """Wait until the kernel has bytes, or room for some, or this direction is stopped."""
        self.turn.waited()
        await until_any((self,))

    def stop(self) -> None:
        """Wake whoever waits, and watch the socket no longer."""
        self._stopped = True
        if self._waiter is not None:
            self.wake()
            self.unwatch(self._waiter)

    def wake(self) -> None:
        """End the wait of whoever waits."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def watch(self, waiter: asyncio.Future[None]) -> None:
        """Complete `waiter` once this direction is ready or stopped."""
        self._waiter = waiter
        self._watch(self._raw, self.wake)

    def unwatch(self, waiter: asyncio.Future[None]) -> None:
        """Leave `waiter` alone from here on."""
        if self._waiter is waiter:
            self._waiter = None
            self._unwatch(self._raw)


async def until_any(directions: Sequence[Direction]) -> None:
    """Wait until one of them, none of which was stopped before, is ready, stopped or woken."""
    waiter = asyncio.get_running_loop().create_future()
    for direction in directions:
        direction.watch(waiter)
    try:
        await waiter
    finally:
        for direction in directions:
            direction.unwatch(waiter)
