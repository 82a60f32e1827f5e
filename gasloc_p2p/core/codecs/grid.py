"""Magnitudes as single bytes, from which both sides of an edge compute the same steps."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from torch import Tensor

from gasloc_p2p.core.codecs.arrays import Bytes, Floats
from gasloc_p2p.core.codecs.numbers import INTEGER_LIMIT

LEVEL: Final = 0.3
"""Part of the typical motion that every block is taken to have moved at least: rows of embeddings
that no sample used stand still here, and differ all the same."""

LEAST: Final = np.float32(0.1)
"""Least half-range as a part of the two motions, so that `told_motion` can bound integers."""

_QUARTERS: Final = (1.0, 1.189207115002721, 1.4142135623730951, 1.681792830507429)

AT_ONCE: Final = 1 << 16
"""Blocks of which the squares are held at a time."""

_LARGEST_FACTOR: Final = 2.0**40
"""With the largest motion a half-range is finite still."""

GRID: Final[Floats] = np.array(
    [0.0, *(math.ldexp(_QUARTERS[byte % 4], byte // 4 - 40) for byte in range(1, 256))],
    dtype=np.float32,
)
"""What a byte stands for: zero, or 2^((byte - 160) / 4). Powers of two scale exactly, so every
machine has the same table."""


def bytes_above(magnitudes: Floats) -> Bytes:
    """Return the smallest byte of the grid for each magnitude that is not below it.

    The largest byte stands for all that are beyond the grid, and for NaN.
    """
    return np.minimum(np.searchsorted(GRID, magnitudes), 255).astype(np.uint8)


def told_motion(*, motion: Tensor | None, largest: Tensor, top: int) -> Bytes:
    """Return what a peer tells its partners of its motion, [blocks].

    It is raised where integers would exceed `INTEGER_LIMIT`, whatever the partner says.

    Args:
        motion: how far it moved per block, fp32 [blocks]; None for zeros.
        largest: the absolute maximum of each block of its vector.
        top: the largest difference of integers in range.
    """
    # A thousandth more than enough, for what rounding takes away.
    floor = largest.numpy() * np.float32(1.001 * top / (float(LEAST) * INTEGER_LIMIT))
    return bytes_above(floor if motion is None else np.maximum(floor, motion.numpy()))


def steps(
    own: Bytes, theirs: Bytes, *, distance: float, block_elements: int, reach: float, top: int
) -> Floats:
    """Return delta of each block, the same on both sides.

    The motions tell how differences vary from block to block, and the distance how large they are
    together: the half-range of a block is `reach` times its root mean square difference if both
    are right. Every operation is rounded once and in a fixed order, so all machines agree.

    Args:
        own: what this side tells of its motion, [blocks].
        theirs: what the partner told.
        distance: of the two vectors; may be infinite, not NaN.
        block_elements: of a block.
        reach: half-range over root mean square.
        top: the largest difference of integers in range.
    """
    motion = GRID[own] + GRID[theirs]
    level = np.float32(LEVEL * math.sqrt(_mean_square(motion)))
    profile = motion + level
    typical = math.sqrt(block_elements * len(profile) * _mean_square(profile))
    factor = min(reach * distance / typical, _LARGEST_FACTOR) if typical else 0.0
    half = np.maximum(profile * np.float32(factor), motion * LEAST)
    delta: Floats = np.maximum(half, GRID[1]) / np.float32(top)
    return delta


def _mean_square(values: Floats) -> float:
    """Return the mean of squares; running sums, for numpy's own have an order of its own choice."""
    total = 0.0
    for start in range(0, len(values), AT_ONCE):
        squares = np.square(values[start : start + AT_ONCE], dtype=np.float64)
        total += float(np.add.accumulate(squares)[-1])
    return total / len(values) if len(values) else 0.0
