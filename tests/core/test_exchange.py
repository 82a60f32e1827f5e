"""One exchange, rule by rule: what each side sends, refuses, and reports at the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import msgspec
import pytest

from gasloc_p2p.core.exchange import Agreed, CodesReceived, Event, Exchange, Finished, PartnerHello
from gasloc_p2p.core.types import BytesLike, EdgeKind
from gasloc_p2p.core.wire import (
    Frame,
    FrameDecoder,
    FrameType,
    Hello,
    ProtocolError,
    Ready,
    Records,
    Refuse,
    RefuseCode,
    pack_chunk,
    pack_frame,
    pack_message,
    read_hello,
    unpack_chunk,
    unpack_message,
)

A, B = "12D3KooWa", "12D3KooWb"
CODES_A, CODES_B = bytes(range(10)), bytes(range(100, 110))
Stage: TypeAlias = Callable[[], Exchange]
READY, APPLIED = pack_message(Ready(clip=1.0)), pack_frame(FrameType.APPLIED)


def hello(peer_id: str, /, **changes: Any) -> Hello:
    base = Hello(
        protocol_min=1,
        protocol_max=1,
        peer_id=peer_id,
        run_digest=b"r" * 32,
        schema_digest=b"s" * 32,
        round=7,
        roster_digest=b"o" * 32,
        codec="bf16",
        code_bytes=10,
        chunk_bytes=4,
        scales=b"",
    )
    return msgspec.structs.replace(base, **changes)


HELLO, RECORDS = pack_message(hello(B)), pack_message(Records(records=()))
FIRST, SECOND, LAST = (pack_chunk(CODES_B[4 * i : 4 * i + 4], round=7, index=i) for i in range(3))
LATE = pack_message(Refuse(code=RefuseCode.CORRUPT, reason="late", round=7))


def sent(exchange: Exchange) -> bytes:
    return b"".join(iter(exchange.data_to_send, None))


def frames(data: BytesLike) -> list[Frame]:
    return FrameDecoder(chunk_bytes=4).feed(data)


def types(data: bytes) -> list[FrameType]:
    return [frame.type for frame in frames(data)]


def refusal(data: bytes) -> Refuse:
    (frame,) = frames(data)
    assert frame.type is FrameType.REFUSE
    return unpack_message(frame.payload, Refuse)


def end(events: list[Event]) -> Finished:
    (last,) = [event for event in events if isinstance(event, Finished)]
    assert events[-1] is last
    return last


def dialer() -> Exchange:
    """A's side, with its Hello on its way."""
    exchange = Exchange(hello=hello(A), partner=B, dialer=True)
    assert types(sent(exchange)) == [FrameType.HELLO]
    return exchange


def acceptor() -> Exchange:
    return Exchange(hello=hello(A), partner=B, dialer=False)


def greeted() -> Exchange:
    """A's side after B's Hello."""
    exchange = dialer()
    assert exchange.receive(HELLO) == [PartnerHello(hello=hello(B))]
    return exchange


def received() -> Exchange:
    """A's side after every chunk went both ways."""
    exchange = greeted()
    exchange.send_codes(CODES_A)
    sent(exchange)
    assert exchange.receive(FIRST + SECOND + LAST) == [CodesReceived(codes=bytearray(CODES_B))]
    return exchange


def agreed() -> Exchange:
    """A's side after both Ready."""
    exchange = received()
    assert exchange.accept() == []
    assert exchange.receive(READY) == [Agreed(clip=1.0)]
    return exchange


# The whole exchange


def test_both_sides_apply() -> None:
    a = Exchange(hello=hello(A), partner=B, dialer=True)
    b = Exchange(hello=hello(B), partner=A, dialer=False)
    assert b.data_to_send() is None
    first = sent(a)
    assert read_hello(first) == hello(A)
    assert b.receive(first) == [PartnerHello(hello=hello(A))]
    assert a.receive(sent(b)) == [PartnerHello(hello=hello(B))]

    a.send_codes(CODES_A)
    b.send_codes(bytearray(CODES_B))
    from_a, from_b = sent(a), sent(b)
    assert types(from_a) == [FrameType.CHUNK] * 3
    assert b.receive(from_a) == [CodesReceived(codes=bytearray(CODES_A))]
    assert a.receive(from_b[:-1]) == []
    assert a.receive(from_b[-1:]) == [CodesReceived(codes=bytearray(CODES_B))]

    assert a.accept() == []
    assert b.receive(sent(a)) == []
    assert b.accept() == [Agreed(clip=1.0)]
    applied = Finished(kind=EdgeKind.APPLIED, reason="")
    assert a.receive(sent(b)) == [Agreed(clip=1.0), applied]
    assert (a.finished, b.finished) == (True, False)
    assert b.receive(sent(a)) == [applied]


def test_ready_follows_the_last_chunk() -> None:
    exchange = greeted()
    exchange.receive(FIRST + SECOND + LAST)
    assert exchange.accept() == []
    assert exchange.data_to_send() is None
    exchange.send_codes(CODES_A)
    assert types(sent(exchange)) == [FrameType.CHUNK] * 3 + [FrameType.READY]


def test_chunks_are_cut_when_they_are_asked_for() -> None:
    exchange = greeted()
    codes = bytearray(CODES_A)
    exchange.send_codes(codes)
    for index, expected in enumerate((CODES_A[:4], b"late")):
        (frame,) = frames(exchange.data_to_send() or b"")
        chunk = unpack_chunk(frame.payload)
        assert (chunk.index, bytes(chunk.data)) == (index, expected)
        codes[4:8] = b"late"


# Hello


@pytest.mark.parametrize(
    ("changes", "code", "kind", "words"),
    [
        ({"protocol_min": 2, "protocol_max": 3}, "protocol", "refused", ["1 to 1", "2 to 3"]),
        ({"protocol_min": 0, "protocol_max": 0}, "protocol", "refused", ["1 to 1", "0 to 0"]),
        ({"protocol_min": 2, "protocol_max": 1}, "protocol", "refused", ["1 to 1", "2 to 1"]),
        ({"peer_id": A}, "identity", "refused", [A, B]),
        ({"run_digest": b"x" * 32}, "run", "refused", ["run digest", "7272", "7878"]),
        ({"schema_digest": b"x" * 32}, "schema", "refused", ["schema digest", "7373", "7878"]),
        ({"codec": "none"}, "codec", "refused", ["bf16", "none"]),
        ({"code_bytes": 11}, "size", "refused", ["code_bytes", "10", "11"]),
        ({"code_bytes": 2**62}, "size", "refused", ["code_bytes", "10", str(2**62)]),
        ({"chunk_bytes": 5}, "size", "refused", ["chunk_bytes", "4", "5"]),
        ({"round": 9}, "not_partner", "not_partner", ["round 7", "got 9"]),
    ],
)
@pytest.mark.parametrize("stage", [dialer, acceptor])
def test_a_disagreement_is_refused_and_named(
    changes: dict[str, object], code: str, kind: str, words: list[str], stage: Stage
) -> None:
    exchange = stage()
    finished = end(exchange.receive(pack_message(hello(B, **changes))))
    refuse = refusal(sent(exchange))
    assert (refuse.code, refuse.round) == (code, 7)
    assert all(word in refuse.reason for word in words)
    assert finished == Finished(
        kind=EdgeKind(kind), reason=f"refused by this peer: {refuse.reason}"
    )


def test_disagreements_are_checked_in_order() -> None:
    changes: dict[str, object] = {"protocol_max": 0, "peer_id": A, "run_digest": b""}
    changes |= {"schema_digest": b"", "codec": "", "chunk_bytes": 1, "round": 1}
    codes = []
    while changes:
        exchange = dialer()
        exchange.receive(pack_message(hello(B, **changes)))
        codes.append(refusal(sent(exchange)).code)
        del changes[next(iter(changes))]
    assert codes == ["protocol", "identity", "run", "schema", "codec", "size", "not_partner"]


@pytest.mark.parametrize(
    "changes",
    [{"protocol_max": 9}, {"protocol_min": 0}, {"scales": b"\x01"}, {"unconfirmed": (2, 3)}],
)
def test_what_may_differ_reaches_the_caller(changes: dict[str, object]) -> None:
    theirs = hello(B, **changes)
    assert dialer().receive(pack_message(theirs)) == [PartnerHello(hello=theirs)]


def test_a_partners_text_is_made_printable() -> None:
    bye = Refuse(code=RefuseCode.LEAVING, reason="bye\x1b[2J\n", round=7)
    for message in (hello(B, codec="\x1b[2J"), bye):
        assert end(dialer().receive(pack_message(message))).reason.isprintable()


@pytest.mark.parametrize("changes", [{"chunk_bytes": 0}, {"scales": bytes(2**16)}])
def test_a_hello_that_no_partner_would_read_is_an_error(changes: dict[str, object]) -> None:
    with pytest.raises(ProtocolError):
        Exchange(hello=hello(A, **changes), partner=B, dialer=True)


def test_more_records_than_a_frame_holds_do_no_harm() -> None:
    records = [b"x" * 4096] * 100
    exchange = Exchange(hello=hello(A), partner=B, dialer=False, records=records)
    exchange.receive(pack_message(hello(B, roster_digest=b"other")))
    (_, frame) = frames(sent(exchange))
    assert 60 <= len(unpack_message(frame.payload, Records).records) < 100


# Violations


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


@pytest.mark.parametrize(
    ("stage", "data", "words"),
    [
        (acceptor, READY, "READY where HELLO was due"),
        (dialer, RECORDS, "RECORDS where HELLO was due"),
        (dialer, FIRST, "CHUNK where HELLO was due"),
        (dialer, READY, "READY where HELLO was due"),
        (dialer, APPLIED, "APPLIED where HELLO was due"),
        (dialer, b"\xff\0\0\0\0", "unknown frame type 255"),
        (dialer, pack_frame(FrameType.HELLO, b"?"), "malformed Hello"),
        (received, pack_frame(FrameType.READY), "malformed Ready"),
        (received, pack_frame(FrameType.READY, b"\x91\xcb" + bytes(8)), "malformed Ready"),
        (greeted, HELLO, "HELLO where CHUNK was due"),
        (greeted, RECORDS, "RECORDS where CHUNK was due"),
        (greeted, READY, "READY where CHUNK was due"),
        (greeted, APPLIED, "APPLIED where CHUNK was due"),
        (greeted, FIRST + SECOND + READY, "READY where CHUNK was due"),
        (greeted, SECOND, "chunk 1 where chunk 0 was due"),
        (greeted, FIRST + FIRST, "chunk 0 where chunk 1 was due"),
        (greeted, pack_chunk(b"", round=7, index=0), "0 bytes, expected 4"),
        (greeted, pack_chunk(CODES_B[:3], round=7, index=0), "3 bytes, expected 4"),
        (greeted, pack_chunk(CODES_B[:5], round=7, index=0)[:5], "CHUNK of 29 bytes"),
        (greeted, FIRST + SECOND + pack_chunk(b"1234", round=7, index=2), "4 bytes, expected 2"),
        (greeted, pack_frame(FrameType.CHUNK, b"short"), "malformed Chunk"),
        (greeted, FIRST + SECOND + LAST + READY, "cannot have every chunk"),
        (received, LAST, "CHUNK where READY was due"),
        (received, APPLIED, "APPLIED where READY was due"),
        (received, READY + READY, "READY where APPLIED was due"),
        (received, READY + APPLIED, "APPLIED before both sides were ready"),
    ],
)
def test_a_violation_is_refused(stage: Stage, data: bytes, words: str) -> None:
    assert words in violation(stage(), data)


def test_chunks_before_the_records_are_a_violation() -> None:
    exchange = dialer()
    exchange.receive(pack_message(hello(B, roster_digest=b"other")))
    assert "CHUNK where RECORDS was due" in violation(exchange, FIRST)


def test_ready_while_a_chunk_waits_to_be_sent_is_a_violation() -> None:
    exchange = greeted()
    exchange.send_codes(CODES_A)
    assert exchange.data_to_send()
    assert "cannot have every chunk" in violation(exchange, FIRST + SECOND + LAST + READY)


@pytest.mark.parametrize(
    "chunk",
    [
        FIRST[:-1] + b"?",
        FIRST[:13] + bytes(16) + FIRST[29:],
        pack_chunk(CODES_B[:4], round=6, index=0),
        SECOND[:5] + FIRST[5:13] + SECOND[13:],
    ],
    ids=["codes", "digest", "another round", "another place"],
)
def test_a_wrong_digest_is_corrupt_on_both_sides(chunk: bytes) -> None:
    exchange = greeted()
    words = "chunk 0 does not match its digest"
    reason = f"refused by this peer: {words}"
    corrupt = Finished(kind=EdgeKind.CORRUPT, reason=reason, offence=True)
    assert exchange.receive(chunk) == [corrupt]
    data = sent(exchange)
    assert refusal(data).code is RefuseCode.CORRUPT
    told = Finished(kind=EdgeKind.CORRUPT, reason=f"refused by partner: {words}")
    assert received().receive(data) == [told]


# Ends


def test_a_long_reason_is_cut_and_made_printable() -> None:
    exchange = dialer()
    exchange.refuse(RefuseCode.LEAVING, "\ud800" + "x" * 1000)
    assert refusal(sent(exchange)).reason == "\ufffd" + "x" * 499


def test_a_refusal_from_another_round_says_so() -> None:
    refuse = Refuse(code=RefuseCode.NOT_PARTNER, reason="no edge", round=9)
    finished = end(dialer().receive(pack_message(refuse)))
    assert finished.reason == "refused by partner: no edge (it is at round 9)"


@pytest.mark.parametrize(
    ("stage", "words"),
    [(dialer, "Hello"), (greeted, "Chunk 1 of 3"), (received, "Ready")],
)
def test_an_end_names_what_was_missing(stage: Stage, words: str) -> None:
    reason = f"the stream ended before the partner's {words}"
    assert stage().end_of_stream() == [Finished(kind=EdgeKind.LOST, reason=reason)]
    reason = f"the deadline passed before the partner's {words}"
    assert stage().expire() == [Finished(kind=EdgeKind.TIMED_OUT, reason=reason)]


@pytest.mark.parametrize("data", [READY, b"\xff" * 5, LATE])
def test_a_violation_or_refusal_cannot_undo_an_agreement(data: bytes) -> None:
    exchange = agreed()
    finished = end(exchange.receive(data))
    assert finished.kind is EdgeKind.ASYMMETRIC
    assert finished.reason.startswith("mixed without the partner's Applied: refused by ")
    assert finished.offence == (data != LATE)
    assert types(sent(exchange)) == [FrameType.READY, FrameType.APPLIED]


def test_nothing_happens_after_the_end() -> None:
    exchange = dialer()
    exchange.expire()
    assert exchange.receive(pack_message(hello(B)) + b"\xff" * 99) == []
    assert exchange.bytes_received == 0
    assert exchange.accept() == exchange.refuse(RefuseCode.LEAVING, "x") == []
    assert exchange.end_of_stream() == exchange.expire() == []
    exchange.send_codes(b"any size")
    assert exchange.data_to_send() is None


def test_bytes_after_the_last_frame_are_ignored() -> None:
    applied = Finished(kind=EdgeKind.APPLIED, reason="")
    assert agreed().receive(APPLIED + READY + b"\xff" * 99) == [applied]
    assert [type(event) for event in dialer().receive(LATE + b"\xff" * 99)] == [Finished]


# The caller's own mistakes


@pytest.mark.parametrize(
    "call",
    [
        lambda: dialer().send_codes(CODES_A),
        lambda: received().send_codes(CODES_A),
        lambda: greeted().accept(),
        lambda: agreed().accept(),
    ],
)
def test_calls_out_of_order_are_errors(call: Callable[[], object]) -> None:
    with pytest.raises(RuntimeError, match="called once, after"):
        call()


def test_codes_of_the_wrong_size_are_an_error() -> None:
    with pytest.raises(ValueError, match="9 bytes of codes, expected 10"):
        greeted().send_codes(CODES_A[:9])
