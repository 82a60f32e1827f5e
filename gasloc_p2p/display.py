"""What a person sees while peers train: a live table, plain lines, or one JSON event a line."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, Protocol

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from gasloc_p2p.core.types import PeerId
from gasloc_p2p.node.events import (
    Event,
    Left,
    Notice,
    Online,
    PeersChanged,
    PeerWork,
    RoundFinished,
    RoundStarted,
    Training,
    Validated,
    Waiting,
    WorkTold,
)
from gasloc_p2p.node.report import RoundReport
from gasloc_p2p.node.sentences import sentence, short_id

DisplayMode = Literal["auto", "live", "plain", "json"]
REFRESH_PER_SECOND = 4
LATE_ROUNDS = 6
"""A peer so many rounds behind the first one is not waited for with a round's line."""


class Display(Protocol):
    """Takes the events of one or several peers; use as a context manager."""

    def observe(self, index: int, event: Event) -> None:
        """Show what happened to the peer with this index."""
        ...

    def say(self, text: str) -> None:
        """Show one line that belongs to no peer."""
        ...

    def __enter__(self) -> Display: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


def make_display(mode: DisplayMode, *, title: str, peers: int, rounds: int) -> Display:
    """Return the display for a mode; `auto` is live in a terminal and plain in a pipe.

    Args:
        mode: the configured mode.
        title: heading of the live table.
        peers: how many peers will send events.
        rounds: training rounds of the run.
    """
    if mode == "json":
        return JsonDisplay()
    console = Console(highlight=False)
    if mode == "live" or (mode == "auto" and console.is_terminal):
        return LiveDisplay(console, title=title, peers=peers, rounds=rounds)
    return PlainDisplay(peers=peers, rounds=rounds)


class JsonDisplay:
    """One event a line on standard output, for programs."""

    def observe(self, index: int, event: Event) -> None:
        """Write the event as one line of JSON."""
        sys.stdout.buffer.write(msgspec.json.encode(event) + b"\n")
        sys.stdout.buffer.flush()

    def say(self, text: str) -> None:
        """Write the text as a notice."""
        self.observe(0, Notice(text=text))

    def __enter__(self) -> JsonDisplay:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return


class PlainDisplay:
    """Plain lines: one a round over all peers, and one for whatever else a person should know."""

    def __init__(self, *, peers: int, rounds: int) -> None:
        self._peers = peers
        self._rounds = rounds
        self._done: dict[int, list[RoundReport]] = {}
        self._val_loss: dict[int, list[float]] = {}
        self._work: tuple[PeerWork, ...] = ()
        self._printed = -1

    def observe(self, index: int, event: Event) -> None:
        """Print what the event means, if anything."""
        match event:
            case RoundFinished(report=report):
                self._finish_round(report)
            case Validated(round=round, val_loss=val_loss):
                self._val_loss.setdefault(round, []).append(val_loss)
            case WorkTold(peers=peers):
                self._work = peers if self._peers == 1 else ()
            case PeersChanged() | Training() if self._peers > 1:
                return
            case _:
                text = sentence(event)
                if text:
                    self.say(f"{self._name(index)}{text}")

    def say(self, text: str) -> None:
        """Print one line."""
        print(text, flush=True)

    def __enter__(self) -> PlainDisplay:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._print_until(max(self._done, default=-1))
        for line in work_lines(self._work):
            self.say(line)

    def _name(self, index: int) -> str:
        return f"peer {index}: " if self._peers > 1 else ""

    def _finish_round(self, report: RoundReport) -> None:
        """Print the rounds up to one that all peers have done, or the first left well behind."""
        if report.round <= self._printed:
            return
        done = self._done.setdefault(report.round, [])
        done.append(report)
        self._print_until(report.round if len(done) == self._peers else report.round - LATE_ROUNDS)

    def _print_until(self, last: int) -> None:
        for round in sorted(round for round in self._done if round <= last):
            self._print_round(round, self._done.pop(round))
        self._printed = max(self._printed, last)

    def _print_round(self, round: int, done: list[RoundReport]) -> None:
        tried = self._val_loss.pop(round, [])
        losses = [r.train_loss for r in done if r.train_loss is not None]
        parts = [_round_text(done[0], self._rounds)]
        if len(done) < self._peers:
            parts.append(f"{len(done)} of {self._peers} peers")
        if losses:
            parts.append(f"train loss {sum(losses) / len(losses):.3f}")
        if tried:
            parts.append(f"validation loss {sum(tried) / len(tried):.3f}")
        parts.append(_edges_text(done))
        if self._peers == 1:
            parts += speed_texts(done[0])
        parts += _reasons(done)
        self.say("  ".join(parts))


def _round_text(report: RoundReport, rounds: int) -> str:
    if report.closing:
        return f"closing round {report.round - rounds + 1}"
    return f"round {report.round + 1}/{rounds}"


def _edges_text(reports: list[RoundReport]) -> str:
    if all_reduces := max(report.all_reduces for report in reports):
        return f"all-reduces: {all_reduces}"
    kinds = [edge.kind.value for report in reports for edge in report.edges]
    unpaired = sum(report.unpaired for report in reports)
    under_way = sum(report.under_way for report in reports)
    counts = [f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds)]
    if unpaired:
        counts.append(f"{unpaired} unpaired")
    if under_way:
        counts.append(f"{under_way} under way")
    return "edges: " + ", ".join(counts)


def speed_texts(report: RoundReport) -> list[str]:
    """Return how fast the inner steps of a round were; nothing without any."""
    if not report.tokens_per_s:
        return []
    used = "" if report.mfu is None else f", MFU {report.mfu:.0%}"
    return [f"{report.tokens_per_s:,.0f} tokens/s{used}"]


def _reasons(reports: list[RoundReport]) -> list[str]:
    """Return why peers did other than the usual number of steps: in full for a single one."""
    told = [report.reason for report in reports if report.reason]
    if len(reports) == 1:
        return told
    kinds = Counter(reason.partition(":")[0] for reason in told)
    return [", ".join(f"{count} {kind}" for kind, count in kinds.items())] if kinds else []


def work_lines(peers: tuple[PeerWork, ...]) -> list[str]:
    """Return who did what, a line each; nothing when nobody else is known."""
    if len(peers) < 2:
        return []
    return ["who did what, as everybody tells:", *(f"  {_work_text(peer)}" for peer in peers)]


def _work_text(work: PeerWork) -> str:
    skips = f", one of {work.every} rounds" if work.every > 1 else ""
    return (
        f"{short_id(work.peer_id)}  {work.tokens} tokens in {work.rounds} rounds of "
        f"{work.steps:.1f} steps{skips}, {work.bytes_sent / 1e6:.1f} MB sent"
    )


@dataclass(slots=True)
class _Row:
    """What the live table shows of one peer."""

    peer_id: PeerId = ""
    state: str = "starting"
    round: int = 0
    train_loss: float | None = None
    val_loss: float | None = None
    partners: tuple[PeerId, ...] = ()
    edges: dict[str, int] = field(default_factory=dict)
    sent_bytes: int = 0
    speed: str = ""


class LiveDisplay:
    """A table that follows every peer in place."""

    def __init__(self, console: Console, *, title: str, peers: int, rounds: int) -> None:
        self._title = title
        self._rounds = rounds
        self._rows = [_Row() for _ in range(peers)]
        self._work: tuple[PeerWork, ...] = ()
        self._live = Live(
            console=console,
            refresh_per_second=REFRESH_PER_SECOND,
            get_renderable=self._shown,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def observe(self, index: int, event: Event) -> None:
        """Update the peer's row; texts that must stay are printed above the table."""
        row = self._rows[index]
        match event:
            case Online(peer_id=peer_id):
                row.peer_id, row.state = peer_id, "online"
            case Waiting(reason=reason):
                row.state = reason
            case RoundStarted(round=round, closing=closing, partners=partners, reason=reason):
                row.state = "mixing" if closing else reason or "training"
                row.round, row.partners = round, partners
            case RoundFinished(report=report):
                _note_round(row, report)
            case Validated(val_loss=val_loss):
                row.val_loss = val_loss
            case WorkTold(peers=peers):
                self._work = peers if len(self._rows) == 1 else ()
            case Left(finished=finished):
                row.state = "finished" if finished else "left"
            case PeersChanged() | Training() if len(self._rows) > 1:
                return
            case _:
                self.say(sentence(event))

    def say(self, text: str) -> None:
        """Print a line above the table."""
        self._live.console.print(text, soft_wrap=True)

    def __enter__(self) -> LiveDisplay:
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()

    def _shown(self) -> Group:
        """Return what is on the screen; it stays there at the end."""
        others = self._work_table() if len(self._work) > 1 else ""
        return Group(self._table(), others)

    def _work_table(self) -> Table:
        table = Table(title="who did what", title_justify="left", expand=False)
        for heading in ("peer", "tokens", "rounds", "steps a round", "takes part in", "sent"):
            table.add_column(heading, justify="left" if heading == "peer" else "right")
        for work in self._work:
            table.add_row(
                short_id(work.peer_id),
                str(work.tokens),
                str(work.rounds),
                f"{work.steps:.1f}",
                "all rounds" if work.every == 1 else f"one of {work.every}",
                f"{work.bytes_sent / 1e6:.1f} MB",
            )
        return table

    def _table(self) -> Table:
        # No lines between columns: that it fits into 80 characters with reasons is worth more.
        table = Table(
            title=self._title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
        )
        for heading in (
            "peer",
            "round",
            "train\nloss",
            "val\nloss",
            "partner",
            "edges",
            "MB\nsent",
        ):
            justify: Literal["left", "right"] = "left" if heading == "peer" else "right"
            table.add_column(heading, justify=justify, no_wrap=heading != "partner")
        table.add_column("now")
        if len(self._rows) == 1 and self._rows[0].speed:
            table.caption, table.caption_justify = self._rows[0].speed, "left"
        for index, row in enumerate(self._rows):
            table.add_row(
                f"{index}  {short_id(row.peer_id)}" if len(self._rows) > 1 else row.peer_id[-6:],
                _progress(row.round, self._rounds),
                _number(row.train_loss),
                _number(row.val_loss),
                ", ".join(short_id(partner) for partner in row.partners) or "-",
                "\n".join(f"{count} {kind}" for kind, count in row.edges.items()) or "-",
                f"{row.sent_bytes / 1e6:.1f}",
                row.state,
            )
        return table


def _note_round(row: _Row, report: RoundReport) -> None:
    if report.train_loss is not None:
        row.train_loss = report.train_loss
    for edge in report.edges:
        row.edges[edge.kind.value] = row.edges.get(edge.kind.value, 0) + 1
    row.sent_bytes += report.bytes_sent
    row.speed = " ".join(speed_texts(report)) or row.speed


def _progress(round: int, rounds: int) -> str:
    return f"{min(round + 1, rounds)}/{rounds}" if round < rounds else f"{rounds}+closing"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
