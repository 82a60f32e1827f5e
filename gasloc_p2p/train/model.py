"""Llama-3-style decoders over bytes, with the same initial parameters on every machine."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor, nn

from gasloc_p2p.train.settings import PresetName

VOCABULARY = 256
"""Tokens are bytes, unless a run has a tokenizer."""

ROPE_BASE = 10_000.0
NORM_EPSILON = 1e-5


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


def build_model(preset: PresetName, seed: int, *, vocabulary: int = VOCABULARY) -> nn.Module:
    """Return a decoder of `preset`, fp32 on the CPU, initialised from the run's `seed` alone.

    Its forward takes `input_ids`, int64 [batch, sequence], and returns an object with `.logits`,
    [batch, sequence, vocabulary]. Embeddings are tied. The global random state is left as it was.
    """
    # transformers takes seconds to import, which nothing else in this package should pay for.
    from transformers.models.llama.configuration_llama import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

    logging.getLogger("transformers").setLevel(logging.ERROR)
    size = PRESETS[preset]
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=size.width,
        intermediate_size=size.feed_forward,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.key_value_heads,
        max_position_embeddings=size.sequence_length,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_BASE},
        rms_norm_eps=NORM_EPSILON,
        tie_word_embeddings=True,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
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
            std = 0.02 if "embed" in name else 1 / math.sqrt(parameter.shape[1])
            parameter.copy_(_bell(seed, name, parameter.shape, std))


def _bell(seed: int, name: str, shape: torch.Size, std: float) -> Tensor:
    """Return fp32 values of mean 0 and the given standard deviation, drawn by (seed, name).

    Each is a sum of four 16-bit uniform integers, exact until one rounding in the final product,
    so machines, devices and library versions agree bit for bit; a library's normal sampler, or the
    order in which it visits layers, would not promise that. The range ends at 3.46 deviations.
    """
    stream = blake3(f"{seed}/{name}".encode()).digest(length=8 * shape.numel())
    sums = np.frombuffer(stream, dtype="<u2").reshape(-1, 4).sum(axis=1, dtype=np.int32)
    unit = std / math.sqrt(4 * (2**32 - 1) / 12)
    values = (sums - 2 * (2**16 - 1)).astype(np.float32) * np.float32(unit)
    return torch.from_numpy(values).view(shape)
