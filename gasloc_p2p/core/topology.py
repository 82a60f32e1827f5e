"""Who exchanges with whom: every peer computes the same graph from the seed, without asking.

Order comes from hashes and never from a shuffle, so a peer that is missing from one view changes
few of the other peers' edges. Source: docs/design.md section 3. Topologies are found by name in
`TOPOLOGIES`, where `register_topology` puts one's own.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, groupby
from typing import Protocol, TypeVar

from gasloc_p2p.core.errors import ConfigError
from gasloc_p2p.core.registry import Registry
from gasloc_p2p.core.types import Edge, PeerId

MayPair = Callable[[PeerId, PeerId], bool]
"""Whether two peers can connect; asked with the smaller id first."""


class DrawEdges(Protocol):
    """Says who exchanges with whom in a round, from nothing but its arguments."""

    def __call__(
        self, peers: Sequence[PeerId], /, *, seed: int, round: int, may_pair: MayPair
    ) -> Iterable[Edge]:
        """Return the edges of one round.

        The ends of an edge come in either order. Repeated edges, edges from a peer to itself and
        edges that `may_pair` forbids are left out by `build_graph`.

        Args:
            peers: the round's roster, sorted.
            seed: the run's seed.
            round: round number.
            may_pair: whether two peers can connect; takes the smaller id first.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """A way to choose the edges of every round.

    Attributes:
        edges: chooses those of one round.
        redrawn: whether they are chosen anew in each round.
    """

    edges: DrawEdges
    redrawn: bool


TOPOLOGIES: Registry[Topology] = Registry("topology")
"""Every topology by name, the default first."""

D = TypeVar("D", bound=DrawEdges)


def register_topology(name: str, *, redrawn: bool = False) -> Callable[[D], D]:
    """Make a function that chooses edges known as the topology `name`; a decorator.

    Every peer calls the function by itself, so it must depend on nothing but its arguments. The
    stability of a topology that is not `redrawn` is that of its graph in round 0 with seed 0.
    For one that is, the mean square disagreement is computed from the means of tr(W) and tr(W^2),
    which assumes that rounds are drawn independently and that the draw favours no peer.

    Args:
        name: the topology's name in a configuration.
        redrawn: whether the edges differ from round to round.

    Raises:
        ConfigError: the name is malformed or taken.
    """

    def register(edges: D) -> D:
        TOPOLOGIES.register(name, Topology(edges=edges, redrawn=redrawn))
        return edges

    return register


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

    Args:
        topology: name of the topology.
        seed: the run's seed, shared by every peer.
        round: round number.
        peers: the round's roster.
        may_pair: whether two peers can connect; edges that it forbids are left out.

    Raises:
        ConfigError: there is no such topology, or it names a peer that is not in the roster.
    """
    members = tuple(sorted(set(peers)))
    candidates = TOPOLOGIES.named(topology).edges(
        members, seed=seed, round=round, may_pair=may_pair
    )
    ordered = sorted((a, b) if a < b else (b, a) for a, b in candidates)
    _check_ends(topology, members, ordered)
    edges = tuple((a, b) for (a, b), _ in groupby(ordered) if a != b and may_pair(a, b))
    return Graph(topology=topology, round=round, peers=members, edges=edges)


def _check_ends(topology: str, members: Sequence[PeerId], edges: Iterable[Edge]) -> None:
    strangers = set[PeerId]().union(*edges).difference(members)
    if strangers:
        raise ConfigError(
            f"the topology {topology!r} has an edge with {min(strangers)!r}",
            why="that peer is not among those that the topology was given",
            fix="make its edges from the peers of the round alone",
        )


@register_topology("pairs", redrawn=True)
def _pairs(
    peers: Sequence[PeerId], /, *, seed: int, round: int, may_pair: MayPair
) -> Iterable[Edge]:
    """One greedy matching per round."""
    allowed = [edge for edge in combinations(peers, 2) if may_pair(*edge)]
    return _greedy_matching(allowed, seed=seed, round=round)


@register_topology("ring", redrawn=True)
def _ring(
    peers: Sequence[PeerId], /, *, seed: int, round: int, may_pair: MayPair
) -> Iterable[Edge]:
    """One closed ring per round."""
    return _circulant(_in_hash_order(peers, seed, round), hops=(1,))


@register_topology("complete")
def _complete(
    peers: Sequence[PeerId], /, *, seed: int, round: int, may_pair: MayPair
) -> Iterable[Edge]:
    """Everybody with everybody."""
    return combinations(peers, 2)


@register_topology("cycle")
def _cycle(
    peers: Sequence[PeerId], /, *, seed: int, round: int, may_pair: MayPair
) -> Iterable[Edge]:
    """One closed ring for the whole run."""
    return _circulant(_in_hash_order(peers, seed), hops=(1,))


@register_topology("exponential")
def _exponential(
    peers: Sequence[PeerId], /, *, seed: int, round: int, may_pair: MayPair
) -> Iterable[Edge]:
    """The ring of `cycle` with links to the peers 2, 4, 8, ... places away on both sides.

    Source: Ying et al., "Exponential Graph is Provably Efficient for Decentralized Deep Training"
    (2021), the static exponential graph, with links both ways.
    """
    return _circulant(_in_hash_order(peers, seed), hops=exponential_hops(len(peers)))


@register_topology("none")
def _none(
    peers: Sequence[PeerId], /, *, seed: int, round: int, may_pair: MayPair
) -> Iterable[Edge]:
    """Nobody with anybody."""
    return ()


def exponential_hops(count: int) -> tuple[int, ...]:
    """Return the powers of two up to half of `count` peers."""
    return tuple(1 << exponent for exponent in range(count.bit_length() - 1))


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


def _circulant(order: Sequence[PeerId], *, hops: Iterable[int]) -> Iterable[Edge]:
    """Yield an edge from every peer of the closed ring `order` to those so many places further."""
    for hop in hops:
        for place, peer in enumerate(order):
            yield peer, order[(place + hop) % len(order)]


def _in_hash_order(peers: Iterable[PeerId], *salt: int) -> list[PeerId]:
    prefix = b"".join(map(_field, salt))
    return sorted(peers, key=lambda peer: _digest(prefix + _field(peer)))


def _field(value: int | str) -> bytes:
    """Return `value` as text after its length, so that neighbouring fields never run together."""
    text = str(value).encode()
    return len(text).to_bytes(8, "big") + text


def _digest(message: bytes) -> bytes:
    return hashlib.sha256(message).digest()
