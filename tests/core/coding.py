"""Two coders at the ends of an edge, for tests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gasloc_p2p.core.codecs import (
    BlockCodec,
    Codec,
    Coder,
    Keys,
    Layout,
    ModularCodec,
    Offer,
    codec_named,
)
from gasloc_p2p.core.codecs.backend import Backend
from gasloc_p2p.core.codecs.grid import steps
from gasloc_p2p.core.codecs.modular import ModularOffer
from gasloc_p2p.core.codecs.sketch import distance

NAMES = ("none", "bf16", "fp16", "int8", "int4", "mod8", "mod4")
ROUND_KEY = 0xFEDC_BA98_7654_3210


def on(name: str, backend: Backend) -> BlockCodec | ModularCodec:
    """Return a built-in codec whose loops run on `backend`."""
    codec = codec_named(name)
    assert isinstance(codec, BlockCodec | ModularCodec)
    return replace(codec, choice=lambda: backend)


def normal(elements: int, seed: int, spread: float = 1.0) -> Tensor:
    """Return a vector of normal numbers."""
    return torch.randn(elements, generator=torch.Generator().manual_seed(seed)) * spread


def offer(
    codec: Codec,
    x: Tensor,
    *,
    motion: float | Tensor = 0.0,
    own_key: int = 1,
    round_key: int = ROUND_KEY,
    chunk_bytes: int = 4096,
) -> Offer:
    """Return the offer of `x`; single numbers hold for all blocks."""
    told = torch.ones(codec.layout(x.numel(), chunk_bytes).all_blocks)
    return codec.offer(
        x,
        motion=told * motion,
        keys=Keys(round=round_key, own=own_key),
        chunk_bytes=chunk_bytes,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Edge:
    """The coders of a peer that holds x and one that holds y."""

    layout: Layout
    of_x: Coder
    of_y: Coder

    def exchange(self) -> list[bytes]:
        """Send every chunk both ways and repair it as an exchange does.

        Returns:
            Per chunk the bitmap of the blocks that were repaired in the end.
        """
        return [self._exchange_chunk(index) for index in range(self.layout.chunks)]

    def flags(self, bitmaps: Sequence[bytes]) -> NDArray[np.bool_]:
        """Return which blocks of the vector are in the bitmaps of its chunks."""
        flags = np.zeros(self.layout.all_blocks, dtype=np.bool_)
        for index, bitmap in enumerate(bitmaps):
            if bitmap:
                bits = np.unpackbits(np.frombuffer(bitmap, dtype=np.uint8), bitorder="little")
                flags[self.layout.block_span(index)] = bits[: self.layout.blocks(index)]
        return flags

    def moves(self, weight: float = 0.5) -> tuple[Tensor, Tensor]:
        """Return what x and y move by."""
        moves = torch.zeros(2, self.layout.elements)
        self.of_x.add_difference(moves[0], weight)
        self.of_y.add_difference(moves[1], weight)
        return moves[0], moves[1]

    def _exchange_chunk(self, index: int) -> bytes:
        codes = self.of_x.encode(index), self.of_y.encode(index)
        assert [len(some) for some in codes] == [self.layout.code_sizes[index]] * 2
        bad = union(self.of_x.take(index, codes[1]), self.of_y.take(index, codes[0]))
        if bad and not self.repair(index, bad):
            bad = self.layout.everything(index)
            assert self.repair(index, bad)
        return bad

    def repair(self, index: int, bad: bytes) -> bool:
        """Repair a chunk on both sides; says whether both digests matched."""
        repairs = self.of_x.repair(index, bad), self.of_y.repair(index, bad)
        assert [len(some) for some in repairs] == [self.layout.repair_bytes(index, bad)] * 2
        x_is_well = self.of_x.take_repair(index, bad, repairs[1])
        y_is_well = self.of_y.take_repair(index, bad, repairs[0])
        return x_is_well and y_is_well


def union(a: bytes, b: bytes) -> bytes:
    """Return the union of two bitmaps, of which one may be empty."""
    bits = int.from_bytes(a, "little") | int.from_bytes(b, "little")
    return bits.to_bytes(max(len(a), len(b)), "little")


def edge_between(of_x: Offer, of_y: Offer) -> Edge:
    """Return the coders between two offers."""
    return Edge(layout=of_x.layout, of_x=of_x.coder(of_y.scales), of_y=of_y.coder(of_x.scales))


def edge(
    codec: Codec,
    x: Tensor,
    y: Tensor,
    *,
    motion: float | Tensor = 0.0,
    half: float | None = None,
    round_key: int = ROUND_KEY,
    chunk_bytes: int = 4096,
) -> Edge:
    """Return the coders between a peer with `x` and one with `y`, which both tell the same.

    With `half`, sketches are replaced by such that every block has this half-range, provided that
    all have moved alike.
    """
    of_x, of_y = (
        offer(codec, v, motion=motion, own_key=key, round_key=round_key, chunk_bytes=chunk_bytes)
        for key, v in ((1, x), ((1 << 64) - 1, y))
    )
    if half is not None:
        assert isinstance(codec, ModularCodec)
        assert isinstance(of_x, ModularOffer)
        assert isinstance(of_y, ModularOffer)
        told = np.zeros_like(of_x.sketch)
        of_x = replace(of_x, sketch=told.copy())
        told[0] = half * math.sqrt(of_x.layout.all_blocks * codec.block_elements) / codec.reach
        of_y = replace(of_y, sketch=told)
    return edge_between(of_x, of_y)


def deltas(codec: ModularCodec, of_x: Offer, of_y: Offer) -> NDArray[np.float32]:
    """Return the step of each block on the edge between two offers."""
    assert isinstance(of_x, ModularOffer)
    assert isinstance(of_y, ModularOffer)
    return steps(
        of_x.motion,
        of_y.motion,
        distance=distance(of_x.sketch, of_y.sketch),
        block_elements=codec.block_elements,
        reach=codec.reach,
        top=(1 << codec.bits - 1) - 1,
    )
