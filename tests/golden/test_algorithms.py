"""The package's rules against an independent NumPy reference, in fp64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from gasloc_p2p.algorithms import ALGORITHMS, load_algorithm
from gasloc_p2p.config import Config, assignment_layer
from gasloc_p2p.core.errors import ConfigError
from gasloc_p2p.core.outer import MixPart, OuterRule, OuterState, mix, outer_rule
from gasloc_p2p.core.topology import build_graph
from gasloc_p2p.report import SwarmReport
from gasloc_p2p.simulate.swarm import simulate
from tests.golden import reference
from tests.golden.reference import Array, Problem
from tests.sim.conftest import QUICK

PEERS = tuple(f"peer {index}" for index in range(6))
ROUNDS = 40
REFERENCES: dict[str, Callable[..., Array]] = {
    "gasloc": reference.gasloc,
    "diloco": reference.diloco,
    "dadam": reference.local_dadam,
    "local-dadam": reference.local_dadam,
    "noloco": reference.noloco,
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


class Peer:
    """One peer with torch's AdamW on the same problem."""

    def __init__(self, problem: Problem, index: int, rule: OuterRule) -> None:
        self.theta = torch.tensor(problem.start, dtype=torch.float64)
        self.memory: OuterState = rule.initial(self.theta)
        self._target = torch.tensor(problem.targets[index], dtype=torch.float64)
        self._parameter = torch.nn.Parameter(self.theta.clone())
        self._adam = torch.optim.AdamW(
            [self._parameter], lr=problem.lr, betas=(0.9, 0.95), weight_decay=0.1
        )
        self._steps = problem.local_steps

    def local_steps(self) -> Tensor:
        with torch.no_grad():
            self._parameter.copy_(self.theta)
        for _ in range(self._steps):
            self._adam.zero_grad()
            ((self._parameter.tanh() - self._target) ** 2 / 2).sum().backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            self._adam.step()
        return self._parameter.detach().clone()


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


@pytest.mark.parametrize(("name", "topology"), CASES)
def test_a_trajectory_equals_the_independent_reference(name: str, topology: str) -> None:
    config = config_of(name, topology)
    task = problem(1 if name == "dadam" else 5)
    expected = REFERENCES[name](task, lambda t: mixing_matrix(config, t), ROUNDS)
    found = run_rules(config, task)
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


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_runs_through_the_nodes_own_round(name: str) -> None:
    report = _quick(name)
    assert all(peer.edges.timed_out == peer.edges.refused == 0 for peer in report.peers)
    assert report.averaged_val_loss is not None
    assert report.averaged_val_loss < report.initial_val_loss
    if name == "noloco":
        [other] = {peer.bytes_sent for peer in _quick("gasloc").peers}
        ratio = report.peers[0].bytes_sent / other
        training = 4 / (4 + 5)
        assert ratio == pytest.approx(1 + training, rel=0.02), "twice the bytes while it trains"


def _quick(name: str) -> SwarmReport:
    layer = assignment_layer([*settings_of(name), "run.initial_peers=4", "run.rounds=4"])
    config = load_algorithm(name, [layer]).config
    return simulate(config, peers=4, observe=lambda index, event: None).report


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
