"""How a vector is cut into chunks and blocks on the wire, and how large everything is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gasloc_p2p.core.types import BytesLike


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How a vector is cut on the wire; the same on both sides (docs/design.md section 5).

    Attributes:
        elements: of the vector.
        chunk_elements: of every chunk but the last; whole blocks.
        block_elements: of every block but the last; 1 where there are no blocks.
        scale_bytes: side information sent before the chunks; 0 for none.
        checked: whether every chunk is answered with the blocks that were not understood.
        code_sizes: bytes of each chunk's codes.
    """

    elements: int
    chunk_elements: int
    block_elements: int
    scale_bytes: int
    checked: bool
    code_sizes: tuple[int, ...]

    @property
    def chunks(self) -> int:
        """Number of chunks; 0 for an empty vector."""
        return len(self.code_sizes)

    @property
    def code_bytes(self) -> int:
        """Bytes of the codes of all chunks."""
        return sum(self.code_sizes)

    @property
    def all_blocks(self) -> int:
        """Number of blocks of the whole vector."""
        return -(-self.elements // self.block_elements)

    def span(self, index: int) -> slice:
        """Return which elements of the vector a chunk holds."""
        start = index * self.chunk_elements
        return slice(start, start + self.elements_of(index))

    def elements_of(self, index: int) -> int:
        """Return the number of elements of a chunk."""
        return min(self.chunk_elements, self.elements - index * self.chunk_elements)

    def blocks(self, index: int) -> int:
        """Return the number of blocks of a chunk."""
        return -(-self.elements_of(index) // self.block_elements)

    def block_span(self, index: int) -> slice:
        """Return which blocks of the vector a chunk holds."""
        start = index * (self.chunk_elements // self.block_elements)
        return slice(start, start + self.blocks(index))

    def bitmap_bytes(self, index: int) -> int:
        """Return the bytes of a bitmap with one bit per block of a chunk."""
        return -(-self.blocks(index) // 8)

    def everything(self, index: int) -> bytes:
        """Return the bitmap of all blocks of a chunk.

        Block b is bit b % 8, counted from the least significant one, of byte b // 8.
        """
        return ((1 << self.blocks(index)) - 1).to_bytes(self.bitmap_bytes(index), "little")

    def is_bitmap(self, index: int, bad: BytesLike) -> bool:
        """Whether `bad` is as long as a bitmap of a chunk and names no block beyond its last."""
        bits = memoryview(bad).cast("B")
        if len(bits) != self.bitmap_bytes(index):
            return False
        unused = -self.blocks(index) % 8
        return not bits or bits[-1] < 1 << 8 - unused

    def repair_bytes(self, index: int, bad: BytesLike) -> int:
        """Return the bytes of a repair of the blocks in `bad`, 2 per element and 8 for a digest.

        Args:
            index: the chunk.
            bad: a bitmap of it, as `is_bitmap` allows.
        """
        bits = int.from_bytes(bad, "little")
        elements = bits.bit_count() * self.block_elements
        blocks = self.blocks(index)
        if blocks and bits >> blocks - 1 & 1:
            elements -= -self.elements_of(index) % self.block_elements
        return 2 * elements + 8


def cut(
    elements: int,
    *,
    chunk_elements: int,
    block_elements: int,
    size: Callable[[int], int],
    scale_bytes: int = 0,
    checked: bool = False,
) -> Layout:
    """Return the layout of a vector whose chunks of n elements have codes of `size(n)` bytes."""
    full, rest = divmod(elements, chunk_elements)
    return Layout(
        elements=elements,
        chunk_elements=chunk_elements,
        block_elements=block_elements,
        scale_bytes=scale_bytes,
        checked=checked,
        code_sizes=(size(chunk_elements),) * full + ((size(rest),) if rest else ()),
    )
