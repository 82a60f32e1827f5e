"""The study `straggler`: what its swarms are made of, and what its claims say."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from gasloc_p2p.studies.cell import Outcome, Standing, SwarmCell, SwarmResult, cell_key
from gasloc_p2p.studies.measure import run_cell
from gasloc_p2p.studies.straggler import OURS, SCENARIOS, VARIANTS, Straggler
from gasloc_p2p.studies.study import cell_config
from gasloc_p2p.studies.time_to_loss import BASELINE, SCENARIO, loss_at_share, time_to_s
from gasloc_p2p.studies.uneven import (
    all_reduce_s,
    compute_s,
    model_bytes,
    slowest_compute_s,
    slowest_exchange_s,
)

from .tiny import SHORT, setup_of

EQUAL, TENTH, FIFTH, SLOW = (scenario.name for scenario in SCENARIOS)


def cells(study: Straggler, **changes: object) -> list[SwarmCell]:
    """Return the cells of one seed."""
    found = study.cells(setup_of({**SHORT, **changes}, seeds=1), 0, [])
    return [cell for cell in found if isinstance(cell, SwarmCell)]


def cell_of(study: Straggler, scenario: str, algorithm: str, **changes: object) -> SwarmCell:
    wanted = {SCENARIO: scenario, "algorithm": algorithm}
    found = [one for one in cells(study, **changes) if wanted.items() <= one.labels.items()]
    [cell] = found
    return cell


@pytest.mark.parametrize("steps", [1, 30])
def test_links_follow_from_the_model_and_the_compute(steps: int) -> None:
    found = {}
    for name in (EQUAL, TENTH, FIFTH, SLOW):
        cell = cell_of(Straggler(), name, BASELINE, **{"inner.local_steps": steps})
        config = cell_config(cell)
        assert compute_s(config) == steps
        assert model_bytes(config) == 4 * 108_864
        figures = (all_reduce_s, slowest_exchange_s, slowest_compute_s)
        found[name] = [figure(config, cell.peers) / steps for figure in figures]
    # Of the time of a round's compute; 2 x 7 / 8 of .25 is .4375.
    assert found[EQUAL] == pytest.approx([0.4375, 0.25, 1], rel=1e-4)
    assert found[TENTH] == pytest.approx([4.375, 2.5, 1], rel=1e-4)
    assert found[FIFTH] == pytest.approx([2.1875, 1.25, 1], rel=1e-4)
    assert found[SLOW] == pytest.approx([0.4375, 0.25, 10], rel=1e-4)


def test_a_scenario_changes_nothing_but_one_peer() -> None:
    for cell in cells(Straggler()):
        simulate = cell_config(cell).simulate
        full, *others, last = simulate.links
        assert others == [full] * 6
        assert (last != full) == (cell.labels[SCENARIO] in (TENTH, FIFTH))
        slow = cell.labels[SCENARIO] == SLOW
        assert simulate.speeds == (("0:0.1:7",) if slow else ())
        assert cell.judged
    labels = [str(variant.label) for variant in VARIANTS]
    assert [cell.labels["algorithm"] for cell in cells(Straggler())] == labels * len(SCENARIOS)


@pytest.mark.parametrize("scenario", [EQUAL, TENTH, SLOW])
def test_rounds_take_what_the_formulas_say(scenario: str) -> None:
    study = Straggler(peers=(4,))
    changes = {"inner.local_steps": 2, "run.rounds": 3}
    for algorithm in (BASELINE, OURS):
        cell = cell_of(study, scenario, algorithm, **changes)
        result = run_cell(cell, lambda rounds: None)
        assert isinstance(result, SwarmResult)
        assert result.train_tokens == 4 * 3 * 2 * 64
        assert [point.rounds for point in result.standings] == [0, 1, 2, 3]
        if algorithm == BASELINE:
            config = cell_config(cell)
            round_s = slowest_compute_s(config, 4) + all_reduce_s(config, 4)
            assert result.simulated_s == pytest.approx(3 * round_s)
            assert result.standings[-1].time_s == pytest.approx(3 * round_s)


CLAIMED_LOSSES = ("averaged", "own")


def standings(*losses: float | None, round_s: float = 10.0) -> tuple[Standing, ...]:
    return tuple(
        Standing(rounds=t, time_s=t * round_s, averaged_val_loss=loss, own_val_loss=loss)
        for t, loss in enumerate(losses)
    )


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ((5.0, 4.0, 2.0, 1.0), 15.0),
        ((5.0, 4.0, 3.0, 1.0), 20.0),
        ((5.0, 4.0, 2.0, 3.5), 15.0),
        ((5.0, None, 3.0), 20.0),
        ((5.0, 4.0, None), None),
        ((5.0, 4.0), None),
        ((2.0, 1.0), 0.0),
        ((), None),
    ],
)
def test_a_loss_is_reached_between_two_standings(
    losses: Sequence[float | None], expected: float | None
) -> None:
    assert time_to_s(standings(*losses), "averaged_val_loss", 3.0) == expected
    assert time_to_s(standings(*losses), "own_val_loss", 3.0) == expected


def test_the_loss_to_reach_is_that_of_a_whole_round() -> None:
    points = standings(5.0, 4.0, 3.0, 2.0, None)
    found = [loss_at_share(points, "averaged_val_loss", share) for share in (0, 0.4, 0.7, 1)]
    assert found == [5.0, 3.0, 2.0, None]
    assert loss_at_share((), "averaged_val_loss", 0.5) is None


def outcomes(**rounds_s: float) -> list[Outcome]:
    """Return made-up runs that all learn the same by round, in which seeds differ a little.

    Args:
        rounds_s: seconds of a round of GASLoC's default configuration by scenario: equal, tenth,
            fifth and slow; DiLoCo's have 10, 40, 20 and 100.
    """
    keys = dict(zip((EQUAL, TENTH, FIFTH, SLOW), ("equal", "tenth", "fifth", "slow"), strict=True))
    usual_s = {"equal": 10.0, "tenth": 40.0, "fifth": 20.0, "slow": 100.0}
    made = []
    for cell in Straggler().cells(setup_of({}, seeds=3), 0, []):
        assert isinstance(cell, SwarmCell)
        key = keys[str(cell.labels[SCENARIO])]
        ours = cell.labels["algorithm"] == OURS
        round_s = usual_s[key]
        if ours:
            round_s = rounds_s.get(key, round_s) * (1 + 0.001 * cell.seed)
        points = standings(*(9.0 - 0.5 * t - 0.1 * cell.seed for t in range(11)), round_s=round_s)
        result = SwarmResult(
            initial_val_loss=9.0,
            averaged_val_loss=points[-1].averaged_val_loss,
            own_val_loss=points[-1].own_val_loss,
            consensus_distance=0.01,
            closing_consensus_distance=None,
            bytes_sent=1,
            simulated_s=points[-1].time_s,
            wall_s=1.0,
            train_tokens=2_000_000,
            standings=points,
        )
        made.append(Outcome(key=cell_key(cell), cell=cell, result=result))
    return made


def test_times_are_compared_by_seed() -> None:
    scenarios, times, _ = Straggler().summary(outcomes(tenth=10.0)).tables
    assert [row[7] for row in scenarios.rows] == ["1.4375", "5.3750", "3.1875", "10.4375"]
    rows = {row[:2]: row[2:] for row in times.rows}
    baseline, ours = rows[TENTH, BASELINE], rows[TENTH, OURS]
    # The loss after 7 of 10 rounds, 5.5 - .1 x seed.
    assert baseline[4:] == ("5.4000 ± 0.2484", "280.0 ± 0.0", "–", "280.0 ± 0.0", "–")
    assert ours[1] == "2.000 ± 0.000"
    assert ours[5:7] == ("70.1 ± 0.2", "4.00 ± 0.01")
    assert rows[EQUAL, "GASLoC 2-peer"][6] == "1.00 ± 0.00"


def test_claims_hold_or_not() -> None:
    found = outcomes(equal=10.3, tenth=13.0, fifth=11.0)
    *_, claims = Straggler().summary(found).tables
    verdicts = {row[:2]: row[3:] for row in claims.rows}
    assert set(verdicts) == {(s, loss) for s in (EQUAL, TENTH, FIFTH) for loss in CLAIMED_LOSSES}
    for loss in CLAIMED_LOSSES:
        assert verdicts[EQUAL, loss] == ("≥ 0.952", "holds")
        assert verdicts[TENTH, loss] == ("≥ 3", "holds")
        assert verdicts[FIFTH, loss] == ("≥ 2", "does not hold")
    sentences = Straggler().summary(outcomes(equal=11.0, tenth=20.0)).verdicts
    assert (
        "With all equal, GASLoC's default configuration is within 5 % of DiLoCo's time: does not "
        "hold at averaged loss, own loss." in sentences
    )
    assert any("at least 3 times faster" in text and "does not hold" in text for text in sentences)


def test_a_run_that_never_gets_there_decides_nothing_and_is_named() -> None:
    found = outcomes(tenth=5.0)
    index, short = next(
        (index, outcome)
        for index, outcome in enumerate(found)
        if outcome.cell.labels[SCENARIO] == TENTH and outcome.cell.labels["algorithm"] == OURS
    )
    assert isinstance(short.result, SwarmResult)
    early = msgspec.structs.replace(short.result, standings=short.result.standings[:5])
    found[index] = msgspec.structs.replace(short, result=early)
    _, times, claims = Straggler().summary(found).tables
    [row] = [row for row in times.rows if row[:2] == (TENTH, OURS)]
    assert "(1 of 3 never)" in row[7]
    assert "(1 of 3 never)" in row[9]
    assert {row[4] for row in claims.rows if row[0] == TENTH} == {"not decided"}
