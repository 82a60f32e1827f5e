"""The batched engine ends where the exact one does, whatever the peers' timing."""

from __future__ import annotations

import pytest
import torch

from gasloc_p2p.algorithms import ALGORITHMS, load_algorithm
from gasloc_p2p.config import assignment_layer
from gasloc_p2p.simulate.swarm import Simulation, simulate
from tests.sim.conftest import QUICK

SETTINGS = ("run.rounds=4", "inner.local_steps=3", "run.initial_peers=4")


def run(algorithm: str, *assignments: str) -> Simulation:
    fixed = ALGORITHMS[algorithm].fixed
    chosen = [text for text in (*QUICK, *SETTINGS) if text.partition("=")[0] not in fixed]
    config = load_algorithm(algorithm, [assignment_layer([*chosen, *assignments])]).config
    return simulate(config, peers=4, observe=lambda index, event: None, algorithm=algorithm)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_both_engines_agree(algorithm: str) -> None:
    exact, batched = run(algorithm), run(algorithm, "simulate.engine=batched")
    for a, b in zip(exact.results, batched.results, strict=True):
        assert ((a.theta - b.theta).norm() / a.theta.norm()).item() < 1e-4
        assert a.report.train_loss == pytest.approx(b.report.train_loss, rel=1e-4)
        assert a.report.edges == b.report.edges
        assert a.report.bytes_sent == b.report.bytes_sent
    assert exact.report.averaged_val_loss == pytest.approx(
        batched.report.averaged_val_loss, rel=1e-4
    )
    assert exact.report.simulated_s == batched.report.simulated_s


def test_peers_out_of_step_train_on_what_they_have() -> None:
    uneven = ("simulate.links=fibre,dsl,mobile,lan", "gossip.topology=ring")
    exact, batched = run("gasloc", *uneven), run("gasloc", *uneven, "simulate.engine=batched")
    for a, b in zip(exact.results, batched.results, strict=True):
        assert ((a.theta - b.theta).norm() / a.theta.norm()).item() < 1e-4
    assert exact.report.simulated_s == batched.report.simulated_s


def test_a_batched_run_is_deterministic() -> None:
    first, second = (run("gasloc", "simulate.engine=batched") for _ in range(2))
    for a, b in zip(first.results, second.results, strict=True):
        assert torch.equal(a.theta, b.theta)
    assert first.report.curve == second.report.curve


def test_the_curve_follows_virtual_time() -> None:
    report = run("gasloc", "node.validate_every_rounds=1", "simulate.step_s=2").report
    assert [point.round for point in report.curve] == [0, 1, 2, 3]
    times_s = [point.time_s for point in report.curve]
    assert times_s == sorted(times_s)
    assert report.simulated_s == pytest.approx(4 * 3 * 2, abs=1)
    assert times_s[-1] == pytest.approx(report.simulated_s, abs=1)
    assert report.curve[-1].val_loss == pytest.approx(
        sum(peer.val_loss or 0 for peer in report.peers) / 4
    )
