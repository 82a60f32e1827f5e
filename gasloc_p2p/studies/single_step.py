"""With a single step between exchanges, is gossip of GASLoC no worse than that of DAdam?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from gasloc_p2p.studies.cell import Cell, Label, Outcome, SwarmCell
from gasloc_p2p.studies.comparison import (
    CLAIM_RULE,
    INTERVALS,
    Claim,
    any_diverged,
    difference,
    distinct,
    loss_cell,
    losses,
    matching,
    verdict_sentence,
)
from gasloc_p2p.studies.format import MISSING, percent_text
from gasloc_p2p.studies.statistics import Estimate, Verdict, estimate
from gasloc_p2p.studies.study import Setup, Study, Summary, Table, Variant, check_also

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TUNING_DISTANCE = 1000
"""How far the tuning seed lies behind the first one; study.seeds never reaches it."""

OUTER = "outer step"
DEFAULT = "default"
OUTER_STEPS: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        DEFAULT: {},
        "lr 1, momentum 0.5": {"outer.lr": 1.0, "outer.momentum": 0.5},
        "lr 1, momentum 0": {"outer.lr": 1.0, "outer.momentum": 0.0},
    }
)
"""Outer steps that GASLoC chooses from; DAdam has none. An outer step after every inner one may
want less momentum than one after thirty."""

SUBJECT = "GASLoC 2-peer"
DADAM = {"pairs": "DAdam pairs", "cycle": "DAdam cycle", "complete": "DAdam complete"}
GASLOC = (
    Variant(label=SUBJECT, settings={"gossip.topology": "ring"}),
    Variant(label="GASLoC 1-peer", settings={"gossip.topology": "pairs"}),
)
VARIANTS = (
    *GASLOC,
    *(
        Variant(label=label, algorithm="dadam", settings={"gossip.topology": topology})
        for topology, label in DADAM.items()
    ),
    Variant(label="DDP", algorithm="ddp"),
)
OWN_OUTER = tuple(variant.label for variant in GASLOC)
CLAIMS = tuple(
    Claim(
        label=SUBJECT,
        baseline=baseline,
        bound="at most",
        limit=0.0,
        words=f"GASLoC 2-peer is no worse than {baseline}",
    )
    for baseline in DADAM.values()
)


@dataclass(frozen=True, kw_only=True)
class SingleStep(Study):
    """Every algorithm at its own best settings, exchanging after each step.

    Attributes:
        rates: inner learning rates to choose from, on a seed that is not evaluated; GASLoC chooses
            among `OUTER_STEPS` as well.
    """

    name: ClassVar[str] = "single-step"
    question: ClassVar[str] = "With one step per round, is GASLoC no worse than DAdam?"
    stage_count: ClassVar[int] = 2
    takes_variants: ClassVar[bool] = True

    rates: tuple[float, ...] = (0.00025, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.016)
    defaults: dict[str, Any] = field(
        default_factory=lambda: {
            "run.rounds": 400,
            "inner.warmup_rounds": 20.0,
            "inner.batch_size": 4,
            "node.validate_every_rounds": 0,
            "simulate.engine": "batched",
        }
    )

    def cells(self, setup: Setup, stage: int, outcomes: Sequence[Outcome]) -> list[Cell]:
        """Return the runs that choose the settings, then those that are compared."""
        check_also(self, [variant.label for variant in VARIANTS], setup.also)
        cells: list[Cell] = []
        for seed in setup.evaluated if stage else [setup.first_seed + TUNING_DISTANCE]:
            for peers in setup.peers or self.peers:
                for variant in (*VARIANTS, *setup.also):
                    tried = self._tried(setup, variant, peers, seed)
                    cells += _best(tried, outcomes) if stage else tried
        return cells

    def _tried(self, setup: Setup, variant: Variant, peers: int, seed: int) -> list[SwarmCell]:
        """Return a variant's runs with everything that it chooses from."""
        tried = []
        for outer in OUTER_STEPS if variant in GASLOC else (DEFAULT,):
            for rate in self.rates:
                settings = {"inner.local_steps": 1, "inner.lr": rate, **OUTER_STEPS[outer]}
                for cell in self.swarm_cells(
                    setup, variant, peers=peers, seed=seed, settings=settings
                ):
                    cell.labels.update({"stage": "tuning", "inner.lr": rate})
                    if outer != DEFAULT:
                        cell.labels[OUTER] = outer
                    tried.append(cell)
        return tried

    def summary(self, outcomes: Sequence[Outcome]) -> Summary:
        """Return the chosen rates, losses, and the differences of 2-peer to each baseline."""
        evaluated = _compared(outcomes)
        models = distinct(outcomes, "model")
        tables = []
        verdicts: dict[str, dict[str, Verdict]] = {claim.words: {} for claim in CLAIMS}
        for model in models:
            tables.append(_table(evaluated, str(model), verdicts, models))
            tables.append(_tuning_table(outcomes, str(model)))
        return Summary(
            tables=tuple(tables),
            verdicts=(
                *(
                    verdict_sentence(claim.words, verdicts[claim.words])
                    for claim in CLAIMS
                    if verdicts[claim.words]
                ),
                *_at_the_end_of_the_grid(outcomes),
            ),
            reading=(
                "Loss: validation loss of the averaged model after the last training round, in "
                "nats per token. Every algorithm runs at the inner learning rate, and GASLoC with "
                "the outer step, with which it ended lowest on one further seed, which is not "
                "among those that are compared. The default outer step is lr 0.7, momentum 0.9.",
                f"{INTERVALS} The difference is that of GASLoC 2-peer, in percent of the other "
                f"algorithm's loss; below zero GASLoC 2-peer is better. {CLAIM_RULE} No worse "
                "means a difference of at most 0.",
            ),
        )

    def figure(self, outcomes: Sequence[Outcome]) -> Figure:
        """Draw losses, and the differences of 2-peer to the others, by algorithm."""
        from gasloc_p2p.studies.plot import new_figure

        evaluated = _compared(outcomes)
        models = distinct(evaluated, "model")
        figure, panels = new_figure(self.question, 2 * max(len(models), 1), panel_size=(6.2, 3.8))
        for model, left, right in zip(models, panels[::2], panels[1::2], strict=False):
            _draw_losses(left, evaluated, str(model))
            _draw_differences(right, evaluated, str(model))
        return figure


def best_choice(
    outcomes: Sequence[Outcome], labels: Mapping[str, Label]
) -> tuple[float, str] | None:
    """Return the inner learning rate and outer step with an algorithm's lowest tuning loss.

    None when no loss is finite.
    """
    wanted = {name: labels[name] for name in ("algorithm", "peers", "model")}
    found: dict[tuple[float, str], float] = {}
    for outcome in matching(outcomes, {**wanted, "stage": "tuning"}):
        for loss in losses([outcome]).values():
            found[_choice(outcome.cell.labels)] = loss
    return min(found, key=found.__getitem__) if found else None


def _compared(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return the evaluations of what was chosen; an earlier run may have tried less and chosen
    something else."""
    return [
        outcome
        for outcome in matching(outcomes, {"stage": "evaluation"})
        if best_choice(outcomes, outcome.cell.labels) in (None, _choice(outcome.cell.labels))
    ]


def _choice(labels: Mapping[str, Label]) -> tuple[float, str]:
    return float(labels["inner.lr"]), str(labels.get(OUTER, DEFAULT))


def _best(tried: Sequence[SwarmCell], outcomes: Sequence[Outcome]) -> list[SwarmCell]:
    """Return one of the `tried` runs per model, that with the best choice, to be compared."""
    best: dict[Label, SwarmCell] = {}
    for cell in tried:
        choice = best_choice(outcomes, cell.labels)
        if choice is None or choice == _choice(cell.labels):
            best.setdefault(cell.labels["model"], cell)
    for cell in best.values():
        cell.labels["stage"] = "evaluation"
    return list(best.values())


def _at_the_end_of_the_grid(outcomes: Sequence[Outcome]) -> list[str]:
    """Say which algorithms might do better at a rate that was not tried."""
    tried = [rate for rate in distinct(outcomes, "inner.lr") if isinstance(rate, float)]
    ends = (min(tried), max(tried)) if len(tried) > 1 else ()
    evaluated = _compared(outcomes)
    found = [
        outcome.cell.labels["algorithm"]
        for outcome in evaluated
        if outcome.cell.labels["inner.lr"] in ends
    ]
    names = ", ".join(dict.fromkeys(str(label) for label in found))
    return [f"The best inner learning rate is the last one that was tried for {names}."] * bool(
        names
    )


def _table(
    evaluated: Sequence[Outcome],
    model: str,
    verdicts: dict[str, dict[str, Verdict]],
    models: Sequence[object],
) -> Table:
    """Return the comparison for one model, and note its verdicts."""
    rows = []
    subject = losses(evaluated, model=model, algorithm=SUBJECT)
    claims = {claim.baseline: claim for claim in CLAIMS}
    for label in distinct(evaluated, "algorithm"):
        found = losses(evaluated, model=model, algorithm=label)
        paired = difference(subject, found) if label != SUBJECT else None
        verdict: str = MISSING
        if label in claims:
            claim = claims[str(label)]
            wild = any(
                any_diverged(evaluated, model=model, algorithm=one) for one in (label, SUBJECT)
            )
            reached = claim.judge(None if wild else paired)
            verdicts[claim.words][model if len(models) > 1 else ""] = verdict = reached
        mine = matching(evaluated, {"model": model, "algorithm": label})
        choices = sorted({_choice(outcome.cell.labels) for outcome in mine})
        rows.append(
            (
                str(label),
                ", ".join(f"{rate:g}" for rate, _ in choices),
                ", ".join(outer for _, outer in choices) if label in OWN_OUTER else MISSING,
                loss_cell(evaluated, model=model, algorithm=label),
                percent_text(paired),
                verdict,
            )
        )
    return Table(
        title=f"Model {model}",
        columns=(
            "Algorithm",
            "Inner lr",
            "Outer step",
            "Loss",
            "GASLoC 2-peer against it",
            "No worse",
        ),
        rows=tuple(rows),
    )


def _tuning_table(outcomes: Sequence[Outcome], model: str) -> Table:
    """Return the losses by which the settings were chosen."""
    tuning = matching(outcomes, {"stage": "tuning", "model": model})
    rates = sorted(rate for rate in distinct(tuning, "inner.lr") if not isinstance(rate, str))
    rows = []
    for label in distinct(tuning, "algorithm"):
        mine = matching(tuning, {"algorithm": label})
        for outer in dict.fromkeys(_choice(outcome.cell.labels)[1] for outcome in mine):
            chosen = [o for o in mine if _choice(o.cell.labels)[1] == outer]
            cells = (loss_cell(chosen, **{"inner.lr": rate}) for rate in rates)
            rows.append((str(label), outer if label in OWN_OUTER else MISSING, *cells))
    return Table(
        title=f"Choosing the settings, model {model}, one seed",
        columns=("Algorithm", "Outer step", *(f"lr {rate:g}" for rate in rates)),
        rows=tuple(rows),
        names=2,
    )


def _draw_losses(axes: Axes, evaluated: Sequence[Outcome], model: str) -> None:
    labels = distinct(evaluated, "algorithm")
    for place, label in enumerate(labels):
        found = list(losses(evaluated, model=model, algorithm=label).values())
        axes.plot(found, [place + 0.24] * len(found), ".", color="#888888", markersize=6)
        _draw_estimate(axes, place, estimate(found))
    _name_rows(axes, labels)
    axes.set_xlabel("validation loss (nats per token); lower is better")
    axes.set_title(
        f"model {model}, each at its best settings\nmean and 95 % interval; grey: each seed",
        loc="left",
    )


def _draw_differences(axes: Axes, evaluated: Sequence[Outcome], model: str) -> None:
    subject = losses(evaluated, model=model, algorithm=SUBJECT)
    labels = distinct(evaluated, "algorithm")
    axes.axvline(0, color="#333333", linewidth=1.2)
    for place, label in enumerate(labels):
        if label != SUBJECT:
            found = losses(evaluated, model=model, algorithm=label)
            _draw_estimate(axes, place, difference(subject, found))
    _name_rows(axes, labels)
    axes.set_xlabel(f"loss of {SUBJECT} compared with the other's (%)")
    axes.set_title(
        f"left of 0: {SUBJECT} is better\nmean and 95 % interval, paired by seed", loc="left"
    )


def _draw_estimate(axes: Axes, place: int, value: Estimate | None) -> None:
    from gasloc_p2p.studies.plot import look

    colour, marker = look(place)
    if value is not None:
        axes.errorbar(
            value.mean,
            place,
            xerr=value.half_width or 0.0,
            color=colour,
            marker=marker,
            capsize=4,
            markersize=7,
        )


def _name_rows(axes: Axes, labels: Sequence[Label]) -> None:
    axes.set_yticks(range(len(labels)), [str(label) for label in labels])
    axes.set_ylim(len(labels) - 0.4, -0.6)
