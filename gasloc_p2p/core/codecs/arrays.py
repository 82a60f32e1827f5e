"""Arrays that the loops of codecs work on."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Bytes: TypeAlias = NDArray[np.uint8]
Floats: TypeAlias = NDArray[np.float32]
Ints: TypeAlias = NDArray[np.int32]
Indices: TypeAlias = NDArray[np.int64]


def rows_of(x: Tensor, block_elements: int) -> Floats:
    """Return a flat fp32 vector as fp32 [blocks, block_elements], the last block filled with zeros.

    It shares the vector's memory when nothing was filled.
    """
    missing = -x.numel() % block_elements
    whole = torch.nn.functional.pad(x, (0, missing)) if missing else x
    rows: Floats = whole.view(-1, block_elements).numpy()
    return rows


def bytes_of(data: memoryview) -> Bytes:
    """Return the bytes of `data` as an array on the same memory."""
    return np.frombuffer(data, dtype=np.uint8)
