"""What the studies that compare algorithms have in common: rows, pairs of runs, claims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from gasloc_p2p.studies.cell import Label, Outcome, SwarmResult
from gasloc_p2p.studies.format import loss_text
from gasloc_p2p.studies.statistics import (
    Estimate,
    Verdict,
    at_least,
    at_most,
    estimate,
    relative_difference,
)

INTERVALS = (
    "± is half of the two-sided 95 % t-interval over the seeds. Differences are paired by seed: "
    "both runs of a pair start from the same parameters and draw the same samples."
)
CLAIM_RULE = (
    "A claim holds when the whole interval of the difference lies on its side of the limit, does "
    "not hold when the whole interval lies on the other side, and is not decided when the interval "
    "straddles the limit, there is only one seed, or a run diverged."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """What is claimed of one algorithm's loss against another's.

    Attributes:
        label: the algorithm.
        baseline: the algorithm that it is compared with.
        bound: whether the difference shall be at most or at least `limit`.
        limit: in percent of the baseline's loss.
        words: the claim as a sentence without its verdict.
    """

    label: str
    baseline: str
    bound: Literal["at most", "at least"]
    limit: float
    words: str

    def judge(self, difference: Estimate | None) -> Verdict:
        """Judge the claim by a difference in percent."""
        rule = at_most if self.bound == "at most" else at_least
        return rule(difference, self.limit)

    @property
    def short(self) -> str:
        """The limit in a table, as ≤ +0.5 %."""
        return f"{'≤' if self.bound == 'at most' else '≥'} {self.limit:+g} %".replace("+0 ", "0 ")


def matching(outcomes: Sequence[Outcome], wanted: Mapping[str, Label]) -> list[Outcome]:
    """Return the outcomes whose cells have the `wanted` labels."""
    return [
        outcome
        for outcome in outcomes
        if all(outcome.cell.labels.get(name) == value for name, value in wanted.items())
    ]


def distinct(outcomes: Sequence[Outcome], name: str) -> list[Label]:
    """Return the values of a label in the order in which they appear."""
    labels = (outcome.cell.labels for outcome in outcomes)
    return list(dict.fromkeys(found[name] for found in labels if name in found))


def titled_groups(outcomes: Sequence[Outcome]) -> list[tuple[str, list[Outcome]]]:
    """Return the outcomes of each model and size of swarm with their title."""
    return [
        (f"Model {model}, {peers} peers", mine)
        for model in distinct(outcomes, "model")
        for peers in distinct(outcomes, "peers")
        if (mine := matching(outcomes, {"model": model, "peers": peers}))
    ]


def losses(outcomes: Sequence[Outcome], **wanted: Label) -> dict[int, float]:
    """Return the averaged model's loss by seed, of the cells with the `wanted` labels.

    Runs that failed or ended non-finite are absent.
    """
    found: dict[int, float] = {}
    for outcome in matching(outcomes, wanted):
        result = outcome.result
        if isinstance(result, SwarmResult) and result.averaged_val_loss is not None:
            found[outcome.cell.seed] = result.averaged_val_loss
    return found


def any_diverged(outcomes: Sequence[Outcome], **wanted: Label) -> bool:
    """Whether one of the cells with the `wanted` labels diverged; no claim is decided then."""
    return any(
        isinstance(outcome.result, SwarmResult) and outcome.result.diverged
        for outcome in matching(outcomes, wanted)
    )


def difference(values: Mapping[int, float], baseline: Mapping[int, float]) -> Estimate | None:
    """Return the difference to the baseline in percent of it, paired by seed."""
    return relative_difference(
        [(values[seed], baseline[seed]) for seed in values if seed in baseline]
    )


def loss_cell(outcomes: Sequence[Outcome], **wanted: Label) -> str:
    """Return the mean loss of the cells with the `wanted` labels as text, diverged runs named."""
    text = loss_text(estimate(list(losses(outcomes, **wanted).values())))
    results = [outcome.result for outcome in matching(outcomes, wanted)]
    diverged = sum(isinstance(result, SwarmResult) and result.diverged for result in results)
    return f"{text} ({diverged} of {len(results)} diverged)" if diverged else text


def verdict_sentence(words: str, verdicts: Mapping[str, Verdict]) -> str:
    """Return a claim with where it holds, where it does not, and where it is not decided.

    Args:
        words: the claim as a sentence without its verdict.
        verdicts: by where they were reached, such as "8 peers"; an empty key is everywhere.
    """
    places: dict[Verdict, list[str]] = {}
    for place, verdict in verdicts.items():
        places.setdefault(verdict, []).append(place)
    parts = [
        f"{verdict} at {', '.join(where)}" if all(where) else verdict
        for verdict, where in places.items()
    ]
    return f"{words}: {'; '.join(parts)}."
