"""Outer rules and the mix, against numbers worked out by hand and against torch's own SGD."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gasloc_p2p.core.errors import ConfigError
from gasloc_p2p.core.outer import (
    OUTER_RULES,
    MixPart,
    OuterRule,
    OuterState,
    mix,
    outer_rule,
    register_outer_rule,
)

DTYPES = (torch.float32, torch.float64)
RULE_NAMES = ("nesterov", "local", "lookahead", "post-mix", "printed", "dadam", "noloco")


def scalar(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float64)


@pytest.mark.parametrize(
    ("name", "outgoing", "theta", "memory"),
    [
        # D = -2, v' = -1.75, theta' = 1 - .1 (-2 - .875)
        ("nesterov", 2.0, 1.2875, -1.75),
        # g = 1, v' = 1.25, 1 + .1 (1 + .625)
        ("local", 1.1625, 3.0, 1.25),
        # y = 1.1, 1.1 + .5 (1.1 - .5)
        ("lookahead", 1.4, 3.0, 1.1),
        # z = 3, 3 + .5 (3 - .5)
        ("post-mix", 1.1, 4.25, 3.0),
        # 3 + .5 (1.1 - .5)
        ("printed", 1.1, 3.3, 1.1),
        # 3 + (2 - 1)
        ("dadam", 1.0, 4.0, 0.0),
    ],
)
def test_one_round_by_hand(name: str, outgoing: float, theta: float, memory: float) -> None:
    rule = outer_rule(name, lr=0.1, momentum=0.5)
    start, end, mixed, state = scalar(1.0), scalar(2.0), scalar(3.0), OuterState(memory=scalar(0.5))
    assert rule.outgoing(start, end, state).item() == pytest.approx(outgoing, rel=1e-15)
    stepped, kept = rule.step(start, end, mixed, state)
    assert stepped.item() == pytest.approx(theta, rel=1e-15)
    assert kept.memory.item() == pytest.approx(memory, rel=1e-15)


def test_one_round_of_noloco_by_hand() -> None:
    rule = outer_rule("noloco", lr=0.1, momentum=0.5)
    start, end, state = scalar(1.0), scalar(2.0), OuterState(memory=scalar(0.5))
    assert rule.outgoing(start, end, state).tolist() == [1.0, 1.0]
    # mean phi = 3, mean g = 4: m' = .25 + .1 x 4 + .1 (3 - 1)
    mixed = torch.tensor([3.0, 4.0], dtype=torch.float64)
    stepped, kept = rule.step(start, end, mixed, state)
    assert kept.memory.item() == pytest.approx(0.85, rel=1e-15)
    assert stepped.item() == pytest.approx(1.85, rel=1e-15)


NESTEROV_LIKE = [name for name in RULE_NAMES if name not in ("dadam", "noloco")]


@pytest.mark.parametrize("name", NESTEROV_LIKE)
@given(
    lr=st.floats(0.01, 2.0),
    momentum=st.floats(0.0, 0.99),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=25, deadline=None)
def test_a_peer_alone_takes_torch_nesterov_steps(
    name: str, lr: float, momentum: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    theta = torch.randn(5, dtype=torch.float64, generator=generator)
    reference = theta.clone()
    # nesterov=True wants a positive momentum; 0 is plain descent.
    sgd = torch.optim.SGD([reference], lr=lr, momentum=momentum, nesterov=momentum > 0)
    rule = outer_rule(name, lr=lr, momentum=momentum)
    state = rule.initial(theta)
    for _ in range(6):
        pseudo_gradient = torch.randn(5, dtype=torch.float64, generator=generator)
        theta_h = theta + pseudo_gradient
        theta, state = rule.step(theta, theta_h, rule.outgoing(theta, theta_h, state), state)
        reference.grad = -pseudo_gradient
        sgd.step()
    torch.testing.assert_close(theta, reference, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", RULE_NAMES)
def test_dtype_is_kept_and_arguments_are_left_alone(name: str, dtype: torch.dtype) -> None:
    rule = outer_rule(name, lr=0.7, momentum=0.9)
    start, end, memory = torch.randn(3, 6, dtype=dtype).unbind()
    mixed = torch.randn(6 * rule.vectors, dtype=dtype)
    before = [tensor.clone() for tensor in (start, end, mixed, memory)]
    state = OuterState(memory=memory)
    outgoing = rule.outgoing(start, end, state)
    theta, kept = rule.step(start, end, mixed, state)
    assert outgoing.shape == mixed.shape
    for result in (theta, kept.memory, rule.initial(start).memory):
        assert result.dtype == outgoing.dtype == dtype
        assert result.shape == start.shape
    for tensor, expected in zip((start, end, mixed, memory), before, strict=True):
        torch.testing.assert_close(tensor, expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", RULE_NAMES)
def test_the_memory_shares_nothing_with_the_parameters(name: str) -> None:
    rule = outer_rule(name, lr=0.7, momentum=0.9)
    start, end = torch.randn(2, 6).unbind()
    mixed = torch.randn(6 * rule.vectors)
    state = rule.initial(start)
    _, kept = rule.step(start, end, mixed, state)
    expected = [state.memory.clone(), kept.memory.clone()]
    for buffer in (start, end, mixed):
        buffer.fill_(torch.nan)
    torch.testing.assert_close([state.memory, kept.memory], expected, rtol=0, atol=0)


def test_rules_are_found_by_name_and_frozen() -> None:
    assert OUTER_RULES.names[:7] == RULE_NAMES, "the default comes first"
    for name in RULE_NAMES:
        rule = outer_rule(name, lr=0.7, momentum=0.9)
        assert (rule.name, rule.lr, rule.momentum) == (name, 0.7, 0.9)
        with pytest.raises(FrozenInstanceError):
            rule.lr = 1.0  # type: ignore[misc]  # assigning to a frozen field is the test


def test_rules_for_comparison_are_not_for_nodes() -> None:
    for name in RULE_NAMES:
        expected = name not in ("lookahead", "post-mix", "printed")
        assert OUTER_RULES.named(name).on_nodes == expected


def test_a_rule_of_ones_own_needs_a_name_and_a_step() -> None:
    @register_outer_rule
    class HeavyBall(OuterRule):
        name = "test-outer-heavy-ball"

        def step(
            self, theta_start: Tensor, theta_h: Tensor, mixed: Tensor, state: OuterState
        ) -> tuple[Tensor, OuterState]:
            memory = self.momentum * state.memory + mixed - theta_start
            return theta_start + self.lr * memory, OuterState(memory=memory)

    rule = outer_rule("test-outer-heavy-ball", lr=0.1, momentum=0.5)
    assert isinstance(rule, HeavyBall)
    assert rule.on_nodes
    assert rule.initial(scalar(7.0)).memory.tolist() == [0.0]
    start, end, state = scalar(1.0), scalar(2.0), OuterState(memory=scalar(0.5))
    assert rule.outgoing(start, end, state) is end
    # m' = .25 + 3 - 1, 1 + .1 m'
    stepped, kept = rule.step(start, end, scalar(3.0), state)
    assert kept.memory.item() == pytest.approx(2.25, rel=1e-15)
    assert stepped.item() == pytest.approx(1.225, rel=1e-15)


def test_a_rule_without_a_step_is_refused() -> None:
    class Idle(OuterRule):
        name = "test-outer-idle"

    with pytest.raises(ConfigError, match="'test-outer-idle' is not complete"):
        register_outer_rule(Idle)  # type: ignore[type-abstract]  # refusing it is the test
    assert "test-outer-idle" not in OUTER_RULES


def test_an_unknown_rule_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'nestrov'") as refusal:
        outer_rule("nestrov", lr=0.7, momentum=0.9)
    assert all(name in refusal.value.fix for name in RULE_NAMES)


@pytest.mark.parametrize("dtype", DTYPES)
def test_mix_by_hand(dtype: torch.dtype) -> None:
    own = torch.tensor([1.0, 2.0], dtype=dtype)
    parts = [
        MixPart(
            weight=0.5,
            received=torch.tensor([3.0, 0.0], dtype=dtype),
            own_copy=torch.tensor([1.0, 1.0], dtype=dtype),
        ),
        MixPart(
            weight=0.25,
            received=torch.tensor([5.0, 4.0], dtype=dtype),
            own_copy=torch.tensor([1.0, 2.0], dtype=dtype),
        ),
    ]
    # [1 + .5 (.5 x 2 + .25 x 4), 2 + .5 (.5 x -1 + .25 x 2)]
    mixed = mix(own, parts, 0.5)
    torch.testing.assert_close(mixed, torch.tensor([2.0, 2.0], dtype=dtype), rtol=0, atol=0)
    assert own.tolist() == [1.0, 2.0]


def test_mix_adds_in_the_order_given() -> None:
    own, zero = torch.zeros(1), torch.zeros(1)
    values = (1e8, 1.0, -1e8)
    parts = [MixPart(weight=1.0, received=torch.tensor([v]), own_copy=zero) for v in values]
    # In fp32 the 1 drowns in 1e8 unless the large terms cancel first.
    assert mix(own, parts, 1.0).item() == 0.0
    assert mix(own, [parts[0], parts[2], parts[1]], 1.0).item() == 1.0


def test_mix_without_parts_is_a_fresh_copy() -> None:
    own = torch.randn(4)
    mixed = mix(own, [], 1.0)
    torch.testing.assert_close(mixed, own, rtol=0, atol=0)
    assert mixed.data_ptr() != own.data_ptr()
