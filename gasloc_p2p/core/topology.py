"""Who exchanges with whom: every peer computes the same graph from the seed, without asking.

Order comes from hashes and never from a shuffle, so a peer that is missing from one view changes
few of the other peers' edges. Source: docs/design.md section 3.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

from gasloc_p2p.core.errors import ConfigError
from gasloc_p2p.core.types import Edge, PeerId

MayPair = Callable[[PeerId, PeerId], bool]
"""Whether two peers can connect; asked with the smaller id first."""

TOPOLOGIES: tuple[str, ...] = ("pairs", "ring", "complete", "cycle", "none")
"""Every topology by name, the default first."""


def require_topology(topology: str) -> None:
    """Check that `topology` is the name of a topology.

    Raises:
        ConfigError: it is not.
    """
    if topology not in TOPOLOGIES:
        raise ConfigError(
            f"there is no topology {topology!r}", fix=f"use one of {', '.join(TOPOLOGIES)}"
        )


@dataclass(frozen=True, kw_only=True)
class Graph:
    """The undirected exchange graph of one round.

    Attributes:
        topology: name of the topology.
        round: round number.
        peers: every peer of the round, sorted.
        edges: every edge once, as (a, b) with a < b, sorted.
    """

    topology: str
    round: int
    peers: tuple[PeerId, ...]
    edges: tuple[Edge, ...]

    @cached_property
    def _neighbours(self) -> dict[PeerId, tuple[PeerId, ...]]:
        found: dict[PeerId, list[PeerId]] = {peer: [] for peer in self.peers}
        for a, b in self.edges:
            found[a].append(b)
            found[b].append(a)
        return {peer: tuple(sorted(partners)) for peer, partners in found.items()}

    def neighbours(self, peer: PeerId) -> tuple[PeerId, ...]:
        """Return the peers that `peer` exchanges with, sorted; a stranger to the graph has none."""
        return self._neighbours.get(peer, ())

    def weight(self, a: PeerId, b: PeerId) -> float:
        """Return the Metropolis weight W_ab = 1 / (1 + the larger degree of the two).

        W is symmetric and doubly stochastic with W_aa = 1 - sum_b W_ab, and uniform over the
        closed neighbourhood on regular graphs: 1/2 in a pair, 1/3 in a ring, 1/n when complete.
        Source: docs/design.md section 2; Xiao and Boyd, "Fast linear iterations for distributed
        averaging" (2004).

        Raises:
            ValueError: a and b share no edge.
        """
        if b not in self.neighbours(a):
            raise ValueError(f"round {self.round} has no edge between {a} and {b}")
        return 1.0 / (1 + max(len(self.neighbours(a)), len(self.neighbours(b))))


def _anyone(_a: PeerId, _b: PeerId) -> bool:
    return True


def build_graph(
    topology: str,
    *,
    seed: int,
    round: int,
    peers: Iterable[PeerId],
    may_pair: MayPair = _anyone,
) -> Graph:
    """Return the graph of one round, the same whatever the order in which peers are given.

    `pairs` draws one greedy matching per round, `ring` one closed ring per round, `cycle` one ring
    for the whole run; `complete` joins everyone, `none` no one. Edges of a ring, a cycle or a
    complete graph that `may_pair` forbids are left out. Source: docs/design.md section 3.

    Args:
        topology: one of `TOPOLOGIES`.
        seed: the run's seed, shared by every peer.
        round: round number.
        peers: the round's roster.
        may_pair: whether two peers can connect.

    Raises:
        ConfigError: there is no such topology.
    """
    require_topology(topology)
    members = tuple(sorted(set(peers)))
    candidates: Iterable[Edge]
    match topology:
        case "pairs":
            allowed = [edge for edge in combinations(members, 2) if may_pair(*edge)]
            candidates = _greedy_matching(allowed, seed=seed, round=round)
        case "ring":
            candidates = _closed_ring(members, prefix=_field(seed) + _field(round))
        case "cycle":
            candidates = _closed_ring(members, prefix=_field(seed))
        case "complete":
            candidates = combinations(members, 2)
        case _:
            candidates = ()
    edges = tuple(sorted(edge for edge in candidates if may_pair(*edge)))
    return Graph(topology=topology, round=round, peers=members, edges=edges)


def _greedy_matching(allowed: Sequence[Edge], *, seed: int, round: int) -> list[Edge]:
    """Return a maximal matching: edges in hash order, those of the least reachable peers first.

    The first key is how many partners the less reachable end of an edge has. Where everyone may
    meet it is the same for all, which leaves the plain hash order. Where reachability is nested
    (whoever reaches a peer also reaches every peer that is easier to reach), the peers that may
    meet the least reachable one may meet everybody, so it costs nothing to spend any of them on
    it, and the matching is a maximum one.
    """
    partners = Counter(peer for edge in allowed for peer in edge)
    prefix = _field(seed) + _field(round)
    encoded = {peer: _field(peer) for peer in partners}

    def order(edge: Edge) -> tuple[int, bytes]:
        a, b = edge
        return min(partners[a], partners[b]), _digest(prefix + encoded[a] + encoded[b])

    matched: set[PeerId] = set()
    matching = []
    for edge in sorted(allowed, key=order):
        if matched.isdisjoint(edge):
            matched.update(edge)
            matching.append(edge)
    return matching


def _closed_ring(members: Sequence[PeerId], *, prefix: bytes) -> set[Edge]:
    """Return the edges of the ring of `members` in hash order (one for two peers, none for one)."""
    order = sorted(members, key=lambda peer: _digest(prefix + _field(peer)))
    following = order[1:] + order[:1]
    return {(min(a, b), max(a, b)) for a, b in zip(order, following, strict=True) if a != b}


def _field(value: int | str) -> bytes:
    """Return `value` as text after its length, so that neighbouring fields never run together."""
    text = str(value).encode()
    return len(text).to_bytes(8, "big") + text


def _digest(message: bytes) -> bytes:
    return hashlib.sha256(message).digest()
