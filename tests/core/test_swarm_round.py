"""Who counts for the estimate of the swarm's round."""

from __future__ import annotations

from gasloc_p2p.core import records
from tests.core.test_roster import book_with, record


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
