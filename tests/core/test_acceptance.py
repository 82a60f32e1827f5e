"""The binding figures of docs/design.md section 2, Acceptance, in fp64 on real graphs and rules."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gasloc_p2p.core.outer import MixPart, OuterRule, OuterState, mix, outer_rule
from gasloc_p2p.core.topology import Graph, build_graph

TOPOLOGIES = ("pairs", "ring", "complete", "cycle", "exponential", "none")
EXACT_RULES = ("nesterov", "local", "lookahead", "post-mix")

Wire = Callable[[Tensor], Tensor]
"""What arrives when a tensor is sent."""


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Matrices this small lose more to a second thread than they gain."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_peers_that_train_alone_drift_apart() -> None:
    """So that agreement in the tests below is the exchange's doing and not the data's."""
    swarm = Swarm("nesterov", "none", peers=8)
    swarm.run_rounds(5, InnerLoop(peers=8, optimizer="sgd"))
    assert swarm.consensus_distance() > 1e-2


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("rule", EXACT_RULES)
def test_the_complete_graph_is_exact_diloco(rule: str, optimizer: str) -> None:
    swarm = Swarm(rule, "complete", peers=8)
    furthest = 0.0
    reference = diloco(InnerLoop(peers=8, optimizer=optimizer), swarm.theta[0])
    inner = InnerLoop(peers=8, optimizer=optimizer)
    for expected, _ in zip(reference, range(30), strict=False):
        swarm.run_rounds(1, inner)
        differences = (swarm.theta - expected).norm(dim=1) / expected.norm()
        furthest = max(furthest, differences.max().item())
    assert furthest < 1e-12


def test_printed_is_not_diloco_and_its_peers_stay_apart_on_the_complete_graph() -> None:
    swarm = Swarm("printed", "complete", peers=8)
    swarm.run_rounds(30, InnerLoop(peers=8, optimizer="sgd"))
    assert swarm.consensus_distance() > 1e-3


@pytest.mark.parametrize(
    ("topology", "peers", "rate"),
    [
        ("pairs", 8, 0.4286),
        ("pairs", 16, 0.4667),
        ("pairs", 32, 0.4839),
        ("ring", 8, 0.2381),
        ("ring", 16, 0.2889),
        ("ring", 32, 0.3118),
    ],
)
def test_contraction_per_round(topology: str, peers: int, rate: float) -> None:
    rounds = 8000 // peers
    rule = outer_rule("nesterov", lr=1.0, momentum=0.0)
    start = torch.randn(peers, 1, dtype=torch.float64, generator=seeded(2))
    start -= start.mean()
    left = []
    for t in range(rounds):
        graph = build_graph(topology, seed=4, round=t, peers=names(peers))
        theta, _ = round_of(rule, graph, start, start, rule.initial(start))
        left.append((theta.square().sum() / start.square().sum()).item())
    shares = torch.tensor(left, dtype=torch.float64)
    error = shares.std().item() / math.sqrt(rounds)
    assert error < 0.01
    assert shares.mean().item() == pytest.approx(rate, abs=4 * error)


@pytest.mark.parametrize(
    ("peers", "rate"),
    # With 2^m peers it is 1 - 2/m; any others are told by their slowest wave.
    [(8, 1 / 3), (16, 1 / 2), (32, 3 / 5), (64, 2 / 3), (6, None), (13, None), (50, None)],
)
def test_contraction_per_round_on_the_exponential_graph(peers: int, rate: float | None) -> None:
    powers = [power for power in (1, 2, 4, 8, 16, 32) if 2 * power <= peers]
    places = {place % peers for power in powers for place in (power, -power)}
    slowest = max(
        abs(1 + sum(math.cos(math.tau * wave * place / peers) for place in places))
        for wave in range(1, peers)
    ) / (1 + len(places))
    rule = outer_rule("nesterov", lr=1.0, momentum=0.0)
    graph = build_graph("exponential", seed=4, round=0, peers=names(peers))
    theta = torch.randn(peers, 3, dtype=torch.float64, generator=seeded(2))
    shares = []
    for _ in range(300):
        # Rounding brings a little of the mean back.
        theta = (theta - theta.mean(0)) / theta.norm()
        before = theta.norm().item()
        theta, _ = round_of(rule, graph, theta, theta, rule.initial(theta))
        shares.append(theta.norm().item() / before)
    assert max(shares) <= slowest + 1e-12
    assert shares[-1] == pytest.approx(slowest, abs=1e-6)
    assert rate is None or slowest == pytest.approx(rate, abs=1e-12)


@pytest.mark.parametrize(
    ("rule", "momentum", "rate"),
    [
        ("nesterov", 0.910, 0.9526),
        ("lookahead", 0.893, 0.9457),
        ("post-mix", 0.893, 0.9457),
        ("printed", 0.890, 0.9434),
        ("local", 0.0, 0.9968),
        ("lookahead", 0.0, 0.9968),
    ],
)
def test_rate_on_the_fixed_cycle(rule: str, momentum: float, rate: float) -> None:
    one_round = map_of_one_round(outer_rule(rule, lr=0.7, momentum=momentum), "cycle", peers=64)
    # Squared 20 times it stands for 2^20 rounds; the growth taken out is kept as a logarithm.
    log_norm = 0.0
    for _ in range(20):
        scale = one_round.norm()
        one_round = (one_round / scale) @ (one_round / scale)
        log_norm = 2 * (log_norm + math.log(scale))
    measured = math.exp((log_norm + math.log(one_round.norm())) / 2**20)
    # nesterov's best momentum is .9095; the design rounds it to .910, which costs .0003.
    assert measured == pytest.approx(rate, abs=4e-4 if rule == "nesterov" else 6e-5)


def test_momentum_at_its_best_beats_none_on_the_fixed_cycle() -> None:
    swarms = [Swarm("lookahead", "cycle", peers=64, momentum=m) for m in (0.0, 0.893)]
    for swarm in swarms:
        swarm.theta = torch.randn(64, 1, dtype=torch.float64, generator=seeded(3))
        swarm.state = swarm.rule.initial(swarm.theta)
        swarm.run_rounds(200, identity)
    assert swarms[1].consensus_distance() < 1e-2 * swarms[0].consensus_distance()


def test_printed_diverges_on_random_pairs_and_nesterov_does_not() -> None:
    distances: dict[str, list[float]] = {}
    for rule in ("printed", "nesterov"):
        swarm = Swarm(rule, "pairs", peers=16)
        inner = InnerLoop(peers=16, optimizer="sgd")
        distances[rule] = []
        for _ in range(3):
            swarm.run_rounds(40, inner)
            distances[rule].append(swarm.consensus_distance())
    assert all(after > 5 * before for before, after in pairwise(distances["printed"]))
    assert max(distances["nesterov"]) < 1.0


def test_printed_diverges_without_gradients_too() -> None:
    for rule, diverges in (("printed", True), ("nesterov", False)):
        swarm = Swarm(rule, "pairs", peers=32)
        swarm.theta = torch.randn(32, 4, dtype=torch.float64, generator=seeded(3))
        swarm.state = swarm.rule.initial(swarm.theta)
        before = swarm.consensus_distance()
        swarm.run_rounds(150, identity)
        assert (swarm.consensus_distance() > 1e3 * before) == diverges
        assert (swarm.consensus_distance() < 1e-3 * before) == (not diverges)


@given(
    topology=st.sampled_from(TOPOLOGIES),
    peers=st.integers(1, 12),
    alpha=st.floats(0.01, 1.0),
    round=st.integers(0, 1000),
    lossy=st.booleans(),
    data=st.data(),
)
@settings(max_examples=150, deadline=None)
def test_no_mix_moves_the_mean_of_the_swarm(
    topology: str, peers: int, alpha: float, round: int, lossy: bool, data: st.DataObject
) -> None:
    graph = build_graph(topology, seed=6, round=round, peers=names(peers))
    lost = data.draw(st.sets(st.sampled_from(graph.edges)) if graph.edges else st.just(set()))
    sent = torch.randn(peers, 50, dtype=torch.float64, generator=seeded(round))
    mixed = mixed_rows(graph, sent, alpha=alpha, wire=bf16 if lossy else identity, lost=lost)
    torch.testing.assert_close(mixed.mean(0), sent.mean(0), rtol=0, atol=1e-14)


def test_mixing_with_the_exact_own_tensor_would_move_the_mean() -> None:
    graph = build_graph("ring", seed=6, round=0, peers=names(8))
    sent = torch.randn(8, 50, dtype=torch.float64, generator=seeded(1))
    kept = mixed_rows(graph, sent, wire=bf16)
    moved = mixed_rows(graph, sent, wire=bf16, own_wire=identity)
    assert (kept.mean(0) - sent.mean(0)).abs().max().item() < 1e-14
    assert (moved.mean(0) - sent.mean(0)).abs().max().item() > 1e-4


def names(count: int) -> list[str]:
    return [f"12D3Koo{index:03d}" for index in range(count)]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def identity(tensor: Tensor) -> Tensor:
    return tensor


def bf16(tensor: Tensor) -> Tensor:
    return tensor.bfloat16().to(tensor.dtype)


def mixed_rows(
    graph: Graph,
    sent: Tensor,
    *,
    alpha: float = 1.0,
    wire: Wire = identity,
    own_wire: Wire | None = None,
    lost: set[tuple[str, str]] | frozenset[tuple[str, str]] = frozenset(),
) -> Tensor:
    """Every peer's mix of `sent` [n, P], each from its own neighbours alone."""
    rows = dict(zip(graph.peers, sent, strict=True))
    mixed = []
    for peer, own in rows.items():
        parts = [
            MixPart(
                weight=graph.weight(peer, other),
                received=wire(rows[other]),
                own_copy=(own_wire or wire)(own),
            )
            for other in graph.neighbours(peer)
            if (min(peer, other), max(peer, other)) not in lost
        ]
        mixed.append(mix(own, parts, alpha))
    return torch.stack(mixed)


def round_of(
    rule: OuterRule, graph: Graph, theta: Tensor, theta_h: Tensor, state: OuterState
) -> tuple[Tensor, OuterState]:
    """One round of all peers, whose parameters and memories are the rows of [n, P]."""
    mixed = mixed_rows(graph, rule.outgoing(theta, theta_h, state))
    return rule.step(theta, theta_h, mixed, state)


def map_of_one_round(rule: OuterRule, topology: str, *, peers: int) -> Tensor:
    """The map of one round without gradients on the disagreement (theta, memory), [2 n, 2 n]."""
    graph = build_graph(topology, seed=8, round=0, peers=names(peers))
    project = torch.eye(peers, dtype=torch.float64) - 1 / peers
    basis = torch.kron(torch.eye(2, dtype=torch.float64), project)
    theta, memory = basis.tensor_split(2)
    theta, state = round_of(rule, graph, theta, theta, OuterState(memory=memory))
    return basis @ torch.cat([theta, state.memory])


class InnerLoop:
    """A tanh perceptron fitted to each peer's own data, fp64; all peers step side by side.

    Optimizer state is each peer's own and lives on from round to round.
    """

    SHAPES = ((6, 4), (6, 1), (2, 6), (2, 1))
    SIZE = 44

    def __init__(self, *, peers: int, optimizer: str, local_steps: int = 4) -> None:
        generator = seeded(7)
        self.inputs = torch.randn(peers, 4, 16, dtype=torch.float64, generator=generator)
        targets = torch.randn(peers, 2, 4, dtype=torch.float64, generator=generator)
        self.targets = torch.sin(targets @ self.inputs)
        self.local_steps = local_steps
        self.theta = torch.zeros(peers, self.SIZE, dtype=torch.float64, requires_grad=True)
        self.optimizer = (
            torch.optim.AdamW([self.theta], lr=2e-2)
            if optimizer == "adamw"
            else torch.optim.SGD([self.theta], lr=0.1)
        )

    def __call__(self, theta: Tensor) -> Tensor:
        """Return theta^H [n, P] after the local steps that start at `theta` [n, P]."""
        with torch.no_grad():
            self.theta.copy_(theta)
        for _ in range(self.local_steps):
            (self.theta.grad,) = torch.autograd.grad(self.loss(), self.theta)
            self.optimizer.step()
        return self.theta.detach().clone()

    def loss(self) -> Tensor:
        flat = self.theta.tensor_split((24, 30, 42), dim=1)
        w1, b1, w2, b2 = (
            part.view(-1, *shape) for part, shape in zip(flat, self.SHAPES, strict=True)
        )
        outputs = w2 @ torch.tanh(w1 @ self.inputs + b1) + b2
        return torch.mean((outputs - self.targets).square(), dim=(1, 2)).sum()


class Swarm:
    """Peers with equal first parameters, as the rows of theta [n, P]."""

    def __init__(
        self, rule: str, topology: str, *, peers: int, lr: float = 0.7, momentum: float = 0.9
    ) -> None:
        self.rule = outer_rule(rule, lr=lr, momentum=momentum)
        self.topology = topology
        self.peers = names(peers)
        self.round = 0
        first = torch.randn(InnerLoop.SIZE, dtype=torch.float64, generator=seeded(1)) / 2
        self.theta = first.expand(peers, -1).clone()
        self.state = self.rule.initial(self.theta)

    def run_rounds(self, rounds: int, inner: Callable[[Tensor], Tensor]) -> None:
        for _ in range(rounds):
            graph = build_graph(self.topology, seed=9, round=self.round, peers=self.peers)
            theta_h = inner(self.theta)
            self.theta, self.state = round_of(self.rule, graph, self.theta, theta_h, self.state)
            self.round += 1

    def consensus_distance(self) -> float:
        """Root mean square distance of a peer from the mean of all."""
        return (self.theta - self.theta.mean(0)).square().sum(1).mean().sqrt().item()


def diloco(inner: InnerLoop, first: Tensor) -> Iterator[Tensor]:
    """Yield one model's parameters after each round of torch's SGD on the averaged -g."""
    phi = first.clone()
    sgd = torch.optim.SGD([phi], lr=0.7, momentum=0.9, nesterov=True)
    while True:
        theta_h = inner(phi.expand(len(inner.inputs), -1))
        phi.grad = -(theta_h - phi).mean(0)
        sgd.step()
        yield phi
