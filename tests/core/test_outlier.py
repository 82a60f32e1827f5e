"""A fetched state against what others tell of theirs: outliers refused, small differences not."""

from __future__ import annotations

import math

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gasloc_p2p.core.outlier import (
    Parts,
    check_summary,
    disagreement,
    judge_state,
    summarise,
)
from gasloc_p2p.core.transfer import Summary, TransferError

PARTS = Parts(theta=(3, 1, 2), memory=(3, 1, 2))
THETA = torch.tensor([3.0, 4.0, 0.0, 0.001, 12.0, 0.0])
MEMORY = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0, 2.0])


def summary(
    theta_scale: float = 1.0,
    memory_scale: float = 1.0,
    *,
    round: int = 4,
    val_loss: float | None = None,
) -> Summary:
    return summarise(
        THETA * theta_scale, MEMORY * memory_scale, PARTS, round=round, val_loss=val_loss
    )


def test_a_memory_like_the_parameters_has_the_same_parts() -> None:
    assert Parts.of([2, 3], memory_elements=5) == Parts(theta=(2, 3), memory=(2, 3))
    assert Parts.of([2, 3], memory_elements=7) == Parts(theta=(2, 3), memory=(7,))


def test_norms_are_those_of_each_tensor() -> None:
    found = summary(val_loss=2.0)
    assert found.round == 4
    assert found.theta_norms == pytest.approx((5.0, 0.001, 12.0))
    assert found.memory_norms == (1.0, 0.0, 2.0)
    assert found.val_loss == 2.0
    check_summary(found, PARTS)


def test_norms_of_large_tensors_are_those_of_the_whole() -> None:
    vector = torch.full((3_000_000,), 1e30)
    found = summarise(
        vector, torch.empty(0), Parts.of([3_000_000], memory_elements=0), round=0, val_loss=None
    )
    assert found.theta_norms == pytest.approx((1e30 * math.sqrt(3e6),), rel=1e-6)
    assert found.memory_norms == (0.0,)


def test_vectors_of_other_sizes_have_no_summary() -> None:
    with pytest.raises(ValueError, match="6 elements in parts of 5"):
        summarise(THETA, MEMORY, Parts.of([2, 3], memory_elements=6), round=0, val_loss=None)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"theta_norms": (1.0, 1.0)}, "another number of norms"),
        ({"memory_norms": (1.0,) * 4}, "another number of norms"),
        ({"theta_norms": (1.0, math.nan, 1.0)}, "not a finite number"),
        ({"memory_norms": (1.0, math.inf, 1.0)}, "not a finite number"),
        ({"theta_norms": (1.0, -1.0, 1.0)}, "not a finite number"),
        ({"val_loss": math.nan}, "the loss in the summary"),
        ({"val_loss": -math.inf}, "the loss in the summary"),
    ],
)
def test_a_hostile_summary_is_refused(changes: dict[str, object], why: str) -> None:
    with pytest.raises(TransferError, match=why):
        check_summary(msgspec.structs.replace(summary(), **changes), PARTS)


# What counts as a difference.


@pytest.mark.parametrize("scale", [0.51, 1.0, 1.99])
def test_parameters_may_differ_by_a_factor_of_two(scale: float) -> None:
    assert disagreement(summary(theta_scale=scale), summary()) == ""


@pytest.mark.parametrize("scale", [0.0, 0.45, 2.1, 1e6])
def test_parameters_of_another_size_are_noticed(scale: float) -> None:
    reason = disagreement(summary(theta_scale=scale), summary())
    assert reason.startswith("parameter tensor 0 has norm")


@pytest.mark.parametrize("scale", [0.26, 1.0, 3.9])
def test_momentum_may_differ_by_a_factor_of_four(scale: float) -> None:
    assert disagreement(summary(memory_scale=scale), summary()) == ""


@pytest.mark.parametrize("scale", [0.0, 0.2, 4.5, 1e6])
def test_momentum_of_another_size_is_noticed(scale: float) -> None:
    reason = disagreement(summary(memory_scale=scale), summary())
    assert reason.startswith("outer momentum of tensor 0 has norm")


def test_a_single_tensor_is_noticed() -> None:
    other = THETA.clone()
    other[4] = 40.0
    reason = disagreement(summarise(other, MEMORY, PARTS, round=4, val_loss=None), summary())
    assert reason == "parameter tensor 2 has norm 40, not 12"


def test_small_tensors_and_small_momentum_never_count() -> None:
    other = THETA.clone()
    other[3] = 0.12  # Tensor 1 is a hundred times as large, and below 1 % of the norm of 13.
    assert disagreement(summarise(other, MEMORY, PARTS, round=4, val_loss=None), summary()) == ""
    tiny = summary(memory_scale=1e-9)
    assert disagreement(tiny, summary(memory_scale=0.06)) == ""
    assert disagreement(tiny, summary(memory_scale=0.1)) != ""


@pytest.mark.parametrize(
    ("rounds", "agree", "differ"),
    [(0, 2.0, 2.05), (1, 3.0, 3.1), (8, 10.05, 10.3), (99, 10.05, 10.3)],
)
def test_states_of_other_rounds_may_differ_more_but_not_without_limit(
    rounds: int, agree: float, differ: float
) -> None:
    told = summary(round=100)
    for round in (100 - rounds, 100 + rounds):
        assert disagreement(summary(theta_scale=agree, round=round), told) == ""
        assert disagreement(summary(theta_scale=differ, round=round), told) != ""


@given(st.floats(0, 1e300), st.floats(0, 1e300))
def test_norms_are_compared_alike_from_both_sides(a: float, b: float) -> None:
    one = Summary(round=0, theta_norms=(a, 1.0), memory_norms=(b,))
    other = Summary(round=0, theta_norms=(b, 1.0), memory_norms=(a,))
    assert bool(disagreement(one, other)) == bool(disagreement(other, one))
    assert disagreement(one, one) == ""


@pytest.mark.parametrize(
    ("own", "told", "differs"),
    [
        (3.0, 2.0, False),
        (3.01, 2.0, True),
        (0.1, 9.0, False),
        (math.nan, 2.0, True),
        (math.inf, 2.0, True),
        (99.0, None, False),
        (None, 2.0, False),
    ],
)
def test_a_loss_counts_when_it_is_worse_by_a_quarter_and_half_a_nat(
    own: float | None, told: float | None, differs: bool
) -> None:
    reason = disagreement(summary(val_loss=own), summary(val_loss=told))
    assert bool(reason) == differs
    if differs:
        assert reason == f"the validation loss is {own:.3g}, not 2"


# Majorities.


@pytest.mark.parametrize(
    ("like", "unlike", "refused"),
    [
        (0, 0, False),
        (1, 0, False),
        (0, 1, False),
        (1, 1, False),
        (0, 2, True),
        (2, 1, False),
        (1, 2, True),
        (0, 3, True),
    ],
)
def test_more_than_half_of_at_least_two_witnesses_refuse(
    like: int, unlike: int, refused: bool
) -> None:
    told = {f"like {n}": summary() for n in range(like)}
    told |= {f"unlike {n}": summary(theta_scale=3.0) for n in range(unlike)}
    verdict = judge_state(summary(), told, donor="donor")
    assert bool(verdict.refused) == refused
    if refused:
        assert verdict.refused.startswith(f"{unlike} of {like + unlike} other peers have")
        assert "norm 5, not 15" in verdict.refused
        assert verdict.remarks == ()
    else:
        named = [remark for remark in verdict.remarks if "unlike 0's" in remark]
        assert len(named) == (unlike > 0)


@pytest.mark.parametrize(
    ("witnesses", "remark"),
    [(0, "no other peer is there"), (1, "only one other peer is there")],
)
def test_too_few_witnesses_are_said(witnesses: int, remark: str) -> None:
    told = {f"witness {n}": summary() for n in range(witnesses)}
    verdict = judge_state(summary(), told, donor="donor")
    assert verdict.remarks == (
        f"the parameters of donor are taken on trust: {remark} to compare them with",
    )
    assert judge_state(summary(), {"a": summary(), "b": summary()}, donor="d").remarks == ()
