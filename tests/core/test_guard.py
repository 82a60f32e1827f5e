"""How far a partner may pull: what is usual, what is clipped, who is left out and for how long."""

from __future__ import annotations

import math
import sys

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gasloc_p2p.core.guard import (
    CLIP_RATIO,
    EXCLUSION_ROUNDS,
    HISTORY_EDGES,
    MAX_OFFENDERS,
    OFFENCE_RATIO,
    RECENT_EDGES,
    Guard,
    GuardState,
)
from gasloc_p2p.core.outer import MixPart, mix
from gasloc_p2p.core.vectors import distance

lengths = st.floats(0.0, 1e30)


def taught(*accepted: float, round: int = 9) -> Guard:
    """A guard that accepted these in training and has begun another round."""
    guard = Guard()
    guard.open_round(round - 1, motion=0.0)
    for length in accepted:
        guard.accept(length)
    guard.open_round(round, motion=1e9)
    return guard


# Lengths


def test_a_distance_is_the_norm_of_the_difference() -> None:
    a, b = torch.randn(2, 3 * 2**20 + 5, generator=torch.Generator().manual_seed(1))
    assert distance(a, b) == pytest.approx(float((a - b).double().norm()), rel=1e-12)
    assert distance(a, a) == 0.0
    assert distance(a, b) == distance(b, a)


@pytest.mark.parametrize(
    ("mine", "theirs"), [(0.0, math.nan), (0.0, -math.inf), (3e38, -3e38), (math.inf, math.inf)]
)
def test_a_distance_is_finite_only_if_every_difference_is(mine: float, theirs: float) -> None:
    a, b = torch.zeros(2**20 + 2), torch.zeros(2**20 + 2)
    a[-1], b[-1] = mine, theirs
    assert not math.isfinite(distance(a, b))


def test_the_largest_numbers_have_a_finite_distance() -> None:
    assert math.isfinite(distance(torch.full((1000,), 3.4e38), torch.zeros(1000)))


# What is clipped


def test_up_to_the_limit_nothing_is_clipped() -> None:
    guard = taught(1.0, 2.0, 8.0)
    assert guard.factor(0.0) == 1.0
    assert guard.factor(2.0 * CLIP_RATIO) == 1.0
    assert guard.factor(math.nextafter(2.0 * CLIP_RATIO, math.inf)) < 1.0
    assert guard.ratio(5.0) == 2.5


@given(st.floats(1e-3, 1e3), st.floats(CLIP_RATIO, 1e9, exclude_min=True))
def test_beyond_it_a_difference_is_shortened_to_the_limit_or_to_what_is_usual(
    usual: float, times: float
) -> None:
    guard = taught(usual, usual)
    length = usual * times
    kept = length * guard.factor(length)
    assert guard.is_far(length) == (guard.ratio(length) > OFFENCE_RATIO)
    expected = usual * (1 if guard.is_far(length) else CLIP_RATIO)
    assert kept == pytest.approx(expected, rel=1e-12)


@given(st.lists(lengths, max_size=40), lengths, st.integers(0, 3))
def test_a_factor_can_always_be_sent(accepted: list[float], length: float, round: int) -> None:
    guard = taught(*accepted, round=round + 1)
    assert 0 < guard.factor(length) <= 1


def test_an_absurd_length_leaves_a_factor_above_zero() -> None:
    assert taught(1e-10, 1e-10).factor(1e300) == sys.float_info.min


def test_before_anything_is_known_a_latecomer_takes_what_it_gets() -> None:
    for guard in (taught(), taught(1.0)):
        assert guard.factor(1e9) == 1.0
        assert not guard.is_far(1e9)


def test_a_founder_knows_by_its_own_motion_how_far_apart_peers_can_be() -> None:
    guard = Guard()
    guard.open_round(0, motion=2.0)
    assert guard.factor(2.0 * CLIP_RATIO) == 1.0
    assert guard.factor(2.5 * CLIP_RATIO) == pytest.approx(0.8)
    assert guard.is_far(2.1 * OFFENCE_RATIO)
    guard.accept(100.0)
    guard.open_round(1, motion=3.0)
    assert guard.ratio(3.0) == 1.0
    guard.accept(0.5)
    guard.open_round(2, motion=3.0)
    assert guard.ratio(3.0) == pytest.approx(3.0 / ((2.0 + 0.5) / 2))


def test_what_is_usual_does_not_change_within_a_round() -> None:
    guard = taught(1.0, 1.0)
    before = guard.factor(8.0)
    for _ in range(10):
        guard.accept(4.0)
    assert guard.factor(8.0) == before < 1
    guard.open_round(10, motion=0.0)
    assert guard.factor(8.0) == 1.0


def test_only_the_latest_count_and_equal_parameters_say_nothing() -> None:
    guard = Guard()
    guard.open_round(5, motion=0.0)
    for length in [1000.0] * 3 + [1.0, 0.0] * HISTORY_EDGES:
        guard.accept(length)
    assert guard.state().lengths == (1.0,) * HISTORY_EDGES


def test_a_minority_of_liars_hardly_moves_the_limit() -> None:
    guard = taught(*[1.0] * 8)
    for round in range(10, 60):
        guard.open_round(round, motion=0.0)
        for length in (1.0, 1.1, 7.0, 1e6, 1.0):
            guard.accept(length)
    guard.open_round(60, motion=0.0)
    assert guard.ratio(1.0) >= 1 / 1.1


def test_the_limit_follows_when_all_differences_grow() -> None:
    guard = taught(*[1.0] * HISTORY_EDGES)
    for round in range(10, 10 + 2 * HISTORY_EDGES):
        guard.open_round(round, motion=0.0)
        guard.accept(9.0)
    guard.open_round(100, motion=0.0)
    assert guard.factor(9.0) == 1.0
    assert guard.factor(20.0) == 1.0


def test_far_differences_move_nothing_not_even_at_the_very_beginning() -> None:
    guard = Guard()
    for round in range(6):
        guard.open_round(round, motion=2.0)
        guard.accept(1e3)
    assert guard.ratio(2.0) == pytest.approx(1.0)


# The mean


@settings(deadline=None)
@given(st.floats(0.1, 0.5), st.floats(-1e4, 1e4), st.floats(1e-3, 1.0), st.floats(1e-3, 1.0))
def test_the_smaller_factor_on_both_sides_keeps_the_sum(
    weight: float, size: float, own: float, partners: float
) -> None:
    draw = torch.Generator().manual_seed(3)
    a = torch.randn(50, dtype=torch.float64, generator=draw)
    b = size * torch.randn(50, dtype=torch.float64, generator=draw)
    clip = min(own, partners)
    mixed = [
        mix(x, [MixPart(weight=weight * clip, received=y, own_copy=x)], alpha=0.7)
        for x, y in ((a, b), (b, a))
    ]
    assert torch.allclose(mixed[0] + mixed[1], a + b, rtol=0, atol=1e-12 * max(1.0, abs(size)))
    pulled = float((mixed[0] - a).norm())
    assert pulled == pytest.approx(0.7 * weight * clip * float((a - b).norm()))


def test_a_factor_of_one_changes_no_bit() -> None:
    draw = torch.Generator().manual_seed(4)
    a, b = torch.randn(2, 1000, generator=draw)
    for weight in (1 / 2, 1 / 3, 1 / 7):
        plain, clipped = (
            mix(a, [MixPart(weight=w, received=b, own_copy=a)], alpha=0.9)
            for w in (weight, weight * taught(1.0, 1.0).factor(CLIP_RATIO))
        )
        assert torch.equal(plain, clipped)


# Who is left out


def test_the_third_offence_among_the_latest_edges_leaves_a_peer_out() -> None:
    guard = taught()
    assert [guard.note("x", t, offence=o) for t, o in enumerate((True, False, True))] == [1, 1, 2]
    assert not guard.is_excluded("x", 3)
    assert guard.excluded_through("x") == -1
    assert guard.note("x", 3, offence=True) == 3
    assert guard.excluded_through("x") == 3 + EXCLUSION_ROUNDS
    assert [guard.is_excluded("x", 3 + n) for n in (1, EXCLUSION_ROUNDS, EXCLUSION_ROUNDS + 1)] == [
        True,
        True,
        False,
    ]
    assert not guard.is_excluded("y", 4)


def test_who_is_far_from_a_majority_of_near_ones_offends() -> None:
    guard = taught()
    found = []
    for t in range(9):
        guard.note("y", t, offence=False, far=False)
        guard.note("z", t, offence=False, far=False)
        found.append(guard.note("x", t, offence=False, far=True))
        if guard.is_excluded("x", t + 1):
            break
    assert found == [1, 2, 3]
    assert not guard.is_excluded("y", 3)


@pytest.mark.parametrize("near", [0, 1])
def test_whoever_finds_half_of_the_others_far_away_leaves_nobody_out(near: int) -> None:
    guard = taught()
    for t in range(40):
        for peer in ("x", "y"):
            assert guard.note(peer, t, offence=False, far=True) == 0
            if near:
                guard.note("z", t, offence=False, far=False)
    assert guard.state().conduct == {}
    assert guard.note("x", 40, offence=True, far=True) == 1, "what is wrong in itself still counts"


def test_offences_are_forgotten_after_some_good_edges() -> None:
    guard = taught()
    for t in range(40):
        guard.note("x", t, offence=t % (RECENT_EDGES // 2) == 0)
    assert not guard.is_excluded("x", 40)
    for t in range(RECENT_EDGES):
        guard.note("x", 40 + t, offence=False)
    assert guard.state().conduct == {}


def test_after_its_time_a_peer_begins_anew() -> None:
    guard = taught()
    for t in range(3):
        guard.note("x", t, offence=True)
    back = 3 + EXCLUSION_ROUNDS
    assert guard.note("x", back, offence=True) == 1
    assert not guard.is_excluded("x", back + 1)
    for t in range(3):
        guard.note("y", t, offence=True)
    guard.note("y", back, offence=False)
    assert "y" not in guard.state().conduct


def test_offenders_take_bounded_memory_and_the_earliest_is_forgotten() -> None:
    guard = taught()
    for index in range(MAX_OFFENDERS):
        guard.note(f"peer {index}", 0, offence=True)
    guard.note("peer 0", 1, offence=True)
    guard.note("peer 1", 1, offence=False)
    guard.note("one more", 1, offence=True)
    known = guard.state().conduct
    assert len(known) == MAX_OFFENDERS
    assert "peer 0" in known
    assert "peer 1" not in known


def test_one_that_is_not_active_does_nothing() -> None:
    guard = Guard(active=False)
    guard.open_round(0, motion=1.0)
    for t in range(9):
        guard.accept(1.0)
        assert guard.note("x", t, offence=True, far=True) == 0
        guard.open_round(t, motion=1.0)
    assert guard.factor(1e9) == 1.0
    assert not guard.is_far(1e9)
    assert not guard.is_excluded("x", 9)


# What a checkpoint keeps


@settings(deadline=None)
@given(
    st.lists(st.tuples(lengths, st.sampled_from("abc"), st.booleans()), max_size=60),
    st.integers(0, 60),
)
def test_a_guard_goes_on_from_its_state(
    edges: list[tuple[float, str, bool]], stop_after: int
) -> None:
    whole, stopped = Guard(), Guard()
    for t, (length, peer, offence) in enumerate(edges):
        if t == stop_after:
            kept = msgspec.json.encode(stopped.state())
            stopped = Guard(msgspec.json.decode(kept, type=GuardState))
        for guard in (whole, stopped):
            guard.open_round(t, motion=1.0)
            guard.accept(length)
            guard.note(peer, t, offence=offence, far=length > 1.0)
        assert whole.factor(length) == stopped.factor(length)
    assert whole.state() == stopped.state()
    assert list(whole.state().conduct) == list(stopped.state().conduct)
