"""How much loss do rarer exchanges cost, at the same number of steps?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from gasloc_p2p.studies.cell import Cell, Label, Outcome
from gasloc_p2p.studies.comparison import (
    INTERVALS,
    difference,
    distinct,
    loss_cell,
    losses,
)
from gasloc_p2p.studies.format import percent_text
from gasloc_p2p.studies.multi_step import BASELINE, VARIANTS
from gasloc_p2p.studies.statistics import Estimate, estimate
from gasloc_p2p.studies.study import Setup, Study, Summary, Table, check_also

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LEFT_OUT = "NoLoCo"
AXIS = "inner.local_steps"


@dataclass(frozen=True, kw_only=True)
class LocalSteps(Study):
    """The multi-step algorithms at several lengths of a round.

    Attributes:
        total_steps: inner steps of each peer in every run.
        local_steps: inner steps in a round; each divides `total_steps`.
    """

    name: ClassVar[str] = "local-steps"
    question: ClassVar[str] = "What do more local steps between exchanges cost?"
    takes_variants: ClassVar[bool] = True

    peers: tuple[int, ...] = (4,)
    total_steps: int = 600
    local_steps: tuple[int, ...] = (5, 10, 25, 50, 100, 200)
    defaults: dict[str, Any] = field(
        default_factory=lambda: {
            "inner.batch_size": 4,
            "node.validate_every_rounds": 0,
            "simulate.engine": "batched",
        }
    )

    def cells(self, setup: Setup, stage: int, outcomes: Sequence[Outcome]) -> list[Cell]:
        """Return every variant at every length of a round, seed by seed."""
        variants = [variant for variant in VARIANTS if variant.label != LEFT_OUT]
        check_also(self, [variant.label for variant in variants], setup.also)
        return [
            cell
            for seed in setup.evaluated
            for local_steps in self.local_steps
            for peers in setup.peers or self.peers
            for variant in (*variants, *setup.also)
            for cell in self.swarm_cells(
                setup,
                variant,
                peers=peers,
                seed=seed,
                labels={AXIS: local_steps},
                settings={
                    AXIS: local_steps,
                    "run.rounds": self.total_steps // local_steps,
                    # As many warm-up steps in every run, or the schedules would differ.
                    "inner.warmup_rounds": self.total_steps / 20 / local_steps,
                },
            )
        ]

    def summary(self, outcomes: Sequence[Outcome]) -> Summary:
        """Return the losses by local steps, and what they are against DiLoCo's."""
        return Summary(
            tables=tuple(
                table
                for model in distinct(outcomes, "model")
                for table in _tables(outcomes, str(model))
            ),
            verdicts=(),
            reading=(
                "Loss: validation loss of the averaged model after the last training round, in "
                "nats per token. Every run does the same number of inner steps per peer, the first "
                "twentieth of them as warm-up; H of them lie between two exchanges. 2-peer is the "
                "random ring, 1-peer are random pairs.",
                INTERVALS,
            ),
        )

    def figure(self, outcomes: Sequence[Outcome]) -> Figure:
        """Draw the losses and their differences to DiLoCo, by local steps."""
        from gasloc_p2p.studies.plot import legend_outside, new_figure

        models = distinct(outcomes, "model")
        figure, panels = new_figure(self.question, 2 * max(len(models), 1), panel_size=(6.2, 4.4))
        for model, left, right in zip(models, panels[::2], panels[1::2], strict=False):
            _draw(left, outcomes, str(model), compared=False)
            left.set_ylabel("validation loss (nats per token)")
            left.set_title(
                f"model {model}; lower is better\nmean and 95 % interval over the seeds", loc="left"
            )
            _draw(right, outcomes, str(model), compared=True)
            right.axhline(0, color="#333333", linewidth=1.2)
            right.set_ylabel(f"loss compared with {BASELINE} (%)")
            right.set_title("at the same H, paired by seed\nmean and 95 % interval", loc="left")
        legend_outside(figure, panels)
        return figure


def _estimate(
    outcomes: Sequence[Outcome], model: str, label: Label, step: Label, *, compared: bool
) -> Estimate | None:
    """Return the loss of an algorithm at H = `step`, or its difference to DiLoCo's in percent."""
    found = losses(outcomes, model=model, algorithm=label, **{AXIS: step})
    if not compared:
        return estimate(list(found.values()))
    return difference(found, losses(outcomes, model=model, algorithm=BASELINE, **{AXIS: step}))


def _tables(outcomes: Sequence[Outcome], model: str) -> tuple[Table, Table]:
    steps = distinct(outcomes, AXIS)
    reached, compared = [], []
    for label in distinct(outcomes, "algorithm"):
        wanted = {"model": model, "algorithm": label}
        texts = [loss_cell(outcomes, **wanted, **{AXIS: step}) for step in steps]
        reached.append((str(label), *texts))
        if label != BASELINE:
            texts = [
                percent_text(_estimate(outcomes, model, label, step, compared=True))
                for step in steps
            ]
            compared.append((str(label), *texts))
    columns = ("Algorithm", *(f"H {step}" for step in steps))
    return (
        Table(title=f"Loss, model {model}", columns=columns, rows=tuple(reached)),
        Table(
            title=f"Difference to DiLoCo at the same H, model {model}",
            columns=columns,
            rows=tuple(compared),
        ),
    )


def _draw(axes: Axes, outcomes: Sequence[Outcome], model: str, *, compared: bool) -> None:
    from gasloc_p2p.studies.plot import draw_estimates

    steps = distinct(outcomes, AXIS)
    for index, label in enumerate(distinct(outcomes, "algorithm")):
        if compared and label == BASELINE:
            continue
        values = [_estimate(outcomes, model, label, step, compared=compared) for step in steps]
        draw_estimates(axes, index, str(label), values, offset=0.08 * (index - 1.5))
    axes.set_xticks(range(len(steps)), [str(step) for step in steps])
    axes.set_xlabel("local steps between two exchanges, H (same total)")
