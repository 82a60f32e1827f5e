"""Both paces, round phases and the learning rate."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gasloc_p2p.core.pace import (
    MIN_DEADLINE_S,
    Pace,
    RoundPhase,
    SecondsPace,
    StepBudget,
    StepsPace,
    lr_at,
    round_phase,
)
from gasloc_p2p.core.tempo import StepPlan

timeless = settings(deadline=None)
"""An example may take long on a busy machine."""

T0 = 1.7e9
STEPS: Pace = StepsPace(rounds=10, closing_rounds=5)
SECONDS = SecondsPace(t0_s=T0, period_s=60.0, rounds=10, closing_rounds=5, exchange_budget_s=10.0)


def lr(position: float, warmup_rounds: float = 2.0, rounds: int = 10) -> float:
    return lr_at(
        position,
        rounds=rounds,
        peak=2e-3,
        warmup_rounds=warmup_rounds,
        min_ratio=0.1,
        schedule="cosine",
    )


def plan(exchange_s: float) -> StepPlan:
    return StepPlan(steps=30, full_steps=40, exchange_s=exchange_s)


def deadline_s(
    pace: Pace,
    *,
    now_s: float = T0,
    own: float = 0.0,
    partner: float = 0.0,
    transfer: float = 0.0,
    awaited: bool = True,
) -> float:
    return pace.edge_deadline_s(
        0,
        now_s,
        own_cycle_s=own,
        partner_cycle_s=partner,
        transfer_s=transfer,
        awaited=awaited,
        floor_s=5.0,
        ceiling_s=120.0,
    )


@pytest.mark.parametrize(
    ("round", "phase"),
    [
        (0, RoundPhase.TRAINING),
        (9, RoundPhase.TRAINING),
        (10, RoundPhase.CLOSING),
        (14, RoundPhase.CLOSING),
        (15, RoundPhase.FINISHED),
    ],
)
def test_phases_follow_each_other(round: int, phase: RoundPhase) -> None:
    assert round_phase(round, rounds=10, closing_rounds=5) is phase
    assert STEPS.phase(round) is phase
    assert SECONDS.phase(round) is phase


def test_without_closing_rounds_a_run_ends_with_its_last_training_round() -> None:
    assert round_phase(10, rounds=10, closing_rounds=0) is RoundPhase.FINISHED


def test_a_budget_needs_a_limit() -> None:
    with pytest.raises(ValueError, match="max_steps or until_s"):
        StepBudget(max_steps=None, until_s=None)


def test_a_step_budget_counts() -> None:
    budget = STEPS.budget(9, T0, plan(1.0))
    assert [budget.allows(done, math.inf) for done in (0, 29, 30, 31)] == [True, True, False, False]
    assert [budget.fraction_done(done, T0, started_s=T0) for done in (0, 15, 30, 31)] == [
        0.0,
        0.5,
        1.0,
        1.0,
    ]


@pytest.mark.parametrize("pace", [STEPS, SECONDS])
def test_a_closing_round_has_no_step(pace: Pace) -> None:
    budget = pace.budget(10, T0, plan(1.0))
    assert not budget.allows(0, T0)
    assert budget.fraction_done(0, T0, started_s=T0) == 1.0


def test_a_time_budget_ends_before_sending_must_start() -> None:
    budget = SECONDS.budget(3, T0 + 180, plan(1.0))
    assert budget.allows(500, T0 + 229.9)
    assert not budget.allows(500, T0 + 230)
    assert [budget.fraction_done(9, T0 + s, started_s=T0 + 180) for s in (170, 180, 205, 240)] == [
        0.0,
        0.0,
        0.5,
        1.0,
    ]


def test_a_slow_link_stops_training_earlier() -> None:
    assert SECONDS.budget(0, T0, plan(20.0)).until_s == T0 + 20


def test_a_late_peer_does_one_step_all_the_same() -> None:
    budget = SECONDS.budget(0, T0 + 59, plan(1.0))
    assert budget.allows(0, T0 + 59)
    assert not budget.allows(1, T0 + 59)
    assert budget.fraction_done(0, T0 + 59, started_s=T0 + 59) == 1.0


def test_both_limits_hold() -> None:
    budget = StepBudget(max_steps=3, until_s=T0)
    assert budget.allows(2, T0 - 1)
    assert not budget.allows(3, T0 - 1)
    assert not budget.allows(2, T0)


@pytest.mark.parametrize(
    ("own", "swarm", "expected"),
    [(-1, None, 0), (-1, 0, 0), (5, None, 6), (5, 2, 6), (5, 6, 6), (5, 7, 7), (5, 90, 90)],
)
def test_steps_skip_to_the_swarm_and_never_back(own: int, swarm: int | None, expected: int) -> None:
    assert STEPS.next_round(own, swarm, T0) == expected


@pytest.mark.parametrize(
    ("own", "at_s", "expected"),
    [(-1, -30, 0), (-1, 0, 0), (-1, 299, 4), (3, 240, 4), (3, 200, 4), (3, 601, 10), (9, 0, 10)],
)
def test_seconds_read_the_round_from_the_clock(own: int, at_s: float, expected: int) -> None:
    assert SECONDS.next_round(own, 10**9, T0 + at_s) == expected


@timeless
@given(st.integers(-1, 10**6), st.none() | st.integers(0, 10**6), st.floats(-1e6, 1e8))
def test_no_round_is_ever_repeated(own: int, swarm: int | None, at_s: float) -> None:
    for pace in (STEPS, SECONDS):
        assert pace.next_round(own, swarm, T0 + at_s) > own


def test_a_round_begins_at_once_or_by_the_clock() -> None:
    assert STEPS.starts_in_s(7, T0) == 0
    assert SECONDS.starts_in_s(1, T0 + 20) == 40
    assert SECONDS.starts_in_s(1, T0 + 70) == 0
    assert SECONDS.starts_in_s(0, T0 - 5) == 5


def test_steps_wait_for_the_slower_of_two_peers() -> None:
    assert deadline_s(STEPS, own=2.0, partner=6.0, transfer=1.5) == 4 * 6.0 + 4 * 1.5
    assert deadline_s(STEPS, own=6.0, partner=2.0) == 24.0
    assert deadline_s(STEPS, own=0.1, partner=0.2) == 5.0
    assert deadline_s(STEPS, own=0.1, partner=1e300, transfer=1.0) == 120.0


def test_an_unknown_cycle_is_given_all_the_time() -> None:
    assert deadline_s(STEPS, transfer=0.001) == 120.0
    assert deadline_s(STEPS, own=3.0) == 12.0


def test_seconds_wait_until_the_end_of_the_round() -> None:
    assert deadline_s(SECONDS, now_s=T0 + 50, own=100.0) == 10.0
    assert deadline_s(SECONDS, now_s=T0 + 61) == MIN_DEADLINE_S > 0


def test_an_edge_that_nobody_awaits_may_outlast_its_round() -> None:
    for transfer_s, most_s in ((2.0, 10.0), (7.0, 28.0), (1e300, 120.0)):
        assert deadline_s(SECONDS, now_s=T0 + 50, transfer=transfer_s, awaited=False) == most_s
        assert deadline_s(SECONDS, now_s=T0 + 50, transfer=transfer_s) == 10.0
    assert deadline_s(STEPS, own=1.0, transfer=20.0, awaited=False) == 84.0


def test_with_overlap_only_the_last_round_keeps_time_for_its_exchange() -> None:
    overlapping = dataclasses.replace(SECONDS, overlap=True)
    for t in (0, overlapping.rounds - 2):
        ends_s = T0 + (t + 1) * 60
        assert overlapping.budget(t, T0, plan(exchange_s=9.0)).until_s == ends_s
        assert SECONDS.budget(t, T0, plan(exchange_s=9.0)).until_s == ends_s - 18
    last = overlapping.rounds - 1
    for pace in (overlapping, SECONDS):
        assert pace.budget(last, T0, plan(exchange_s=9.0)).until_s == T0 + (last + 1) * 60 - 18


def test_lr_warms_up_and_falls_to_its_minimum() -> None:
    assert lr(0.0) == 0.0
    assert lr(0.5) == pytest.approx(5e-4)
    assert lr(2.0) == pytest.approx(2e-3)
    assert lr(4.0) == pytest.approx(2e-3 * (0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2))
    assert lr(6.0) == pytest.approx(2e-3 * 0.55)
    assert lr(10.0) == pytest.approx(2e-4)
    assert lr(14.5) == pytest.approx(2e-4)


def test_lr_stays_at_its_peak_when_constant() -> None:
    def constant(position: float) -> float:
        return lr_at(
            position, rounds=10, peak=1.0, warmup_rounds=1, min_ratio=0.1, schedule="constant"
        )

    assert [constant(p) for p in (0.25, 1.0, 9.9, 12.0)] == [0.25, 1.0, 1.0, 1.0]


def test_lr_without_warm_up_and_with_nothing_else() -> None:
    assert lr(0.0, warmup_rounds=0) == 2e-3
    assert lr(9.0, warmup_rounds=10) == pytest.approx(1.8e-3)
    assert lr(10.0, warmup_rounds=10) == pytest.approx(2e-4)
    assert lr(10.0, warmup_rounds=20) == pytest.approx(1e-3)


@timeless
@given(st.floats(0, 20), st.floats(0, 12))
def test_lr_is_never_above_its_peak(position: float, warmup_rounds: float) -> None:
    assert 0.0 <= lr(position, warmup_rounds) <= 2e-3


@timeless
@given(st.floats(2, 10), st.floats(2, 10))
def test_lr_falls_after_the_warm_up(a: float, b: float) -> None:
    assert lr(max(a, b)) <= lr(min(a, b)) + 1e-15


def wsd(position: float, **changes: float) -> float:
    values: dict[str, float] = {"warmup_rounds": 1, "min_ratio": 0.1, "decay_rounds": 4} | changes
    return lr_at(
        position,
        rounds=10,
        peak=1.0,
        schedule="wsd",
        warmup_rounds=values["warmup_rounds"],
        min_ratio=values["min_ratio"],
        decay_rounds=values["decay_rounds"],
    )


def test_lr_of_wsd_is_constant_and_falls_in_a_straight_line_at_the_end() -> None:
    assert [wsd(p) for p in (0.5, 1.0, 3.0, 6.0)] == [0.5, 1.0, 1.0, 1.0]
    assert [wsd(p) for p in (8.0, 9.0, 10.0, 12.0)] == pytest.approx([0.55, 0.325, 0.1, 0.1])
    assert [wsd(p, decay_rounds=0) for p in (8.0, 9.0)] == pytest.approx([1.0, 0.55])
    assert wsd(5.5, decay_rounds=99) == pytest.approx(0.55), "it never begins in the warm-up"
