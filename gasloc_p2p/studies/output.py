"""What a study leaves behind for people: table.md and plot.svg."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from gasloc_p2p.studies.catalogue import STUDIES
from gasloc_p2p.studies.estimate import duration_text
from gasloc_p2p.studies.format import markdown
from gasloc_p2p.studies.record import Results, write_atomically
from gasloc_p2p.studies.study import Study, Summary

TABLE_FILE = "table.md"
PLOT_FILE = "plot.svg"


def study_of(results: Results) -> Study:
    """Return the study that results belong to."""
    return STUDIES[results.request.study].quick


def summary_of(results: Results) -> Summary:
    """Return what results say."""
    return study_of(results).summary(results.cells)


def write_outputs(folder: Path, results: Results) -> None:
    """Write the table and the plot of results, which may be part of all."""
    from gasloc_p2p.studies.plot import svg

    study = study_of(results)
    text = f"# {study.question}\n\n{results_text(results)}\n![Plot]({PLOT_FILE})\n"
    write_atomically(folder / TABLE_FILE, text.encode())
    plot = svg(lambda: study.figure(results.cells), study.question)
    write_atomically(folder / PLOT_FILE, plot)


def results_text(results: Results) -> str:
    """Return tables, verdicts, and how the results were made, as Markdown without a heading."""
    failed = [outcome for outcome in results.cells if outcome.result is None]
    missing = f"**{len(failed)} simulations failed and are missing here.**\n\n" if failed else ""
    return f"{missing}{markdown(summary_of(results))}\n{origin_text(results)}"


def origin_text(results: Results) -> str:
    """Return the command, date, duration and machine as Markdown."""
    started = datetime.fromisoformat(results.started)
    simulations = len(results.cells)
    return (
        f"Made with\n\n    {results.command}\n\n"
        f"on {started:%Y-%m-%d}, version {results.request.version}: {simulations} simulations in "
        f"{duration_text(results.duration_s)} on {results.machine.sentence()}. Every setting and "
        "every result is in `results.json`.\n"
    )
