"""One edge of a codec that sends remainders: completing, finding what is wrong, repairing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from gasloc_p2p.core.codecs.api import CodesError
from gasloc_p2p.core.codecs.arrays import Bytes, Floats, Indices, Ints, bytes_of, rows_of
from gasloc_p2p.core.codecs.backend import ModularLoops
from gasloc_p2p.core.codecs.direct import of_size
from gasloc_p2p.core.codecs.layout import Layout
from gasloc_p2p.core.types import BytesLike

TAG_BYTES: Final = 2
DIGEST_BYTES: Final = 8
PIECE_BLOCKS: Final = 4096


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Repair:
    """The repaired blocks of a chunk.

    Attributes:
        blocks: their numbers within the chunk, ascending.
        data: the partner's elements, bf16.
        square: sum of the squared differences.
    """

    blocks: Indices
    data: memoryview
    square: float


class ModularCoder:
    """Both directions of one edge of one round.

    Args:
        x: the own vector, flat fp32 without gaps.
        layout: how it is cut.
        delta: the step of each block.
        loops: the inner loops.
        key: of the hashes.
    """

    def __init__(
        self, *, x: Tensor, layout: Layout, delta: Floats, loops: ModularLoops, key: int
    ) -> None:
        self._x = x
        self._layout = layout
        self._delta = delta
        self._loops = loops
        self._key = key
        self._own_digests: dict[int, int] = {}
        self._digests: dict[int, int] = {}
        self._codes: dict[int, memoryview] = {}
        self._repairs: dict[int, _Repair] = {}
        self._squares: Ints = np.zeros(len(delta), dtype=np.int32)

    @property
    def repaired_blocks(self) -> int:
        """Number of blocks that were repaired."""
        return sum(len(repair.blocks) for repair in self._repairs.values())

    def encode(self, index: int) -> memoryview:
        """Return the codes of an own chunk."""
        codes = np.empty(self._layout.code_sizes[index], dtype=np.uint8)
        remainders, tags = self._parts(index, codes)
        digest = self._loops.encode(
            self._rows(index),
            self._delta[self._layout.block_span(index)],
            self._places(index),
            self._key,
            remainders,
            tags,
        )
        codes[-DIGEST_BYTES:] = bytes_of(memoryview(_digest_bytes(digest)))
        self._own_digests[index] = digest
        return codes.data

    def take(self, index: int, codes: BytesLike) -> bytes:
        """Keep the partner's codes of a chunk, and return the bitmap of those not understood.

        Raises:
            CodesError: they have another size.
        """
        view = of_size(codes, self._layout.code_sizes[index], "codes")
        blocks = self._layout.block_span(index)
        remainders, tags = self._parts(index, bytes_of(view))
        bad = np.empty(self._layout.blocks(index), dtype=np.uint8)
        digest = self._loops.take(
            self._rows(index),
            self._delta[blocks],
            self._places(index),
            self._key,
            remainders,
            tags,
            bad,
            self._squares[blocks],
        )
        self._codes[index] = view
        self._digests[index] = digest
        if bad.any():
            return np.packbits(bad, bitorder="little").tobytes()
        if _digest_bytes(digest) != view[-DIGEST_BYTES:]:
            return self._layout.everything(index)
        return b""

    def repair(self, index: int, bad: BytesLike) -> bytes:
        """Return the blocks in `bad` of an own chunk as bf16, and the digest of all others."""
        if index not in self._own_digests:
            self.encode(index)
        blocks = self._listed(index, bad)
        codes = np.empty((len(blocks), self._code_bytes), dtype=np.uint8)
        tags = np.empty((len(blocks), TAG_BYTES), dtype=np.uint8)
        digest = self._own_digests[index] - self._loops.encode(
            self._rows(index)[blocks],
            self._delta[self._layout.block_span(index)][blocks],
            self._places(index)[blocks],
            self._key,
            codes,
            tags,
        )
        return self._halves(index, blocks).view(torch.uint8).numpy().tobytes() + _digest_bytes(
            digest
        )

    def take_repair(self, index: int, bad: BytesLike, repair: BytesLike) -> bool:
        """Put bf16 differences in the place of the blocks in `bad`.

        Returns:
            False when the chunk's other blocks were misunderstood; nothing is kept then.

        Raises:
            CodesError: it has another size, or says that there are other blocks and there are none.
        """
        view = of_size(repair, self._layout.repair_bytes(index, bad), "a repair")
        blocks = self._listed(index, bad)
        everything = len(blocks) == self._layout.blocks(index)
        others = 0 if everything else self._digests[index] - self._taken_digest(index, blocks)
        if _digest_bytes(others) != view[-DIGEST_BYTES:]:
            if everything:
                raise CodesError("a repair of a whole chunk has the digest of other blocks")
            return False
        data = view[:-DIGEST_BYTES]
        difference = self._repaired(index, blocks, data)
        exact = difference.to(torch.float64)
        self._repairs[index] = _Repair(
            blocks=blocks,
            data=data,
            square=float(torch.dot(exact, exact)),
        )
        return True

    def square_distance(self) -> float:
        """Return ||Q(x_j) - Q(x_i)||^2."""
        total = 0.0
        for index in range(self._layout.chunks):
            span = self._layout.block_span(index)
            squares = self._squares[span] * np.square(self._delta[span], dtype=np.float64)
            repair = self._repairs.get(index)
            if repair is not None:
                squares[repair.blocks] = 0.0
                total += repair.square
            total += float(squares.sum())
        return total

    def add_difference(self, mixed: Tensor, weight: float) -> None:
        """Add weight x (Q(x_j) - Q(x_i)) to `mixed`."""
        for index in range(self._layout.chunks):
            self._add_chunk(index, mixed[self._layout.span(index)], weight)

    @property
    def _code_bytes(self) -> int:
        """Bytes of the remainders of a block."""
        whole = self._layout.code_sizes[0] - DIGEST_BYTES
        return whole // self._layout.blocks(0) - TAG_BYTES

    def _rows(self, index: int) -> Floats:
        return rows_of(self._x[self._layout.span(index)], self._layout.block_elements)

    def _places(self, index: int) -> Indices:
        span = self._layout.block_span(index)
        return np.arange(span.start, span.stop, dtype=np.int64)

    def _parts(self, index: int, codes: Bytes) -> tuple[Bytes, Bytes]:
        """Return the remainders and the tags in the codes of a chunk, one row per block."""
        blocks = self._layout.blocks(index)
        tags = len(codes) - DIGEST_BYTES - blocks * TAG_BYTES
        return codes[:tags].reshape(blocks, -1), codes[tags:-DIGEST_BYTES].reshape(blocks, -1)

    def _listed(self, index: int, bad: BytesLike) -> Indices:
        """Return the numbers of the blocks in a bitmap.

        Raises:
            CodesError: it is no bitmap of this chunk.
        """
        if not self._layout.is_bitmap(index, bad):
            raise CodesError("a bitmap of blocks has another size, or names blocks beyond the last")
        flags = np.unpackbits(bytes_of(memoryview(bad)), bitorder="little")
        return np.flatnonzero(flags).astype(np.int64)

    def _taken_digest(self, index: int, blocks: Indices) -> int:
        """Return the digest of some blocks of the partner's chunk as they were understood."""
        remainders, tags = self._parts(index, bytes_of(self._codes[index]))
        return self._loops.take(
            self._rows(index)[blocks],
            self._delta[self._layout.block_span(index)][blocks],
            self._places(index)[blocks],
            self._key,
            remainders[blocks],
            tags[blocks],
            np.empty(len(blocks), dtype=np.uint8),
            np.empty(len(blocks), dtype=np.int32),
        )

    def _halves(self, index: int, blocks: Indices) -> Tensor:
        """Return the own elements of some blocks of a chunk as bf16; no filling at the end."""
        rows = torch.from_numpy(self._rows(index)[blocks]).to(torch.bfloat16)
        holds_last = int(self._layout.blocks(index) - 1 in blocks)
        filling = -self._layout.elements_of(index) % self._layout.block_elements * holds_last
        return rows.view(-1)[: rows.numel() - filling]

    def _repaired(self, index: int, blocks: Indices, data: memoryview) -> Tensor:
        """Return the difference on repaired blocks of a chunk, fp32, no filling at the end."""
        own = self._halves(index, blocks).to(torch.float32)
        # Neither an empty buffer nor one that is read-only makes a tensor.
        theirs = torch.frombuffer(bytearray(data) + b"\0\0", dtype=torch.bfloat16)[:-1]
        return torch.sub(theirs.to(torch.float32), own)

    def _add_chunk(self, index: int, mixed: Tensor, weight: float) -> None:
        """Add what a chunk differs by, a piece at a time, which stays in the processor's cache."""
        rows, delta = self._rows(index), self._delta[self._layout.block_span(index)]
        remainders, _ = self._parts(index, bytes_of(self._codes[index]))
        block = self._layout.block_elements
        for first in range(0, len(rows), PIECE_BLOCKS):
            piece = slice(first, first + PIECE_BLOCKS)
            out = torch.empty(rows[piece].shape)
            difference: Floats = out.numpy()
            self._loops.difference(rows[piece], delta[piece], remainders[piece], difference)
            self._patch(index, first, difference)
            target = mixed[first * block : (first + PIECE_BLOCKS) * block]
            target.add_(out.view(-1)[: target.numel()], alpha=weight)

    def _patch(self, index: int, first: int, difference: Floats) -> None:
        """Put the repaired blocks of a chunk into a piece of it that begins with block `first`."""
        repair = self._repairs.get(index)
        if repair is None:
            return
        inside = (repair.blocks >= first) & (repair.blocks < first + len(difference))
        repaired = self._repaired(index, repair.blocks, repair.data)
        rows = rows_of(repaired, self._layout.block_elements)
        difference[repair.blocks[inside] - first] = rows[inside]


def _digest_bytes(digest: int) -> bytes:
    """Return the low 64 bits of a sum of digests."""
    return (digest & (1 << 64) - 1).to_bytes(DIGEST_BYTES, "little")
