"""How much of the same text peers have trained on."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, takewhile
from pathlib import Path

from gasloc_p2p.data.shelf import Entry, read_entries


def units_trained_on(folder: Path, tokens: int) -> frozenset[str]:
    """Return names of the units that the first so many tokens of a peer's stream came from.

    Args:
        folder: what the peer keeps of its text; see `Shelf`.
        tokens: how many it has trained on.
    """
    begun = 0

    def is_begun(entry: Entry) -> bool:
        nonlocal begun
        begins, begun = begun, begun + entry.tokens
        return begins < tokens

    return frozenset(e.name for e in takewhile(is_begun, read_entries(folder)) if e.tokens)


def overlap(peers: Sequence[frozenset[str]]) -> float | None:
    """Return the share of its units that a peer has in common with another one.

    Of two peers, it is that of the one with fewer units; the mean over all pairs is returned, and
    None when there are no two peers with units.
    """
    shares = [
        len(one & other) / min(len(one), len(other))
        for one, other in combinations(peers, 2)
        if one and other
    ]
    return sum(shares) / len(shares) if shares else None
