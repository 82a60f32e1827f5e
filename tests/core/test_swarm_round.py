"""Who counts for the estimate of the swarm's round."""

from __future__ import annotations

from gasloc_p2p.core import records
from gasloc_p2p.core.roster import RosterBook
from tests.core.test_roster import OWN, RUN, book_with, observe, record, renew


def test_those_who_left_or_fell_silent_do_not_count_for_the_swarm_round() -> None:
    now_s = 10_000.0
    fresh = now_s + records.RECORD_TTL_S
    book = book_with(
        record("here", signed_round=200, cycle_s=1.0, expires_at=fresh - 27),
        record("left", signed_round=8, lease_until=10, expires_at=fresh),
        record("dead", signed_round=9, cycle_s=1.0, expires_at=fresh - 29),
        record("beginner", signed_round=0, expires_at=fresh - 301),
        record("ahead of time", signed_round=7, expires_at=fresh + 21),
        own_round=7,
    )
    book.expire(now_s)
    assert book.swarm_round() == 200


def test_who_renews_in_a_round_long_over_here_is_alive_and_behind() -> None:
    book = RosterBook(RUN, OWN)
    renew(book, 0)
    observe(book, record("other", seq=1, signed_round=0, cycle_s=1.0))
    observe(book, record("gone", seq=1, signed_round=0, cycle_s=1.0))
    book.close_round(0)
    for t in range(1, 30):
        renew(book, t)
        book.close_round(t)
    assert book.swarm_round() is None, "both leases are over, and neither peer is known to live"
    observe(book, record("other", seq=2, signed_round=12, cycle_s=1.0), own_round=29)
    observe(book, record("late", seq=2, signed_round=9, cycle_s=1.0), own_round=29)
    assert book.swarm_round() == 12, "a first record may be an old one"
    assert [other.peer_id for other in book.others()] == ["other"]
    observe(book, record("other", seq=3, signed_round=28, cycle_s=1.0), own_round=29)
    assert book.swarm_round() == 28


def test_a_peer_gathers_until_it_begins_a_round() -> None:
    assert record("a", signed_round=8, first_round=4).is_gathering
    assert not record("a", signed_round=8, first_round=4, cycle_s=1.0).is_gathering
    assert not record("a", signed_round=8, first_round=11).is_gathering, "it joins late"


def test_those_who_skip_rounds_count_only_if_there_is_nobody_else() -> None:
    skipping = [record(f"s{n}", signed_round=3, every=4, since=1) for n in range(3)]
    soon = record("soon", signed_round=8, every=4, since=11)
    assert book_with(*skipping, own_round=6).swarm_round() == 3
    assert book_with(*skipping, soon, own_round=6).swarm_round() == 8
    assert soon.stride.every_at(8) == 1


def test_a_peer_that_skips_rounds_may_be_silent_for_so_many() -> None:
    for every, before, patience_s in ((1, 1, 28), (16, 1, 36), (1, 12, 32)):
        last = record("a", cycle_s=1.0, every=every, every_before=before, expires_at=9000.0)
        signed_s = 9000.0 - records.RECORD_TTL_S
        assert not last.is_silent(signed_s + patience_s)
        assert last.is_silent(signed_s + patience_s + 0.1)
