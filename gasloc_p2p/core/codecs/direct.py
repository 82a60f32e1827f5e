"""What codecs whose chunks explain themselves have in common: nothing to check or to repair."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gasloc_p2p.core.codecs.api import Coder, CodesError
from gasloc_p2p.core.codecs.layout import Layout
from gasloc_p2p.core.types import BytesLike


def flat_fp32(x: Tensor) -> Tensor:
    """Return the elements of `x`, without gradients and without gaps between them.

    Raises:
        ValueError: it is not a flat fp32 vector.
    """
    if x.dim() != 1 or x.dtype != torch.float32:
        raise ValueError(f"expected a flat fp32 vector, got {x.dtype} of shape {tuple(x.shape)}")
    return x.detach().contiguous()


def of_size(data: BytesLike, size: int, what: str) -> memoryview:
    """Return a view of the bytes in `data`.

    Raises:
        CodesError: there are not `size` of them.
    """
    view = memoryview(data).cast("B")
    if len(view) != size:
        raise CodesError(f"{len(view)} bytes of {what}, expected {size}")
    return view


@dataclass(frozen=True, kw_only=True, slots=True)
class DirectOffer:
    """A vector whose codes are the same for all partners; sends no scales.

    Attributes:
        layout: how the vector is cut.
        start: makes the coder of an edge.
    """

    layout: Layout
    start: Callable[[], Coder]

    @property
    def scales(self) -> bytes:
        """Nothing is needed before the chunks."""
        return b""

    def coder(self, partner_scales: BytesLike) -> Coder:
        """Return the coder for an edge.

        Raises:
            CodesError: there are scales.
        """
        of_size(partner_scales, 0, "scales")
        return self.start()


class DirectCoder(ABC):
    """One edge of a codec that is not checked; a subclass encodes and compares single chunks.

    Args:
        x: flat fp32, without gaps.
        layout: how it is cut.
    """

    repaired_blocks = 0

    def __init__(self, x: Tensor, layout: Layout) -> None:
        self.x = x
        self.layout = layout
        self._codes: dict[int, memoryview] = {}
        self._squares: dict[int, float] = {}

    @abstractmethod
    def encode(self, index: int) -> BytesLike:
        """Return the codes of an own chunk, of the size that the layout says."""

    @abstractmethod
    def difference(self, index: int, codes: memoryview) -> Tensor:
        """Return a fresh fp32 tensor, Q(x_j) - Q(x_i) on one chunk.

        Args:
            index: the chunk.
            codes: of the partner, of the right size; may not be changed.

        Raises:
            CodesError: no honest peer sends them.
        """

    def take(self, index: int, codes: BytesLike) -> bytes:
        view = of_size(codes, self.layout.code_sizes[index], "codes")
        exact = self.difference(index, view).to(torch.float64)
        self._squares[index] = float(torch.dot(exact, exact))
        self._codes[index] = view
        return b""

    def repair(self, index: int, bad: BytesLike) -> BytesLike:
        raise CodesError("a codec that is not checked has no repairs")

    def take_repair(self, index: int, bad: BytesLike, repair: BytesLike) -> bool:
        raise CodesError("a codec that is not checked has no repairs")

    def square_distance(self) -> float:
        return sum((self._squares[index] for index in range(self.layout.chunks)), start=0.0)

    def add_difference(self, mixed: Tensor, weight: float) -> None:
        for index in range(self.layout.chunks):
            difference = self.difference(index, self._codes[index])
            mixed[self.layout.span(index)].add_(difference, alpha=weight)
