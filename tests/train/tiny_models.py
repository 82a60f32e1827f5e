"""Small models of several architectures, as folders that transformers wrote; no network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen2Config

_SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "initializer_range": 0.05,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 255,
}
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**_SIZES, attention_dropout=0.1),
    "gpt2": GPT2Config(
        vocab_size=256,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=96,
        initializer_range=0.05,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "qwen2": Qwen2Config(**_SIZES, tie_word_embeddings=True),
}


def write_model(folder: Path, kind: str, *, dtype: torch.dtype = torch.float32) -> Any:
    """Write a model with weights of its own, drawn from a fixed seed, and return it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model: Any = AutoModelForCausalLM.from_config(CONFIGS[kind])  # type: ignore[no-untyped-call]
    model = model.to(dtype)
    model.save_pretrained(folder)
    return model


def change_config(folder: Path, **values: object) -> None:
    """Change entries of a model's config.json; None removes one."""
    file = folder / "config.json"
    config = json.loads(file.read_text()) | values
    file.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
