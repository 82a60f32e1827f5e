"""results.json: what a study has found so far, and what it was asked for."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from gasloc_p2p.core.errors import ConfigError
from gasloc_p2p.machine import Machine
from gasloc_p2p.studies.cell import Cell, Outcome, cell_key

RESULTS_FILE = "results.json"


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What all results of one folder have in common.

    Attributes:
        study: name.
        scale: quick or full.
        version: of this package.
        first_seed: the first evaluated seed.
        settings: the person's own, by `section.key`.
        also: the person's own algorithms, settings by name.
        text_digest: of the text that is trained on; None when nothing is trained.
        extensions_digest: of the files in node.extensions; None without any.
    """

    study: str
    scale: str
    version: str
    first_seed: int
    settings: dict[str, Any]
    also: dict[str, dict[str, Any]]
    text_digest: str | None
    extensions_digest: str | None


class Results(msgspec.Struct, frozen=True, kw_only=True):
    """The content of results.json.

    Attributes:
        request: what was asked for.
        question: of the study.
        command: with which the same is asked for again.
        seeds: how many are evaluated.
        started: when the first simulation began, UTC.
        duration_s: seconds of running, over all resumptions.
        machine: of the last of them.
        cells: in the order of the plan.
    """

    request: Request
    question: str
    command: str
    seeds: int
    started: str
    duration_s: float
    machine: Machine
    cells: tuple[Outcome, ...]


def read_results(folder: Path) -> Results | None:
    """Return what `folder` holds; None when there is no results.json.

    Raises:
        ConfigError: results.json cannot be read.
    """
    file = folder / RESULTS_FILE
    try:
        return msgspec.json.decode(file.read_bytes(), type=Results)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"cannot read {file}",
            why=str(error),
            fix="it may be of another version; use another folder for --out",
        ) from None


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file in one step, so that an interruption leaves the old or the new one."""
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(content)
    partial.replace(path)


class Store:
    """The results in one folder, which one process at a time works on.

    Raises:
        ConfigError: the folder is in use, or holds results that do not belong to these.
    """

    def __init__(self, folder: Path, asked: Results) -> None:
        self._folder = folder
        self._lock = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise ConfigError(
                f"the folder {folder} is in use",
                why="another `gasloc study` writes its results there",
                fix="wait until it has ended, or use another folder for --out",
            ) from None
        try:
            found = read_results(folder)
            if found is not None:
                _check_same(found, asked, folder)
        except ConfigError:
            self.close()
            raise
        self._outcomes: dict[str, Outcome] = {}
        self._head = asked
        if found is not None:
            self._outcomes = {outcome.key: outcome for outcome in found.cells}
            self._head = msgspec.structs.replace(
                asked, started=found.started, duration_s=found.duration_s
            )
        self._earlier_s = self._head.duration_s
        self._order: list[str] = []

    def plan(self, cells: Sequence[Cell]) -> list[Cell]:
        """Add cells to the plan, and return those that have no result yet."""
        self._order += [cell_key(cell) for cell in cells]
        return [cell for cell in cells if not self.has(cell)]

    def has(self, cell: Cell) -> bool:
        """Whether there is a result of this cell."""
        outcome = self._outcomes.get(cell_key(cell))
        return outcome is not None and outcome.result is not None

    def add(self, outcome: Outcome, *, running_s: float) -> None:
        """Keep an outcome, on disk too.

        Args:
            outcome: of a cell of the plan.
            running_s: seconds since this process began to run cells.
        """
        self._outcomes[outcome.key] = outcome
        self._head = msgspec.structs.replace(
            self._head, duration_s=round(self._earlier_s + running_s, 1)
        )
        encoded = msgspec.json.encode(self.results(), order="sorted")
        text = msgspec.json.format(encoded, indent=1) + b"\n"
        write_atomically(self._folder / RESULTS_FILE, text)

    def outcomes(self) -> list[Outcome]:
        """Return what is known of the plan's cells, in its order."""
        return [self._outcomes[key] for key in self._order if key in self._outcomes]

    def results(self) -> Results:
        """Return everything, cells of the plan first."""
        planned = self.outcomes()
        keys = {outcome.key for outcome in planned}
        others = [outcome for key, outcome in self._outcomes.items() if key not in keys]
        return msgspec.structs.replace(self._head, cells=(*planned, *others))

    def close(self) -> None:
        """Let others use the folder."""
        os.close(self._lock)


def _check_same(found: Results, asked: Results, folder: Path) -> None:
    """Refuse to mix results that cannot be compared.

    Raises:
        ConfigError: they belong to another study, version, text or other settings, or to more
            seeds.
    """
    where = f"{folder} holds results of"
    fix = "use another folder for --out, or the command of these results:\n       " + found.command
    for name in msgspec.structs.fields(Request):
        there, here = getattr(found.request, name.name), getattr(asked.request, name.name)
        if there != here:
            raise ConfigError(
                f"{where} another {_WORDS[name.name]}",
                why=f"there it is {_shown(there)}, here {_shown(here)}; results of both would not "
                "be comparable",
                fix=fix,
            )
    if found.seeds > asked.seeds:
        raise ConfigError(
            f"{where} {found.seeds} seeds, and study.seeds is {asked.seeds}",
            why="seeds can be added to a study, not taken away",
            fix=f"set study.seeds to {found.seeds} or more, or use another folder for --out",
        )


_WORDS = {
    "study": "study",
    "scale": "scale",
    "version": "version of this package",
    "first_seed": "first seed (run.seed)",
    "settings": "set of settings",
    "also": "set of --also",
    "text_digest": "text (data.path)",
    "extensions_digest": "content of node.extensions",
}


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} = {item}" for key, item in value.items()) or "none"
    return "none" if value is None else str(value)
