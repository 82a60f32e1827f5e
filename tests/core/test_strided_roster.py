"""Peers that skip rounds are in the same rosters everywhere."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from gasloc_p2p.core.records import LEASE_ROUNDS, Verdict
from gasloc_p2p.core.roster import AHEAD_ROUNDS, RosterBook
from gasloc_p2p.core.stride import Stride
from tests.core.test_roster import (
    OWN,
    ROUNDS,
    RUN,
    assert_agreed,
    book_with,
    delays,
    observe,
    record,
    renew,
    timeless,
)


@timeless
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5)), min_size=1, max_size=3),
    delays,
    st.booleans(),
)
def test_a_change_of_stride_holds_in_every_roster_at_once(
    changes: list[tuple[int, int]], delay: Callable[[], int], skips: bool
) -> None:
    wanted = {0: 1}
    for wait, every in changes:
        wanted[max(wanted) + wait] = every
    asked = [wanted[max(at for at in wanted if at <= t)] for t in range(ROUNDS)]
    alone = RosterBook(RUN, "x")
    told = [renew(alone, t, first_round=0, every=asked[t]).stride for t in range(ROUNDS)]
    assert_agreed(
        lambda t: {"first_round": 0, "every": asked[t]},
        delay,
        present=lambda t: told[max(0, t - 3)].takes_part(t),
        skips=skips,
    )
    for signed, (before, after) in enumerate(itertools.pairwise(told), start=1):
        for t in range(signed - AHEAD_ROUNDS, max(signed, after.since)):
            assert before.takes_part(t) == after.takes_part(t), "a record tells of its past too"


def test_a_change_is_announced_for_when_all_can_know_of_it() -> None:
    book = RosterBook(RUN, OWN)
    assert renew(book, 10, every=4).stride == Stride(), "it is in no roster yet"
    observe(book, record("ahead", signed_round=13), 10)
    assert renew(book, 11, every=4).stride == Stride(4, 0, 16)
    assert book.stride() == Stride(4, 0, 16)
    assert renew(book, 12, every=2).stride == Stride(4, 0, 16), "one change at a time"
    assert renew(book, 13).stride == Stride(4, 0, 16)
    assert [renew(book, t, every=2).since for t in (15, 17, 19)] == [16] * 3
    assert renew(book, 20, every=2).stride == Stride(2, 0, 24, 4, 0)


def test_a_peer_that_is_back_goes_on_with_its_stride_while_it_is_counted_on() -> None:
    left = record(OWN, signed_round=9, seq=1, first_round=2, every=3, phase=1, since=7)
    for first_round, stride in ((2, left.stride), (15, Stride())):
        book = RosterBook(RUN, OWN)
        assert book.stride() == Stride()
        assert observe(book, left, 9) is Verdict.OWN_IDENTITY_ELSEWHERE
        assert renew(book, 12, first_round=first_round).stride == stride
    book = RosterBook(RUN, OWN)
    observe(book, left, 9)
    assert renew(book, 12, first_round=2, every=1).stride == Stride(1, 0, 16, 3, 1)


def test_peers_that_skip_a_round_are_live_in_it() -> None:
    book = book_with(record("a"), record("b", every=3, phase=1), record("later", first_round=2))
    assert book.at(0).peers == ("a",)
    assert tuple(book.live(0)) == ("a", "b")
    assert book.lapsing(LEASE_ROUNDS + 1) == ("a", "b", "later"), "round 5 is no turn of b's"


def test_rates_are_those_of_all_that_are_in_the_swarm() -> None:
    book = book_with(
        record("steady"),
        record("skipping", every=3, phase=1),
        record("silent", cycle_s=1.0, expires_at=4000.0),
        record("gone", lease_until=2),
        record("lapsed", signed_round=0, seq=1),
        own_round=0,
    )
    renew(book, 4, first_round=0)
    observe(book, record("ahead", signed_round=30), 4)
    book.expire(3999.0)
    assert {told.peer_id for told in book.rates()} == {
        "steady",
        "skipping",
        "silent",
        "lapsed",
        "ahead",
    }
    renew(book, 5)
    assert [told.peer_id for told in book.rates()] == ["ahead"]


def test_nobody_skips_the_rounds_after_the_last_training_round() -> None:
    book = RosterBook(RUN, OWN, rounds=20)
    renew(book, 11, first_round=0)
    assert renew(book, 12, every=4).stride == Stride(4, 3, 15), "a record tells nothing of it"
    observe(book, record("slow", signed_round=18, every=5, phase=2), 16)
    for t in (13, 15, 17):
        renew(book, t)
    book.close_round(18)
    rosters = {t: book.at(t).peers for t in range(18, 22)}
    everybody = (OWN, "slow")
    assert rosters == {18: (), 19: (OWN,), 20: everybody, 21: everybody}
    assert [book.stride().next_turn(t) for t in (16, 20, 21)] == [19, 20, 21]
    assert book.swarm_round() == 18, "its record is of a round that it may skip"
