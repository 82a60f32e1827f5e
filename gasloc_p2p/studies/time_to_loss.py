"""When swarms had reached a loss, from their standings on the way, and how that compares."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, TypeAlias

from gasloc_p2p.studies.cell import Label, Outcome, Standing, SwarmCell, SwarmResult
from gasloc_p2p.studies.comparison import matching
from gasloc_p2p.studies.statistics import Estimate, estimate

SCENARIO = "scenario"
"""Label of what is uneven."""

BASELINE = "DiLoCo"
"""The algorithm that the others are compared with, under the label `algorithm`."""

TARGET_SHARE = 0.7
"""Share of DiLoCo's rounds after which its loss is the one that all are timed to.

The others have the remaining rounds to get there, since less mixing learns less per round.
"""

LossName: TypeAlias = Literal["averaged_val_loss", "own_val_loss"]
"""A loss of a `Standing`."""


def loss_at_share(standings: Sequence[Standing], name: LossName, share: float) -> float | None:
    """Return the loss after a share of the rounds, rounded to a whole one; None if not finite."""
    if not standings:
        return None
    after = round(share * standings[-1].rounds)
    return next((_loss(point, name) for point in standings if point.rounds == after), None)


def time_to_s(standings: Sequence[Standing], name: LossName, target: float) -> float | None:
    """Return the virtual second at which a loss was first at or below `target`.

    Between two standings the loss is taken to change evenly.

    Returns:
        None when it never was.
    """
    for before, after in pairwise(standings):
        high, low = _loss(before, name), _loss(after, name)
        if low is not None and low <= target:
            if high is None:
                return after.time_s
            share = (high - target) / (high - low) if high > target else 0.0
            return before.time_s + share * (after.time_s - before.time_s)
    return None


def _loss(point: Standing, name: LossName) -> float | None:
    return point.averaged_val_loss if name == "averaged_val_loss" else point.own_val_loss


def runs_of(
    outcomes: Sequence[Outcome], scenario: Label, algorithm: Label
) -> dict[int, tuple[SwarmCell, SwarmResult]]:
    """Return the runs that ended, by seed."""
    found = matching(outcomes, {SCENARIO: scenario, "algorithm": algorithm})
    return {
        o.cell.seed: (o.cell, o.result)
        for o in found
        if isinstance(o.cell, SwarmCell) and isinstance(o.result, SwarmResult)
    }


def targets_of(outcomes: Sequence[Outcome], scenario: Label) -> dict[int, float]:
    """Return the loss to reach, by seed."""
    losses = {
        seed: loss_at_share(run.standings, "averaged_val_loss", TARGET_SHARE)
        for seed, (_, run) in runs_of(outcomes, scenario, BASELINE).items()
    }
    return {seed: loss for seed, loss in losses.items() if loss is not None}


def times_s_of(
    outcomes: Sequence[Outcome], scenario: Label, algorithm: Label, loss: LossName
) -> dict[int, float | None]:
    """Return the virtual seconds to the target by seed, None where it was not reached."""
    runs, targets = runs_of(outcomes, scenario, algorithm), targets_of(outcomes, scenario)
    return {
        seed: time_to_s(runs[seed][1].standings, loss, targets[seed])
        for seed in runs
        if seed in targets
    }


def ratio_of(
    outcomes: Sequence[Outcome], scenario: Label, algorithm: Label, loss: LossName
) -> Estimate | None:
    """Return DiLoCo's time by this one's; of the seeds with which both were reached."""
    times_s = times_s_of(outcomes, scenario, algorithm, loss)
    baseline_s = times_s_of(outcomes, scenario, BASELINE, loss)
    return estimate(
        [
            reference_s / time_s
            for seed, time_s in times_s.items()
            if time_s and (reference_s := baseline_s.get(seed))
        ]
    )
