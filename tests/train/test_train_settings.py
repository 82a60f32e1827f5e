from __future__ import annotations

import math

import pytest
from pydantic import BaseModel, ValidationError

from gasloc_p2p.train.settings import DataConfig, InnerConfig, ModelConfig


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
