"""Settings of the model, the data and the inner optimizer; importable without torch."""

from __future__ import annotations

from typing import Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

PresetName: TypeAlias = Literal["nano", "tiny", "134m", "551m"]


class _Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ModelConfig(_Settings):
    """Which model a run trains."""

    preset: PresetName = Field(
        default="nano",
        description="Model size: nano (0.1 M parameters), tiny (1 M), 134m or 551m.",
    )


class DataConfig(_Settings):
    """Where this peer's own text lies, and how much of it is kept for validation."""

    path: str = Field(
        default="",
        description="A local text file or folder; empty: this Python's standard library source.",
    )
    validation_fraction: float = Field(
        default=0.1,
        gt=0.0,
        le=0.5,
        description="Share of the files (of the bytes, for a single file) kept for validation.",
    )
    validation_tokens: int = Field(
        default=16384,
        ge=1,
        le=2**24,
        description="Tokens that one validation loss is measured on.",
    )


class InnerConfig(_Settings):
    """AdamW, its learning-rate schedule, and the local steps between two exchanges."""

    lr: float = Field(default=2e-3, gt=0.0, le=1.0, description="Peak inner learning rate.")
    batch_size: int = Field(
        default=8, ge=1, le=65536, description="Windows of text in one inner step."
    )
    local_steps: int = Field(
        default=30, ge=1, le=1_000_000, description="Inner steps in one round."
    )
    weight_decay: float = Field(
        default=0.1, ge=0.0, le=1.0, description="AdamW decay of matrices; vectors never decay."
    )
    beta1: float = Field(default=0.9, ge=0.0, lt=1.0, description="AdamW first-moment decay.")
    beta2: float = Field(default=0.95, ge=0.0, lt=1.0, description="AdamW second-moment decay.")
    clip_norm: float = Field(
        default=1.0, gt=0.0, description="Gradients with a larger norm are scaled down to it."
    )
    warmup_rounds: float = Field(
        default=1.0, ge=0.0, description="Rounds over which the learning rate rises from zero."
    )
    min_lr_ratio: float = Field(
        default=0.1, ge=0.0, le=1.0, description="Last learning rate as a share of the peak."
    )
    schedule: Literal["cosine", "constant"] = Field(
        default="cosine", description="Learning rate after the warm-up."
    )
