"""How far a study is: a live table in a terminal, plain lines in a pipe."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol

import msgspec
from rich.box import SIMPLE
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table as RichTable
from rich.text import Text

from gasloc_p2p.display import DisplayMode
from gasloc_p2p.node.events import Notice
from gasloc_p2p.studies.cell import Cell, Outcome, SwarmResult
from gasloc_p2p.studies.estimate import cost, duration_text, rounds
from gasloc_p2p.studies.format import markdown_table, rich_table
from gasloc_p2p.studies.study import Table

REFRESH_PER_SECOND = 2


class Tally:
    """What is done and what runs, and how long the rest will take.

    Args:
        cells: all cells of the plan.
        waiting: those that have no result yet.
        rate: cost that is done per second by all processes together, as calibrated.
        now_s: a monotonic clock.
    """

    def __init__(
        self,
        *,
        cells: int,
        waiting: Sequence[Cell],
        rate: float,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.cells = cells
        self.done = cells - len(waiting)
        self.failed = 0
        self.running: dict[str, tuple[Cell, int]] = {}
        self._now_s = now_s
        self._began_s = now_s()
        self._rate = rate
        self._total_cost = sum(map(cost, waiting))
        self._done_cost = 0.0

    def replan(self, *, cells: int, waiting: Sequence[Cell]) -> None:
        """Count again, once an earlier stage has decided which cells a later one has."""
        self.cells = cells
        self.done = cells - len(waiting)
        self._total_cost = self._done_cost + sum(map(cost, waiting))

    def rounds(self, cell: Cell, done: int) -> None:
        """Note the progress of a cell; 0 when it starts."""
        self.running[name_of(cell)] = (cell, done)

    def finish(self, outcome: Outcome) -> None:
        """Note how a cell ended."""
        self.running.pop(name_of(outcome.cell), None)
        self._done_cost += cost(outcome.cell)
        self.done += outcome.result is not None
        self.failed += outcome.result is None

    @property
    def elapsed_s(self) -> float:
        """Seconds since this process began to run cells."""
        return self._now_s() - self._began_s

    @property
    def left_s(self) -> float:
        """Seconds that the rest takes, at the speed so far, or as calibrated at first."""
        under_way = sum(
            cost(cell) * done / max(rounds(cell), 1) for cell, done in self.running.values()
        )
        done = self._done_cost + under_way
        rate = done / self.elapsed_s if self._done_cost and self.elapsed_s else self._rate
        return max(self._total_cost - done, 0.0) / rate

    def headline(self) -> str:
        """Return counts and times in one line."""
        failed = f", {self.failed} failed" if self.failed else ""
        return (
            f"{self.done} of {self.cells} simulations done{failed}; "
            f"{duration_text(self.elapsed_s)} gone, about {duration_text(self.left_s)} left"
        )


class Progress(Protocol):
    """Shows a study's progress; use as a context manager."""

    def say(self, text: str) -> None:
        """Show one line."""
        ...

    def table(self, table: Table) -> None:
        """Show a table."""
        ...

    def follow(self, tally: Tally) -> None:
        """Show this tally from here on."""
        ...

    def finished(self, outcome: Outcome) -> None:
        """Show how a cell ended."""
        ...

    def __enter__(self) -> Progress: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


def make_progress(mode: DisplayMode, title: str) -> Progress:
    """Return the display for a mode; `auto` is live in a terminal and plain in a pipe."""
    console = Console(highlight=False)
    if mode == "json":
        return PlainProgress(write=_write_json)
    if mode == "live" or (mode == "auto" and console.is_terminal):
        return LiveProgress(console, title)
    return PlainProgress(write=_write_line)


def _write_json(text: str) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(Notice(text=text)) + b"\n")
    sys.stdout.buffer.flush()


def _write_line(text: str) -> None:
    print(text, flush=True)


class PlainProgress:
    """One line per cell that ends."""

    def __init__(self, *, write: Callable[[str], None]) -> None:
        self._write = write
        self._tally: Tally | None = None

    def say(self, text: str) -> None:
        """Write one line."""
        self._write(text)

    def table(self, table: Table) -> None:
        """Write a table as lines of Markdown."""
        for line in markdown_table(table).splitlines():
            self._write(line)

    def follow(self, tally: Tally) -> None:
        """Count by this tally from here on."""
        self._tally = tally

    def finished(self, outcome: Outcome) -> None:
        """Write how a cell ended, and how far the study is."""
        assert self._tally is not None
        self._write(f"{name_of(outcome.cell)}: {ending(outcome)}  ({self._tally.headline()})")

    def __enter__(self) -> PlainProgress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return


class LiveProgress:
    """A table of the cells that run, in place."""

    def __init__(self, console: Console, title: str) -> None:
        self._title = title
        self._tally: Tally | None = None
        self._live = Live(
            console=console,
            refresh_per_second=REFRESH_PER_SECOND,
            get_renderable=self._shown,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def say(self, text: str) -> None:
        """Print a line above the table."""
        self._live.console.print(text, soft_wrap=True)

    def table(self, table: Table) -> None:
        """Print a table above the live one."""
        self._live.console.print(rich_table(table))

    def follow(self, tally: Tally) -> None:
        """Show this tally from here on."""
        self._tally = tally

    def finished(self, outcome: Outcome) -> None:
        """Print what failed; the rest the table shows."""
        if outcome.result is None:
            self.say(f"{name_of(outcome.cell)}: {ending(outcome)}")

    def __enter__(self) -> LiveProgress:
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # What ran last is no news any more.
        self._tally = None
        self._live.stop()

    def _shown(self) -> RenderableType:
        if self._tally is None:
            return Text("")
        table = RichTable(expand=False, box=SIMPLE)
        for column in ("running", "rounds"):
            table.add_column(column, justify="left" if column == "running" else "right")
        for name, (cell, done) in self._tally.running.items():
            table.add_row(name, f"{done}/{rounds(cell)}")
        return Group(Text(self._title, style="bold"), Text(self._tally.headline()), table)


def name_of(cell: Cell) -> str:
    """Return what tells a cell from the others, in words."""
    labels = {**cell.labels, "seed": cell.seed}
    parts = []
    for name, value in labels.items():
        match name:
            case "algorithm" | "stage" | "kind" | "gossip.topology" | "outer.rule":
                parts.append(str(value))
            case "peers":
                parts.append(f"{value} peers")
            case "inner.local_steps":
                parts.append(f"H {value}")
            case _:
                parts.append(f"{name.rpartition('.')[2]} {value}")
    return ", ".join(parts)


def ending(outcome: Outcome) -> str:
    """Return how a cell ended, in words."""
    result = outcome.result
    if result is None:
        # The rest of it is in results.json.
        first, _, _ = (outcome.error or "").partition("\n")
        return f"failed: {first}"
    if not isinstance(result, SwarmResult):
        return f"factor {result.factor:.4f} per round"
    loss = result.averaged_val_loss
    text = "loss not finite" if loss is None else f"loss {loss:.4f}"
    return f"{text}, diverged" if result.diverged else text
