"""What a peer learns of its own speed, and of that of the swarm."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gasloc_p2p.core.rates import (
    REMEMBERED_EDGES,
    REMEMBERED_PARTNERS,
    RateWatch,
    is_slow_edge,
    target_cycle_s,
    typical_transfer_s,
)

timeless = settings(deadline=None)
"""An example may take long on a busy machine."""


@dataclass(frozen=True)
class Told:
    step_s: float
    transfer_s: float


def watch(*transfers_s: float) -> RateWatch:
    rates = RateWatch()
    for transfer_s in transfers_s:
        rates.note_edge("a", transfer_s)
    return rates


def test_nothing_is_known_at_first() -> None:
    rates = RateWatch()
    assert (rates.step_s, rates.transfer_s, rates.exchange_s) == (0.0, 0.0, None)
    assert rates.expected_edge_s("a", 0.0) == 0.0
    assert rates.expected_edge_s("a", 3.0) == 3.0


def test_one_bad_round_does_not_change_a_step_and_two_do() -> None:
    rates, seen = RateWatch(), []
    for steps, train_s in ((10, 1.0), (10, 1.0), (2, 1.0), (10, 1.0), (4, 2.0), (2, 1.0)):
        rates.note_round(steps=steps, train_s=train_s)
        seen.append(rates.step_s)
    assert seen == [0.1, 0.1, 0.1, 0.1, 0.5, 0.5]


def test_a_round_without_steps_or_edges_teaches_nothing() -> None:
    rates = watch(1.0)
    rates.note_round(steps=0, train_s=0.0)
    assert rates.step_s == 0.0
    assert rates.exchange_s is None, "one round may be that of a slow partner"
    rates.note_round(steps=1, train_s=1.0)
    assert rates.exchange_s is None
    rates.note_edge("a", 3.0)
    rates.note_round(steps=1, train_s=1.0)
    assert rates.exchange_s == 1.0


def test_a_transfer_is_as_quick_as_the_quickest_of_the_last_ones() -> None:
    assert watch(4.0).transfer_s == 0.0, "its only partner may have been slow"
    assert watch(4.0, 1.0).transfer_s == 1.0
    assert watch(1.0, 9.0, 9.0).transfer_s == 9.0, "the link has become slow"
    rates = watch(9.0, 9.0)
    rates.note_edge("quick", 1.0)
    assert rates.transfer_s == 1.0
    for n in range(REMEMBERED_EDGES):
        rates.note_edge(str(n), 9.0)
    assert rates.transfer_s == 9.0


def test_an_exchange_lasts_as_long_as_the_longest_edge_that_is_awaited() -> None:
    rates = RateWatch()
    for a_s, b_s in ((1.0, 2.0), (3.0, 1.0), (1.0, 1.0)):
        rates.note_edge("a", a_s)
        rates.note_edge("b", b_s)
        rates.note_edge("late", 9.0, awaited=False)
        rates.note_round(steps=1, train_s=1.0)
    assert rates.exchange_s == 2.0
    for expected in (1.0, 1.0, 0.0):
        rates.note_edge("late", 9.0, awaited=False)
        rates.note_round(steps=1, train_s=1.0)
        assert rates.exchange_s == expected, "rounds that waited for nobody count when all do"


def test_an_edge_is_expected_to_take_what_the_last_two_took() -> None:
    rates = watch(5.0, 1.0, 2.0)
    assert rates.expected_edge_s("a", 9.0) == 1.5
    assert rates.expected_edge_s("b", 0.5) == 1.0, "this peer's own"
    assert rates.expected_edge_s("b", 3.0) == 3.0
    assert watch(5.0).expected_edge_s("b", 1.0) == 1.0, "its only partner may have been slow"


def test_an_edge_that_ran_out_of_time_makes_nobody_seem_quick() -> None:
    rates = watch(10.0, 10.0)
    rates.note_edge("a", 1.0, timed_out=True)
    rates.note_edge("a", 2.0, timed_out=True)
    assert rates.transfer_s == 10.0
    rates.note_edge("a", 15.0, timed_out=True)
    rates.note_edge("a", 15.0, timed_out=True)
    assert rates.transfer_s == 30.0


def test_partners_met_long_ago_are_forgotten() -> None:
    rates = RateWatch()
    rates.note_edge("first", 7.0)
    rates.note_edge("again", 8.0)
    for n in range(REMEMBERED_PARTNERS - 2):
        rates.note_edge(str(n), 1.0)
    rates.note_edge("first", 7.0)
    rates.note_edge("one more", 1.0)
    assert rates.expected_edge_s("first", 0.0) == 7.0
    assert rates.expected_edge_s("again", 0.0) == 1.0


def test_the_cycle_is_that_of_the_median_peer() -> None:
    told = [Told(1.0, 5.0), Told(2.0, 0.0), Told(9.0, 9.0), Told(3.0, 1.0), Told(0.0, 1.0)]
    assert target_cycle_s(10, told) == 25.0, "who tells of no exchange counts as usual"
    assert target_cycle_s(10, told, overlap=True) == 20.0
    assert typical_transfer_s(told) == 5.0
    assert target_cycle_s(10, [Told(0.0, 1.0)]) == typical_transfer_s([Told(0.0, 1.0)]) == 0.0


rates_s = st.floats(1e-6, 1e6)
lies = st.builds(Told, st.floats(0, 1e300), st.floats(0, 1e300))


@timeless
@given(
    st.lists(st.builds(Told, rates_s, rates_s), min_size=1, max_size=9),
    st.lists(lies, max_size=8),
    st.integers(1, 1000),
)
def test_a_minority_of_liars_does_not_move_the_cycle_out_of_the_honest_range(
    honest: list[Told], liars: list[Told], local_steps: int
) -> None:
    told = honest + liars[: len(honest) - 1]
    cycles_s = [local_steps * peer.step_s + peer.transfer_s for peer in honest]
    assert min(cycles_s) <= target_cycle_s(local_steps, told) <= max(cycles_s)
    transfers_s = [peer.transfer_s for peer in honest]
    assert min(transfers_s) <= typical_transfer_s(told) <= max(transfers_s)


@pytest.mark.parametrize(
    ("expected_s", "typical_s", "cycle_s", "slow"),
    [
        (3.6, 1.0, 10.0, True),
        (3.5, 1.0, 10.0, False),
        (99.0, 1.0, 0.0, False),
        (0.0, 9.0, 1.0, False),
    ],
)
def test_an_edge_is_slow_if_it_takes_a_quarter_of_a_round_more_than_usual(
    expected_s: float, typical_s: float, cycle_s: float, slow: bool
) -> None:
    assert is_slow_edge(expected_s, typical_s, cycle_s) is slow
