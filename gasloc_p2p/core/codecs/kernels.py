"""The loops of codecs, compiled with numba; they give the same bits as those of `plain`.

Every loop is compiled for one width of codes and one block size when a codec first needs it, so
that inner loops have constant bounds and become vector instructions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from gasloc_p2p.core.codecs.arrays import Bytes, Floats, Indices, Ints
from gasloc_p2p.core.codecs.block_kernels import compile_block_loops, compile_block_maxima
from gasloc_p2p.core.codecs.jit import Loop
from gasloc_p2p.core.codecs.modular_kernels import compile_modular_loops


@dataclass(frozen=True, slots=True)
class BlockLoops:
    """See `backend.BlockLoops`."""

    encode: Callable[[Floats, Floats, int, int, Bytes], None]
    difference: Callable[[Floats, Floats, int, int, Floats, Floats, Bytes, Floats], None]


@dataclass(frozen=True, slots=True)
class ModularLoops:
    """See `backend.ModularLoops`."""

    encode: Callable[[Floats, Floats, Indices, int, Bytes, Bytes], int]
    take: Callable[[Floats, Floats, Indices, int, Bytes, Bytes, Bytes, Ints], int]
    difference: Callable[[Floats, Floats, Bytes, Floats], None]


@functools.cache
def block_loops(bits: int, block_elements: int) -> BlockLoops:
    """Return the loops of a codec that rounds blocks."""
    return BlockLoops(*compile_block_loops(bits, block_elements))


@functools.cache
def modular_loops(bits: int, block_elements: int) -> ModularLoops:
    """Return the loops of a codec that sends remainders."""
    return ModularLoops(*compile_modular_loops(bits, block_elements))


def block_maxima(x: Floats, out: Floats) -> None:
    """Write the maximum of |x| per row of `x`, NaN where there is one."""
    _maxima()(x.view(np.int32), out.view(np.int32))


@functools.cache
def _maxima() -> Loop:
    return compile_block_maxima()
