"""Which unit a peer reads after which: every peer goes its own way, and nobody is asked.

Source: docs/design.md section 6.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from blake3 import blake3

from gasloc_p2p.core.types import PeerId


class Place(NamedTuple):
    """Where a unit lies on a peer's way through a data set.

    Attributes:
        lap: how often everything has been read before.
        turn: how many shards have been read in this lap before.
        unit: number of the unit in its shard.
    """

    lap: int
    turn: int
    unit: int


def shards_in_order(names: Sequence[str], *, seed: int, peer_id: PeerId, lap: int) -> Sequence[str]:
    """Return the shards as a peer visits them: by a hash of (seed, lap, peer, name)."""
    hasher = blake3()
    for part in (str(seed), str(lap), peer_id):
        hasher.update(len(part.encode()).to_bytes(8, "little") + part.encode())

    def rank(name: str) -> bytes:
        own = hasher.copy()
        own.update(name.encode(errors="surrogateescape"))
        return own.digest()

    return sorted(names, key=rank)


def is_held_out(document: bytes, fraction: float) -> bool:
    """Whether a document, as UTF-8, is for validation: by its text alone, wherever it lies."""
    return int.from_bytes(blake3(document).digest(length=8), "little") < fraction * 2**64
