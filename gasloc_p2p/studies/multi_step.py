"""Does gossip with one or two peers lose against an all-reduce, at many local steps?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from gasloc_p2p.studies.cell import Cell, Label, Outcome
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
from gasloc_p2p.studies.statistics import Estimate, Verdict
from gasloc_p2p.studies.study import Setup, Study, Summary, Table, Variant, check_also

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BASELINE = "DiLoCo"
VARIANTS = (
    Variant(label=BASELINE, algorithm="diloco"),
    Variant(label="GASLoC 2-peer", settings={"gossip.topology": "ring"}),
    Variant(label="GASLoC 1-peer", settings={"gossip.topology": "pairs"}),
    Variant(label="Local-DAdam", algorithm="local-dadam", settings={"gossip.topology": "pairs"}),
    Variant(label="NoLoCo", algorithm="noloco"),
)
SMALLEST_ONLY = ("NoLoCo",)
"""Shown for comparison at the smallest size; nothing is claimed of it."""

CLAIMS = {
    claim.label: claim
    for claim in (
        Claim(
            label="GASLoC 2-peer",
            baseline=BASELINE,
            bound="at most",
            limit=0.5,
            words="GASLoC 2-peer is within 0.5 % of DiLoCo",
        ),
        Claim(
            label="GASLoC 1-peer",
            baseline=BASELINE,
            bound="at most",
            limit=1.0,
            words="GASLoC 1-peer is within 1 % of DiLoCo",
        ),
        Claim(
            label="Local-DAdam",
            baseline=BASELINE,
            bound="at least",
            limit=3.0,
            words="Local-DAdam is at least 3 % worse than DiLoCo",
        ),
    )
}


@dataclass(frozen=True, kw_only=True)
class MultiStep(Study):
    """All algorithms at several swarm sizes, with the same number of steps for every peer."""

    name: ClassVar[str] = "multi-step"
    question: ClassVar[str] = "Does gossip with 1 or 2 peers per round lose against DiLoCo?"
    takes_variants: ClassVar[bool] = True

    peers: tuple[int, ...] = (8, 16, 32)
    defaults: dict[str, Any] = field(
        default_factory=lambda: {
            "run.rounds": 40,
            "inner.lr": 1e-3,
            "inner.local_steps": 30,
            "inner.batch_size": 4,
            "node.validate_every_rounds": 0,
            "simulate.engine": "batched",
        }
    )

    def cells(self, setup: Setup, stage: int, outcomes: Sequence[Outcome]) -> list[Cell]:
        """Return the variants at every size, seed by seed."""
        check_also(self, [variant.label for variant in VARIANTS], setup.also)
        sizes = setup.peers or self.peers
        return [
            cell
            for seed in setup.evaluated
            for peers in sizes
            for variant in (*VARIANTS, *setup.also)
            if peers == min(sizes) or variant.label not in SMALLEST_ONLY
            for cell in self.swarm_cells(setup, variant, peers=peers, seed=seed)
        ]

    def summary(self, outcomes: Sequence[Outcome]) -> Summary:
        """Return the losses and their differences to DiLoCo, by number of peers."""
        models = distinct(outcomes, "model")
        verdicts: dict[str, dict[str, Verdict]] = {label: {} for label in CLAIMS}
        tables = tuple(_table(outcomes, str(model), verdicts, models) for model in models)
        return Summary(
            tables=tables,
            verdicts=tuple(
                verdict_sentence(CLAIMS[label].words, found)
                for label, found in verdicts.items()
                if found
            ),
            reading=(
                "Loss: validation loss of the averaged model after the last training round, in "
                "nats per token. 2-peer is the random ring, 1-peer are random pairs. NoLoCo runs "
                "with the fewest peers only.",
                f"{INTERVALS} {CLAIM_RULE} Within x % means at most x % above.",
            ),
        )

    def figure(self, outcomes: Sequence[Outcome]) -> Figure:
        """Draw the differences to DiLoCo with their intervals, by number of peers."""
        from gasloc_p2p.studies.plot import legend_outside, new_figure

        models = distinct(outcomes, "model")
        figure, panels = new_figure(self.question, max(len(models), 1), panel_size=(7.2, 4.6))
        for model, axes in zip(models, panels, strict=False):
            _draw(axes, outcomes, str(model))
        legend_outside(figure, panels)
        return figure


def _table(
    outcomes: Sequence[Outcome],
    model: str,
    verdicts: dict[str, dict[str, Verdict]],
    models: Sequence[object],
) -> Table:
    """Return the table of one model, and note its verdicts."""
    rows = []
    mine = matching(outcomes, {"model": model})
    for peers in distinct(mine, "peers"):
        for label in distinct(mine, "algorithm"):
            if not matching(mine, {"peers": peers, "algorithm": label}):
                continue
            paired = _against_baseline(mine, peers, label) if label != BASELINE else None
            claim = CLAIMS.get(str(label))
            loss = loss_cell(mine, peers=peers, algorithm=label)
            row = [str(label), str(peers), loss, percent_text(paired)]
            if claim is None:
                row += [MISSING, MISSING]
            else:
                wild = any(
                    any_diverged(mine, peers=peers, algorithm=one) for one in (label, BASELINE)
                )
                verdict = claim.judge(None if wild else paired)
                place = f"{peers} peers" + (f" ({model})" if len(models) > 1 else "")
                verdicts[claim.label][place] = verdict
                row += [claim.short, verdict]
            rows.append(tuple(row))
    return Table(
        title=f"Model {model}",
        columns=("Algorithm", "Peers", "Loss", "Difference to DiLoCo", "Claim", "Verdict"),
        rows=tuple(rows),
    )


def _against_baseline(outcomes: Sequence[Outcome], peers: Label, label: Label) -> Estimate | None:
    return difference(
        losses(outcomes, peers=peers, algorithm=label),
        losses(outcomes, peers=peers, algorithm=BASELINE),
    )


def _draw(axes: Axes, outcomes: Sequence[Outcome], model: str) -> None:
    from gasloc_p2p.studies.plot import draw_estimates, look

    mine = matching(outcomes, {"model": model})
    sizes = distinct(mine, "peers")
    labels = [label for label in distinct(mine, "algorithm") if label != BASELINE]
    axes.axhline(0, color="#333333", linewidth=1.2, label=BASELINE)
    for index, label in enumerate(labels):
        values = [_against_baseline(mine, peers, label) for peers in sizes]
        if str(label) in CLAIMS:
            limit, (colour, _) = CLAIMS[str(label)].limit, look(index)
            axes.axhline(limit, color=colour, linestyle=":", linewidth=1.2)
        offset = 0.09 * (index - (len(labels) - 1) / 2)
        draw_estimates(axes, index, str(label), values, offset=offset)
    axes.set_xticks(range(len(sizes)), [str(size) for size in sizes])
    axes.set_xlabel("peers in the swarm")
    axes.set_ylabel("loss compared with DiLoCo (%)\nmean and 95 % interval over the seeds")
    axes.set_title(f"model {model}; lower is better; dotted: limits of the claims", loc="left")
