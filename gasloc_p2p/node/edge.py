"""One edge of one round: drives the sans-IO exchange over a stream, within a deadline."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from gasloc_p2p.core.codecs import Coder, CodesError, Offer
from gasloc_p2p.core.exchange import (
    Agreed,
    ChunkArrived,
    Complete,
    Cut,
    Event,
    Exchange,
    Finished,
    PartnerHello,
    PartnerRecords,
    PartnerScales,
    RepairArrived,
)
from gasloc_p2p.core.substrate import Compute, PeerUnreachableError, Stream
from gasloc_p2p.core.types import MIXED_KINDS, BytesLike, EdgeKind, EdgeOutcome, PeerId
from gasloc_p2p.core.wire import FrameType, Hello, RefuseCode

READ_BYTES = 262_144
FLUSH_S = 2.0
"""How long the last words, a refusal or the final acknowledgement, may take to leave."""
MAX_RESUMPTIONS = 4
"""Streams that break more often than this in one edge are given up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EdgeWork:
    """What an edge needs of the node while it runs.

    Attributes:
        offer: what this peer gives to the mix.
        compute: runs the codec off the loop.
        clip: length of a difference to the factor in (0, 1] by which this peer would clip it.
        records: takes the signed records that the partner handed over.
    """

    offer: Offer
    compute: Compute
    clip: Callable[[float], float]
    records: Callable[[tuple[bytes, ...]], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Contact:
    """An open stream to the partner, with what was already read from it."""

    stream: Stream
    early: bytes = b""


class Watch(Protocol):
    """Who wants to know how an edge goes."""

    def met(self, *, late: bool) -> None:
        """The partner has answered; if `late`, its round goes on without this edge."""
        ...

    def let_go(self) -> None:
        """Either side's round goes on without this edge."""
        ...


class DeclinedError(Exception):
    """There is no stream for an edge, and the partner is not waited for any longer.

    Attributes:
        ended: how the edge ends instead.
    """

    def __init__(self, ended: Finished) -> None:
        super().__init__(ended.reason)
        self.ended = ended


async def run_edge(
    *,
    partner: PeerId,
    contact: Callable[[], Awaitable[Contact]],
    exchange: Exchange,
    work: EdgeWork,
    deadline_s: float,
    met_deadline_s: float = 0.0,
    watch: Watch | None = None,
) -> EdgeOutcome:
    """Carry one exchange to its end and say how it ended.

    A stream that breaks on the way is replaced, and the exchange goes on from the first frame that
    did not arrive.

    Args:
        partner: who it is with.
        contact: dials the partner, or waits for it to dial; may raise `DeclinedError`.
        exchange: fresh state machine of this edge.
        work: what the exchange needs of the node.
        deadline_s: seconds after which the edge is given up.
        met_deadline_s: the same once the partner has answered, if that is longer.
        watch: told how it goes.
    """
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    pump = _Pump(exchange, work, watch)
    try:
        async with asyncio.timeout(deadline_s) as pump.limit:
            pump.met_until_s = began_s + max(deadline_s, met_deadline_s)
            await pump.run(contact)
    except TimeoutError:
        await pump.conclude(exchange.expire())
    finally:
        if pump.stream is not None:
            await pump.stream.aclose()
    ended, coder = pump.ended, pump.coder
    assert ended is not None
    mixes = ended.kind in MIXED_KINDS
    now_s = loop.time()
    return EdgeOutcome(
        partner=partner,
        kind=ended.kind,
        reason=ended.reason,
        code=ended.code or "",
        coder=coder if mixes else None,
        clip=pump.clip,
        length=pump.length,
        offence=ended.reason if ended.offence else "",
        unconfirmed=pump.partner.unconfirmed if pump.partner is not None else (),
        bytes_sent=exchange.bytes_sent,
        bytes_received=exchange.bytes_received,
        elapsed_s=now_s - began_s,
        wait_s=(pump.met_s if pump.met_s is not None else now_s) - began_s,
        resumed=pump.resumed,
        repaired_blocks=coder.repaired_blocks if coder is not None and mixes else 0,
    )


def unreachable(error: PeerUnreachableError) -> Finished:
    """Return the end of an edge to a partner that cannot be dialled."""
    return Finished(kind=EdgeKind.LOST, reason=f"cannot be reached: {error}")


class _Pump:
    """Moves bytes between a stream and an exchange, both directions at once.

    The stream's own buffers are what overlaps sending, receiving and the codec: while one chunk is
    encoded or taken, the one before is on its way and the next one arrives.
    """

    def __init__(self, exchange: Exchange, work: EdgeWork, watch: Watch | None) -> None:
        self.stream: Stream | None = None
        self.ended: Finished | None = None
        self.limit = asyncio.timeout(None)
        self.met_until_s = 0.0
        self.met_s: float | None = None
        self.partner: Hello | None = None
        self.coder: Coder | None = None
        self.clip = 1.0
        self.length = 0.0
        self.resumed = 0
        self._exchange = exchange
        self._work = work
        self._watch = watch
        self._met = asyncio.Event()
        self._wake = asyncio.Event()

    async def run(self, contact: Callable[[], Awaitable[Contact]]) -> None:
        """Pump until the exchange has finished and its last words are out."""
        while self.ended is None:
            try:
                reached = await contact()
            except PeerUnreachableError as error:
                await self._give_up(unreachable(error))
                return
            except DeclinedError as error:
                await self._give_up(error.ended)
                return
            if self.stream is not None:
                await self.stream.aclose()
                self._exchange.reconnect()
                self.resumed += 1
            self.stream = reached.stream
            await self._pump(reached.stream, reached.early)

    async def _pump(self, stream: Stream, early: bytes) -> None:
        """Pump until the exchange has finished, or until its stream breaks and may be replaced."""
        async with asyncio.TaskGroup() as tasks:
            writing = tasks.create_task(self._write(stream))
            data: bytes | None = early or await stream.read(READ_BYTES)
            while data:
                await self._handle(self._exchange.receive(data))
                data = await stream.read(READ_BYTES) if self.ended is None else None
            if self.ended is None and not self._may_resume():
                await self._handle(self._exchange.end_of_stream())
            if self.ended is not None:
                await asyncio.wait({writing}, timeout=FLUSH_S)
            writing.cancel()

    def _may_resume(self) -> bool:
        return self._exchange.resumable and self.resumed < MAX_RESUMPTIONS

    async def _give_up(self, ended: Finished) -> None:
        """There is no stream, or none any more."""
        if self.stream is not None:
            await self._handle(self._exchange.end_of_stream())
        if self.ended is None or self.ended.kind is EdgeKind.LOST:
            self.ended = ended

    async def conclude(self, events: list[Event]) -> None:
        """Take the exchange's final events after a deadline and flush its last words."""
        await self._handle(events)
        if self.stream is None:
            return
        try:
            async with asyncio.timeout(FLUSH_S):
                await self._flush(self.stream)
        except TimeoutError:
            return

    async def _write(self, stream: Stream) -> None:
        while await self._flush(stream):
            if self._exchange.finished:
                return
            await self._wake.wait()

    async def _flush(self, stream: Stream) -> bool:
        """Write all that there is to say; False when the stream takes no more."""
        try:
            self._wake.clear()
            while (item := self._exchange.next_to_send()) is not None:
                for part in await self._made(item) if isinstance(item, Cut) else item:
                    await stream.write(part)
        except ConnectionError:
            # What the partner said last may still be there to read; the reader finds the end.
            return False
        return True

    async def _made(self, cut: Cut) -> tuple[BytesLike, ...]:
        await self._met.wait()
        coder = self.coder
        if coder is None:
            return ()

        def make() -> tuple[BytesLike, ...]:
            if cut.kind is FrameType.CHUNK:
                return cut.frame(coder.encode(cut.index))
            return cut.frame(coder.repair(cut.index, cut.bad))

        return await self._work.compute.run(make)

    async def _handle(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case PartnerHello(hello=hello):
                    if self.met_s is None:
                        self.met_s = asyncio.get_running_loop().time()
                        self.limit.reschedule(self.met_until_s)
                    self.partner = hello
                    if self._watch is not None:
                        self._watch.met(late=hello.late)
                case PartnerRecords(records=records):
                    self._work.records(records)
                case PartnerScales(scales=scales):
                    await self._meet(scales)
                case ChunkArrived():
                    await self._take(event)
                case RepairArrived():
                    await self._take_repair(event)
                case Complete():
                    await self._judge()
                case Agreed(clip=clip, late=late):
                    self.clip = clip
                    if self._watch is not None and late:
                        self._watch.let_go()
                case Finished():
                    self.ended = event
        self._wake.set()

    async def _meet(self, scales: bytes) -> None:
        try:
            self.coder = await self._work.compute.run(lambda: self._work.offer.coder(scales))
        except CodesError as fault:
            await self._refuse(RefuseCode.CORRUPT, str(fault))
        self._met.set()

    async def _take(self, event: ChunkArrived) -> None:
        coder = self.coder
        assert coder is not None

        def take() -> bytes | None:
            return coder.take(event.index, event.data) if event.intact() else None

        try:
            bad = await self._work.compute.run(take)
        except CodesError as fault:
            await self._refuse(RefuseCode.CORRUPT, str(fault))
            return
        if bad is None:
            await self._refuse(RefuseCode.CORRUPT, f"chunk {event.index} does not match its digest")
        else:
            await self._handle(self._exchange.checked(event.index, bad))

    async def _take_repair(self, event: RepairArrived) -> None:
        coder = self.coder
        assert coder is not None

        def take() -> bool | None:
            if not event.intact():
                return None
            return coder.take_repair(event.index, event.bad, event.data)

        try:
            matches = await self._work.compute.run(take)
        except CodesError as fault:
            await self._refuse(RefuseCode.CORRUPT, str(fault))
            return
        if matches is None:
            await self._refuse(
                RefuseCode.CORRUPT, f"the repair of chunk {event.index} does not match its digest"
            )
        else:
            await self._handle(self._exchange.repaired(event.index, matches))

    async def _judge(self) -> None:
        coder = self.coder
        assert coder is not None
        squares = await self._work.compute.run(coder.square_distance)
        if not math.isfinite(squares):
            await self._refuse(RefuseCode.NON_FINITE, "the parameters are not finite numbers")
            return
        self.length = math.sqrt(squares)
        await self._handle(self._exchange.accept(clip=self._work.clip(self.length)))

    async def _refuse(self, code: RefuseCode, words: str) -> None:
        await self._handle(self._exchange.refuse(code, words))
