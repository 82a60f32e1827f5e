"""How streams to peers far away come to have several lanes.

A lane is a stream of p2pd's, and yamux lets it carry no more than a window in each round trip. One
is enough for a peer nearby. Every lane begins with what its dialer says:

    PROBE     answer with a byte, which measures the round trip; something else follows
    PLAIN     the rest is a stream of its own, on this lane alone
    FIRST     and a name, random and good for this peer alone: a stream that may have further lanes
    FURTHER   and a name: another lane of that stream; answer with a byte, then use it

The dialer probes a peer on its first contact, and opens further lanes when a stream has carried a
few bytes. None of them is needed: the other end may refuse any, or all.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final, TypeAlias

from gasloc_p2p.core.substrate import PeerUnreachableError, Stream, StreamHandler
from gasloc_p2p.core.types import PeerId
from gasloc_p2p.net.bonded import BondedStream
from gasloc_p2p.net.streams import P2PStream

MAX_LANES: Final = 8
MAX_FURTHER_LANES: Final = 32
"""Those that are accepted by a node at a time, so that there is room for streams beside them."""
LONG_ROUND_TRIP_S = 0.03
"""From here on a stream may have several lanes; a window of 256 KiB, with which yamux begins, in
each of these is 70 Mbit/s."""
MAX_PROBES: Final = 3
"""A machine that is busy answers late at times, however near it is."""
GROW_BYTES = 64 * 1024
"""A stream that has carried no more in both directions together stays on its first lane."""
OPEN_DEADLINE_S: Final = 10.0
PREAMBLE_DEADLINE_S: Final = 10.0
MEASURED_PEERS: Final = 1024
MEASUREMENTS: Final = 16
PROBE, PLAIN, FIRST, FURTHER = (bytes([kind]) for kind in range(4))
ANSWER: Final = b"\x01"
NAME_BYTES: Final = 16

OpenLane: TypeAlias = Callable[[], Awaitable[P2PStream]]


class Lanes:
    """The streams of a node, as the lanes that they have."""

    def __init__(self) -> None:
        self._round_trips = RoundTrips()
        self._bonds: dict[tuple[PeerId, bytes], BondedStream] = {}
        self._further = 0

    async def dial(self, peer: PeerId, open_lane: OpenLane) -> Stream:
        """Open a stream to `peer`; one that breaks at once says so when it is used.

        Raises:
            PeerUnreachableError: `open_lane` did.
        """
        first = await open_lane()
        begun = False
        try:
            stream = await self._begin(first, peer, open_lane)
            begun = True
        finally:
            if not begun:
                first.abort()
        return stream

    async def _begin(self, first: P2PStream, peer: PeerId, open_lane: OpenLane) -> Stream:
        try:
            if not await self._is_far(peer, first):
                await first.write(PLAIN)
                return first
            name = os.urandom(NAME_BYTES)
            await first.write(FIRST + name)
        except ConnectionError:
            return first
        return DialledStream(first, open_further=lambda: self._open_further(name, open_lane))

    async def _is_far(self, peer: PeerId, lane: P2PStream) -> bool:
        """Whether the round trip is long; one that seems so at first is measured again."""
        if self._round_trips.shortest_s(peer) is None:
            for _ in range(MAX_PROBES):
                await lane.write(PROBE)
                if not await self._answered(lane) or not self._seems_far(peer):
                    break
        return self._seems_far(peer)

    def _seems_far(self, peer: PeerId) -> bool:
        return (self._round_trips.shortest_s(peer) or 0.0) >= LONG_ROUND_TRIP_S

    async def _answered(self, lane: P2PStream) -> bool:
        """Whether the other end answers; measures how long that takes."""
        loop = asyncio.get_running_loop()
        asked_s = loop.time()
        if await lane.read(1) != ANSWER:
            return False
        self._round_trips.measured(lane.peer_id, loop.time() - asked_s)
        return True

    async def _open_further(self, name: bytes, open_lane: OpenLane) -> P2PStream | None:
        """Open a further lane; None if the other end does not take it.

        From its answer on, the other end may use the lane, so it is waited for as long as the
        stream is open.
        """
        lane: P2PStream | None = None
        taken = False
        try:
            async with asyncio.timeout(OPEN_DEADLINE_S):
                lane = await open_lane()
                await lane.write(FURTHER + name)
            taken = await self._answered(lane)
        except (PeerUnreachableError, ConnectionError, TimeoutError):
            return None
        finally:
            if lane is not None and not taken:
                lane.close()
        return lane if taken else None

    async def serve(self, lane: P2PStream, handler: StreamHandler) -> None:
        """Serve a lane that a peer opened, to its end; `handler` gets the stream that it begins.

        A lane that belongs to no open stream of its peer is refused, so that nothing is kept for
        one that may never be.
        """
        try:
            async with asyncio.timeout(PREAMBLE_DEADLINE_S):
                kind, name = await _preamble_of(lane)
        except (EOFError, ConnectionError, TimeoutError):
            return
        key = lane.peer_id, name
        bond = self._bonds.get(key)
        if kind == PLAIN:
            await handler(lane)
        elif kind == FIRST and bond is None:
            await self._serve_bond(key, BondedStream(lane), handler)
        elif kind == FURTHER and bond is not None and bond.lanes < MAX_LANES:
            await self._join(bond, lane)

    async def _serve_bond(
        self, key: tuple[PeerId, bytes], bond: BondedStream, handler: StreamHandler
    ) -> None:
        self._bonds[key] = bond
        try:
            await handler(bond)
        finally:
            del self._bonds[key]
            bond.close()

    async def _join(self, bond: BondedStream, lane: P2PStream) -> None:
        """Have `bond` use a further lane until it is closed."""
        if self._further >= MAX_FURTHER_LANES:
            return
        self._further += 1
        try:
            async with asyncio.timeout(PREAMBLE_DEADLINE_S):
                await lane.write(ANSWER)
            bond.add(lane)
            await bond.closed()
        except (ConnectionError, TimeoutError):
            return
        finally:
            self._further -= 1


class DialledStream(BondedStream):
    """The end that dialled, which opens the further lanes once there is something to carry.

    Args:
        first: the first lane.
        open_further: opens another one, or returns None.
    """

    def __init__(
        self, first: P2PStream, *, open_further: Callable[[], Awaitable[P2PStream | None]]
    ) -> None:
        super().__init__(first)
        self._open_further = open_further
        self._moved_bytes = 0
        self._growing: asyncio.Task[None] | None = None

    def _moved(self, size_bytes: int) -> None:
        self._moved_bytes += size_bytes
        if self._moved_bytes > GROW_BYTES and self._growing is None:
            # Whoever reads or writes does not wait for it, and `close` ends it.
            self._growing = asyncio.ensure_future(self._grow())

    async def _grow(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(MAX_LANES - 1):
                tasks.create_task(self._add_one())

    async def _add_one(self) -> None:
        lane = await self._open_further()
        if lane is not None:
            self.add(lane)

    async def _may_grow(self) -> bool:
        if self._growing is None or self._growing.done():
            return False
        await asyncio.wait((self._growing,))
        return True

    def close(self) -> None:
        """Do what `aclose` does, at once."""
        super().close()
        if self._growing is not None:
            self._growing.cancel()


class RoundTrips:
    """The last few round trips to each of the peers that were measured last, in seconds."""

    def __init__(self) -> None:
        self._recent: dict[PeerId, deque[float]] = {}

    def measured(self, peer: PeerId, round_trip_s: float) -> None:
        """Take note of one."""
        recent = self._recent.pop(peer, None) or deque(maxlen=MEASUREMENTS)
        recent.append(round_trip_s)
        self._recent[peer] = recent
        if len(self._recent) > MEASURED_PEERS:
            del self._recent[next(iter(self._recent))]

    def shortest_s(self, peer: PeerId) -> float | None:
        """Return the shortest, which waited least for others; None if none was measured."""
        return min(self._recent.get(peer, ()), default=None)


async def _preamble_of(lane: P2PStream) -> tuple[bytes, bytes]:
    """Return what a lane is to be and its name, b"" where it has none; answer to probes.

    Raises:
        EOFError: the lane has ended.
        ConnectionError: the peer does not wait for the answer.
    """
    kind = await _exactly(lane, 1)
    for _ in range(MAX_PROBES):
        if kind != PROBE:
            break
        await lane.write(ANSWER)
        kind = await _exactly(lane, 1)
    return kind, await _exactly(lane, NAME_BYTES) if kind in (FIRST, FURTHER) else b""


async def _exactly(lane: P2PStream, size_bytes: int) -> bytes:
    received = b""
    while len(received) < size_bytes:
        piece = await lane.read(size_bytes - len(received))
        if not piece:
            raise EOFError("the lane has ended")
        received += piece
    return received
