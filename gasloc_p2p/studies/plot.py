"""The look that all plots share, and their file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from io import BytesIO
from typing import Any

from matplotlib import style
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gasloc_p2p.studies.statistics import Estimate

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Told apart with any common colour blindness. Source: Okabe and Ito, "Color Universal Design"."""

MARKERS = "osD^vPX*"

LEGEND_ENTRY_INCHES = 1.8
"""Width of an entry with the longest name that the studies have."""

STYLE: dict[str, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": "#555555",
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 10.5,
    "figure.facecolor": "white",
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "savefig.facecolor": "white",
    # Outlines of letters look the same wherever the file is shown; fonts would have to be there.
    "svg.fonttype": "path",
    "svg.hashsalt": "gasloc",
}


def new_figure(
    title: str,
    panels: int = 1,
    *,
    columns: int = 2,
    panel_size: tuple[float, float] = (6.4, 4.2),
) -> tuple[Figure, list[Axes]]:
    """Return a figure whose title states the question, and its panels.

    Args:
        title: the question.
        panels: how many.
        columns: most panels side by side.
        panel_size: width and height of one in inches.
    """
    across = min(panels, columns)
    down = -(-panels // across)
    figure = Figure(figsize=(panel_size[0] * across, panel_size[1] * down), layout="constrained")
    axes = figure.subplots(down, across, squeeze=False)
    figure.suptitle(title, fontsize=12, fontweight="bold", x=0.01, horizontalalignment="left")
    flat = [axes[row][column] for row in range(down) for column in range(across)]
    for unused in flat[panels:]:
        unused.set_axis_off()
    return figure, flat[:panels]


def look(index: int) -> tuple[str, str]:
    """Return colour and marker of the line with this index; colour never tells alone."""
    return COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]


def draw_estimates(
    axes: Axes, index: int, label: str, values: Sequence[Estimate | None], *, offset: float
) -> None:
    """Draw one algorithm's means and intervals, at places 0, 1, ... moved by `offset`.

    Args:
        axes: the panel.
        index: of the algorithm's colour and marker.
        label: in the legend.
        values: by place; None leaves one out.
        offset: keeps algorithms at the same place apart.
    """
    colour, marker = look(index)
    found = [(place, value) for place, value in enumerate(values) if value is not None]
    if found:
        axes.errorbar(
            [place + offset for place, _ in found],
            [value.mean for _, value in found],
            yerr=[value.half_width or 0.0 for _, value in found],
            label=label,
            color=colour,
            marker=marker,
            capsize=4,
            linewidth=1.2,
            markersize=6.5,
        )


def legend_outside(figure: Figure, axes: Sequence[Axes]) -> None:
    """Put one legend for all panels under them."""
    found: dict[str, Artist] = {}
    for panel in axes:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    if found:
        fitting = int(figure.get_figwidth() / LEGEND_ENTRY_INCHES)
        figure.legend(
            list(found.values()),
            list(found),
            loc="outside lower center",
            ncols=min(len(found), fitting),
        )


def svg(draw: Callable[[], Figure], title: str) -> bytes:
    """Return what `draw` draws as SVG; the same figure gives the same bytes."""
    return _saved(draw, "svg", {"Date": None, "Title": title})


def png(draw: Callable[[], Figure]) -> bytes:
    """Return what `draw` draws as PNG, for places that show no SVG."""
    return _saved(draw, "png", {"Software": None})


def _saved(draw: Callable[[], Figure], form: str, metadata: dict[str, str | None]) -> bytes:
    buffer = BytesIO()
    with style.context(STYLE):
        draw().savefig(buffer, format=form, metadata=metadata)
    return buffer.getvalue()
