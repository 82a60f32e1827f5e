"""Which outer learning rates and momenta train well, and where do the peers drift apart?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from gasloc_p2p.core.errors import ConfigError
from gasloc_p2p.core.stability import radius
from gasloc_p2p.studies.cell import Cell, Outcome, SwarmCell, SwarmResult
from gasloc_p2p.studies.comparison import distinct, matching
from gasloc_p2p.studies.format import MISSING
from gasloc_p2p.studies.study import Setup, Study, Summary, Table, Variant, cell_config, check_also

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BOUNDARY_POINTS = 25
"""Points along each axis at which stability is computed for the boundary."""

COLOUR_SPAN = 1.35
"""The colours end at this multiple of the lowest loss, so that good runs can be told apart."""


@dataclass(frozen=True, kw_only=True)
class OuterSensitivity(Study):
    """A grid over eta and gamma for each topology, short runs of one seed.

    Attributes:
        topologies: names of topologies.
        lrs: eta.
        momenta: gamma.
    """

    name: ClassVar[str] = "outer-sensitivity"
    question: ClassVar[str] = "Which outer learning rate and momentum train well?"

    topologies: tuple[str, ...] = ("pairs", "ring", "cycle", "complete")
    lrs: tuple[float, ...] = (0.3, 0.5, 0.7, 0.9, 1.1)
    momenta: tuple[float, ...] = (0.0, 0.5, 0.7, 0.8, 0.9, 0.95)
    defaults: dict[str, Any] = field(
        default_factory=lambda: {
            "run.rounds": 12,
            "inner.local_steps": 10,
            "inner.batch_size": 4,
            "outer.force": True,
            "node.validate_every_rounds": 0,
            "simulate.engine": "batched",
        }
    )

    def cells(self, setup: Setup, stage: int, outcomes: Sequence[Outcome]) -> list[Cell]:
        """Return the grid of every topology, for the first seed."""
        check_also(self, [], setup.also)
        return [
            cell
            for topology in self.topologies
            for momentum in self.momenta
            for lr in self.lrs
            for peers in setup.peers or self.peers
            for cell in self.swarm_cells(
                setup,
                Variant(label="GASLoC"),
                peers=peers,
                seed=setup.first_seed,
                labels={
                    "gossip.topology": topology,
                    "outer.lr": lr,
                    "outer.momentum": momentum,
                },
                settings={
                    "gossip.topology": topology,
                    "outer.lr": lr,
                    "outer.momentum": momentum,
                },
            )
        ]

    def summary(self, outcomes: Sequence[Outcome]) -> Summary:
        """Return a table of losses per topology, and how runs and theory agree."""
        groups = _groups(outcomes)
        return Summary(
            tables=tuple(_table(title, cells) for title, cells in groups),
            verdicts=tuple(_verdict(title, cells) for title, cells in groups),
            reading=(
                "Validation loss of the averaged model in nats per token / consensus distance, "
                "both after the last training round of one seed. 'diverged' is a run whose loss "
                "ended non-finite or no better than at the start. "
                "† marks settings that are unstable in theory: without gradients the peers' "
                "disagreement grows (docs/design.md section 2). A short run at such settings may "
                "still end well, and stable settings can be too aggressive for training.",
            ),
        )

    def figure(self, outcomes: Sequence[Outcome]) -> Figure:
        """Draw a heat map of the loss per topology, with the boundary of stability."""
        from gasloc_p2p.studies.plot import new_figure

        groups = _groups(outcomes)
        figure, panels = new_figure(
            self.question, max(len(groups), 1), columns=2, panel_size=(4.8, 4.3)
        )
        lowest = min((loss for _, cells in groups for loss in _losses(cells)), default=1.0)
        span = (lowest, COLOUR_SPAN * lowest)
        image = None
        for (title, cells), axes in zip(groups, panels, strict=False):
            image = _draw(axes, title, cells, span)
        if image is not None:
            figure.colorbar(
                image,
                ax=panels,
                label="validation loss (nats per token)",
                extend="max",
                shrink=0.8,
            )
            figure.supxlabel(
                "dashed: boundary of stability in theory, unstable above it;  ×: diverged",
                fontsize=9.5,
            )
        return figure


def _groups(outcomes: Sequence[Outcome]) -> list[tuple[str, list[Outcome]]]:
    """Return the outcomes of each model and topology with their title."""
    models = distinct(outcomes, "model")
    return [
        (
            str(topology) + (f", model {model}" if len(models) > 1 else ""),
            matching(outcomes, {"gossip.topology": topology, "model": model}),
        )
        for model in models
        for topology in distinct(outcomes, "gossip.topology")
    ]


def _losses(cells: Sequence[Outcome]) -> list[float]:
    return [loss for loss in map(_loss, cells) if loss is not None]


def _loss(outcome: Outcome) -> float | None:
    """Return the loss of a run that did not diverge."""
    result = outcome.result
    if not isinstance(result, SwarmResult) or result.diverged:
        return None
    return result.averaged_val_loss


def _is_stable(outcome: Outcome) -> bool:
    """Whether theory says that disagreement dies out; of rules without theory, it is taken to."""
    labels = outcome.cell.labels
    (found,) = _radii(outcome, [(float(labels["outer.lr"]), float(labels["outer.momentum"]))])
    return not found > 1 + 1e-9


def _radii(outcome: Outcome, settings: Sequence[tuple[float, float]]) -> list[float]:
    """Return the radius of an outcome's rule and topology at several eta and gamma.

    A person's own rule may not be linear; then theory says nothing, which is NaN here.
    """
    cell = outcome.cell
    assert isinstance(cell, SwarmCell)
    config = cell_config(cell)
    rule, alpha, topology = config.outer.rule, config.outer.alpha, config.gossip.topology
    try:
        return [radius(rule, lr, gamma, alpha, topology, cell.peers) for lr, gamma in settings]
    except ConfigError:
        return [math.nan] * len(settings)


def _grid(cells: Sequence[Outcome]) -> tuple[list[float], list[float], dict[Any, Outcome]]:
    """Return eta, gamma, and the outcome at each pair of them."""
    found = {
        (float(cell.cell.labels["outer.lr"]), float(cell.cell.labels["outer.momentum"])): cell
        for cell in cells
    }
    return sorted({lr for lr, _ in found}), sorted({gamma for _, gamma in found}), found


def _table(title: str, cells: Sequence[Outcome]) -> Table:
    lrs, momenta, found = _grid(cells)

    def text(lr: float, momentum: float) -> str:
        outcome = found.get((lr, momentum))
        if outcome is None or outcome.result is None:
            return MISSING
        loss = _loss(outcome)
        mark = " †" if not _is_stable(outcome) else ""
        distance = getattr(outcome.result, "consensus_distance", None)
        apart = "" if loss is None or distance is None else f" / {distance:.2g}"
        return ("diverged" if loss is None else f"{loss:.3f}") + apart + mark

    return Table(
        title=f"{title}",
        columns=("Momentum", *(f"lr {lr:g}" for lr in lrs)),
        rows=tuple((f"{momentum:g}", *(text(lr, momentum) for lr in lrs)) for momentum in momenta),
    )


def _verdict(title: str, cells: Sequence[Outcome]) -> str:
    done = [cell for cell in cells if cell.result is not None]
    best = min(
        (cell for cell in done if _loss(cell) is not None),
        key=lambda cell: _loss(cell) or 0.0,
        default=None,
    )
    diverged = [cell for cell in done if _loss(cell) is None]
    foreseen = sum(not _is_stable(cell) for cell in diverged)
    parts = []
    if best is not None:
        labels = best.cell.labels
        parts.append(
            f"lowest loss {_loss(best):.3f} at lr {labels['outer.lr']}, momentum "
            f"{labels['outer.momentum']}"
        )
    parts.append(
        f"{len(diverged)} of {len(done)} runs diverged, {foreseen} of them unstable in theory"
        if diverged
        else f"none of {len(done)} runs diverged"
    )
    return f"{title}: {'; '.join(parts)}."


def _draw(axes: Axes, title: str, cells: Sequence[Outcome], span: tuple[float, float]) -> Any:
    """Draw one heat map; the grid's values stand at equal distances."""
    lrs, momenta, found = _grid(cells)
    values = np.full((len(momenta), len(lrs)), np.nan)
    for (lr, momentum), outcome in found.items():
        place = (momenta.index(momentum), lrs.index(lr))
        loss = _loss(outcome)
        if loss is not None:
            values[place] = loss
        if outcome.result is not None:
            dark = loss is None or loss > (span[0] + span[1]) / 2
            axes.text(
                place[1],
                place[0],
                "×" if loss is None else f"{loss:.2f}",
                horizontalalignment="center",
                verticalalignment="center",
                fontsize=14 if loss is None else 8.5,
                color="black" if loss is None or dark else "white",
            )
    image = axes.imshow(
        values, origin="lower", aspect="auto", cmap="viridis", vmin=span[0], vmax=span[1]
    )
    axes.set_facecolor("#dddddd")
    axes.grid(visible=False)
    _draw_boundary(axes, cells[0], lrs, momenta)
    axes.set_xticks(range(len(lrs)), [f"{lr:g}" for lr in lrs])
    axes.set_yticks(range(len(momenta)), [f"{momentum:g}" for momentum in momenta])
    axes.set_xlabel("outer lr, η")
    axes.set_ylabel("outer momentum, γ")
    axes.set_title(title, loc="left")
    return image


def _draw_boundary(
    axes: Axes, outcome: Outcome, lrs: Sequence[float], momenta: Sequence[float]
) -> None:
    """Draw where the radius is 1, on axes whose ticks are `lrs` and `momenta`."""
    across = np.linspace(-0.5, len(lrs) - 0.5, BOUNDARY_POINTS)
    up = np.linspace(-0.5, len(momenta) - 0.5, BOUNDARY_POINTS)

    def value(place: float, ticks: Sequence[float]) -> float:
        """Interpolate between ticks, and go on straight beyond them."""
        if len(ticks) < 2:
            return ticks[0]
        low = min(max(int(place), 0), len(ticks) - 2)
        return ticks[low] + (place - low) * (ticks[low + 1] - ticks[low])

    settings = [
        (max(value(x, lrs), 0.0), min(max(value(y, momenta), 0.0), 0.999))
        for y in up
        for x in across
    ]
    radii = np.array(_radii(outcome, settings)).reshape(len(up), len(across))
    if (radii < 1).any() and (radii > 1).any():
        for colour, width in (("black", 3.0), ("white", 1.4)):
            axes.contour(
                across, up, radii, levels=[1.0], colors=colour, linewidths=width, linestyles="--"
            )
