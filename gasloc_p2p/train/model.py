"""The models that a run may train, with the same initial parameters on every machine."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gasloc_p2p.core.errors import ConfigError
from gasloc_p2p.train.initial import bell
from gasloc_p2p.train.settings import InnerConfig, ModelConfig, PresetName

VOCABULARY = 256
"""Tokens are bytes, unless a run has a tokenizer."""

ROPE_BASE = 10_000.0
NORM_EPSILON = 1e-5
EVEN_WIDTH = 128
"""Up to this width embeddings have deviation .02; beyond, one that leaves first logits as small.

With .02 at width 1024 every token begins sure that it comes again: a loss of 19.9 nats a byte in
place of the 5.5 of even odds.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """Size of a decoder; `sequence_length` in tokens, the other fields as in `LlamaConfig`."""

    layers: int
    width: int
    feed_forward: int
    heads: int
    key_value_heads: int
    sequence_length: int


PRESETS: Mapping[PresetName, Preset] = {
    "nano": Preset(
        layers=2, width=64, feed_forward=176, heads=4, key_value_heads=2, sequence_length=64
    ),
    "tiny": Preset(
        layers=4, width=128, feed_forward=512, heads=4, key_value_heads=2, sequence_length=128
    ),
    "134m": Preset(
        layers=12, width=1024, feed_forward=2784, heads=16, key_value_heads=4, sequence_length=1024
    ),
    "551m": Preset(
        layers=22, width=1536, feed_forward=4064, heads=24, key_value_heads=8, sequence_length=1024
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BuiltModel:
    """A model that a run begins with.

    Attributes:
        module: fp32 on the CPU; its forward takes `input_ids`, int64 [batch, sequence], and returns
            an object with `.logits`, [batch, sequence, vocabulary].
        sequence_length: tokens that one window predicts.
    """

    module: nn.Module
    sequence_length: int


def model_of(
    model: ModelConfig, *, seed: int, vocabulary: int = VOCABULARY, folder: str = ""
) -> BuiltModel:
    """Return the model that the settings name.

    Args:
        model: the settings.
        seed: the run's seed.
        vocabulary: tokens of the run's tokenizer.
        folder: where the files of `model.name` lie.

    Raises:
        ConfigError: it cannot be read, is no causal language model, needs code of its own, or is
            another one than the run's.
    """
    if model.name:
        # It imports transformers, which presets without a learner do not need.
        from gasloc_p2p.train.hub import NamedModel

        named = NamedModel.open(model, folder=folder)
        module = named.build(seed=seed, vocabulary=vocabulary)
        named.require_digest(model.digest, module)
        return BuiltModel(module=module, sequence_length=named.sequence_length)
    length = preset_length(model)
    module = build_model(model.preset, seed, vocabulary=vocabulary, sequence_length=length)
    return BuiltModel(module=module, sequence_length=length)


def require_model_folder(folder: str) -> None:
    """Refuse a folder that holds no model; an empty name is that of none.

    Raises:
        ConfigError: it has no config.json.
    """
    place = Path(folder).expanduser()
    if folder and not (place / "config.json").is_file():
        raise ConfigError(
            f"there is no model in {place}",
            why="device.model_folder names a folder with a config.json, as transformers' "
            "save_pretrained writes it",
            fix="correct device.model_folder, or leave it empty to fetch the model by its name",
        )


def digest_of(model: ModelConfig, *, folder: str = "") -> str:
    """Return, in hex, the digest of the model that `model.name` names; empty for a preset.

    It covers the architecture and, of existing weights, every value. With fresh ones those follow
    from the run's seed.

    Raises:
        ConfigError: the model cannot be had, is no causal language model, or needs code of its own.
    """
    if not model.name:
        return ""
    from gasloc_p2p.train.hub import NamedModel

    named = NamedModel.open(model, folder=folder)
    if model.weights == "fresh":
        return named.digest(None)
    return named.digest(named.build(seed=0, vocabulary=1))


def length_of(model: ModelConfig, *, vocabulary: int, folder: str = "") -> int:
    """Return the tokens of one window, without building the model.

    Args:
        model: the settings.
        vocabulary: tokens of the run's tokenizer.
        folder: where the files of `model.name` lie; empty: they come from the hub.

    Raises:
        ConfigError: the model cannot be had, or fits neither the windows nor the tokenizer.
    """
    if not model.name:
        return preset_length(model)
    from gasloc_p2p.train.hub import NamedModel

    named = NamedModel.open(model, folder=folder)
    named.require_tokens(vocabulary)
    return named.sequence_length


def preset_length(model: ModelConfig) -> int:
    """Return the tokens of one window of a run that trains a preset.

    Raises:
        ConfigError: it trains another model.
    """
    if model.name:
        raise ConfigError(
            f"model.name = {model.name!r} does not work here",
            why="only presets are known well enough without being loaded",
            fix="leave model.name empty and choose a model.preset, or use `gasloc start`",
        )
    return model.sequence_length or PRESETS[model.preset].sequence_length


def windows_per_step(inner: InnerConfig, sequence_length: int) -> int:
    """Return how many windows one inner step takes.

    Raises:
        ConfigError: `inner.tokens_per_step` is not a whole number of windows.
    """
    tokens = inner.tokens_per_step
    if not tokens:
        return inner.batch_size
    windows, rest = divmod(tokens, sequence_length)
    if rest or not windows:
        near = sorted({max(1, windows) * sequence_length, (windows + 1) * sequence_length})
        raise ConfigError(
            f"inner.tokens_per_step = {tokens} is not a whole number of windows",
            why=f"a window has {sequence_length} tokens (model.sequence_length)",
            fix=f"set it to {' or '.join(map(str, near))}",
        )
    return windows


def preset_config(preset: PresetName, *, vocabulary: int, sequence_length: int) -> Any:
    """Return the `LlamaConfig` of a preset."""
    # transformers takes seconds to import, which nothing else in this package should pay for.
    from transformers.models.llama.configuration_llama import LlamaConfig

    size = PRESETS[preset]
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=size.width,
        intermediate_size=size.feed_forward,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.key_value_heads,
        max_position_embeddings=sequence_length,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_BASE},
        rms_norm_eps=NORM_EPSILON,
        tie_word_embeddings=True,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )


def build_model(
    preset: PresetName, seed: int, *, vocabulary: int = VOCABULARY, sequence_length: int = 0
) -> nn.Module:
    """Return a decoder of `preset`, fp32 on the CPU, initialised from the run's `seed` alone.

    Its forward takes `input_ids`, int64 [batch, sequence], and returns an object with `.logits`,
    [batch, sequence, vocabulary]. Embeddings are tied. The global random state is left as it was.

    Args:
        preset: its size.
        seed: the run's seed.
        vocabulary: how many tokens there are.
        sequence_length: tokens of a window; 0: those of the preset.
    """
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

    logging.getLogger("transformers").setLevel(logging.ERROR)
    config = preset_config(
        preset,
        vocabulary=vocabulary,
        sequence_length=sequence_length or PRESETS[preset].sequence_length,
    )
    with torch.random.fork_rng(devices=[]):
        model = LlamaForCausalLM(config)
    model.set_attn_implementation("sdpa")
    _initialise(model, seed)
    return model


@torch.no_grad()
def _initialise(model: nn.Module, seed: int) -> None:
    """Set norm gains to 1 and matrices to a bell curve, the ones that end a block to 0.

    With residual branches that start at zero a nano model trained alone for 720 steps ends 0.1
    nats below the one with every matrix at deviation .02.
    """
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            parameter.fill_(1.0)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.zero_()
        else:
            # What reads embeddings back into logits is as long as they are wide.
            embedded = 0.02 * min(1.0, EVEN_WIDTH / parameter.shape[1])
            std = embedded if "embed" in name else 1 / math.sqrt(parameter.shape[1])
            parameter.copy_(bell(seed, name, parameter.shape, std))
