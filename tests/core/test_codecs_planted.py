"""Jumps planted in random blocks: each is repaired, and no difference is mixed wrongly."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from gasloc_p2p.core.codecs import codec_named
from gasloc_p2p.core.codecs.grid import GRID
from tests.core.coding import edge

MOTION = float(GRID[120])
HALF_RANGE = 2 * MOTION
BLOCKS = 1 << 14
"""Of one exchange, half of them planted."""

MODULAR = pytest.mark.parametrize("name", ["mod4", "mod8"])


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """These vectors are too short for threads, which wait for each other at every step."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def planted(
    drawn: np.random.Generator, block: int, top: int
) -> tuple[Tensor, Tensor, NDArray[np.int64]]:
    """Return x, y, and the blocks in which y jumped; all else is in range.

    Blocks jump in one element, in a pair whose jumps cancel, in three, or in all. Most jumps are
    whole moduli, which leave the remainders as they are; the others have any size.
    """
    # So small that no motion is raised for the sake of the integers.
    x = drawn.standard_normal((BLOCKS, block), dtype=np.float32) * np.float32(0.02)
    apart = (drawn.random((BLOCKS, block), dtype=np.float32) - 0.5) * (1.8 * HALF_RANGE)
    where = np.flatnonzero(drawn.random(BLOCKS) < 0.5)
    shape = (len(where), block)
    few = drawn.choice([1, 2, 3, block], (len(where), 1))
    offset, stride = drawn.integers(0, block, (2, len(where), 1))
    order = (np.arange(block) + offset) * (2 * stride + 1) % block
    sizes = 2.2 + 8.0 * drawn.random(shape, dtype=np.float32)
    whole = drawn.random((len(where), 1)) < 0.7
    sizes = np.where(whole, np.floor(sizes - 1) * ((2 * top + 2) / top), sizes) * HALF_RANGE
    sizes *= drawn.choice(np.array([-1, 1], dtype=np.int8), shape)
    first = (sizes * (order == 0)).sum(1, keepdims=True)
    sizes = np.where((few == 2) & (order == 1), -first, sizes)
    apart[where] += sizes * (order < few)
    y = x + apart
    return torch.from_numpy(x.ravel()), torch.from_numpy(y.ravel()), where


def plant(name: str, blocks: int) -> None:
    """Exchange vectors until `blocks` blocks were planted, and check every difference."""
    codec = codec_named(name)
    block, top = codec.block_elements, 7 if name == "mod4" else 127
    drawn = np.random.default_rng(20)
    while blocks > 0:
        x, y, where = planted(drawn, block, top)
        both = edge(codec, x, y, motion=MOTION, half=HALF_RANGE, chunk_bytes=1 << 16)
        flags = both.flags(both.exchange())
        assert flags[where].all(), "each was found"
        rows = torch.from_numpy(flags)
        largest = torch.maximum(x.abs(), y.abs()).view(BLOCKS, block).amax(1)
        # bf16 takes up to 2^-8 of either side; k is rounded from x to 2^-23 of it.
        allowed = torch.where(rows, largest * 2.0**-7, HALF_RANGE / top + largest * 2.0**-22)
        of_x, of_y = both.moves(1.0)
        assert torch.equal(of_x, -of_y)
        error = (of_x - (y - x)).abs().view(BLOCKS, block).amax(1)
        assert bool((error <= allowed).all())
        blocks -= len(where)


@MODULAR
def test_planted_jumps_are_repaired(name: str) -> None:
    plant(name, 60_000)


@pytest.mark.slow
@pytest.mark.timeout(400)
@MODULAR
def test_ten_million_planted_jumps_are_repaired(name: str) -> None:
    plant(name, 5_000_000)
