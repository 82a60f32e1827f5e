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
    tokenizer: str = Field(
        default="bytes",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?$",
        description="What a token is: bytes; file: every peer's data.tokenizer_file, which must be "
        "the same; or the name of a model on the Hugging Face hub, as in OWNER/NAME.",
    )
    tokenizer_digest: str = Field(
        default="",
        pattern=r"^([0-9a-f]{64})?$",
        description="Digest of the tokenizer, filled in when a run is founded; peers with another "
        "tokenizer are refused.",
    )


class DataConfig(_Settings):
    """Where this peer's own text lies, and how much of it is kept for validation."""

    path: str = Field(
        default="",
        description="A local text file or folder; JSON Lines or Parquet, as a file or a folder of "
        "them; or hub:OWNER/NAME, a data set of the Hugging Face hub (docs/data.md). Empty: this "
        "Python's standard library source.",
    )
    text_field: str = Field(
        default="text",
        min_length=1,
        description="The column of Parquet, or the key of JSON Lines, that holds the text.",
    )
    subset: str = Field(
        default="",
        description="Configuration or folder of a hub data set; empty: its default.",
    )
    revision: str = Field(
        default="main",
        min_length=1,
        description="Branch, tag or commit of a hub data set. The commit that it means at the "
        "first start is the one that later starts use.",
    )
    files: tuple[str, ...] = Field(
        default=(),
        description="Patterns of the files of a hub data set to read, as in data/CC-MAIN-2024-*/*, "
        "instead of those of a subset.",
    )
    buffer_mb: int = Field(
        default=256,
        ge=1,
        le=2**20,
        description="MiB on the disk for text that was read ahead, from documents or a hub; most "
        "of what bridges an outage.",
    )
    tokenizer_file: str = Field(
        default="",
        description="With model.tokenizer file: a tokenizer.json, as `gasloc tokenizer train` "
        "writes it.",
    )
    validation_fraction: float = Field(
        default=0.0,
        ge=0.0,
        le=0.5,
        description="Share of the files (of the bytes, for a single file; of the documents, for "
        "JSON Lines, Parquet and a hub) kept for validation. 0: a tenth of files and bytes, a "
        "hundredth of documents.",
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
