"""A stream that is spread over several lanes, each a stream of p2pd's to the same peer."""

from __future__ import annotations

import asyncio
from typing import Final

from gasloc_p2p.core.ordering import HEADER, SEGMENT_BYTES, Arrivals, Order, OrderError
from gasloc_p2p.core.types import BytesLike, PeerId
from gasloc_p2p.net.sockets import Turn
from gasloc_p2p.net.streams import P2PStream, any_readable, any_with_room

LANE_BUFFER_BYTES: Final = 64 * 1024
"""Send buffer of a lane, which the kernel doubles. What waits in the slowest lane holds up all the
others at the end; a lane that has room, to the kernel, has room for a segment."""


class BondedStream:
    """One bidirectional stream; see `gasloc_p2p.core.substrate.Stream`.

    It begins on its first lane, and either end uses every further one from when it is added. There
    is nothing to do in the background: whoever reads takes from all lanes, as far as the window of
    `gasloc_p2p.core.ordering` goes, and whoever writes hands each segment to a lane with room.

    Args:
        first: its first lane.
    """

    def __init__(self, first: P2PStream) -> None:
        self._lanes: list[P2PStream] = []
        self._closed = asyncio.Event()
        self._reading = asyncio.Lock()
        self._turn = Turn()
        self._order = Order()
        self._arrivals: dict[P2PStream, Arrivals] = {}
        self._writing = asyncio.Lock()
        self._broken = False
        self._number = 0
        self._owing: P2PStream | None = None
        self._unsent = b""
        self.add(first)

    @property
    def peer_id(self) -> PeerId:
        """Identity of the other end, proved by the transport for each lane."""
        return self._lanes[0].peer_id

    @property
    def lanes(self) -> int:
        """How many lanes there are."""
        return len(self._lanes)

    def add(self, lane: P2PStream) -> None:
        """Use a further lane, which the other end takes bytes from."""
        if self._closed.is_set():
            lane.close()
            return
        lane.limit_send_buffer(LANE_BUFFER_BYTES)
        self._arrivals[lane] = Arrivals(self._order)
        self._lanes.append(lane)
        for other in self._lanes:
            other.wake()

    async def read(self, max_bytes: int) -> bytes:
        """Return between 1 and `max_bytes` bytes, or b"" once either end has closed."""
        async with self._reading:
            await self._turn.over()
            while not self._closed.is_set():
                if data := self._order.take(max_bytes):
                    self._turn.moved(len(data))
                    self._moved(len(data))
                    return data
                if not await self._receive():
                    break
        return b""

    async def _receive(self) -> bool:
        """Take what the lanes have, or wait for something; False if nothing can come any more."""
        awaited = [lane for lane, arrivals in self._arrivals.items() if arrivals.wanted_bytes]
        if not awaited:
            return await self._may_grow()
        ready = [lane for lane in awaited if lane.is_readable]
        if not ready:
            await any_readable(awaited)
            self._turn.waited()
        for lane in ready:
            arrivals = self._arrivals[lane]
            if data := await lane.read(arrivals.wanted_bytes):
                try:
                    arrivals.take(data)
                except OrderError:
                    self.close()
            else:
                del self._arrivals[lane]
        return True

    async def _may_grow(self) -> bool:
        """Wait for lanes that the other end may use already; False if there are none."""
        return False

    def _moved(self, size_bytes: int) -> None:
        """Take note that so many bytes were read or written."""

    async def write(self, data: BytesLike) -> None:
        """Send `data`, which may be reused afterwards; return once a lane's send buffer is low.

        Raises:
            ConnectionError: the other end is gone, or this one was closed.
        """
        async with self._writing:
            if self._broken:
                raise ConnectionResetError("a lane of the stream has broken")
            try:
                if self._owing is not None:
                    await self._owing.write(b"")
                    self._owing = None
                if unsent := self._unsent:
                    await self._push(memoryview(unsent), begun=True)
                await self._push(memoryview(data).cast("B"), begun=False)
            except ConnectionError:
                self._broken = True
                raise

    async def _push(self, rest: memoryview, *, begun: bool) -> None:
        """Send `rest`; if that is cancelled after it was begun, keep what is left of it."""
        try:
            while len(rest):
                lane = await self._lane_with_room()
                await self._send(lane, rest[:SEGMENT_BYTES])
                self._moved(len(rest[:SEGMENT_BYTES]))
                rest, begun = rest[SEGMENT_BYTES:], True
        except asyncio.CancelledError:
            if self._owing is not None:
                rest, begun = rest[SEGMENT_BYTES:], True
            self._unsent = bytes(rest) if begun else b""
            raise
        self._unsent = b""

    async def _lane_with_room(self) -> P2PStream:
        while True:
            for turn in range(len(self._lanes)):
                lane = self._lanes[(self._number + turn) % len(self._lanes)]
                if lane.has_room:
                    return lane
            await any_with_room(self._lanes)

    async def _send(self, lane: P2PStream, segment: memoryview) -> None:
        framed = b"".join((HEADER.pack(self._number, len(segment)), segment))
        try:
            await lane.write(framed)
        except asyncio.CancelledError:
            if lane.owes:
                self._owing = lane
                self._number += 1
            raise
        self._number += 1

    async def aclose(self) -> None:
        """Close both directions; what was written still arrives if the other end reads it."""
        self.close()

    def close(self) -> None:
        """Do what `aclose` does, at once."""
        self._closed.set()
        for lane in self._lanes:
            lane.close()

    async def closed(self) -> None:
        """Wait until this end is closed."""
        await self._closed.wait()
