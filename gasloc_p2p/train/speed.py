"""How much of what a device can do training makes of it."""

from __future__ import annotations

import time
from typing import Final

import torch
from torch import nn

from gasloc_p2p.train.device import Device

FLOPS_PER_PARAMETER_AND_TOKEN: Final = 6
"""Forward and backward pass. Source: Kaplan et al., "Scaling laws for neural language models"."""
_MEASURED_S: Final = 0.05
_SIZES: Final = {"cpu": 512, "mps": 2048, "cuda": 8192}
"""Rows of the square matrices whose product is timed."""


def flops_per_token(module: nn.Module, *, sequence_length: int) -> float:
    """Return the floating point operations of training on one token.

    6 for each parameter, and 12 for each pair of tokens and element of a query in every block, of
    which causal attention needs half. What activation checkpointing computes again does not count.
    Source: Chowdhery et al., "PaLM", appendix B.
    """
    parameters = sum(p.numel() for p in module.parameters() if p.requires_grad)
    config = getattr(module, "config", None)
    text = config.get_text_config() if config is not None else None
    width = int(getattr(text, "hidden_size", 0) or 0)
    blocks = int(getattr(text, "num_hidden_layers", 0) or 0)
    return float(FLOPS_PER_PARAMETER_AND_TOKEN * (parameters + blocks * width * sequence_length))


def measured_peak(device: Device) -> float:
    """Return the floating point operations per second of products of large matrices.

    They have the type in which a model trains on this device. Takes a tenth of a second.
    """
    size = _SIZES[device.place.type]
    dtype = device.autocast or torch.float32
    a, b = (torch.ones(size, size, dtype=dtype, device=device.place) for _ in range(2))
    _wait(device, a @ b)
    began_s, products, best_s = time.perf_counter(), 0, float("inf")
    while products < 3 or time.perf_counter() - began_s < _MEASURED_S:
        start_s = time.perf_counter()
        _wait(device, a @ b)
        best_s = min(best_s, time.perf_counter() - start_s)
        products += 1
    return 2.0 * size**3 / best_s


def _wait(device: Device, product: torch.Tensor) -> None:
    """Wait until a product is there."""
    if device.place.type != "cpu":
        product[0, 0].item()
