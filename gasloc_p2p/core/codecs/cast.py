"""Codecs that send every element as one number of some dtype."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

import torch
from torch import Tensor

from gasloc_p2p.core.codecs.api import Keys, Offer
from gasloc_p2p.core.codecs.direct import DirectCoder, DirectOffer, flat_fp32
from gasloc_p2p.core.codecs.layout import Layout, cut

STEP_ELEMENTS: Final = 64
"""Chunks are multiples of this. torch may add whole registers of a processor in another way than
the elements that remain, and so these must be the same as if the vector were added at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CastCodec:
    """Sends every element as one `dtype` number, rounded to nearest even; needs no scales.

    What fp16 cannot hold becomes its largest number, as an infinity would spoil the edge. Codes are
    in the host's own byte order; every platform that hivemind and torch support together is little
    endian.
    """

    name: str
    dtype: torch.dtype
    block_elements: ClassVar[int] = 1
    checked: ClassVar[bool] = False

    def layout(self, elements: int, chunk_bytes: int) -> Layout:
        """Return how a vector is cut, into chunks of a multiple of 64 elements."""
        size = self.dtype.itemsize
        return cut(
            elements,
            chunk_elements=max(1, chunk_bytes // size // STEP_ELEMENTS) * STEP_ELEMENTS,
            block_elements=1,
            size=lambda elements: elements * size,
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
        return DirectOffer(layout=layout, start=lambda: _CastCoder(flat, layout, self.dtype))


class _CastCoder(DirectCoder):
    def __init__(self, x: Tensor, layout: Layout, dtype: torch.dtype) -> None:
        super().__init__(x, layout)
        self._dtype = dtype
        largest = torch.finfo(dtype).max
        # bf16 ends where fp32 does, but for its last step.
        self._limit = largest if largest < torch.finfo(torch.bfloat16).max else None

    def encode(self, index: int) -> memoryview:
        return self._cast(index).view(torch.uint8).numpy().data

    def difference(self, index: int, codes: memoryview) -> Tensor:
        # torch warns about tensors on read-only memory, even ones that are only read.
        source = bytearray(codes) if codes.readonly else codes
        theirs = torch.frombuffer(source, dtype=self._dtype).to(torch.float32)
        return torch.sub(theirs, self._cast(index).to(torch.float32))

    def _cast(self, index: int) -> Tensor:
        """Return an own chunk as it is sent; fp32 shares the vector's memory."""
        own = self.x[self.layout.span(index)]
        if self._limit is not None:
            own = own.clamp(-self._limit, self._limit)
        return own.to(self._dtype)
