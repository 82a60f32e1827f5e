"""Initial parameters that depend on nothing but the run's seed and a parameter's name."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor, nn

_AT_ONCE: Final = 1 << 22
"""Values made at a time; what they are made from takes four times their memory."""


def bell(seed: int, name: str, shape: torch.Size, std: float) -> Tensor:
    """Return fp32 values of mean 0 and the given standard deviation, drawn by (seed, name).

    Each is a sum of four 16-bit uniform integers, exact until one rounding in the final product,
    so machines, devices and library versions agree bit for bit; a library's normal sampler, or the
    order in which it visits layers, would not promise that. The range ends at 3.46 deviations.
    """
    hasher = blake3(f"{seed}/{name}".encode())
    unit = np.float32(std / math.sqrt(4 * (2**32 - 1) / 12))
    flat = np.empty(shape.numel(), dtype=np.float32)
    for start in range(0, flat.size, _AT_ONCE):
        part = flat[start : start + _AT_ONCE]
        stream = hasher.digest(length=8 * part.size, seek=8 * start)
        sums = np.frombuffer(stream, dtype="<u2").reshape(-1, 4).sum(axis=1, dtype=np.int32)
        np.multiply((sums - 2 * (2**16 - 1)).astype(np.float32), unit, out=part)
    return torch.from_numpy(flat).view(shape)


@torch.no_grad()
def initialise(model: nn.Module, seed: int, *, deviation: float) -> None:
    """Set a model of any architecture to values that follow from `seed` and parameters' names.

    Matrices get a bell curve of this deviation. Vectors keep what their library gives them if all
    their elements are alike, as those of norms and biases are; of others, biases become 0 and the
    rest 1.
    """
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            parameter.copy_(bell(seed, name, parameter.shape, deviation))
        elif parameter.numel() and not bool((parameter == parameter.flatten()[0]).all()):
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
