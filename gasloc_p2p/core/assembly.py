"""A state in chunks: how a donor cuts it, what a joiner still misses, how long a piece may take.

A state is two vectors of little-endian fp32, parameters and outer memory. The root is a digest over
the digests of all chunks, so it names the state, whoever hands it over (docs/design.md section 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
import torch
from blake3 import blake3
from torch import Tensor

from gasloc_p2p.core.transfer import MIN_CHUNK_BYTES, Offer, StateRequest, TransferError
from gasloc_p2p.core.types import BytesLike

CHUNK_BYTES: Final = 32 * 1024
"""What a donor cuts: two joiners get their first chunk in time over a shared 0.05 Mbit/s."""
DIGEST_BYTES: Final = 32

FIRST_BLOCK_S: Final = 20.0
MIN_BLOCK_S: Final = 5.0
MAX_BLOCK_S: Final = 120.0
PATIENCE: Final = 4.0
"""A block may take this many times as long as the rate so far predicts."""


class Chunks:
    """The bytes of vectors, cut into chunks; none reaches from one vector into the next.

    Args:
        vectors: fp32, flat and contiguous on the CPU; the chunks are views of their memory.
        chunk_bytes: size of every chunk but the last one of each vector.
    """

    def __init__(self, vectors: Sequence[Tensor], chunk_bytes: int) -> None:
        self._vectors = [_bytes_of(vector) for vector in vectors]
        self._chunk_bytes = chunk_bytes
        self._counts = [-(-len(view) // chunk_bytes) for view in self._vectors]

    def __len__(self) -> int:
        return sum(self._counts)

    def __getitem__(self, index: int) -> memoryview:
        for view, count in zip(self._vectors, self._counts, strict=True):
            if index < count:
                return view[index * self._chunk_bytes : (index + 1) * self._chunk_bytes]
            index -= count
        raise IndexError(index)

    def digests(self) -> bytes:
        """Return the digests of all chunks, `DIGEST_BYTES` each."""
        return b"".join(blake3(self[index]).digest() for index in range(len(self)))


def root_of(digests: BytesLike) -> bytes:
    """Return the digest over the digests of all chunks."""
    return blake3(digests).digest()


class Assembly:
    """A state on its way to a joiner, over as many streams as it takes.

    For each stream: send `request`, give the answer to `accept`, then fill each `next_block` and
    call `close_block`, until it is `complete`. A stream may break anywhere; whole blocks count.
    Memory is that of the two vectors, which the first acceptable offer allocates, and of their
    digests, at most `DIGEST_BYTES` per `MIN_CHUNK_BYTES`.

    Args:
        elements: elements of the joiner's own parameter vector.
        memory_elements: elements of its outer rule's memory.
    """

    def __init__(self, *, elements: int, memory_elements: int) -> None:
        self._sizes = (elements, memory_elements)
        self._vectors: tuple[Tensor, ...] = ()
        self._block_bytes = 0
        self._chunks = Chunks((), MIN_CHUNK_BYTES)
        self._digests = bytearray()
        self._listed_bytes = 0
        self._root = b""
        self._round = 0
        self._verified = 0

    @property
    def round(self) -> int:
        """The round at whose start the donor held this state, as it says."""
        return self._round

    @property
    def verified(self) -> int:
        """How many chunks have arrived and match their digests."""
        return self._verified

    @property
    def complete(self) -> bool:
        """Whether all of them have."""
        return self._verified == len(self._chunks) > 0

    def request(self, request: StateRequest) -> StateRequest:
        """Return `request`, asking for what is missing of the state that was begun."""
        return msgspec.structs.replace(request, root=self._known_root, first_chunk=self._verified)

    def accept(self, offer: Offer) -> None:
        """Take an offer; one of another state than before starts over.

        Raises:
            TransferError: it has other sizes than the joiner's own; nothing is allocated for it.
        """
        for what, size, own in zip(
            ("parameters", "elements of outer memory"),
            (offer.elements, offer.memory_elements),
            self._sizes,
            strict=True,
        ):
            if size != own:
                raise TransferError(f"offers {size} {what}, this model has {own}")
        self._round = offer.round
        if offer.root == self._known_root:
            return
        if not self._vectors:
            self._vectors = tuple(torch.empty(size) for size in self._sizes)
        self._block_bytes = offer.chunk_bytes
        self._chunks = Chunks(self._vectors, offer.chunk_bytes)
        self._digests = bytearray(DIGEST_BYTES * len(self._chunks))
        self._listed_bytes = self._verified = 0
        self._root = offer.root

    def forget(self) -> None:
        """Start over with whatever comes next, in the same memory."""
        self._listed_bytes = self._verified = 0
        self._root = b""

    def next_block(self) -> memoryview:
        """Return the memory into which the next bytes of the stream belong."""
        if self._listing:
            end = self._listed_bytes + self._block_bytes
            return memoryview(self._digests)[self._listed_bytes : end]
        return self._chunks[self._verified]

    def close_block(self) -> None:
        """Check the block that has been filled.

        Raises:
            TransferError: it does not match its digest.
        """
        block = self.next_block()
        if self._listing:
            self._listed_bytes += len(block)
            whole = self._listed_bytes == len(self._digests)
            if whole and root_of(self._digests) != self._root:
                raise TransferError("corrupt: the list of digests does not match the offer")
            return
        place = DIGEST_BYTES * self._verified
        if blake3(block).digest() != self._digests[place : place + DIGEST_BYTES]:
            raise TransferError(f"corrupt: {self.position()} does not match its digest")
        self._verified += 1

    def position(self) -> str:
        """Say in words what is due next."""
        if not self._root:
            return "an offer"
        if self._listing:
            return "the list of digests"
        return f"chunk {self._verified + 1} of {len(self._chunks)}"

    def vectors(self) -> tuple[Tensor, Tensor]:
        """Return the parameters and the outer memory, fp32, once all is there.

        Raises:
            RuntimeError: it is not complete.
        """
        if not self.complete:
            raise RuntimeError("the state is not complete")
        theta, memory = self._vectors
        return theta, memory

    @property
    def _listing(self) -> bool:
        return self._listed_bytes < len(self._digests)

    @property
    def _known_root(self) -> bytes:
        return b"" if self._listing else self._root


def block_deadline_s(block_bytes: int, *, received_bytes: int, elapsed_s: float) -> float:
    """Return the seconds that the next block of a stream may take.

    `FIRST_BLOCK_S` before anything has come; then `PATIENCE` times what the rate of this stream
    predicts, between `MIN_BLOCK_S` and `MAX_BLOCK_S`.

    Args:
        block_bytes: size of the block.
        received_bytes: what came over this stream before it.
        elapsed_s: how long that took.
    """
    if not received_bytes:
        return FIRST_BLOCK_S
    predicted_s = block_bytes * elapsed_s / received_bytes
    return min(MAX_BLOCK_S, max(MIN_BLOCK_S, PATIENCE * predicted_s))


def _bytes_of(vector: Tensor) -> memoryview:
    return vector.detach().view(torch.uint8).numpy().data
