"""Settings of the model, the data and the inner optimizer; importable without torch."""

from __future__ import annotations

from typing import Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from gasloc_p2p.core.registry import NAME_PATTERN

PresetName: TypeAlias = Literal["nano", "tiny", "134m", "551m"]


class _Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ModelConfig(_Settings):
    """Which model a run trains."""

    preset: PresetName = Field(
        default="nano",
        description="Model size: nano (0.1 M parameters), tiny (1 M), 134m or 551m.",
    )
    name: str = Field(
        default="",
        max_length=200,
        description="A causal language model of the Hugging Face hub in place of the preset, as in "
        "Qwen/Qwen2.5-0.5B; code that comes with a model is never run (docs/models.md).",
    )
    revision: str = Field(
        default="main",
        min_length=1,
        max_length=200,
        description="With model.name: branch, tag or, best, commit of the model.",
    )
    weights: Literal["fresh", "existing"] = Field(
        default="fresh",
        description="With model.name: fresh parameters from run.seed, or the existing ones, whose "
        "training goes on.",
    )
    sequence_length: int = Field(
        default=0,
        ge=0,
        le=2**20,
        description="Tokens in one window; 0: those of the preset, or 1024 with model.name if the "
        "model takes so many.",
    )
    digest: str = Field(
        default="",
        pattern=r"^([0-9a-f]{64})?$",
        description="With model.name: digest of the model that all peers begin with; founding "
        "fills it in.",
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
    """The inner optimizer, its learning rate, and the local steps between two exchanges."""

    optimizer: str = Field(
        default="adamw",
        pattern=NAME_PATTERN,
        description="adamw, sgd with momentum inner.beta1, adafactor, or one of your own "
        "(node.extensions).",
    )
    lr: float = Field(default=2e-3, gt=0.0, le=1.0, description="Peak inner learning rate.")
    batch_size: int = Field(
        default=8, ge=1, le=65536, description="Windows of text in one inner step."
    )
    tokens_per_step: int = Field(
        default=0,
        ge=0,
        le=2**31,
        description="Tokens in one inner step, whole windows; 0: inner.batch_size windows. How "
        "many of them a device takes at once is its own affair (device.micro_batch).",
    )
    local_steps: int = Field(
        default=30, ge=1, le=1_000_000, description="Inner steps in one round."
    )
    weight_decay: float = Field(
        default=0.1, ge=0.0, le=1.0, description="Decay of matrices; vectors never decay."
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
    schedule: Literal["cosine", "constant", "wsd"] = Field(
        default="cosine",
        description="Learning rate after the warm-up. wsd: constant, then falling in a straight "
        "line over the last inner.decay_rounds.",
    )
    decay_rounds: float = Field(
        default=0.0,
        ge=0.0,
        description="With inner.schedule wsd: rounds in which the learning rate falls; 0: a fifth "
        "of the run.",
    )


class DeviceConfig(_Settings):
    """What this machine trains with, and how much of it; never shared."""

    kind: Literal["auto", "cpu", "cuda", "mps"] = Field(
        default="auto", description="Where the model lives; auto: a GPU if there is one."
    )
    precision: Literal["auto", "fp32", "bf16"] = Field(
        default="auto",
        description="Arithmetic of matrix products; parameters and the wire stay what they are. "
        "auto: bf16 on CUDA, fp32 elsewhere.",
    )
    compile: bool = Field(
        default=False,
        description="Compile the forward pass with torch.compile: takes a minute or more at the "
        "start, and steps are quicker from then on.",
    )
    activation_checkpointing: bool = Field(
        default=False,
        description="Compute activations twice rather than keep them: about a third more time for "
        "much less memory.",
    )
    micro_batch: int = Field(
        default=0,
        ge=0,
        le=65536,
        description="Windows that go through the model at once; a step is made of as many such "
        "parts as it takes. 0: as many as fit, found by trying.",
    )
    processes: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Processes that train together as this one peer, each on a GPU of its own "
        "where there are GPUs; a step's windows are shared among them.",
    )
    model_folder: str = Field(
        default="",
        description="With model.name: a folder with the model in the form of transformers, to read "
        "it from instead of the hub.",
    )
