"""What a swarm as a whole had learned on the way."""

from __future__ import annotations

import msgspec
import pytest

from gasloc_p2p.algorithms import ALGORITHMS, load_algorithm
from gasloc_p2p.config import assignment_layer
from gasloc_p2p.simulate.swarm import Simulation, simulate
from tests.sim.conftest import QUICK

SETTINGS = (
    "run.rounds=3",
    "run.closing_rounds=2",
    "run.initial_peers=4",
    "node.validate_every_rounds=1",
    "simulate.links=fibre,dsl",
)


def run(algorithm: str, *assignments: str, judged: bool = True) -> Simulation:
    fixed = ALGORITHMS[algorithm].fixed
    chosen = [text for text in (*QUICK, *SETTINGS) if text.partition("=")[0] not in fixed]
    config = load_algorithm(algorithm, [assignment_layer([*chosen, *assignments])]).config
    return simulate(
        config, peers=4, observe=lambda index, event: None, algorithm=algorithm, judged=judged
    )


@pytest.mark.parametrize("engine", ["exact", "batched"])
@pytest.mark.parametrize("algorithm", ["gasloc", "diloco"])
def test_the_last_standing_is_what_the_report_says(algorithm: str, engine: str) -> None:
    settings = (f"simulate.engine={engine}", "gossip.topology=complete", "pace.adapt_steps=false")
    simulation = run(algorithm, *settings)
    report, points = simulation.report, simulation.standings
    assert [point.rounds for point in points] == [0, 1, 2, 3]
    assert points[0].averaged_val_loss == points[0].own_val_loss == report.initial_val_loss
    assert points[-1].averaged_val_loss == report.averaged_val_loss
    # On the complete graph nobody begins a round before all have ended the one before.
    for point, of_round in zip(points[1:], report.curve, strict=True):
        assert point.time_s == pytest.approx(of_round.time_s, rel=0.01)
        assert point.own_val_loss == pytest.approx(of_round.val_loss)


def test_looking_changes_nothing() -> None:
    looked, not_looked = run("gasloc"), run("gasloc", judged=False)
    assert not_looked.standings == ()
    assert len(looked.standings) == 4
    first, second = (
        msgspec.structs.replace(one.report, wall_s=0.0) for one in (looked, not_looked)
    )
    assert first == second


def test_an_attacker_does_not_count() -> None:
    simulation = run("gasloc", "simulate.poison=scaled", "gossip.guard=false")
    assert simulation.standings[-1].averaged_val_loss == simulation.report.averaged_val_loss
    own = [result.report.val_loss or 0 for result in simulation.honest]
    assert simulation.standings[-1].own_val_loss == pytest.approx(sum(own) / 3)


def test_who_is_behind_counts_with_what_it_had_last() -> None:
    # Alone, three peers end all their rounds before the fourth one ends its first.
    settings = ("gossip.topology=none", "simulate.step_s=1", 'simulate.speeds=["0:0.05:3"]')
    points = run("gasloc", *settings).standings
    assert [point.rounds for point in points] == [0, 1, 2, 3]
    assert [point.time_s for point in points[1:]] == pytest.approx([4, 6, 120], abs=1)
    losses = [point.own_val_loss for point in points]
    assert losses == sorted(losses, reverse=True)
