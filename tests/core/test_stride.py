"""Peers that skip rounds: which ones they take part in, and when they choose to."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gasloc_p2p.core.stride import CONSIDERED_ROUNDS, MAX_STRIDE, Stride, StrideChooser

timeless = settings(deadline=None)
"""An example may take long on a busy machine."""


def turns(stride: Stride, rounds: range) -> list[int]:
    return [t for t in rounds if stride.takes_part(t)]


def test_at_first_a_peer_takes_part_in_all_rounds() -> None:
    assert turns(Stride(), range(5)) == [0, 1, 2, 3, 4]
    assert Stride().has_begun(0)


def test_a_change_begins_with_a_turn_of_both_strides() -> None:
    third = Stride().changed(3, at_least=7)
    assert turns(third, range(17)) == [0, 1, 2, 3, 4, 5, 6, 7, 10, 13, 16]
    assert [third.has_begun(t) for t in (6, 7)] == [False, True]
    fifth = third.changed(5, at_least=11)
    assert turns(fifth, range(7, 27)) == [7, 10, 13, 18, 23]
    assert [fifth.every_at(t) for t in (12, 13)] == [3, 5]
    again = fifth.changed(1, at_least=14)
    assert turns(again, range(13, 22)) == [13, 18, 19, 20, 21]
    assert [again.next_turn(t) for t in (14, 18, 19)] == [18, 18, 19]


def test_a_stride_may_end_in_a_round_that_no_record_tells() -> None:
    for since in (4, 20):
        stride = Stride(3, 1, since, 2, 0, until=12)
        before = [0, 2] if since == 4 else [0, 2, 4, 6, 8, 10]
        after = [4, 7, 10] if since == 4 else []
        assert turns(stride, range(15)) == [*before, *after, 12, 13, 14]
        assert [stride.every_at(t) for t in (11, 12)] == [3 if since == 4 else 2, 1]
        assert stride.told() == stride._replace(until=99).told()
        assert Stride(**stride.told()) == Stride(3, 1, since, 2, 0)


@timeless
@given(st.lists(st.tuples(st.integers(1, MAX_STRIDE), st.integers(0, 40)), min_size=1, max_size=8))
def test_two_turns_are_never_further_apart_than_the_stride(changes: list[tuple[int, int]]) -> None:
    stride, now, seen = Stride(), 0, [0]
    for every, wait in changes:
        changed = stride.changed(every, at_least=max(now, stride.since) + 3)
        assert turns(changed, range(now, changed.since)) == turns(stride, range(now, changed.since))
        stride = changed
        until = stride.since + wait
        seen += [t for t in turns(stride, range(now, until)) if t > seen[-1]]
        now = max(now, until)
        assert stride.phase < stride.every
        assert stride.phase_before < stride.every_before
    assert all(b - a <= MAX_STRIDE for a, b in itertools.pairwise(seen))


def chosen(cycles: list[float]) -> list[int | None]:
    chooser = StrideChooser()
    return [chooser.consider(least_s=2 * c, cycle_s=2.0) for c in cycles]


@pytest.mark.parametrize(
    ("cycles", "every"),
    [
        pytest.param([0.2] * 4, [None, None, 1, 1], id="fits"),
        pytest.param([1.15] * 4, [None, None, 1, 1], id="nearly fits"),
        pytest.param([2.3] * 3, [None, None, 2], id="two rounds, nearly"),
        pytest.param([2.9] * 3, [None, None, 3], id="three rounds"),
        pytest.param([9.0, 0.5, 9.0, 9.0, 9.0], [None, None, 1, 1, 8], id="a single good round"),
        pytest.param([3.0, 9.0, 5.0], [None, None, 3], id="never the same"),
        pytest.param([1e9] * 3, [None, None, MAX_STRIDE], id="hopeless"),
        pytest.param(
            [3.0] * 3 + [2.2] * 4 + [1.9] * 3, [None, None] + [3] * 7 + [2], id="a little better"
        ),
        pytest.param(
            [3.0] * 3 + [0.5, 1.5, 0.5, 0.5, 0.5], [None, None] + [3] * 3 + [2, 2, 1], id="better"
        ),
    ],
)
def test_a_stride_changes_when_three_rounds_ask_for_it(
    cycles: list[float], every: list[int | None]
) -> None:
    assert CONSIDERED_ROUNDS == 3
    assert chosen(cycles) == every


@timeless
@given(st.lists(st.floats(0, 1e12), max_size=40))
def test_a_stride_is_always_within_bounds(cycles: list[float]) -> None:
    assert all(every is None or 1 <= every <= MAX_STRIDE for every in chosen(cycles))
