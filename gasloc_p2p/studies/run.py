"""Run a study to its end, keeping every result as it comes."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from gasloc_p2p import __version__
from gasloc_p2p.config import Config
from gasloc_p2p.data.supply import load_text
from gasloc_p2p.machine import this_machine, usable_cores, visible_gpus
from gasloc_p2p.studies.cell import Cell, Outcome, Result, SwarmCell, cell_key
from gasloc_p2p.studies.estimate import duration_text, measured_rate, total_cost
from gasloc_p2p.studies.pool import run_cells
from gasloc_p2p.studies.progress import Progress, Tally
from gasloc_p2p.studies.record import Request, Results, Store
from gasloc_p2p.studies.study import Setup, Study
from gasloc_p2p.train.data import Corpus

QUICK, FULL = "quick", "full"
"""The scales of a study."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A study that is about to run.

    Attributes:
        study: the study.
        setup: what was asked for.
        scale: quick or full.
        command: with which the same is asked for again.
        cells: all cells of all stages, as far as they are known.
        corpus: the text that is trained on; None when nothing is trained.
        config: settings of the command itself.
    """

    study: Study
    setup: Setup
    scale: str
    command: str
    cells: Sequence[Cell]
    corpus: Corpus | None
    config: Config

    @property
    def jobs(self) -> int:
        """How many processes run at the same time."""
        alone = len(visible_gpus()) if self.scale == FULL else usable_cores()
        return self.config.study.jobs or max(alone, 1)


def make_plan(study: Study, setup: Setup, *, scale: str, command: str, config: Config) -> Plan:
    """Work out what a study consists of, and check all of it.

    Args:
        study: the study.
        setup: what was asked for.
        scale: quick or full.
        command: with which the same is asked for again.
        config: the effective settings without the study's own.

    Raises:
        ConfigError: settings that the study sets itself, or that are not accepted.
        UnstableError: peers would drift apart.
        DataError: the text cannot be used.
    """
    cells = [cell for stage in range(study.stage_count) for cell in study.cells(setup, stage, [])]
    trains = any(isinstance(cell, SwarmCell) for cell in cells)
    return Plan(
        study=study,
        setup=setup,
        scale=scale,
        command=command,
        cells=cells,
        corpus=load_text(config.model, config.data) if trains else None,
        config=config,
    )


def open_store(plan: Plan, folder: Path) -> Store:
    """Return the folder's results, checked to belong to this plan.

    Raises:
        ConfigError: the folder is in use, or holds results that do not belong to these.
    """
    asked = Results(
        request=Request(
            study=plan.study.name,
            scale=plan.scale,
            version=__version__,
            first_seed=plan.setup.first_seed,
            settings=plan.setup.values,
            also={variant.label: dict(variant.settings) for variant in plan.setup.also},
            text_digest=plan.corpus.digest.hex() if plan.corpus is not None else None,
            extensions_digest=_extensions_digest(plan.config.node.extensions),
        ),
        question=plan.study.question,
        command=plan.command,
        seeds=plan.setup.seeds,
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        duration_s=0.0,
        machine=this_machine(),
        cells=(),
    )
    return Store(folder, asked)


async def run_study(plan: Plan, store: Store, progress: Progress) -> None:
    """Run what has no result yet, stage by stage; failures end a study after their stage.

    Args:
        plan: what to run.
        store: keeps the results.
        progress: told what happens.
    """
    study = plan.study
    planned = _planned(plan, store.results().cells)
    waiting = [cell for cell in planned if not store.has(cell)]
    if not waiting:
        progress.say(f"all {len(planned)} simulations are there already")
    # Off the loop, so that Ctrl-C works meanwhile.
    rate = await asyncio.to_thread(_announce, plan, waiting, progress) if waiting else 1.0
    tally = Tally(cells=len(planned), waiting=waiting, rate=rate)
    progress.follow(tally)

    def done(cell: Cell, result: Result | None, error: str | None) -> None:
        outcome = Outcome(key=cell_key(cell), cell=cell, result=result, error=error)
        store.add(outcome, running_s=tally.elapsed_s)
        tally.finish(outcome)
        progress.finished(outcome)

    for stage in range(study.stage_count):
        if stage:
            planned = _planned(plan, store.outcomes())
            tally.replan(
                cells=len(planned), waiting=[cell for cell in planned if not store.has(cell)]
            )
        cells = study.cells(plan.setup, stage, store.outcomes())
        await run_cells(
            store.plan(cells),
            jobs=plan.jobs,
            gpus=visible_gpus(),
            on_rounds=tally.rounds,
            on_done=done,
        )
        if tally.failed:
            return


def _planned(plan: Plan, known: Sequence[Outcome]) -> list[Cell]:
    """Return the cells of all stages, as far as the `known` outcomes decide them."""
    stages = range(plan.study.stage_count)
    return [cell for stage in stages for cell in plan.study.cells(plan.setup, stage, known)]


def _announce(plan: Plan, waiting: Sequence[Cell], progress: Progress) -> float:
    """Say how much there is to do; return the rate of all processes together."""
    jobs = min(plan.jobs, len(waiting))
    # The middle one, so that the example is neither the smallest nor the largest.
    example = sorted(waiting, key=lambda cell: cell.peers)[len(waiting) // 2]
    rate = jobs * measured_rate(example, plan.corpus)
    known = len(plan.cells) - len(waiting)
    already = f" ({known} of {len(plan.cells)} are there already)" if known else ""
    progress.say(
        f"{len(waiting)} simulations{already}, about "
        f"{duration_text(total_cost(waiting) / rate)} on this machine, {jobs} at a time; "
        "Ctrl-C keeps what is finished"
    )
    return rate


def _extensions_digest(names: Sequence[str]) -> str | None:
    """Return a digest of the content of extension files; modules count by name."""
    if not names:
        return None
    hasher = hashlib.sha256()
    for name in names:
        hasher.update(Path(name).read_bytes() if name.endswith(".py") else name.encode())
    return hasher.hexdigest()
