"""Codecs that round blocks at random to multiples of their absolute maximum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gasloc_p2p.core.codecs.api import CodesError, Keys, Offer
from gasloc_p2p.core.codecs.arrays import Bytes, Floats, bytes_of, rows_of
from gasloc_p2p.core.codecs.backend import Backend, Choice, backend
from gasloc_p2p.core.codecs.direct import DirectCoder, DirectOffer, flat_fp32
from gasloc_p2p.core.codecs.layout import Layout, cut

Words: TypeAlias = NDArray[np.uint16]

SMALLEST_SCALE: Final = np.float32(2.0**-100)
"""Blocks whose absolute maximum is below this are sent as zeros: its inverse must be finite."""

LARGEST_BF16: Final = np.uint32(0x7F7F)
"""The largest finite bf16; above are infinities, what is no number, and all negative numbers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockCodec:
    """Sends integers of `bits` bits (4 or 8), and the absolute maximum of each block as bf16.

    With top = 2^(bits - 1) - 1 and a maximum that is rounded up, x is worth x top / maximum steps.
    They are rounded up with the probability of their fraction, so the error is zero on average;
    what is drawn depends on the peer's key and the element's place alone. The codes of a chunk are
    two bytes per block, then the integers of whole blocks, with 4 bits those of the first half of a
    block in the low ones. docs/design.md section 5.

    Attributes:
        name: the codec's name.
        bits: of an integer, 4 or 8.
        block_elements: elements that share a maximum; even.
        choice: says which implementation runs; all of them give the same bits.
    """

    name: str
    bits: int
    block_elements: int
    choice: Choice = backend
    checked: ClassVar[bool] = False

    def layout(self, elements: int, chunk_bytes: int) -> Layout:
        """Return how a vector is cut."""
        size = 2 + self.block_elements * self.bits // 8
        return cut(
            elements,
            chunk_elements=max(1, chunk_bytes // size) * self.block_elements,
            block_elements=self.block_elements,
            size=lambda elements: -(-elements // self.block_elements) * size,
        )

    def offer(
        self,
        x: Tensor,
        *,
        motion: Tensor | None,
        keys: Keys,
        chunk_bytes: int,
    ) -> Offer:
        """Prepare to send `x`.

        Raises:
            ValueError: `x` is not a flat fp32 vector.
        """
        flat = flat_fp32(x)
        layout = self.layout(flat.numel(), chunk_bytes)
        chosen = self.choice()
        return DirectOffer(
            layout=layout,
            start=lambda: _BlockCoder(flat, layout, chosen, self.bits, keys.own),
        )


class _BlockCoder(DirectCoder):
    def __init__(self, x: Tensor, layout: Layout, chosen: Backend, bits: int, key: int) -> None:
        super().__init__(x, layout)
        self._maxima = chosen.block_maxima
        self._loops = chosen.block_loops(bits, layout.block_elements)
        self._top = np.float32((1 << bits - 1) - 1)
        self._key = key

    def encode(self, index: int) -> memoryview:
        codes = np.empty(self.layout.code_sizes[index], dtype=np.uint8)
        scales, integers = self._parts(index, codes)
        rows = self._rows(index)
        words, inverses = self._scaled(rows)
        scales[:] = words.view(np.uint8).reshape(-1, 2)
        start = self.layout.span(index).start
        self._loops.encode(rows, inverses, start, self._key, integers)
        return codes.data

    def difference(self, index: int, codes: memoryview) -> Tensor:
        scales, integers = self._parts(index, bytes_of(codes))
        theirs = np.ascontiguousarray(scales).view("<u2")[:, 0]
        if (theirs > LARGEST_BF16).any():
            raise CodesError("the scale of a block is negative or not finite")
        rows = self._rows(index)
        words, inverses = self._scaled(rows)
        out = torch.empty(rows.shape)
        self._loops.difference(
            rows,
            inverses,
            self.layout.span(index).start,
            self._key,
            _bf16(words) / self._top,
            _bf16(theirs) / self._top,
            integers,
            out.numpy(),
        )
        return out.view(-1)[: self.layout.elements_of(index)]

    def _rows(self, index: int) -> Floats:
        return rows_of(self.x[self.layout.span(index)], self.layout.block_elements)

    def _scaled(self, rows: Floats) -> tuple[Words, Floats]:
        """Return the bf16 scale of each row, and the integers per unit."""
        maxima: Floats = np.empty(len(rows), dtype=np.float32)
        self._maxima(rows, maxima)
        bits = np.minimum(maxima.view(np.uint32), LARGEST_BF16 << 16)
        words = np.where(maxima < SMALLEST_SCALE, 0, bits + 0xFFFF >> 16).astype("<u2")
        inverses = np.zeros(len(rows), dtype=np.float32)
        np.divide(self._top, _bf16(words), out=inverses, where=words > 0)
        return words, inverses

    def _parts(self, index: int, codes: Bytes) -> tuple[Bytes, Bytes]:
        """Return the scales and the integers in the codes of a chunk, one row per block."""
        blocks = self.layout.blocks(index)
        return codes[: 2 * blocks].reshape(blocks, 2), codes[2 * blocks :].reshape(blocks, -1)


def _bf16(words: Words) -> Floats:
    values: Floats = (words.astype(np.uint32) << 16).view(np.float32)
    return values
