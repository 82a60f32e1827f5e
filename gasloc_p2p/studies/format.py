"""Figures and tables as text: Markdown for files, rich for terminals."""

from __future__ import annotations

from rich.box import SIMPLE
from rich.table import Table as RichTable

from gasloc_p2p.studies.statistics import Estimate
from gasloc_p2p.studies.study import Summary, Table

MISSING = "–"


def loss_text(value: Estimate | None) -> str:
    """Return a loss with its interval, as 2.0104 ± 0.0012."""
    return interval_text(value, ".4f")


def percent_text(value: Estimate | None) -> str:
    """Return a signed difference in percent with its interval, as +0.31 ± 0.12 %."""
    text = interval_text(value, "+z.2f")
    return text if value is None else f"{text} %"


def interval_text(value: Estimate | None, form: str) -> str:
    """Return a mean with its interval, both in the format `form`."""
    if value is None:
        return MISSING
    width = "" if value.half_width is None else f" ± {value.half_width:{form.lstrip('+z')}}"
    return f"{value.mean:{form}}{width}"


def markdown(summary: Summary) -> str:
    """Return tables, verdicts and how to read them as Markdown, without a heading."""
    parts = [markdown_table(table) for table in summary.filled_tables]
    if summary.verdicts:
        parts.append("\n".join(f"- {verdict}" for verdict in summary.verdicts))
    parts += summary.reading
    return "\n\n".join(parts) + "\n"


def markdown_table(table: Table) -> str:
    """Return a table as Markdown, its title above it."""
    rules = ["---" if index < table.names else "---:" for index in range(len(table.columns))]
    lines = [_row(table.columns), _row(rules), *map(_row, table.rows)]
    return "\n".join(([f"**{table.title}**", ""] if table.title else []) + lines)


def _row(cells: tuple[str, ...] | list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def rich_table(table: Table) -> RichTable:
    """Return a table for a terminal."""
    shown = RichTable(title=table.title, title_justify="left", box=SIMPLE, padding=(0, 1))
    for index, column in enumerate(table.columns):
        shown.add_column(column, justify="left" if index < table.names else "right")
    for row in table.rows:
        shown.add_row(*row)
    return shown
