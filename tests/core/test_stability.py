"""Stability of the outer rules: the design's figures, and both against swarms that are run."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gasloc_p2p.core.errors import ConfigError, UnstableError
from gasloc_p2p.core.outer import OuterState, outer_rule
from gasloc_p2p.core.stability import check_stability, covariance_map, disagreement_map, radius
from gasloc_p2p.core.topology import Graph, build_graph

RULE_NAMES = ("nesterov", "local", "lookahead", "post-mix", "printed", "dadam", "noloco")
FIXED = ("complete", "cycle", "exponential", "none")
TOPOLOGIES = ("pairs", "ring", *FIXED)

Case = tuple[str, float, float, float, str, int, float]

# rule, lr, momentum, alpha, topology, peers, factor of the mean square disagreement per round
DESIGN_FIGURES: list[Case] = [
    ("nesterov", 0.7, 0.5, 1.0, "pairs", 32, 0.57),
    ("nesterov", 0.7, 0.7, 1.0, "pairs", 32, 0.72),
    ("nesterov", 0.7, 0.9, 1.0, "pairs", 32, 0.90),
    *(
        (rule, lr, momentum, 1.0, "pairs", 32, figure)
        for rule, lr in (("nesterov", 1.0), ("lookahead", 0.7), ("post-mix", 0.7))
        for momentum, figure in ((0.5, 0.70), (0.7, 0.90), (0.9, 1.12))
    ),
    ("printed", 0.7, 0.5, 1.0, "pairs", 32, 0.78),
    ("printed", 0.7, 0.7, 1.0, "pairs", 32, 0.98),
    ("printed", 0.7, 0.9, 1.0, "pairs", 32, 1.20),
    ("nesterov", 0.7, 0.9, 1.0, "ring", 32, 0.70),
    ("lookahead", 0.7, 0.9, 1.0, "ring", 32, 0.87),
    ("printed", 0.7, 0.9, 1.0, "ring", 32, 1.10),
]

OTHER_CASES: list[tuple[str, float, float, float, str, int]] = [
    ("local", 0.7, 0.9, 1.0, "pairs", 32),
    ("local", 0.7, 0.5, 1.0, "ring", 32),
    ("nesterov", 0.7, 0.9, 0.5, "pairs", 32),
    ("lookahead", 0.7, 0.9, 0.3, "ring", 8),
    ("post-mix", 0.7, 0.7, 0.8, "pairs", 8),
    ("printed", 0.7, 0.7, 0.6, "pairs", 9),
    ("nesterov", 0.7, 0.9, 1.0, "ring", 4),
]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Matrices this small lose more to a second thread than they gain."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("case", DESIGN_FIGURES, ids=str)
def test_figures_of_the_design(case: Case) -> None:
    rule, lr, momentum, alpha, topology, peers, figure = case
    assert radius(rule, lr, momentum, alpha, topology, peers) == pytest.approx(figure, abs=0.005)


def test_nesterov_at_eta_1_is_as_stable_as_lookahead() -> None:
    for momentum in np.linspace(0, 0.99, 12):
        nesterov = radius("nesterov", 1.0, momentum, 1.0, "pairs", 32)
        for rule in ("lookahead", "post-mix"):
            assert radius(rule, 0.7, momentum, 1.0, "pairs", 32) == pytest.approx(nesterov)


@pytest.mark.parametrize("count", [2, 8, 16, 32, 100])
def test_contraction_per_round_without_momentum(count: int) -> None:
    pairs = (count - 2) / (2 * (count - 1))
    ring = max(0, count - 3) / (3 * (count - 1))
    for rule in RULE_NAMES:
        assert radius(rule, 1.0, 0.0, 1.0, "pairs", count) == pytest.approx(pairs, abs=1e-12)
        assert radius(rule, 1.0, 0.0, 1.0, "ring", count) == pytest.approx(ring, abs=1e-12)


@pytest.mark.parametrize(
    ("rule", "momentum", "rate"),
    [
        ("lookahead", 0.893, 0.9457),
        ("post-mix", 0.893, 0.9457),
        ("printed", 0.890, 0.9434),
        ("nesterov", 0.910, 0.9526),
    ],
)
def test_best_momentum_on_the_fixed_cycle(rule: str, momentum: float, rate: float) -> None:
    assert radius(rule, 0.7, momentum, 1.0, "cycle", 64) == pytest.approx(rate, abs=5e-4)
    grid = np.linspace(0.85, 0.95, 401)
    rates = [radius(rule, 0.7, value, 1.0, "cycle", 64) for value in grid]
    assert min(rates) == pytest.approx(rate, abs=1.5e-4)
    assert grid[np.argmin(rates)] == pytest.approx(momentum, abs=1e-3)


def test_the_fixed_cycle_without_momentum() -> None:
    for rule in ("lookahead", "post-mix", "printed", "local"):
        assert radius(rule, 1.0, 0.0, 1.0, "cycle", 64) == pytest.approx(0.9968, abs=5e-5)


@pytest.mark.parametrize("rule", RULE_NAMES)
@pytest.mark.parametrize("topology", ["pairs", "ring", "complete", "cycle", "none"])
def test_no_number_of_peers_means_the_limit_of_many(rule: str, topology: str) -> None:
    for momentum in (0.0, 0.5, 0.9):
        many = radius(rule, 0.7, momentum, 0.8, topology, 100_001)
        assert radius(rule, 0.7, momentum, 0.8, topology) == pytest.approx(many, abs=1e-4)


@pytest.mark.parametrize("rule", RULE_NAMES)
@given(peers=st.integers(2, 100_000), momentum=st.floats(0.0, 0.99), alpha=st.floats(0.05, 1.0))
@settings(max_examples=20, deadline=None)
def test_the_limit_bounds_every_exponential_graph(
    rule: str, peers: int, momentum: float, alpha: float
) -> None:
    many = radius(rule, 0.7, momentum, alpha, "exponential")
    assert radius(rule, 0.7, momentum, alpha, "exponential", peers) <= many + 1e-9


def test_the_modes_of_exponential_graphs_tend_to_their_limits() -> None:
    def slowest(peers: int, lr: float) -> float:
        """Without momentum the nesterov rule's radius at eta is |1 - eta (1 - mode)|."""
        return radius("nesterov", lr, 0.0, 1.0, "exponential", peers)

    for exponent in (3, 5, 10, 20):
        assert slowest(2**exponent, 1.0) == pytest.approx(1 - 2 / exponent)
    # A step twice too long turns the lowest mode into the slowest: 1 - 2 (1 - mode).
    lowest = [1 - (1 + slowest(peers, 2.0)) / 2 for peers in (7, 63, 999, 4999, 10**6 + 1)]
    assert lowest == sorted(lowest, reverse=True)
    assert -0.5 < lowest[-1] < -0.46
    assert radius("nesterov", 2.0, 0.0, 1.0, "exponential") == pytest.approx(2.0)


@pytest.mark.parametrize("rule", RULE_NAMES)
@given(
    lr=st.floats(0.01, 2.0),
    momentum=st.floats(0.0, 0.99),
    alpha=st.floats(0.05, 1.0),
    topology=st.sampled_from(FIXED),
    count=st.integers(2, 14),
)
@settings(max_examples=30, deadline=None)
def test_fixed_graphs_against_every_mode_of_the_graph(
    rule: str, lr: float, momentum: float, alpha: float, topology: str, count: int
) -> None:
    graph = build_graph(topology, seed=3, round=0, peers=names(count))
    modes = np.linalg.eigvalsh(gossip_matrix(graph).numpy())[:-1]  # the last is the mean's
    a, b = disagreement_map(rule, lr, momentum)
    relaxed = 1 - alpha + alpha * modes[:, None, None]
    expected = np.abs(np.linalg.eigvals(a + relaxed * b)).max()
    assert radius(rule, lr, momentum, alpha, topology, count) == pytest.approx(expected, abs=1e-6)


Rows = tuple[tuple[float, float], tuple[float, float]]


def worked_out(rule: str, eta: float, gamma: float) -> tuple[Rows, Rows]:
    """A and B by hand, from the table of rules with g = 0."""
    pull = eta * (1 + gamma)
    maps: dict[str, tuple[Rows, Rows]] = {
        "nesterov": (((1 - pull, -eta * gamma**2), (1, gamma)), ((pull, 0), (-1, 0))),
        "local": (((0, 0), (0, gamma)), ((1, eta * gamma**2), (0, 0))),
        "lookahead": (((0, 0), (1, 0)), ((1 + gamma, -gamma), (0, 0))),
        "post-mix": (((0, -gamma), (0, 0)), ((1 + gamma, 0), (1, 0))),
        "printed": (((gamma, -gamma), (1, 0)), ((1, 0), (0, 0))),
        "dadam": (((0, 0), (0, 0)), ((1, 0), (0, 0))),
        "noloco": (((1 - eta, gamma), (-eta, gamma)), ((eta, 0), (eta, 0))),
    }
    return maps[rule]


@pytest.mark.parametrize("rule", RULE_NAMES)
@given(lr=st.floats(0.0, 10.0), momentum=st.floats(0.0, 0.999))
@settings(max_examples=30, deadline=None)
def test_the_map_is_the_one_worked_out_by_hand(rule: str, lr: float, momentum: float) -> None:
    for found, expected in zip(
        disagreement_map(rule, lr, momentum), worked_out(rule, lr, momentum), strict=True
    ):
        assert found.dtype == np.float64
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("rule", RULE_NAMES)
def test_the_map_is_what_the_rule_does(rule: str) -> None:
    matrix = gossip_matrix(build_graph("ring", seed=3, round=0, peers=names(7)))
    outer = outer_rule(rule, lr=0.6, momentum=0.8)
    before = torch.randn(2, 7, 5, dtype=torch.float64)
    after = advance(rule, 0.6, 0.8, 1.0, matrix, before)
    a, b = (torch.from_numpy(part) for part in disagreement_map(rule, 0.6, 0.8))
    expected = torch.einsum("ij,jpc->ipc", a, before) + torch.einsum(
        "ij,pq,jqc->ipc", b, matrix, before
    )
    torch.testing.assert_close(after, expected, rtol=1e-12, atol=1e-12)
    # Peers that agree on theta and start afresh stay where they are.
    theta = torch.randn(5, dtype=torch.float64).expand(7, 5)
    fresh = outer.initial(theta)
    mixed = matrix @ outer.outgoing(theta, theta, fresh)
    rest, _ = outer.step(theta, theta, mixed, fresh)
    torch.testing.assert_close(rest, theta, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", [*(case[:-1] for case in DESIGN_FIGURES), *OTHER_CASES], ids=str)
def test_monte_carlo_swarms_grow_by_the_radius(
    case: tuple[str, float, float, float, str, int],
) -> None:
    rule, lr, momentum, alpha, topology, count = case
    swarms, rounds = 160, 8
    matrices = drawn_matrices(topology, count, swarms * rounds).view(rounds, swarms, count, count)
    state = dominant_state(case, swarms)
    start = state.square().sum((0, 2, 3))
    for matrix in matrices:
        state = advance(rule, lr, momentum, alpha, matrix, state)
    growth = state.square().sum((0, 2, 3)) / start
    expected = radius(*case) ** rounds
    error = growth.std().item() / math.sqrt(swarms)
    assert growth.mean().item() == pytest.approx(expected, abs=4.5 * error)
    # The interval is narrow enough to tell the radius from its square root and from its neighbours.
    assert 4.5 * error / expected / rounds < 0.05


@given(
    rule=st.sampled_from(RULE_NAMES),
    topology=st.sampled_from(TOPOLOGIES),
    momentum=st.floats(0.0, 0.999),
    alpha=st.floats(0.01, 1.0),
    peers=st.none() | st.integers(1, 100),
)
@settings(max_examples=200, deadline=None)
def test_many_configurations_need_no_second_thought(
    rule: str, topology: str, momentum: float, alpha: float, peers: int | None
) -> None:
    """`local` is stable for every momentum below 1, and `none` leaves nothing to control."""
    check_stability("local", 0.7, momentum, alpha, topology, peers)
    check_stability(rule, 0.7, momentum, alpha, "none", peers)
    assert radius(rule, 0.7, momentum, alpha, topology, 1) == 0.0
    many = radius(rule, 0.7, momentum, alpha, "none", None)
    assert many == pytest.approx(1.0, abs=1e-9)


def limits(
    rule: str, lr: float, momentum: float, alpha: float, topology: str, peers: int | None = None
) -> dict[str, float]:
    """What a refusal proposes."""
    with pytest.raises(UnstableError) as refusal:
        check_stability(rule, lr, momentum, alpha, topology, peers)
    proposals = re.findall(r"outer\.(\w+) to at most ([\d.]+)", refusal.value.fix)
    return {key: float(value) for key, value in proposals}


def test_the_limits_of_the_design() -> None:
    # The design's figure of about .86 is that of 64 peers; fewer may step further.
    assert limits("nesterov", 1.0, 0.9, 1.0, "pairs", 64)["lr"] == pytest.approx(0.86, abs=0.001)
    assert limits("nesterov", 1.0, 0.9, 1.0, "pairs", 32)["lr"] == pytest.approx(0.873, abs=0.001)
    assert limits("nesterov", 1.0, 0.9, 1.0, "pairs")["lr"] == pytest.approx(0.847, abs=0.001)
    check_stability("nesterov", 0.7, 0.9, 1.0, "pairs")
    assert limits("printed", 0.7, 0.9, 1.0, "pairs").keys() == {"momentum"}
    assert limits("nesterov", 2.5, 0.9, 1.0, "pairs").keys() == {"lr"}


def test_the_refusal_states_what_why_and_how_to_mend_it() -> None:
    with pytest.raises(UnstableError) as refusal:
        check_stability("printed", 0.7, 0.9, 1.0, "pairs", 32)
    text = str(refusal.value)
    assert "'printed'" in text
    assert "'pairs'" in text
    assert "radius 1.198" in text
    assert "32 peers" in text
    assert "mean square disagreement grows 1.198-fold" in text
    with pytest.raises(UnstableError, match=r"many peers the peers' disagreement grows"):
        check_stability("nesterov", 1.8, 0.9, 1.0, "cycle")


@given(
    rule=st.sampled_from(RULE_NAMES),
    lr=st.floats(0.01, 5.0),
    momentum=st.floats(0.0, 0.999),
    alpha=st.floats(0.05, 1.0),
    topology=st.sampled_from(["pairs", "ring", "complete", "cycle", "exponential"]),
    peers=st.none() | st.integers(2, 100),
)
@settings(max_examples=300, deadline=None)
def test_what_a_refusal_proposes_is_accepted_and_is_the_limit(
    rule: str, lr: float, momentum: float, alpha: float, topology: str, peers: int | None
) -> None:
    if radius(rule, lr, momentum, alpha, topology, peers) <= 1 + 1e-9:
        check_stability(rule, lr, momentum, alpha, topology, peers)
        return
    proposed = limits(rule, lr, momentum, alpha, topology, peers)
    assert proposed
    for key, limit in proposed.items():
        above = limit + 0.0012
        if key == "lr":
            check_stability(rule, limit, momentum, alpha, topology, peers)
            refused = radius(rule, min(lr, above), momentum, alpha, topology, peers)
        else:
            check_stability(rule, lr, limit, alpha, topology, peers)
            refused = radius(rule, lr, min(momentum, above), alpha, topology, peers)
        assert refused > 1


def test_names_and_numbers_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError, match="'nestrov'"):
        radius("nestrov", 0.7, 0.9, 1.0, "pairs")
    with pytest.raises(ConfigError, match="'star'"):
        radius("nesterov", 0.7, 0.9, 1.0, "star")
    for lr, momentum, alpha in (
        (-0.1, 0.9, 1.0),
        (0.7, 1.0, 1.0),
        (0.7, -0.1, 1.0),
        (0.7, 0.9, 0.0),
        (0.7, 0.9, 1.1),
        (math.nan, 0.9, 1.0),
    ):
        with pytest.raises(ValueError, match="out of range: lr"):
            radius("nesterov", lr, momentum, alpha, "pairs")
    with pytest.raises(ValueError, match="0 peers"):
        radius("nesterov", 0.7, 0.9, 1.0, "pairs", 0)


def names(count: int) -> list[str]:
    return [f"12D3Koo{index:03d}" for index in range(count)]


def gossip_matrix(graph: Graph) -> Tensor:
    """W as fp64 [n, n]."""
    index = {peer: row for row, peer in enumerate(graph.peers)}
    matrix = np.eye(len(graph.peers))
    for a, b in graph.edges:
        i, j, weight = index[a], index[b], graph.weight(a, b)
        matrix[i, j] = matrix[j, i] = weight
        matrix[i, i] -= weight
        matrix[j, j] -= weight
    return torch.from_numpy(matrix)


@cache
def drawn_matrices(topology: str, count: int, rounds: int) -> Tensor:
    """W of so many rounds as fp64 [rounds, n, n]."""
    peers = names(count)
    graphs = (build_graph(topology, seed=11, round=t, peers=peers) for t in range(rounds))
    return torch.stack([gossip_matrix(graph) for graph in graphs])


def advance(
    rule: str, lr: float, momentum: float, alpha: float, matrix: Tensor, state: Tensor
) -> Tensor:
    """One round without gradients; `state` stacks theta and the memory, [2, ..., n, columns]."""
    outer = outer_rule(rule, lr=lr, momentum=momentum)
    theta, memory = state[0], OuterState(memory=state[1])
    outgoing = outer.outgoing(theta, theta, memory)
    mixed = outgoing + alpha * (matrix @ outgoing - outgoing)
    theta, memory = outer.step(theta, theta, mixed, memory)
    return torch.stack([theta, memory.memory])


def dominant_state(case: tuple[str, float, float, float, str, int], swarms: int) -> Tensor:
    """Random disagreement whose covariance grows by the radius from the first round on.

    Returns fp64 [2, swarms, n, 8].
    """
    rule, lr, momentum, alpha, topology, count = case
    a, b = disagreement_map(rule, lr, momentum)
    a, b = a + (1 - alpha) * b, alpha * b
    drawn = drawn_matrices(topology, count, 1280)
    # The trace without the mean's eigenvalue of 1, over the dimensions of the disagreement.
    mean_mode = (drawn.diagonal(dim1=1, dim2=2).sum(1).mean().item() - 1) / (count - 1)
    values, vectors = np.linalg.eig(covariance_map(a, b, mean_mode, mean_mode))
    covariance = vectors[:, np.abs(values).argmax()].real.reshape(2, 2)
    scales, axes = np.linalg.eigh(covariance * np.sign(np.trace(covariance)))
    factor = torch.from_numpy(axes * np.sqrt(np.maximum(scales, 0)))
    generator = torch.Generator().manual_seed(5)
    noise = torch.randn(2, swarms, count, 8, dtype=torch.float64, generator=generator)
    noise -= noise.mean(dim=2, keepdim=True)
    return torch.einsum("ij,j...->i...", factor, noise)
