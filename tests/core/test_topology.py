"""The graph of a round: its shape, its weights, and that everybody computes the same one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import sha256
from itertools import combinations

import networkx as nx  # type: ignore[import-untyped]  # networkx ships no type information
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from gasloc_p2p.core.errors import ConfigError
from gasloc_p2p.core.topology import (
    TOPOLOGIES,
    Graph,
    MayPair,
    build_graph,
    exponential_hops,
    register_topology,
)
from gasloc_p2p.core.types import Edge, PeerId

NAMES = ("pairs", "ring", "complete", "cycle", "exponential", "none")
topologies = st.sampled_from(NAMES)
seeds = st.integers(0, 2**63 - 1)
rounds = st.integers(0, 2**31 - 1)
rosters = st.sets(st.text("123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdef", min_size=1), max_size=12)


def names(count: int) -> list[PeerId]:
    return [f"12D3Koo{index:03d}" for index in range(count)]


def forbidding(forbidden: Iterable[Edge]) -> MayPair:
    refused = frozenset(forbidden)

    def may_pair(a: PeerId, b: PeerId) -> bool:
        assert a < b, "peers are asked about in one order only"
        return (a, b) not in refused

    return may_pair


@st.composite
def rosters_with_forbidden_edges(draw: st.DrawFn) -> tuple[list[PeerId], MayPair]:
    peers = sorted(draw(rosters))
    edges = list(combinations(peers, 2))
    refused = draw(st.sets(st.sampled_from(edges)) if edges else st.just(set[Edge]()))
    return peers, forbidding(refused)


@given(topology=topologies, seed=seeds, round=rounds, case=rosters_with_forbidden_edges())
@settings(max_examples=120, deadline=None)
def test_graphs_are_simple_allowed_symmetric_and_of_bounded_degree(
    topology: str, seed: int, round: int, case: tuple[list[PeerId], MayPair]
) -> None:
    peers, may_pair = case
    graph = build_graph(topology, seed=seed, round=round, peers=peers, may_pair=may_pair)
    assert (graph.topology, graph.round, graph.peers) == (topology, round, tuple(peers))
    assert list(graph.edges) == sorted(set(graph.edges))
    for a, b in graph.edges:
        assert a < b
        assert may_pair(a, b)
    everybody = max(0, len(peers) - 1)
    bound = {"pairs": 1, "ring": 2, "cycle": 2, "complete": everybody, "none": 0}
    bound["exponential"] = min(everybody, 2 * len(exponential_hops(len(peers))))
    for peer in peers:
        neighbours = graph.neighbours(peer)
        assert list(neighbours) == sorted(set(neighbours))
        assert len(neighbours) <= bound[topology]
        assert all(peer in graph.neighbours(other) for other in neighbours)
        assert all((min(peer, other), max(peer, other)) in graph.edges for other in neighbours)


@given(topology=topologies, seed=seeds, round=rounds, case=rosters_with_forbidden_edges())
@settings(max_examples=120, deadline=None)
def test_weights_are_symmetric_and_doubly_stochastic(
    topology: str, seed: int, round: int, case: tuple[list[PeerId], MayPair]
) -> None:
    peers, may_pair = case
    graph = build_graph(topology, seed=seed, round=round, peers=peers, may_pair=may_pair)
    for peer in peers:
        given_away = sum(graph.weight(peer, other) for other in graph.neighbours(peer))
        # What stays with the peer is positive, so every row, and by symmetry every column, is
        # a distribution.
        assert given_away < 1.0
        for other in graph.neighbours(peer):
            assert 0.0 < graph.weight(peer, other) == graph.weight(other, peer)


@given(
    topology=topologies,
    seed=seeds,
    round=rounds,
    case=rosters_with_forbidden_edges(),
    data=st.data(),
)
@settings(max_examples=120, deadline=None)
def test_every_peer_computes_the_same_graph(
    topology: str,
    seed: int,
    round: int,
    case: tuple[list[PeerId], MayPair],
    data: st.DataObject,
) -> None:
    peers, may_pair = case
    shuffled = data.draw(st.permutations(peers))
    repeated = shuffled + shuffled[:2]
    graph = build_graph(topology, seed=seed, round=round, peers=peers, may_pair=may_pair)
    assert graph == build_graph(
        topology, seed=seed, round=round, peers=iter(repeated), may_pair=may_pair
    )


def is_one_closed_ring(graph: Graph) -> bool:
    drawn = nx.Graph(list(graph.edges))
    return (
        len(drawn) == len(graph.peers)
        and nx.is_connected(drawn)
        and all(len(graph.neighbours(peer)) == 2 for peer in graph.peers)
    )


@pytest.mark.parametrize("topology", ["ring", "cycle"])
def test_a_ring_is_closed_and_small_ones_are_what_remains(topology: str) -> None:
    for count in range(3, 20):
        graph = build_graph(topology, seed=1, round=2, peers=names(count))
        assert is_one_closed_ring(graph)
        assert {graph.weight(a, b) for a, b in graph.edges} == {1 / 3}
    for count in range(3):
        graph = build_graph(topology, seed=1, round=2, peers=names(count))
        assert graph.edges == tuple(combinations(names(count), 2))
    pair = build_graph(topology, seed=1, round=2, peers=names(2))
    assert pair.weight(*pair.edges[0]) == 1 / 2
    three = build_graph(topology, seed=1, round=2, peers=names(3))
    assert three.edges == build_graph("complete", seed=1, round=2, peers=names(3)).edges


@pytest.mark.parametrize(
    ("count", "degree"),
    # Half way round a ring of 4, 8 or 16 is one place, whichever way one goes.
    [(1, 0), (2, 1), (3, 2), (4, 3), (5, 4), (6, 4), (7, 4), (8, 5), (9, 6), (16, 7), (17, 8)],
)
def test_exponential_graphs_are_regular(count: int, degree: int) -> None:
    graph = build_graph("exponential", seed=1, round=2, peers=names(count))
    assert {len(graph.neighbours(peer)) for peer in names(count)} == {degree}
    assert len(graph.edges) == count * degree / 2
    assert all(graph.weight(a, b) == 1 / (1 + degree) for a, b in graph.edges)
    if count <= 5:
        assert graph.edges == build_graph("complete", seed=1, round=2, peers=names(count)).edges


@given(seed=seeds, count=st.integers(1, 70))
@settings(max_examples=60, deadline=None)
def test_exponential_graphs_mix_well(seed: int, count: int) -> None:
    graph = build_graph("exponential", seed=seed, round=0, peers=names(count))
    drawn = nx.Graph(list(graph.edges))
    drawn.add_nodes_from(graph.peers)
    assert nx.is_connected(drawn)
    # Every binary digit of a distance is one hop.
    assert nx.diameter(drawn) <= max(0, count.bit_length() - 1)
    weights = gossip_matrix(graph)
    assert (weights == weights.T).all()
    assert weights.min() >= 0
    assert weights.sum(axis=0) == pytest.approx(np.ones(count), abs=1e-12)
    cycle = gossip_matrix(build_graph("cycle", seed=seed, round=0, peers=names(count)))
    assert spectral_gap(weights) >= spectral_gap(cycle) - 1e-12
    if count >= 8:
        assert spectral_gap(weights) > 1.5 * spectral_gap(cycle)


def gossip_matrix(graph: Graph) -> NDArray[np.float64]:
    index = {peer: row for row, peer in enumerate(graph.peers)}
    weights = np.zeros((len(index), len(index)))
    for a, b in graph.edges:
        weights[index[a], index[b]] = graph.weight(a, b)
        weights[index[b], index[a]] = graph.weight(b, a)
    np.fill_diagonal(weights, 1 - weights.sum(axis=1))
    return weights


def spectral_gap(weights: NDArray[np.float64]) -> float:
    """How much of the slowest disagreement goes in a round."""
    modes = np.linalg.eigvalsh(weights)[:-1]
    return 1.0 - float(np.abs(modes).max(initial=0.0))


def test_a_topology_of_ones_own_is_made_simple() -> None:
    @register_topology("test-topology-star")
    def star(
        peers: Sequence[PeerId], /, *, seed: int, round: int, may_pair: MayPair
    ) -> Iterable[Edge]:
        hub = peers[seed % len(peers)]
        assert list(peers) == sorted(peers)
        for peer in peers:
            yield hub, peer
            yield peer, hub

    def may_pair(a: PeerId, b: PeerId) -> bool:
        assert a < b
        return a != names(4)[0]

    assert callable(star), "the function is still there to be called"
    assert not TOPOLOGIES.named("test-topology-star").redrawn
    peers = names(4)
    graph = build_graph("test-topology-star", seed=2, round=0, peers=reversed(peers))
    hub = peers[2]
    assert graph.edges == ((peers[0], hub), (peers[1], hub), (hub, peers[3]))
    assert {graph.weight(*edge) for edge in graph.edges} == {1 / 4}
    partial = build_graph("test-topology-star", seed=2, round=0, peers=peers, may_pair=may_pair)
    assert partial.edges == graph.edges[1:]


def test_a_topology_that_invents_peers_is_refused() -> None:
    @register_topology("test-topology-stranger", redrawn=True)
    def stranger(
        peers: Sequence[PeerId], /, *, seed: int, round: int, may_pair: MayPair
    ) -> Iterable[Edge]:
        return [(peers[0], "somebody")]

    assert TOPOLOGIES.named("test-topology-stranger").redrawn
    with pytest.raises(ConfigError, match="'test-topology-stranger' has an edge with 'somebody'"):
        build_graph("test-topology-stranger", seed=0, round=0, peers=names(2))


@pytest.mark.parametrize("count", range(1, 20))
def test_sizes_and_weights(count: int) -> None:
    peers = names(count)
    pairs = build_graph("pairs", seed=5, round=1, peers=peers)
    assert len(pairs.edges) == count // 2
    assert all(pairs.weight(a, b) == 1 / 2 for a, b in pairs.edges)
    complete = build_graph("complete", seed=5, round=1, peers=peers)
    assert complete.edges == tuple(combinations(peers, 2))
    assert all(complete.weight(a, b) == 1 / count for a, b in complete.edges)
    assert build_graph("none", seed=5, round=1, peers=peers).edges == ()


def test_an_irregular_graph_takes_the_larger_degree() -> None:
    hub, *others = names(5)

    def may_pair(a: PeerId, b: PeerId) -> bool:
        return a == hub or (a, b) == (others[0], others[1])

    graph = build_graph("complete", seed=5, round=1, peers=names(5), may_pair=may_pair)
    assert [graph.weight(hub, other) for other in others] == [1 / 5] * 4
    assert graph.weight(others[0], others[1]) == graph.weight(others[1], others[0]) == 1 / 3


def test_a_stranger_has_no_neighbours_and_an_absent_edge_no_weight() -> None:
    graph = build_graph("pairs", seed=5, round=1, peers=names(4))
    assert graph.neighbours("stranger") == ()
    (partner,) = graph.neighbours(names(4)[0])
    other = next(peer for peer in names(4)[1:] if peer != partner)
    for absent in (other, names(4)[0], "stranger"):
        with pytest.raises(ValueError, match="no edge"):
            graph.weight(names(4)[0], absent)


def test_an_unknown_topology_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'star'") as refusal:
        build_graph("star", seed=1, round=1, peers=names(4))
    assert all(repr(topology) in refusal.value.fix for topology in TOPOLOGIES.names)


def test_topologies_are_found_by_name() -> None:
    assert TOPOLOGIES.names[:6] == NAMES, "the default comes first"
    redrawn = {name for name in NAMES if TOPOLOGIES.named(name).redrawn}
    assert redrawn == {"pairs", "ring"}


def test_random_graphs_change_with_seed_and_round_and_fixed_ones_with_the_seed_only() -> None:
    peers = names(16)
    for topology in ("pairs", "ring"):
        drawn = {
            build_graph(topology, seed=seed, round=round, peers=peers).edges
            # 1 and 23 written one after the other look like 12 and 3.
            for seed, round in ((1, 23), (12, 3), (1, 24), (2, 23))
        }
        assert len(drawn) == 4
    for topology in ("cycle", "exponential"):
        graphs = [build_graph(topology, seed=1, round=t, peers=peers).edges for t in range(5)]
        assert len(set(graphs)) == 1
        assert build_graph(topology, seed=2, round=0, peers=peers).edges != graphs[0]


def digest(*fields: object) -> bytes:
    texts = [str(field).encode() for field in fields]
    return sha256(b"".join(len(text).to_bytes(8, "big") + text for text in texts)).digest()


def closed(order: Sequence[PeerId]) -> list[Edge]:
    ring = zip(order, [*order[1:], order[0]], strict=True)
    return sorted((min(a, b), max(a, b)) for a, b in ring)


@given(seed=seeds, round=rounds, count=st.integers(3, 12))
@settings(max_examples=50, deadline=None)
def test_graphs_follow_the_hashes_that_every_version_must_share(
    seed: int, round: int, count: int
) -> None:
    peers = names(count)
    ring = build_graph("ring", seed=seed, round=round, peers=peers)
    assert list(ring.edges) == closed(sorted(peers, key=lambda peer: digest(seed, round, peer)))
    cycle = build_graph("cycle", seed=seed, round=round, peers=peers)
    assert list(cycle.edges) == closed(sorted(peers, key=lambda peer: digest(seed, peer)))
    order = sorted(peers, key=lambda peer: digest(seed, peer))
    exponential = build_graph("exponential", seed=seed, round=round, peers=peers)
    powers = [power for power in (1, 2, 4) if 2 * power <= count]
    jumps = [(order[k], order[k - power]) for k in range(count) for power in powers]
    assert list(exponential.edges) == sorted({(min(jump), max(jump)) for jump in jumps})
    matching: list[Edge] = []
    free = set(peers)
    for edge in sorted(combinations(peers, 2), key=lambda edge: digest(seed, round, *edge)):
        if free.issuperset(edge):
            matching.append(edge)
            free.difference_update(edge)
    pairs = build_graph("pairs", seed=seed, round=round, peers=peers)
    assert list(pairs.edges) == sorted(matching)


@pytest.mark.parametrize(
    ("topology", "kept_share", "tolerance"), [("ring", 0.97, 0.005), ("pairs", 0.92, 0.015)]
)
def test_a_peer_missing_from_one_view_changes_few_edges(
    topology: str, kept_share: float, tolerance: float
) -> None:
    peers = names(64)
    kept = total = 0
    for round in range(64):
        partial = [peer for index, peer in enumerate(peers) if index != round]
        whole = set(build_graph(topology, seed=3, round=round, peers=peers).edges)
        kept += len(whole & set(build_graph(topology, seed=3, round=round, peers=partial).edges))
        total += len(whole)
    assert kept / total == pytest.approx(kept_share, abs=tolerance)


def allowed_edges(peers: Sequence[PeerId], may_pair: MayPair) -> list[Edge]:
    return [edge for edge in combinations(peers, 2) if may_pair(*edge)]


@given(seed=seeds, round=rounds, case=rosters_with_forbidden_edges())
@settings(max_examples=200, deadline=None)
def test_the_matching_is_maximal_whoever_may_pair(
    seed: int, round: int, case: tuple[list[PeerId], MayPair]
) -> None:
    peers, may_pair = case
    graph = build_graph("pairs", seed=seed, round=round, peers=peers, may_pair=may_pair)
    matched = {peer for edge in graph.edges for peer in edge}
    assert all(matched.intersection(edge) for edge in allowed_edges(peers, may_pair))


@given(
    seed=seeds,
    round=rounds,
    levels=st.lists(st.integers(0, 3), max_size=16),
    needed=st.integers(1, 5),
)
@settings(max_examples=300, deadline=None)
def test_reachability_classes_get_a_maximum_matching(
    seed: int, round: int, levels: list[int], needed: int
) -> None:
    """Two peers connect when their ease of reach adds up: private, relayed, public and the like."""
    peers = names(len(levels))
    level = dict(zip(peers, levels, strict=True))

    def may_pair(a: PeerId, b: PeerId) -> bool:
        return level[a] + level[b] >= needed

    graph = build_graph("pairs", seed=seed, round=round, peers=peers, may_pair=may_pair)
    most = nx.max_weight_matching(nx.Graph(allowed_edges(peers, may_pair)), maxcardinality=True)
    assert len(graph.edges) == len(most)


def test_the_least_reachable_peers_are_matched_first() -> None:
    peers = names(20)
    private = set(peers[::2])
    public = set(peers[:6]) - private

    def may_pair(a: PeerId, b: PeerId) -> bool:
        return a not in private or b not in private

    for round in range(50):
        roster = private | public
        graph = build_graph("pairs", seed=9, round=round, peers=roster, may_pair=may_pair)
        # Three public peers for ten private ones: none is spent on another public peer.
        assert len(graph.edges) == len(public)
        assert all(len(private.intersection(edge)) == 1 for edge in graph.edges)
    partners = {
        edge
        for round in range(50)
        for edge in build_graph(
            "pairs", seed=9, round=round, peers=private | public, may_pair=may_pair
        ).edges
    }
    # Over the rounds everybody meets everybody who can be met.
    assert len(partners) == len(public) * len(private)
