"""What a promise of a network is, and what a check of one may use.

docs/testing.md says how a transport is put to all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Final, TypeAlias

from gasloc_p2p.core.substrate import Network, PeerUnreachableError, Stream
from gasloc_p2p.core.types import PeerId

StartNetwork: TypeAlias = Callable[[int], Awaitable[Network]]
"""Starts the network of an index, or returns it if it is one of those that stay open."""

BUFFERED_BYTES: Final = 64 << 20
PIECE_BYTES: Final = 1 << 20
_STALLED_S = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """The transport that is put to the test.

    Attributes:
        start: starts a network.
        wait_s: how long anything may take.
        prompt_s: within which time the end of a stream is seen at its other end.
        buffered_bytes: what is taken at most off a writer whose reader does not read.
    """

    start: StartNetwork
    wait_s: float = 30.0
    prompt_s: float = 2.0
    buffered_bytes: int = BUFFERED_BYTES

    async def pair(self) -> tuple[Network, Network]:
        """Return networks 0 and 1."""
        return await self.start(0), await self.start(1)

    async def dial(self, network: Network, peer: PeerId, protocol: str) -> Stream:
        """Open a stream to a peer that is there, however often that has to be tried."""
        async with asyncio.timeout(self.wait_s):
            while True:
                try:
                    return await network.open_stream(peer, protocol, deadline_s=self.wait_s)
                except PeerUnreachableError:
                    await asyncio.sleep(0.1)


Promise: TypeAlias = Callable[[Trial], Awaitable[None]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One promise.

    Attributes:
        name: in words, for a report.
        run: keeps quiet if the promise holds.
    """

    name: str
    run: Promise

    def __str__(self) -> str:
        return self.name


def checks_of(promises: Iterable[Promise]) -> tuple[Check, ...]:
    """Return a check for each function, named as it is."""
    return tuple(Check(name=p.__name__.strip("_").replace("_", " "), run=p) for p in promises)


async def read_exactly(stream: Stream, size: int) -> bytes:
    """Return the next `size` bytes."""
    received = bytearray()
    while len(received) < size:
        piece = await stream.read(size - len(received))
        assert piece, f"the stream ended after {len(received)} of {size} bytes"
        received += piece
    return bytes(received)


async def write_until_closed(stream: Stream) -> None:
    """Write on and on, until the other end is seen to be gone."""
    try:
        while True:
            await stream.write(bytes(65_536))
            # So that time passes, and a deadline with it, if nobody notices.
            await asyncio.sleep(0.001)
    except ConnectionError:
        return


async def stalled(writing: asyncio.Task[None], written: Callable[[], int], *, below: int) -> None:
    """Wait until nothing more is taken, which is before `below` bytes are."""
    before = -1
    # It has stalled once a stretch of time, long against a write, moves nothing.
    while written() != before:
        before = written()
        await asyncio.wait({writing}, timeout=_STALLED_S)
        assert written() < below, f"{written()} bytes were taken, and nobody has read one"


async def expect(
    kinds: type[Exception] | tuple[type[Exception], ...], work: Awaitable[object]
) -> Exception:
    """Return the error of one of these kinds that `work` ends with."""
    try:
        result = await work
    except kinds as error:
        return error
    raise AssertionError(f"{kinds} was expected, but {result!r} came back")
