"""One edge of one round: drives the sans-IO exchange over a stream, within a deadline."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from torch import Tensor

from gasloc_p2p.core.exchange import (
    Agreed,
    CodesReceived,
    Event,
    Exchange,
    Finished,
    PartnerHello,
    PartnerRecords,
)
from gasloc_p2p.core.substrate import PeerUnreachableError, Stream
from gasloc_p2p.core.types import MIXED_KINDS, BytesLike, EdgeKind, EdgeOutcome, PeerId
from gasloc_p2p.core.wire import Hello, RefuseCode

READ_BYTES = 262_144
FLUSH_S = 2.0
"""How long the last words, a refusal or the final acknowledgement, may take to leave."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Judgement:
    """What a peer makes of a partner's codes.

    Attributes:
        received: the partner's contribution, decoded.
        length: norm of its difference to this peer's own contribution.
        clip: factor in (0, 1] by which this peer would clip that difference.
    """

    received: Tensor
    length: float
    clip: float


@dataclass(frozen=True, kw_only=True, slots=True)
class EdgeCallbacks:
    """What the exchange asks of the node while it runs.

    Attributes:
        encode: scales of the partner to this peer's codes for it.
        judge: the partner's codes and scales to what they are; None when they are not finite.
        records: takes the signed records that the partner handed over.
    """

    encode: Callable[[bytes], Awaitable[BytesLike]]
    judge: Callable[[BytesLike, bytes], Awaitable[Judgement | None]]
    records: Callable[[tuple[bytes, ...]], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Contact:
    """An open stream to the partner, with what was already read from it."""

    stream: Stream
    early: bytes = b""


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
    callbacks: EdgeCallbacks,
    deadline_s: float,
) -> EdgeOutcome:
    """Carry one exchange to its end and say how it ended.

    Args:
        partner: who it is with.
        contact: dials the partner, or waits for it to dial; may raise `DeclinedError`.
        exchange: fresh state machine of this edge.
        callbacks: what the exchange needs from the node.
        deadline_s: seconds after which the edge is given up.
    """
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    pump = _Pump(exchange, callbacks)
    try:
        async with asyncio.timeout(deadline_s):
            reached = await contact()
            pump.stream = reached.stream
            await pump.run(reached.early)
    except TimeoutError:
        await pump.conclude(exchange.expire())
    except PeerUnreachableError as error:
        pump.ended = unreachable(error)
    except DeclinedError as error:
        pump.ended = error.ended
    finally:
        if pump.stream is not None:
            await pump.stream.aclose()
    ended, judged = pump.ended, pump.judged
    assert ended is not None
    mixes = ended.kind in MIXED_KINDS
    now_s = loop.time()
    return EdgeOutcome(
        partner=partner,
        kind=ended.kind,
        reason=ended.reason,
        received=judged.received if judged is not None and mixes else None,
        scales=pump.partner.scales if pump.partner is not None else b"",
        clip=pump.clip,
        length=judged.length if judged is not None else 0.0,
        offence=ended.reason if ended.offence else "",
        unconfirmed=pump.partner.unconfirmed if pump.partner is not None else (),
        bytes_sent=exchange.bytes_sent,
        bytes_received=exchange.bytes_received,
        elapsed_s=now_s - began_s,
        wait_s=(pump.met_s if pump.met_s is not None else now_s) - began_s,
    )


def unreachable(error: PeerUnreachableError) -> Finished:
    """Return the end of an edge to a partner that cannot be dialled."""
    return Finished(kind=EdgeKind.LOST, reason=f"cannot be reached: {error}")


async def knock(stream: Stream, exchange: Exchange, *, deadline_s: float) -> Finished | None:
    """Show a partner that is to dial this peer the Hello of their edge, and close the stream.

    Args:
        stream: to the partner, whose inbox takes it for what it is.
        exchange: fresh state machine that speaks first.
        deadline_s: seconds to wait for an answer.

    Returns:
        How the partner refuses the edge; None when it does not.
    """
    try:
        async with asyncio.timeout(deadline_s):
            while (data := exchange.data_to_send()) is not None:
                await stream.write(data)
            while answer := await stream.read(READ_BYTES):
                for event in exchange.receive(answer):
                    if isinstance(event, Finished):
                        return event
    except (TimeoutError, ConnectionError):
        return None
    finally:
        await stream.aclose()
    return None


async def decline_edge(
    *,
    partner: PeerId,
    dial: Callable[[], Awaitable[Stream]] | None,
    exchange: Exchange,
    reason: str,
) -> EdgeOutcome:
    """Leave out a partner, and tell it so that it need not wait.

    Args:
        partner: whom.
        dial: opens a stream to the partner; None where the partner dials, whose stream the inbox
            refuses.
        exchange: fresh state machine of this edge.
        reason: why, in one sentence.
    """
    first = exchange.data_to_send()
    [ended] = exchange.refuse(RefuseCode.EXCLUDED, reason)
    assert isinstance(ended, Finished)
    last = exchange.data_to_send()
    if dial is not None:
        assert first is not None
        assert last is not None
        # It cannot be helped if this fails: the partner finds out at its own deadline.
        with contextlib.suppress(TimeoutError, PeerUnreachableError, ConnectionError):
            async with asyncio.timeout(FLUSH_S):
                # Both at once, or the partner might find the stream closed while it answers.
                await _say(await dial(), bytes(first) + bytes(last))
    return EdgeOutcome(partner=partner, kind=ended.kind, reason=ended.reason, excluded=True)


async def _say(stream: Stream, data: bytes) -> None:
    try:
        await stream.write(data)
    finally:
        await stream.aclose()


class _Pump:
    """Moves bytes between a stream and an exchange, both directions at once."""

    def __init__(self, exchange: Exchange, callbacks: EdgeCallbacks) -> None:
        self.stream: Stream | None = None
        self.ended: Finished | None = None
        self.met_s: float | None = None
        self.partner: Hello | None = None
        self.judged: Judgement | None = None
        self.clip = 1.0
        self._exchange = exchange
        self._callbacks = callbacks
        self._wake = asyncio.Event()

    async def run(self, early: bytes) -> None:
        """Pump until the exchange has finished and its last words are out."""
        assert self.stream is not None
        async with asyncio.TaskGroup() as tasks:
            writing = tasks.create_task(self._write(self.stream))
            if early:
                await self._handle(self._exchange.receive(early))
            while self.ended is None:
                data = await self.stream.read(READ_BYTES)
                await self._handle(
                    self._exchange.receive(data) if data else self._exchange.end_of_stream()
                )
            await asyncio.wait({writing}, timeout=FLUSH_S)
            writing.cancel()

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
        while True:
            self._wake.clear()
            await self._flush(stream)
            if self._exchange.finished:
                return
            await self._wake.wait()

    async def _flush(self, stream: Stream) -> None:
        try:
            while (data := self._exchange.data_to_send()) is not None:
                await stream.write(data)
        except ConnectionError:
            await self._handle(self._exchange.end_of_stream())

    async def _handle(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case PartnerHello(hello=hello):
                    self.met_s = asyncio.get_running_loop().time()
                    self.partner = hello
                    codes = await self._callbacks.encode(hello.scales)
                    self._exchange.send_codes(codes)
                case PartnerRecords(records=records):
                    self._callbacks.records(records)
                case CodesReceived(codes=codes):
                    await self._judge(codes)
                case Agreed(clip=clip):
                    self.clip = clip
                case Finished():
                    self.ended = event
        self._wake.set()

    async def _judge(self, codes: BytesLike) -> None:
        assert self.partner is not None
        self.judged = await self._callbacks.judge(codes, self.partner.scales)
        if self.judged is None:
            words = "the parameters are not finite numbers"
            await self._handle(self._exchange.refuse(RefuseCode.NON_FINITE, words))
        else:
            await self._handle(self._exchange.accept(clip=self.judged.clip))
