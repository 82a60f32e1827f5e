"""Checks and repairs: both sides repair the same blocks, whatever crosses on the way."""

from __future__ import annotations

import pytest

from gasloc_p2p.core.exchange import Agreed, Complete, Cut, Exchange, Finished, RepairArrived
from gasloc_p2p.core.types import EdgeKind
from gasloc_p2p.core.wire import FrameType, Ready, pack_frame, pack_message, piece_digest
from tests.core.exchange_stages import FIRST, SCALES, checking, opened, piece, violation
from tests.core.two_sides import CHECKED, A, B, Side, check, frames, key, sent, settle, sides

READY, APPLIED = pack_message(Ready(clip=1.0)), pack_frame(FrameType.APPLIED)
ALL = b"\x03"


def heard(index: int, bad: bytes = b"") -> bytes:
    return piece(FrameType.CHECK, index, bad)


def repair(index: int, bad: bytes) -> bytes:
    return piece(FrameType.REPAIR, index, bytes(CHECKED.repair_bytes(index, bad)))


def damaged() -> Exchange:
    """A's side: B understood all, A did not understand the first block of chunk 0."""
    exchange = checking()
    exchange.receive(heard(0) + heard(1) + heard(2))
    for index in range(3):
        exchange.checked(index, b"\x01" if index == 0 else b"")
    return exchange


def said(exchange: Exchange) -> list[tuple[FrameType, int]]:
    return [(frame.head.type, frame.head.index) for frame in frames(sent(exchange))]


def give_out_checks(exchange: Exchange) -> None:
    checks = [exchange.next_to_send() for _ in range(3)]
    assert all(isinstance(item, tuple) for item in checks)


def both(ours: bytes, theirs: bytes) -> Exchange:
    exchange = checking()
    exchange.checked(0, ours)
    exchange.receive(heard(0, theirs))
    return exchange


@pytest.mark.parametrize(
    ("ours", "theirs", "union"),
    [
        (b"", b"", b""),
        (b"\x00", b"\x00", b""),
        (b"\x01", b"", b"\x01"),
        (b"", b"\x02", b"\x02"),
        (b"\x01", b"\x02", b"\x03"),
        (b"\x03", b"\x01", b"\x03"),
    ],
)
def test_both_sides_repair_the_union(ours: bytes, theirs: bytes, union: bytes) -> None:
    exchange = both(ours, theirs)
    items = list(iter(exchange.next_to_send, None))
    cuts = [item for item in items if isinstance(item, Cut)]
    if not union:
        assert "which was not due" in violation(exchange, repair(0, b"\x01"))
        return
    assert [(cut.kind, cut.index, cut.bad) for cut in cuts] == [(FrameType.REPAIR, 0, union)]
    (event,) = exchange.receive(repair(0, union))
    assert isinstance(event, RepairArrived)
    assert event.intact()
    assert (event.index, event.bad) == (0, union)
    digest = piece_digest(FrameType.REPAIR, 0, event.data, key=key(B))
    assert event.digest == digest


def test_checks_and_repairs_go_ahead_of_chunks() -> None:
    exchange = opened()
    exchange.receive(SCALES)
    while not isinstance(exchange.next_to_send(), Cut):
        pass
    exchange.receive(FIRST + heard(0))
    exchange.checked(0, b"\x01")
    assert said(exchange) == [
        (FrameType.CHECK, 0),
        (FrameType.REPAIR, 0),
        (FrameType.CHUNK, 1),
        (FrameType.CHUNK, 2),
    ]


def test_complete_waits_for_every_check_and_repair() -> None:
    exchange = damaged()
    assert exchange.receive(repair(0, b"\x01"))
    assert exchange.repaired(0, True) == [Complete()]

    exchange = checking()
    for index in range(3):
        assert exchange.checked(index, b"") == []
    assert exchange.receive(heard(2) + heard(0)) == []
    assert exchange.receive(heard(1)) == [Complete()]


def test_a_failed_repair_asks_for_the_whole_chunk_once() -> None:
    exchange = damaged()
    assert said(exchange)[-1] == (FrameType.REPAIR, 0)
    exchange.receive(repair(0, b"\x01"))
    assert exchange.repaired(0, False) == []
    (check_again, whole) = iter(exchange.next_to_send, None)
    assert isinstance(check_again, tuple)
    (frame,) = frames(b"".join(check_again))
    assert (frame.head.type, frame.head.index, bytes(frame.data)) == (FrameType.CHECK, 0, ALL)
    assert isinstance(whole, Cut)
    assert (whole.kind, whole.bad) == (FrameType.REPAIR, ALL)
    (event,) = exchange.receive(repair(0, ALL))
    assert isinstance(event, RepairArrived)
    assert event.bad == ALL
    assert exchange.repaired(0, True) == [Complete()]


def test_a_whole_chunk_that_does_not_match_is_an_offence() -> None:
    exchange = damaged()
    exchange.receive(repair(0, b"\x01"))
    exchange.repaired(0, False)
    exchange.receive(repair(0, ALL))
    (finished,) = exchange.repaired(0, False)
    assert isinstance(finished, Finished)
    assert finished.kind is EdgeKind.CORRUPT
    assert finished.offence


def test_a_first_repair_that_was_not_sent_yet_gives_way_to_the_whole_chunk() -> None:
    exchange = damaged()
    give_out_checks(exchange)
    exchange.receive(repair(0, b"\x01"))
    exchange.repaired(0, False)
    assert said(exchange) == [(FrameType.CHECK, 0), (FrameType.REPAIR, 0)]
    assert "another check of chunk 0" in violation(exchange, heard(0, ALL))


def asked_after_ready() -> Exchange:
    """A's side has accepted; then B asks for the whole of chunk 0."""
    exchange = damaged()
    exchange.receive(repair(0, b"\x01"))
    exchange.repaired(0, True)
    assert exchange.accept() == []
    assert said(exchange)[-2:] == [(FrameType.REPAIR, 0), (FrameType.READY, 0)]
    assert exchange.receive(heard(0, ALL)) == []
    assert said(exchange) == [(FrameType.REPAIR, 0)]
    return exchange


def test_a_whole_chunk_is_repaired_even_after_ready() -> None:
    exchange = asked_after_ready()
    (event,) = exchange.receive(repair(0, ALL))
    assert isinstance(event, RepairArrived)
    assert exchange.receive(READY) == []
    assert exchange.repaired(0, True) == [Agreed(clip=1.0)]


def test_the_partner_may_have_applied_while_its_last_repair_is_taken() -> None:
    exchange = asked_after_ready()
    exchange.receive(repair(0, ALL))
    assert exchange.receive(READY + APPLIED) == []
    applied = Finished(kind=EdgeKind.APPLIED, reason="")
    assert exchange.repaired(0, True) == [Agreed(clip=1.0), applied]
    assert said(exchange) == [(FrameType.APPLIED, 0)]


def test_applied_comes_once() -> None:
    exchange = asked_after_ready()
    exchange.receive(repair(0, ALL) + READY)
    assert "APPLIED where APPLIED was due" in violation(exchange, APPLIED + APPLIED)


def test_ready_before_a_repair_that_its_sender_asked_for_is_a_violation() -> None:
    assert "READY where REPAIR was due" in violation(asked_after_ready(), READY)


def test_ready_may_cross_the_wish_for_a_whole_chunk() -> None:
    exchange = damaged()
    sent(exchange)
    exchange.receive(repair(0, b"\x01"))
    assert exchange.receive(READY) == []
    assert exchange.repaired(0, False) == []
    assert said(exchange) == [(FrameType.CHECK, 0), (FrameType.REPAIR, 0)]
    assert exchange.receive(repair(0, ALL))
    assert exchange.repaired(0, True) == [Complete()]
    assert exchange.accept() == [Agreed(clip=1.0)]


def test_after_ready_only_a_repair_that_was_asked_for_may_come() -> None:
    def ready() -> Exchange:
        exchange = damaged()
        sent(exchange)
        exchange.receive(repair(0, b"\x01") + READY)
        return exchange

    assert "CHECK where APPLIED was due" in violation(ready(), heard(0, ALL))
    asking = ready()
    asking.repaired(0, False)
    assert "APPLIED where REPAIR was due" in violation(asking, APPLIED)


def test_wishes_for_a_whole_chunk_may_cross() -> None:
    exchange = damaged()
    sent(exchange)
    exchange.receive(repair(0, b"\x01") + heard(0, ALL))
    assert exchange.receive(repair(0, ALL))
    assert exchange.repaired(0, False) == []
    assert said(exchange) == [(FrameType.REPAIR, 0)]
    assert exchange.repaired(0, True) == [Complete()]

    exchange = damaged()
    sent(exchange)
    exchange.receive(repair(0, b"\x01"))
    exchange.repaired(0, False)
    exchange.receive(heard(0, ALL))
    assert said(exchange) == [(FrameType.CHECK, 0), (FrameType.REPAIR, 0)]
    assert "READY where REPAIR was due" in violation(exchange, READY)


def test_a_wish_that_crosses_the_whole_chunk_is_met_already() -> None:
    exchange = damaged()
    sent(exchange)
    exchange.receive(repair(0, b"\x01"))
    exchange.repaired(0, False)
    sent(exchange)
    exchange.receive(heard(0, ALL))
    assert said(exchange) == []
    exchange.receive(repair(0, ALL))
    assert exchange.repaired(0, True) == [Complete()]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (READY, "READY where REPAIR was due"),
        (APPLIED, "APPLIED where REPAIR was due"),
        (repair(1, b"\x01"), "a repair of chunk 1, which was not due"),
        (repair(0, ALL), "expected 12"),
        (repair(0, b"\x01") + repair(0, b"\x01"), "a repair of chunk 0, which was not due"),
        (repair(0, b"\x01") + heard(0, b"\x01"), "does not ask for all of it"),
        (repair(0, b"\x01") + heard(0), "does not ask for all of it"),
        (heard(1, ALL), "another check of chunk 1"),
        (heard(0, ALL) + heard(0, ALL), "another check of chunk 0"),
        (repair(0, b"\x01") + heard(0, ALL) + repair(0, ALL) + heard(0, ALL), "another check"),
    ],
)
def test_a_violation_is_refused(data: bytes, words: str) -> None:
    exchange = damaged()
    sent(exchange)
    assert words in violation(exchange, data)


def test_a_second_check_needs_our_repair() -> None:
    exchange = damaged()
    assert "another check of chunk 0" in violation(exchange, heard(0, ALL))
    everything = both(ALL, b"")
    sent(everything)
    assert "another check of chunk 0" in violation(everything, heard(0, ALL))


def test_ready_before_our_checks_and_repairs_are_out_is_a_violation() -> None:
    exchange = damaged()
    exchange.receive(repair(0, b"\x01"))
    assert "cannot have everything" in violation(exchange, READY)
    exchange = damaged()
    exchange.receive(repair(0, b"\x01"))
    give_out_checks(exchange)
    assert "cannot have everything" in violation(exchange, READY)


def test_ready_without_any_of_our_repairs_is_a_violation() -> None:
    exchange = damaged()
    give_out_checks(exchange)
    exchange.receive(repair(0, b"\x01"))
    exchange.repaired(0, False)
    assert "cannot have everything" in violation(exchange, READY)


def test_a_wish_for_a_whole_chunk_comes_before_its_sender_repairs_all_of_it() -> None:
    exchange = damaged()
    sent(exchange)
    exchange.receive(repair(0, b"\x01"))
    exchange.repaired(0, False)
    exchange.receive(repair(0, ALL))
    assert "another check of chunk 0" in violation(exchange, heard(0, ALL))


@pytest.mark.parametrize("fails", ["neither", "a", "b", "both"])
@pytest.mark.parametrize("found", ["a", "b", "both"])
def test_both_sides_end_with_the_same_repairs(fails: str, found: str) -> None:
    a, b = sides(CHECKED, same_roster=False)

    def prepare(side: Side, name: str) -> None:
        if found in (name, "both"):
            side.finding = lambda index: b"\x01" if index != 1 else b""
        if fails in (name, "both"):
            side.matches = lambda index: index != 0

    prepare(a, "a")
    prepare(b, "b")
    settle(a, b)
    check(a, b)
    first = b"\x01" if fails == "neither" else ALL
    assert a.repaired == b.repaired == {0: first, 2: b"\x01"}
    assert a.finished.kind is b.finished.kind is EdgeKind.APPLIED
    assert a.name == A
