"""Codecs that send remainders, which a partner completes from its own vector."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

from gasloc_p2p.core.codecs.api import CodesError, Keys
from gasloc_p2p.core.codecs.arrays import Bytes, Floats, bytes_of
from gasloc_p2p.core.codecs.backend import Choice, ModularLoops, backend, block_max_difference
from gasloc_p2p.core.codecs.completion import DIGEST_BYTES, TAG_BYTES, ModularCoder
from gasloc_p2p.core.codecs.direct import flat_fp32, of_size
from gasloc_p2p.core.codecs.grid import steps, told_motion
from gasloc_p2p.core.codecs.layout import Layout, cut
from gasloc_p2p.core.codecs.sketch import SKETCH_BYTES, distance, sketch
from gasloc_p2p.core.types import BytesLike


@dataclass(frozen=True, kw_only=True, slots=True)
class ModularCodec:
    """Sends k = round(x / delta) modulo 2^bits; the partner takes the k nearest to its own.

    The error is about distance / 2^bits rather than |x| / 2^bits. delta of a block comes from what
    both sides tell each other in their scales: a byte per block, how far it has moved on the grid
    of `grid.py`, and a sketch of the vector. Blocks whose differences exceed the range
    2^(bits - 1) - 1 are detected and repaired. The codes of a chunk are the remainders of whole
    blocks, with 4 bits those of the first half of a block in the low ones, then two bytes of a hash
    per block, then eight bytes of a digest of the chunk. docs/design.md section 5.

    Attributes:
        name: the codec's name.
        bits: of a remainder, 4 or 8.
        block_elements: elements that share delta; even, at most 256.
        reach: half-range over the root mean square of the differences that are expected.
        choice: says which implementation runs; all of them give the same bits.
    """

    name: str
    bits: int
    block_elements: int
    reach: float
    choice: Choice = backend
    checked: ClassVar[bool] = True

    def layout(self, elements: int, chunk_bytes: int) -> Layout:
        """Return how a vector is cut."""
        block = self.block_elements
        size = block * self.bits // 8 + TAG_BYTES
        return cut(
            elements,
            chunk_elements=max(1, (chunk_bytes - DIGEST_BYTES) // size) * block,
            block_elements=block,
            size=lambda elements: -(-elements // block) * size + DIGEST_BYTES,
            scale_bytes=-(-elements // block) + SKETCH_BYTES if elements else 0,
            checked=True,
        )

    def offer(
        self,
        x: Tensor,
        *,
        motion: Tensor | None,
        keys: Keys,
        chunk_bytes: int,
    ) -> ModularOffer:
        """Prepare to send `x`.

        Raises:
            ValueError: `x` is not a flat fp32 vector.
        """
        flat = flat_fp32(x)
        top = (1 << self.bits - 1) - 1
        largest = block_max_difference(flat, None, self.block_elements, self.choice)
        return ModularOffer(
            layout=self.layout(flat.numel(), chunk_bytes),
            motion=told_motion(motion=motion, largest=largest, top=top),
            sketch=sketch(flat, keys.round),
            x=flat,
            loops=self.choice().modular_loops(self.bits, self.block_elements),
            reach=self.reach,
            top=top,
            key=keys.round,
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ModularOffer:
    """One vector, as a peer sends it to all its partners of a round.

    Attributes:
        layout: how the vector is cut.
        motion: what every partner is told of it, uint8 [blocks].
        sketch: of the vector, fp32 [BUCKETS].
        x: the vector.
        loops: its inner loops.
        reach: half-range over the root mean square of the differences that are expected.
        top: the largest difference of integers in range.
        key: of the round's hashes.
    """

    layout: Layout
    motion: Bytes
    sketch: Floats
    x: Tensor
    loops: ModularLoops
    reach: float
    top: int
    key: int

    @property
    def scales(self) -> bytes:
        """What every partner must know before the chunks."""
        if not self.layout.elements:
            return b""
        return self.motion.tobytes() + self.sketch.astype("<f4").tobytes()

    def coder(self, partner_scales: BytesLike) -> ModularCoder:
        """Return the coder for an edge.

        Raises:
            CodesError: these are no scales of this layout.
        """
        view = of_size(partner_scales, self.layout.scale_bytes, "scales")
        told = np.frombuffer(view[self.layout.all_blocks :], dtype="<f4").astype(np.float32)
        if not np.isfinite(told).all():
            raise CodesError("the sketch in the scales has numbers that are not finite")
        delta = steps(
            self.motion,
            bytes_of(view[: self.layout.all_blocks]),
            distance=distance(self.sketch, told) if len(told) else 0.0,
            block_elements=self.layout.block_elements,
            reach=self.reach,
            top=self.top,
        )
        return ModularCoder(
            x=self.x, layout=self.layout, delta=delta, loops=self.loops, key=self.key
        )
