"""Which implementation of the inner loops runs: compiled ones where numba is there, or torch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Final, Protocol, TypeAlias

import torch
from torch import Tensor

from gasloc_p2p.core.codecs import plain
from gasloc_p2p.core.codecs.arrays import Bytes, Floats, Indices, Ints, rows_of

AT_ONCE_BYTES: Final = 1 << 20
"""Of fp32, where a pass over a vector needs a buffer."""


class BlockLoops(Protocol):
    """Loops over blocks that are rounded at random, for one width of codes and one block size.

    Rows are blocks: `x` and `out` are [blocks, block_elements], `codes` [blocks, bytes of a
    block]. `inverses` are integers per unit of x, [blocks], `start` is the place of the first
    element in its vector, `key` what the rounding is drawn from.
    """

    def encode(self, x: Floats, inverses: Floats, start: int, key: int, codes: Bytes) -> None:
        """Write the codes of `x`."""
        ...

    def difference(
        self,
        x: Floats,
        inverses: Floats,
        start: int,
        key: int,
        own: Floats,
        theirs: Floats,
        codes: Bytes,
        out: Floats,
    ) -> None:
        """Write the partner's integers times its steps, less the own ones times the own steps."""
        ...


class ModularLoops(Protocol):
    """Loops over blocks of remainders, for one width of codes and one block size.

    Rows are blocks, as in `BlockLoops`. `delta` is the step of each block, `tags` [blocks, 2] the
    bytes of its hash that travel, `places` [blocks] its place in the vector, `key` what hashes are
    keyed with. A digest is the sum of the blocks' hashes, mixed once more, modulo 2^64.
    """

    def encode(
        self, x: Floats, delta: Floats, places: Indices, key: int, codes: Bytes, tags: Bytes
    ) -> int:
        """Write the codes and tags of `x`, and return the digest of its integers."""
        ...

    def take(
        self,
        x: Floats,
        delta: Floats,
        places: Indices,
        key: int,
        codes: Bytes,
        tags: Bytes,
        bad: Bytes,
        squares: Ints,
    ) -> int:
        """Complete the partner's codes, and return the digest of the integers that come out.

        Writes per block whether it was not understood (0 or 1), and in steps the sum of squares
        of the differences to the own integers.
        """
        ...

    def difference(self, x: Floats, delta: Floats, codes: Bytes, out: Floats) -> None:
        """Write the differences to the own integers, times delta."""
        ...


class Backend(Protocol):
    """One implementation; all of them give the same bits."""

    def block_loops(self, bits: int, block_elements: int) -> BlockLoops:
        """Return the loops of a codec that rounds blocks."""
        ...

    def modular_loops(self, bits: int, block_elements: int) -> ModularLoops:
        """Return the loops of a codec that sends remainders."""
        ...

    def block_maxima(self, x: Floats, out: Floats) -> None:
        """Write the maximum of |x| per row of `x`, NaN where there is one."""
        ...


Choice: TypeAlias = Callable[[], Backend]
"""Says which backend to use, at the time when one is needed."""


@functools.cache
def backend() -> Backend:
    """Return the compiled loops, or those of torch where numba cannot be imported."""
    try:
        # Importing numba takes half a second, which commands that use no such codec need not wait.
        from gasloc_p2p.core.codecs import kernels
    except (ImportError, OSError):
        # Not installed, or its shared library does not load here.
        return plain
    return kernels


def block_max_difference(
    a: Tensor, b: Tensor | None, block_elements: int, choice: Choice = backend
) -> Tensor:
    """Return max |a - b| per block of two flat fp32 vectors, fp32 [blocks].

    It is NaN where a difference is.

    Args:
        a: a vector without gaps.
        b: another one, or None for zeros.
        block_elements: of every block but the last.
        choice: says which implementation to use.
    """
    maxima = torch.empty(-(-a.numel() // block_elements))
    out: Floats = maxima.numpy()
    loops = choice()
    blocks_at_once = max(1, AT_ONCE_BYTES // (4 * block_elements))
    for first in range(0, len(out), blocks_at_once):
        span = slice(first * block_elements, (first + blocks_at_once) * block_elements)
        part = a[span] if b is None else a[span] - b[span]
        loops.block_maxima(rows_of(part, block_elements), out[first : first + blocks_at_once])
    return maxima
