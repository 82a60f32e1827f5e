"""One side of an exchange at every stage, and what its partner sends it, for tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from gasloc_p2p.core.exchange import (
    Agreed,
    ChunkArrived,
    Complete,
    Exchange,
    PartnerHello,
    PartnerScales,
)
from gasloc_p2p.core.types import EdgeKind
from gasloc_p2p.core.wire import (
    FrameType,
    Head,
    Ready,
    Records,
    Refuse,
    RefuseCode,
    pack_frame,
    pack_head,
    pack_message,
    pack_piece,
)
from tests.core.two_sides import CHECKED, PLAIN, A, B, end, hello, key, refusal, sent, types

CODES_B = bytes(range(100, 110))
Stage: TypeAlias = Callable[[], Exchange]
READY, APPLIED = pack_message(Ready(clip=1.0)), pack_frame(FrameType.APPLIED)


def piece(
    kind: FrameType, index: int, data: bytes = b"", *, sender: str = B, round: int = 7
) -> bytes:
    return b"".join(pack_piece(kind, index, data, key=key(sender, round)))


def chunk(index: int, data: bytes) -> bytes:
    return piece(FrameType.CHUNK, index, data)


def announced(kind: FrameType, index: int, size: int) -> bytes:
    """The head of a piece of which nothing follows."""
    return pack_head(Head(type=kind, size=size, index=index, digest=bytes(16)))


HELLO, RECORDS = pack_message(hello(B)), pack_message(Records(records=()))
FIRST, SECOND, LAST = (chunk(i, CODES_B[4 * i : 4 * i + 4]) for i in range(3))
CHECK, REPAIR = piece(FrameType.CHECK, 0), piece(FrameType.REPAIR, 0)
SCALES = piece(FrameType.SCALES, 0, b"123")
LATE = pack_message(Refuse(code=RefuseCode.CORRUPT, reason="late", round=7))


def dialer() -> Exchange:
    """A's side, with its Hello on its way."""
    exchange = Exchange(hello=hello(A), layout=PLAIN, partner=B, dialer=True)
    assert types(sent(exchange)) == [FrameType.HELLO]
    return exchange


def acceptor() -> Exchange:
    return Exchange(hello=hello(A), layout=PLAIN, partner=B, dialer=False)


def greeted() -> Exchange:
    """A's side after B's Hello."""
    exchange = dialer()
    assert exchange.receive(HELLO) == [PartnerHello(hello=hello(B)), PartnerScales(scales=b"")]
    return exchange


def received() -> Exchange:
    """A's side after every chunk went both ways."""
    exchange = greeted()
    sent(exchange)
    events = exchange.receive(FIRST + SECOND + LAST)
    assert [event.index for event in events if isinstance(event, ChunkArrived)] == [0, 1, 2]
    assert exchange.checked(0, b"") == exchange.checked(1, b"") == []
    assert exchange.checked(2, b"") == [Complete()]
    return exchange


def agreed() -> Exchange:
    """A's side after both Ready."""
    exchange = received()
    assert exchange.accept() == []
    assert exchange.receive(READY) == [Agreed(clip=1.0)]
    return exchange


def opened() -> Exchange:
    """A's side of a checked codec, after B's Hello."""
    exchange = Exchange(
        hello=hello(A, CHECKED), layout=CHECKED, scales=b"abc", partner=B, dialer=True
    )
    sent(exchange)
    exchange.receive(pack_message(hello(B, CHECKED)))
    return exchange


def checking() -> Exchange:
    """A's side of a checked codec, after both sides' chunks; none has been checked."""
    exchange = opened()
    exchange.receive(SCALES)
    sent(exchange)
    exchange.receive(FIRST + SECOND + LAST)
    return exchange


def violation(exchange: Exchange, data: bytes) -> str:
    """Feed `data`; return the reason after checking that it was refused as a violation."""
    hello_agreed = exchange.bytes_received > 0
    finished = end(exchange.receive(data))
    assert finished.kind is EdgeKind.REFUSED
    assert finished.offence == hello_agreed
    refuse = refusal(sent(exchange))
    assert refuse.code is RefuseCode.PROTOCOL
    assert finished.reason == f"refused by this peer: {refuse.reason}"
    return refuse.reason
