"""A broken stream is replaced, and the exchange goes on from the first frame that was lost."""

from __future__ import annotations

import pytest

from gasloc_p2p.core.codecs.layout import Layout
from gasloc_p2p.core.exchange import (
    Agreed,
    ChunkArrived,
    Complete,
    Cut,
    Exchange,
    PartnerScales,
    RepairArrived,
)
from gasloc_p2p.core.types import EdgeKind
from gasloc_p2p.core.wire import FrameType, pack_message, read_hello
from tests.core.exchange_stages import (
    APPLIED,
    FIRST,
    LAST,
    READY,
    SECOND,
    acceptor,
    agreed,
    checking,
    chunk,
    greeted,
    opened,
    piece,
    received,
    violation,
)
from tests.core.test_exchange_repairs import ALL, damaged, heard, repair
from tests.core.two_sides import (
    CHECKED,
    PLAIN,
    A,
    B,
    Side,
    check,
    end,
    hello,
    run,
    sent,
    sides,
    types,
)


def resumed(exchange: Exchange, received: int, expected: int, *, checked: bool = False) -> None:
    """Reconnect; the partner has `received` frames, and we have `expected` of its."""
    exchange.reconnect()
    own = read_hello(sent(exchange))
    assert own == hello(A, CHECKED if checked else PLAIN, received=expected)
    theirs = hello(B, CHECKED if checked else PLAIN, received=received)
    assert exchange.receive(pack_message(theirs)) == []


def test_only_what_the_partner_lacks_is_sent_again() -> None:
    exchange = greeted()
    sent(exchange)
    before = exchange.bytes_sent
    resumed(exchange, received=1, expected=0)
    data = sent(exchange)
    assert types(data) == [FrameType.CHUNK] * 2
    own = pack_message(hello(A))
    assert exchange.bytes_sent == before + len(own) + len(data)


def test_chunks_that_were_dealt_with_do_not_come_again() -> None:
    exchange = greeted()
    exchange.receive(FIRST + SECOND + LAST[:9])
    exchange.checked(0, b"")
    resumed(exchange, received=0, expected=1)
    (event,) = exchange.receive(SECOND)
    assert isinstance(event, ChunkArrived)
    assert event.index == 1
    exchange.checked(1, b"")
    exchange.receive(LAST)
    assert exchange.checked(2, b"") == [Complete()]


def test_what_is_dealt_with_while_the_stream_is_broken_counts() -> None:
    exchange = greeted()
    exchange.receive(FIRST + SECOND)
    resumed(exchange, received=0, expected=0)
    exchange.checked(0, b"")
    assert exchange.receive(FIRST) == []
    (event,) = exchange.receive(SECOND)
    assert isinstance(event, ChunkArrived)
    resumed(exchange, received=0, expected=1)
    exchange.checked(1, b"")
    resumed(exchange, received=0, expected=2)
    assert exchange.receive(LAST)


def test_frames_behind_an_open_chunk_come_again_in_silence() -> None:
    exchange = checking()
    behind = heard(0, b"\x01") + heard(1) + heard(2)
    exchange.receive(behind)
    for index in (1, 2):
        exchange.checked(index, b"")
    resumed(exchange, received=4, expected=1, checked=True)
    (event,) = exchange.receive(FIRST)
    assert isinstance(event, ChunkArrived)
    assert exchange.receive(SECOND + LAST + behind) == []
    exchange.checked(0, b"")
    (event_again,) = exchange.receive(repair(0, b"\x01"))
    assert isinstance(event_again, RepairArrived)
    assert exchange.repaired(0, True) == [Complete()]


def test_repairs_come_again_with_their_blocks() -> None:
    exchange = damaged()
    sent(exchange)
    exchange.receive(repair(0, b"\x01") + heard(0, ALL) + repair(0, ALL))
    resumed(exchange, received=8, expected=7, checked=True)
    events = exchange.receive(repair(0, b"\x01") + heard(0, ALL) + repair(0, ALL))
    assert [event.bad for event in events if isinstance(event, RepairArrived)] == [b"\x01", ALL]
    exchange.repaired(0, True)
    assert exchange.repaired(0, True) == [Complete()]


def test_a_lost_repair_is_asked_for_again() -> None:
    exchange = damaged()
    sent(exchange)
    resumed(exchange, received=7, expected=7, checked=True)
    item = exchange.next_to_send()
    assert isinstance(item, Cut)
    assert (item.kind, item.index, item.bad) == (FrameType.REPAIR, 0, b"\x01")


def test_ready_survives_a_broken_stream() -> None:
    exchange = received()
    exchange.receive(READY)
    exchange.reconnect()
    assert exchange.accept() == []
    assert exchange.resumable
    sent(exchange)
    events = exchange.receive(pack_message(hello(B, received=3)))
    assert events == [Agreed(clip=1.0)]
    assert types(sent(exchange)) == [FrameType.READY, FrameType.APPLIED]


def test_whoever_was_dialled_answers_a_second_hello_with_what_it_has() -> None:
    exchange = acceptor()
    resumable = [exchange.resumable]
    exchange.receive(pack_message(hello(B)))
    resumable.append(exchange.resumable)
    assert resumable == [False, True]
    sent(exchange)
    exchange.receive(FIRST)
    exchange.checked(0, b"")
    exchange.reconnect()
    assert exchange.next_to_send() is None
    assert exchange.receive(pack_message(hello(B, received=2))) == []
    item = exchange.next_to_send()
    assert isinstance(item, tuple)
    assert read_hello(b"".join(item)) == hello(A, received=1)
    assert types(sent(exchange)) == [FrameType.CHUNK]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"received": 4}, "4 frames received, and 3 were sent"),
        ({"received": 2**63 - 1}, "and 3 were sent"),
        ({"unconfirmed": (1,)}, "another Hello than before"),
        ({"roster_digest": b"x"}, "another Hello than before"),
        ({"round": 8}, "another Hello than before"),
    ],
)
def test_another_exchange_is_not_resumed(changes: dict[str, object], words: str) -> None:
    exchange = greeted()
    sent(exchange)
    exchange.reconnect()
    sent(exchange)
    finished = end(exchange.receive(pack_message(hello(B, **changes))))
    assert words in finished.reason
    # So it may be an honest partner that started anew.
    assert not finished.offence


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (SECOND, "CHUNK is not the CHUNK from before"),
        (chunk(0, b"abcd"), "CHUNK is not the CHUNK from before"),
        (READY, "READY is not the CHUNK from before"),
        (FIRST + FIRST, "chunk 0 where chunk 1 was due"),
    ],
)
def test_other_frames_than_before_are_a_violation(data: bytes, words: str) -> None:
    exchange = greeted()
    exchange.receive(FIRST)
    resumed(exchange, received=0, expected=0)
    assert words in violation(exchange, data)


def test_scales_go_on_where_they_broke_off() -> None:
    exchange = opened()
    exchange.receive(piece(FrameType.SCALES, 0, b"123")[:-1])
    sent(exchange)
    resumed(exchange, received=0, expected=0, checked=True)
    events = exchange.receive(piece(FrameType.SCALES, 0, b"123"))
    assert events == [PartnerScales(scales=b"123")]
    assert types(sent(exchange)) == [FrameType.SCALES] + [FrameType.CHUNK] * 3


def test_an_end_before_the_second_hello_says_so() -> None:
    exchange = greeted()
    exchange.reconnect()
    finished = end(exchange.expire())
    assert finished.kind is EdgeKind.TIMED_OUT
    assert finished.reason == "the deadline passed before the partner's Hello on a fresh stream"


def test_an_exchange_is_not_resumed_once_it_is_agreed() -> None:
    exchange = agreed()
    assert not exchange.resumable
    assert end(exchange.end_of_stream()).kind is EdgeKind.ASYMMETRIC


def busy_sides(cut: Layout) -> tuple[Side, Side]:
    """Both sides find bad blocks in chunk 0, and one of its repairs fails."""
    a, b = sides(cut, same_roster=False)
    a.finding = b.finding = lambda index: b"\x01" if index == 0 else b""
    b.matches = lambda index: False
    return a, b


def broken_at(cut: Layout, at: int, sender: str) -> tuple[EdgeKind, EdgeKind]:
    """Lose what `sender` says from byte `at` on, and go on upon a fresh stream if that may be."""
    a, b = busy_sides(cut)
    (a if sender == A else b).cut_at = at
    run(a, b)
    a.cut_at = b.cut_at = None
    for side in (a, b):
        side.inbox.clear()
        side.pending.clear()
        if side.exchange.resumable:
            side.exchange.reconnect()
        else:
            side.take(side.exchange.end_of_stream())
    if not (a.exchange.finished or b.exchange.finished):
        run(a, b)
    a.take(a.exchange.end_of_stream())
    b.take(b.exchange.end_of_stream())
    check(a, b)
    return a.finished.kind, b.finished.kind


@pytest.mark.parametrize("cut", [CHECKED, PLAIN])
@pytest.mark.parametrize("sender", [A, B])
def test_every_single_break_between_hello_and_ready_is_survived(cut: Layout, sender: str) -> None:
    whole = busy_sides(cut)
    run(*whole)
    total = whole[0 if sender == A else 1].exchange.bytes_sent
    kinds = [broken_at(cut, at, sender) for at in range(total)]
    hello_bytes = len(pack_message(hello(sender, cut, roster_digest=sender.encode())))
    last_bytes = len(READY) + len(APPLIED)
    assert set(kinds[:hello_bytes]) == {(EdgeKind.LOST, EdgeKind.LOST)}
    assert set(kinds[hello_bytes:-last_bytes]) == {(EdgeKind.APPLIED, EdgeKind.APPLIED)}
    lost = kinds[-last_bytes : -len(APPLIED)]
    unconfirmed = kinds[-len(APPLIED) :]
    own, other = (0, 1) if sender == A else (1, 0)
    assert {pair[own] for pair in lost} == {pair[other] for pair in unconfirmed}
    assert {pair[own] for pair in lost} == {EdgeKind.ASYMMETRIC}
    assert {pair[other] for pair in lost} == {EdgeKind.LOST}
    assert {pair[own] for pair in unconfirmed} == {EdgeKind.APPLIED}
