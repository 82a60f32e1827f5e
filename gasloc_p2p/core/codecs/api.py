"""What a codec is: a layout, an offer to all partners of a round, and a coder for each edge."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from gasloc_p2p.core.codecs.layout import Layout
from gasloc_p2p.core.types import BytesLike


class CodesError(Exception):
    """Codes, scales or repairs that no honest peer sends; the message is for a person."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Keys:
    """What a codec draws its hashes and its rounding from; nothing else is random.

    Attributes:
        round: 64 bits, the same at all peers of a round; keys the hashes of blocks.
        own: 64 bits, of this peer and round; keys stochastic rounding.
    """

    round: int
    own: int


class Codec(Protocol):
    """A way to send a flat fp32 vector to partners that hold a similar one.

    Partners mix the difference of their two vectors as the codes tell them, Q(x_j) - Q(x_i). Both
    sides of an edge compute exact negatives of each other, so the swarm's mean stays
    (docs/design.md section 5).
    """

    @property
    def name(self) -> str:
        """Name in the configuration and in Hello."""
        ...

    @property
    def block_elements(self) -> int:
        """Elements of a block; 1 where there are no blocks."""
        ...

    @property
    def checked(self) -> bool:
        """Whether chunks can be misunderstood, so that they are checked and repaired."""
        ...

    def layout(self, elements: int, chunk_bytes: int) -> Layout:
        """Return how a vector is cut.

        Args:
            elements: of the vector.
            chunk_bytes: wished size of a chunk of codes; a chunk has one block at least.
        """
        ...

    def offer(
        self,
        x: Tensor,
        *,
        motion: Tensor | None,
        keys: Keys,
        chunk_bytes: int,
    ) -> Offer:
        """Prepare to send `x` in one round.

        Args:
            x: flat, fp32, CPU; may not change as long as the offer or a coder of it is in use.
            motion: fp32 [blocks], how far this peer knows to have moved per block; None for zeros.
                Only checked codecs use it.
            keys: of this peer and round.
            chunk_bytes: as for `layout`.

        Raises:
            ValueError: `x` is not a flat fp32 vector.
        """
        ...


class Offer(Protocol):
    """One vector, as a peer sends it to all its partners of a round."""

    @property
    def scales(self) -> bytes:
        """What every partner must know before the chunks."""
        ...

    @property
    def layout(self) -> Layout:
        """How the vector is cut."""
        ...

    def coder(self, partner_scales: BytesLike) -> Coder:
        """Return the coder for the edge with the partner that sent these scales.

        Raises:
            CodesError: they are no scales of this layout.
        """
        ...


class Coder(Protocol):
    """Both directions of one edge of one round; not thread-safe.

    What is taken is kept as codes. `encode` and `repair` make the same bytes each time, so nothing
    that was sent needs to be kept.
    """

    @property
    def repaired_blocks(self) -> int:
        """Number of blocks that were repaired; 0 for codecs that are not checked."""
        ...

    def encode(self, index: int) -> BytesLike:
        """Return the codes of an own chunk, to be read only; they may be the vector's own bytes."""
        ...

    def take(self, index: int, codes: BytesLike) -> bytes:
        """Keep the partner's codes of a chunk; the buffer may not change afterwards.

        Returns:
            The bitmap of the blocks that were not understood, b"" for none.

        Raises:
            CodesError: no honest peer sends them.
        """
        ...

    def repair(self, index: int, bad: BytesLike) -> BytesLike:
        """Return what repairs the blocks in the bitmap `bad` of an own chunk at the partner."""
        ...

    def take_repair(self, index: int, bad: BytesLike, repair: BytesLike) -> bool:
        """Put a repair in the place of the blocks in `bad`; the buffer may not change afterwards.

        Both sides repair the same blocks. A later repair of the chunk replaces an earlier one.

        Returns:
            False when the chunk's other blocks are not what the partner sent; nothing is kept then,
            and all of it needs a repair.

        Raises:
            CodesError: no honest peer sends it.
        """
        ...

    def square_distance(self) -> float:
        """Return ||Q(x_j) - Q(x_i)||^2, summed in fp64 in the order of the chunks.

        It is infinite or NaN exactly when an element of the difference, in fp32, is.
        """
        ...

    def add_difference(self, mixed: Tensor, weight: float) -> None:
        """Add weight x (Q(x_j) - Q(x_i)) to `mixed`, with no buffer larger than a few chunks.

        Args:
            mixed: flat fp32, changed in place; not the vector of the offer.
            weight: of the edge.
        """
        ...
