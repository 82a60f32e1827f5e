"""The plot of the study `straggler`."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes

from gasloc_p2p.studies.cell import Label, Outcome
from gasloc_p2p.studies.comparison import distinct
from gasloc_p2p.studies.plot import draw_estimates, look
from gasloc_p2p.studies.time_to_loss import BASELINE, SCENARIO, ratio_of, runs_of, targets_of


def draw_curves(axes: Axes, title: str, outcomes: Sequence[Outcome], scenario: Label) -> None:
    """Draw the averaged loss over time, in the mean over the seeds."""
    targets = targets_of(outcomes, scenario).values()
    for index, algorithm in enumerate(distinct(outcomes, "algorithm")):
        runs = [run.standings for _, run in runs_of(outcomes, scenario, algorithm).values()]
        points = [
            (sum(p.time_s for p in at) / len(at) / 60, sum(losses) / len(losses))
            for at in zip(*runs, strict=False)
            if len(losses := [p.averaged_val_loss for p in at if p.averaged_val_loss]) == len(at)
        ]
        if points:
            colour, _ = look(index)
            minutes, means = zip(*points, strict=True)
            axes.plot(minutes, means, label=str(algorithm), color=colour, linewidth=1.4)
    if targets:
        target = sum(targets) / len(targets)
        axes.axhline(target, color="#333333", linestyle=":", linewidth=1.2, label="loss to reach")
        axes.set_ylim(top=target + 1.2)
    axes.set_xlabel("virtual minutes")
    axes.set_ylabel("loss of the averaged model")
    axes.set_title(f"{title}\n{scenario}; mean over the seeds", loc="left")


def draw_ratios(axes: Axes, outcomes: Sequence[Outcome]) -> None:
    """Draw how many times DiLoCo's time is each one's, by scenario."""
    scenarios = distinct(outcomes, SCENARIO)
    labels = distinct(outcomes, "algorithm")
    for index, algorithm in enumerate(labels):
        if algorithm != BASELINE:
            values = [ratio_of(outcomes, one, algorithm, "averaged_val_loss") for one in scenarios]
            offset = 0.09 * (index - len(labels) / 2)
            draw_estimates(axes, index, str(algorithm), values, offset=offset)
    for line in axes.get_lines():
        line.set_linestyle("none")
    axes.axhline(1, color="#333333", linewidth=1.2)
    words = [str(one).replace("one at ", "").replace("% ", "%\n") for one in scenarios]
    axes.set_xticks(range(len(scenarios)), words)
    axes.set_ylim(bottom=0)
    axes.set_ylabel(f"{BASELINE}'s time to the loss\nby this one's")
    axes.set_title("higher is better\nmean and 95 % interval over the seeds", loc="left")
