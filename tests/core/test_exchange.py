"""One exchange, rule by rule: what each side sends, refuses, and reports at the end."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gasloc_p2p.core.exchange import (
    Agreed,
    ChunkArrived,
    Complete,
    Cut,
    Exchange,
    Finished,
    PartnerHello,
    PartnerScales,
)
from gasloc_p2p.core.types import EdgeKind
from gasloc_p2p.core.wire import (
    SCALES_BYTES,
    FrameType,
    ProtocolError,
    Records,
    Refuse,
    RefuseCode,
    pack_message,
    read_hello,
    unpack_message,
)
from tests.core.exchange_stages import (
    APPLIED,
    CODES_B,
    FIRST,
    HELLO,
    LAST,
    LATE,
    READY,
    SCALES,
    SECOND,
    Stage,
    acceptor,
    agreed,
    checking,
    dialer,
    greeted,
    opened,
    received,
    violation,
)
from tests.core.two_sides import (
    CHECKED,
    PLAIN,
    A,
    B,
    end,
    frames,
    hello,
    layout,
    refusal,
    sent,
    types,
)

# The whole exchange


def test_both_sides_apply() -> None:
    a = Exchange(hello=hello(A), layout=PLAIN, partner=B, dialer=True)
    b = Exchange(hello=hello(B), layout=PLAIN, partner=A, dialer=False)
    assert b.next_to_send() is None
    first = sent(a)
    assert read_hello(first) == hello(A)
    assert b.receive(first) == [PartnerHello(hello=hello(A)), PartnerScales(scales=b"")]
    from_b = sent(b, B)
    assert types(from_b) == [FrameType.HELLO, *[FrameType.CHUNK] * 3]
    assert len(a.receive(from_b[:-1])) == 4
    (last,) = a.receive(from_b[-1:])
    assert isinstance(last, ChunkArrived)
    assert last.intact()
    assert last.index == 2
    b.receive(sent(a))
    for index in range(3):
        a_events, b_events = a.checked(index, b""), b.checked(index, b"")
    assert a_events == b_events == [Complete()]

    assert a.accept() == []
    assert b.receive(sent(a)) == []
    assert b.accept() == [Agreed(clip=1.0)]
    applied = Finished(kind=EdgeKind.APPLIED, reason="")
    assert a.receive(sent(b)) == [Agreed(clip=1.0), applied]
    assert (a.finished, b.finished) == (True, False)
    assert b.receive(sent(a)) == [applied]


@pytest.mark.parametrize("when", ["in Hello", "before Ready"])
@pytest.mark.parametrize("who", ["a", "b"])
def test_if_one_side_lets_go_both_do(when: str, who: str) -> None:
    late = {side: when == "in Hello" and who == side for side in "ab"}
    a = Exchange(hello=hello(A, late=late["a"]), layout=PLAIN, partner=B, dialer=True)
    b = Exchange(hello=hello(B, late=late["b"]), layout=PLAIN, partner=A, dialer=False)
    b.receive(sent(a))
    a.receive(sent(b, B))
    b.receive(sent(a))
    for index in range(3):
        a.checked(index, b"")
        b.checked(index, b"")
    if when == "before Ready":
        assert {"a": a, "b": b}[who].let_go()
    a.accept()
    b.accept()
    to_b = sent(a)
    [agreed, *_] = a.receive(sent(b))
    assert agreed == Agreed(clip=1.0, late=True)
    assert b.receive(to_b) == [Agreed(clip=1.0, late=True)]


def test_after_ready_it_is_too_late_to_let_go() -> None:
    exchange = greeted()
    exchange.receive(FIRST + SECOND + LAST)
    for index in range(3):
        exchange.checked(index, b"")
    exchange.accept()
    sent(exchange)
    assert not exchange.let_go()
    assert exchange.receive(READY) == [Agreed(clip=1.0, late=False)]


def test_ready_follows_the_last_chunk() -> None:
    exchange = greeted()
    exchange.receive(FIRST + SECOND + LAST)
    for index in range(3):
        exchange.checked(index, b"")
    assert exchange.accept() == []
    assert types(sent(exchange)) == [FrameType.CHUNK] * 3 + [FrameType.READY]


def test_chunks_are_cut_when_they_are_asked_for() -> None:
    exchange = greeted()
    sizes = []
    for index in range(3):
        item = exchange.next_to_send()
        assert isinstance(item, Cut)
        assert (item.kind, item.index, item.bad) == (FrameType.CHUNK, index, b"")
        before = exchange.bytes_sent
        data = memoryview(bytes(item.size))
        head, body = item.frame(data)
        assert body is data
        assert item.frame_bytes == len(head) + len(body)
        assert exchange.bytes_sent == before
        sizes.append(item.size)
        with pytest.raises(ValueError, match=f"chunk {index}, expected {item.size}"):
            item.frame(bytes(item.size + 1))
    assert exchange.next_to_send() is None
    assert sizes == [4, 4, 2]


def test_chunks_wait_for_the_partners_scales() -> None:
    exchange = opened()
    assert types(sent(exchange)) == [FrameType.SCALES]
    assert exchange.receive(SCALES) == [PartnerScales(scales=b"123")]
    assert types(sent(exchange)) == [FrameType.CHUNK] * 3


def test_large_scales_travel_in_several_frames() -> None:
    cut = layout(4, checked=False, scale_bytes=SCALES_BYTES + 1)
    ours = bytes(i % 251 for i in range(cut.scale_bytes))
    a = Exchange(hello=hello(A, cut), layout=cut, scales=ours, partner=B, dialer=False)
    b = Exchange(hello=hello(B, cut), layout=cut, scales=ours, partner=A, dialer=True)
    a.receive(sent(b))
    data = sent(a)
    assert [frame.head.size for frame in frames(data)[1:]] == [SCALES_BYTES, 1]
    assert b.receive(data)[1:] == [PartnerScales(scales=ours)]


def test_whole_frames_are_not_copied() -> None:
    data = FIRST + SECOND
    (first, second) = greeted().receive(data)
    for event in (first, second):
        assert isinstance(event, ChunkArrived)
        assert isinstance(event.data, memoryview)
        assert event.data.obj is data
    exchange = greeted()
    exchange.receive(FIRST[:31])
    (event,) = exchange.receive(FIRST[31:])
    assert isinstance(event, ChunkArrived)
    assert bytes(event.data) == CODES_B[:4]


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
        ({"scale_bytes": 2**62}, "size", "refused", ["scale_bytes", "0", str(2**62)]),
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
        kind=EdgeKind(kind),
        reason=f"refused by this peer: {refuse.reason}",
        code=RefuseCode(code),
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
    "changes", [{"protocol_max": 9}, {"protocol_min": 0}, {"unconfirmed": (2, 3)}]
)
def test_what_may_differ_reaches_the_caller(changes: dict[str, object]) -> None:
    theirs = hello(B, **changes)
    assert dialer().receive(pack_message(theirs))[0] == PartnerHello(hello=theirs)


def test_a_partners_text_is_made_printable() -> None:
    bye = Refuse(code=RefuseCode.LEAVING, reason="bye\x1b[2J\n", round=7)
    for message in (hello(B, codec="\x1b[2J"), bye):
        assert end(dialer().receive(pack_message(message))).reason.isprintable()


@pytest.mark.parametrize("changes", [{"chunk_bytes": 0}, {"codec": "x" * 33}])
def test_a_hello_that_no_partner_would_read_is_an_error(changes: dict[str, object]) -> None:
    with pytest.raises(ProtocolError):
        Exchange(hello=hello(A, **changes), partner=B, dialer=True)


@pytest.mark.parametrize(
    ("changes", "scales"), [({"code_bytes": 9}, b"abc"), ({"scale_bytes": 2}, b"ab"), ({}, b"ab")]
)
def test_a_hello_that_contradicts_the_layout_is_an_error(
    changes: dict[str, object], scales: bytes
) -> None:
    with pytest.raises(ValueError, match="other sizes"):
        Exchange(
            hello=hello(A, CHECKED, **changes),
            layout=CHECKED,
            scales=scales,
            partner=B,
            dialer=True,
        )


def test_an_exchange_without_a_layout_greets_and_refuses_only() -> None:
    knocking = Exchange(hello=hello(A), partner=B, dialer=True)
    assert types(sent(knocking)) == [FrameType.HELLO]
    assert knocking.receive(HELLO) == [PartnerHello(hello=hello(B))]
    assert knocking.next_to_send() is None
    assert "CHUNK where nothing was due" in violation(knocking, FIRST)

    answering = Exchange(hello=hello(A), partner=B, dialer=False)
    answering.receive(HELLO)
    answering.refuse(RefuseCode.NOT_PARTNER, "no edge")
    assert refusal(sent(answering)).reason == "no edge"


def test_more_records_than_a_frame_holds_do_no_harm() -> None:
    records = [b"x" * 4096] * 100
    exchange = Exchange(hello=hello(A), layout=PLAIN, partner=B, dialer=False, records=records)
    exchange.receive(pack_message(hello(B, roster_digest=b"other")))
    (_, frame) = frames(sent(exchange))
    assert 60 <= len(unpack_message(frame.data, Records).records) < 100


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
    [
        (dialer, "Hello"),
        (greeted, "Chunk 1 of 3"),
        (received, "Ready"),
        (opened, "Scales"),
        (checking, "Check"),
        (agreed, "Applied"),
    ],
)
def test_an_end_names_what_was_missing(stage: Stage, words: str) -> None:
    mixed = "mixed without the partner's Applied: " if stage is agreed else ""
    for how, kind, end_of in (
        ("the stream ended", EdgeKind.LOST, Exchange.end_of_stream),
        ("the deadline passed", EdgeKind.TIMED_OUT, Exchange.expire),
    ):
        reason = f"{mixed}{how} before the partner's {words}"
        expected = Finished(kind=EdgeKind.ASYMMETRIC if mixed else kind, reason=reason)
        assert end_of(stage()) == [expected]


@pytest.mark.parametrize("data", [READY, b"\xff" * 5, LATE, FIRST])
def test_a_violation_or_refusal_cannot_undo_an_agreement(data: bytes) -> None:
    exchange = agreed()
    finished = end(exchange.receive(data))
    assert finished.kind is EdgeKind.ASYMMETRIC
    assert finished.reason.startswith("mixed without the partner's Applied: refused by ")
    assert finished.offence == (data != LATE)
    assert types(sent(exchange)) == [FrameType.READY, FrameType.APPLIED]


def test_applied_before_our_ready_is_a_violation() -> None:
    exchange = agreed()
    finished = end(exchange.receive(APPLIED))
    assert finished.kind is EdgeKind.ASYMMETRIC
    assert "APPLIED before both sides were ready" in finished.reason


def test_nothing_happens_after_the_end() -> None:
    exchange = dialer()
    exchange.expire()
    assert exchange.receive(HELLO + b"\xff" * 99) == []
    assert exchange.bytes_received == 0
    assert exchange.accept() == exchange.refuse(RefuseCode.LEAVING, "x") == []
    assert exchange.end_of_stream() == exchange.expire() == []
    assert exchange.checked(5, b"any size") == exchange.repaired(5, False) == []
    exchange.reconnect()
    assert exchange.next_to_send() is None


def test_bytes_after_the_last_frame_are_ignored() -> None:
    exchange = agreed()
    sent(exchange)
    applied = Finished(kind=EdgeKind.APPLIED, reason="")
    assert exchange.receive(APPLIED + READY + b"\xff" * 99) == [applied]
    assert [type(event) for event in dialer().receive(LATE + b"\xff" * 99)] == [Finished]


def test_a_refusal_leaves_chunks_unsent() -> None:
    exchange = greeted()
    assert exchange.next_to_send()
    exchange.refuse(RefuseCode.LEAVING, "bye")
    assert types(sent(exchange)) == [FrameType.REFUSE]


# The caller's own mistakes


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: greeted().accept(), "called once, after"),
        (lambda: agreed().accept(), "called once, after"),
        (lambda: greeted().checked(0, b""), "chunk 0 has not arrived"),
        (lambda: received().checked(2, b""), "dealt with before"),
        (lambda: checking().repaired(0, True), "repair 0 has not arrived"),
        (lambda: dialer().reconnect(), "between PartnerHello and Agreed"),
        (lambda: agreed().reconnect(), "between PartnerHello and Agreed"),
    ],
)
def test_calls_out_of_order_are_errors(call: Callable[[], object], words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        call()


@pytest.mark.parametrize(("stage", "bad"), [(checking, b"\x04"), (checking, b"ab")])
def test_a_finding_that_is_no_bitmap_is_an_error(stage: Stage, bad: bytes) -> None:
    with pytest.raises(ValueError, match="not a bitmap"):
        stage().checked(0, bad)


def test_chunks_that_are_not_checked_have_no_bad_blocks() -> None:
    exchange = greeted()
    exchange.receive(FIRST)
    with pytest.raises(ValueError, match="not a bitmap"):
        exchange.checked(0, b"\x01")
