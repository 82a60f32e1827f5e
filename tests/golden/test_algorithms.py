"""Every algorithm against an independent NumPy reference, in fp64."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import numpy as np
import pytest
import torch
from torch import Tensor

from gasloc_p2p.algorithms import ALGORITHMS, load_algorithm, require_on_nodes
from gasloc_p2p.config import Config, assignment_layer
from gasloc_p2p.core.errors import ConfigError
from gasloc_p2p.core.outer import MixPart, OuterRule, OuterState, mix, outer_rule
from gasloc_p2p.core.topology import build_graph
from gasloc_p2p.node.report import EdgeCounts
from gasloc_p2p.report import SwarmReport
from gasloc_p2p.simulate.clock import InlineCompute
from gasloc_p2p.simulate.collective import DDP, AllReduce, DiLoCo
from gasloc_p2p.simulate.engine import Engine, GradientModel
from gasloc_p2p.simulate.links import LINKS, links_of, ring_all_reduce_s
from gasloc_p2p.simulate.swarm import simulate
from tests.golden import reference
from tests.golden.reference import Array, Problem
from tests.sim.conftest import QUICK, in_virtual_time

PEERS = tuple(f"peer {index}" for index in range(6))
ROUNDS = 40
REFERENCES: dict[str, Callable[..., Array]] = {
    "gasloc": reference.gasloc,
    "diloco": reference.diloco,
    "dadam": reference.local_dadam,
    "local-dadam": reference.local_dadam,
    "noloco": reference.noloco,
    "ddp": reference.ddp,
}
CASES = [
    ("gasloc", "pairs"),
    ("gasloc", "ring"),
    ("gasloc", "cycle"),
    ("gasloc", "complete"),
    ("diloco", "complete"),
    ("dadam", "pairs"),
    ("dadam", "cycle"),
    ("dadam", "complete"),
    ("local-dadam", "pairs"),
    ("local-dadam", "ring"),
    ("noloco", "pairs"),
    ("gasloc", "exponential"),
    ("dadam", "exponential"),
]


def settings_of(name: str) -> list[str]:
    """Quick settings, without those that make an algorithm what it is."""
    fixed = ALGORITHMS[name].fixed
    return [setting for setting in QUICK if setting.partition("=")[0] not in fixed]


def config_of(name: str, topology: str) -> Config:
    chosen = assignment_layer([*settings_of(name), f"gossip.topology={topology}"])
    return load_algorithm(name, [chosen]).config


def problem(local_steps: int) -> Problem:
    draw = np.random.default_rng(7)
    return Problem(
        targets=draw.uniform(-0.9, 0.9, (len(PEERS), 50)),
        start=draw.normal(size=50),
        local_steps=local_steps,
        lr=0.05,
    )


def mixing_matrix(config: Config, t: int) -> Array:
    graph = build_graph(config.gossip.topology, seed=config.run.seed, round=t, peers=PEERS)
    weights = np.zeros((len(PEERS), len(PEERS)))
    for i, a in enumerate(PEERS):
        for b in graph.neighbours(a):
            weights[i, PEERS.index(b)] = graph.weight(a, b)
        weights[i, i] = 1 - weights[i].sum()
    return weights


class ToyModel:
    """Torch's AdamW in fp64 on one peer's part of the problem."""

    schema_digest = b""

    def __init__(self, problem: Problem, index: int) -> None:
        self.elements = len(problem.start)
        self._target = torch.tensor(problem.targets[index], dtype=torch.float64)
        self._parameter = torch.nn.Parameter(torch.tensor(problem.start, dtype=torch.float64))
        self._adam = torch.optim.AdamW(
            [self._parameter], lr=problem.lr, betas=(0.9, 0.95), weight_decay=0.1
        )

    def step(self, lr: float) -> float:
        gradient, loss = self.gradient()
        self.apply(gradient, lr)
        return loss

    def gradient(self) -> tuple[Tensor, float]:
        loss = self._loss(self._parameter)
        (gradient,) = torch.autograd.grad(loss, [self._parameter])
        return gradient, loss.item()

    def apply(self, gradient: Tensor, lr: float) -> None:
        self._adam.param_groups[0]["lr"] = lr
        self._parameter.grad = gradient
        self._adam.step()

    def theta(self) -> Tensor:
        return self._parameter.detach().clone()

    @torch.no_grad()
    def load(self, flat: Tensor) -> None:
        self._parameter.copy_(flat)

    def validation_loss(self, flat: Tensor | None = None) -> float:
        return self._loss(self._parameter if flat is None else flat).item()

    def _loss(self, theta: Tensor) -> Tensor:
        return ((theta.tanh() - self._target) ** 2 / 2).sum()


class Peer:
    """One peer as the package's rules see it."""

    def __init__(self, problem: Problem, index: int, rule: OuterRule) -> None:
        self.model = ToyModel(problem, index)
        self.theta = self.model.theta()
        self.memory: OuterState = rule.initial(self.theta)
        self._lrs = [problem.lr] * problem.local_steps

    def local_steps(self) -> Tensor:
        self.model.load(self.theta)
        for lr in self._lrs:
            self.model.step(lr)
        return self.model.theta()


def run_rules(config: Config, problem: Problem) -> Array:
    """Run the package's outer rule, graph and mix over all peers."""
    outer, gossip = config.outer, config.gossip
    rule = outer_rule(outer.rule, lr=outer.lr, momentum=outer.momentum)
    peers = {name: Peer(problem, index, rule) for index, name in enumerate(PEERS)}
    for t in range(ROUNDS):
        graph = build_graph(gossip.topology, seed=config.run.seed, round=t, peers=PEERS)
        ends = {name: peer.local_steps() for name, peer in peers.items()}
        sent = {
            name: rule.outgoing(peer.theta, ends[name], peer.memory) for name, peer in peers.items()
        }
        for name, peer in peers.items():
            parts = [
                MixPart(weight=graph.weight(name, b), received=sent[b], own_copy=sent[name])
                for b in graph.neighbours(name)
            ]
            mixed = mix(sent[name], parts, alpha=outer.alpha)
            peer.theta, peer.memory = rule.step(peer.theta, ends[name], mixed, peer.memory)
    return np.stack([peer.theta.numpy() for peer in peers.values()])


def run_collective(name: str, config: Config, problem: Problem) -> Array:
    """Run the simulator's barrier algorithm over all peers, in virtual time."""
    models = [ToyModel(problem, index) for index in range(len(PEERS))]
    engine = Engine(
        # Nobody comes back from a checkpoint in here, so the toy has no state to hand over.
        models=cast("list[GradientModel]", models),
        computes=[InlineCompute(step_s=1.0)] * len(PEERS),
        gradients=lambda: [model.gradient() for model in models],
    )
    all_reduce = AllReduce(links=[LINKS["lan"]] * len(PEERS), partitions=())
    outer = config.outer
    rule = outer_rule(outer.rule, lr=outer.lr, momentum=outer.momentum)
    start = models[0].theta()
    method: DDP | DiLoCo = DDP()
    if name == "diloco":
        method = DiLoCo(rule=rule, theta=start, state=rule.initial(start))

    async def main() -> None:
        for _ in range(ROUNDS):
            await method.round(engine, [problem.lr] * problem.local_steps, all_reduce)

    in_virtual_time(main)
    return np.stack([model.theta().numpy() for model in models])


@pytest.mark.parametrize(("name", "topology"), CASES)
def test_a_trajectory_equals_the_independent_reference(name: str, topology: str) -> None:
    config = config_of(name, topology)
    task = problem(1 if name == "dadam" else 5)
    expected = REFERENCES[name](task, lambda t: mixing_matrix(config, t), ROUNDS)
    found = run_rules(config, task)
    assert np.abs(found - expected).max() < 1e-12
    assert np.abs(expected - task.start).max() > 0.1, "the reference has moved"


@pytest.mark.parametrize("name", ["diloco", "ddp"])
def test_an_all_reduce_equals_the_independent_reference(name: str) -> None:
    task = problem(5)
    expected = REFERENCES[name](task, None, ROUNDS)
    found = run_collective(name, config_of(name, "complete"), task)
    assert np.abs(found - expected).max() < 1e-12
    assert np.abs(expected - task.start).max() > 0.1, "the reference has moved"


def test_every_algorithm_has_a_reference() -> None:
    assert set(REFERENCES) == set(ALGORITHMS)


def test_diloco_is_gasloc_on_the_complete_graph() -> None:
    task = problem(5)
    diloco = run_rules(config_of("diloco", "complete"), task)
    gasloc = run_rules(config_of("gasloc", "complete"), task)
    assert np.abs(diloco - gasloc).max() < 1e-12
    assert np.abs(diloco - diloco[0]).max() < 1e-12, "all peers hold one model"
    reduced = run_collective("diloco", config_of("diloco", "complete"), task)
    assert np.abs(reduced - gasloc).max() < 1e-12, "by all-reduce as by gossip"


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_learns_in_the_simulator(name: str) -> None:
    report = _quick(name)
    assert report.algorithm == name
    assert all(peer.edges.timed_out == peer.edges.refused == 0 for peer in report.peers)
    assert report.averaged_val_loss is not None
    assert report.averaged_val_loss < report.initial_val_loss


def test_noloco_sends_twice_the_bytes_while_it_trains() -> None:
    [gasloc] = {peer.bytes_sent for peer in _quick("gasloc").peers}
    ratio = _quick("noloco").peers[0].bytes_sent / gasloc
    assert ratio == pytest.approx(1 + 4 / (4 + 5), rel=0.02)


def test_an_all_reduce_sends_what_its_cost_model_says() -> None:
    parameters = 108_864
    a_mean = round(2 * (4 - 1) / 4 * 4 * parameters)
    diloco, ddp = _quick("diloco"), _quick("ddp")
    assert [peer.bytes_sent for peer in diloco.peers] == [4 * a_mean] * 4
    steps = 4 * ddp.config["inner"]["local_steps"]
    assert [peer.bytes_sent for peer in ddp.peers] == [steps * a_mean] * 4
    assert diloco.consensus_distance == ddp.consensus_distance == 0
    assert all(peer.edges == EdgeCounts() for peer in (*diloco.peers, *ddp.peers))


def test_an_all_reduce_takes_the_time_of_the_slowest_link() -> None:
    steps_s = 4 * 2 * 0.02
    ideal, slow = _quick("diloco"), _quick("diloco", "simulate.links=ideal,dsl")
    links = links_of(("ideal", "dsl"), 4)
    assert ideal.simulated_s == pytest.approx(steps_s)
    assert slow.simulated_s == pytest.approx(steps_s + 4 * ring_all_reduce_s(links, 4 * 108_864))
    cut = _quick("diloco", "simulate.partitions=0-50:1")
    assert cut.simulated_s == pytest.approx(50 + 3 / 4 * steps_s)
    nobody_apart = _quick("diloco", "simulate.partitions=0-50:0+1+2+3")
    assert nobody_apart.simulated_s == pytest.approx(steps_s)


def test_gossip_settings_have_no_meaning_with_an_all_reduce() -> None:
    with pytest.raises(ConfigError, match="codec"):
        _quick("ddp", "gossip.codec=bf16")
    with pytest.raises(ConfigError, match=r"pace\.mode"):
        _quick("diloco", "pace.mode=seconds")


def test_nodes_cannot_run_ddp() -> None:
    with pytest.raises(ConfigError, match="simulator only"):
        require_on_nodes("ddp")
    require_on_nodes("diloco")


def _quick(name: str, *assignments: str) -> SwarmReport:
    quick = (*settings_of(name), "run.initial_peers=4", "run.rounds=4", *assignments)
    config = load_algorithm(name, [assignment_layer(quick)]).config
    return simulate(config, peers=4, observe=lambda index, event: None, algorithm=name).report


@pytest.mark.parametrize(
    ("name", "setting", "words"),
    [
        ("diloco", "gossip.topology=ring", "gossip.topology = 'complete'"),
        ("dadam", "inner.local_steps=5", "inner.local_steps = 1"),
        ("noloco", "outer.rule=local", "outer.rule = 'noloco'"),
        ("sgd", "run.rounds=1", "no algorithm 'sgd'"),
    ],
)
def test_what_makes_an_algorithm_cannot_be_changed(name: str, setting: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_algorithm(name, [assignment_layer([setting])])


def test_what_its_authors_merely_use_can_be_changed() -> None:
    assert load_algorithm("noloco", []).config.outer.momentum == 0.5
    changed = load_algorithm("noloco", [assignment_layer(["outer.momentum=0.3"])])
    assert changed.config.outer.momentum == 0.3
