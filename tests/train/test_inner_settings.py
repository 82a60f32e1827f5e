from __future__ import annotations

import itertools
import math

import pytest
from pydantic import BaseModel, ValidationError

from gasloc_p2p.train.settings import DataConfig, InnerConfig, ModelConfig


def test_rate_warms_up_then_falls_along_a_cosine() -> None:
    inner = InnerConfig(lr=1.0, warmup_rounds=2.0, min_lr_ratio=0.2)
    rates = [inner.lr_at(progress, rounds=10) for progress in (0.0, 0.5, 1.0, 2.0, 6.0, 10.0)]
    assert rates == pytest.approx([0.0, 0.25, 0.5, 1.0, 0.6, 0.2])
    quarter = 0.2 + 0.8 * (1 + math.cos(math.pi / 4)) / 2
    assert inner.lr_at(4.0, rounds=10) == pytest.approx(quarter)


def test_rate_has_no_jump_and_stays_at_its_ends() -> None:
    inner = InnerConfig()
    rates = [inner.lr_at(step / 30, rounds=24) for step in range(24 * 30 + 1)]
    jumps = [abs(after - before) for before, after in itertools.pairwise(rates)]
    assert max(jumps) <= inner.lr / 30 * 1.001
    assert max(rates) == inner.lr
    assert inner.lr_at(99.0, rounds=24) == pytest.approx(inner.lr * inner.min_lr_ratio)
    assert inner.lr_at(-1.0, rounds=24) == 0.0


def test_constant_rate() -> None:
    inner = InnerConfig(schedule="constant", warmup_rounds=0.0)
    assert {inner.lr_at(progress, rounds=4) for progress in (0.0, 2.0, 4.0, 9.0)} == {inner.lr}


def test_run_no_longer_than_its_warm_up() -> None:
    inner = InnerConfig(lr=1.0, warmup_rounds=4.0)
    assert inner.lr_at(1.0, rounds=2) == 0.25
    assert inner.lr_at(4.0, rounds=4) == pytest.approx(0.1)


@pytest.mark.parametrize("model", [ModelConfig, DataConfig, InnerConfig])
def test_settings_are_frozen_closed_and_described(model: type[BaseModel]) -> None:
    for name, field in model.model_fields.items():
        assert field.description, name
        assert "\n" not in field.description
    with pytest.raises(ValidationError, match="Extra inputs"):
        model.model_validate({"unknown": 1})
    with pytest.raises(ValidationError, match="frozen"):
        setattr(model(), next(iter(model.model_fields)), "x")


@pytest.mark.parametrize(
    "values",
    [{"lr": 0.0}, {"lr": math.nan}, {"local_steps": 0}, {"beta2": 1.0}, {"clip_norm": math.inf}],
)
def test_bounds(values: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        InnerConfig.model_validate(values)
