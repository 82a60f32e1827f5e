"""`gasloc study`: a named experiment, its table and its plot."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Sequence
from pathlib import Path

from gasloc_p2p.commands.arguments import make_folder
from gasloc_p2p.commands.lifetime import INTERRUPTED_EXIT_CODE, Leave, run_until_asked
from gasloc_p2p.config import ENV_PREFIX, Layer, load
from gasloc_p2p.studies.catalogue import study_named
from gasloc_p2p.studies.full import full_text, require_full
from gasloc_p2p.studies.output import PLOT_FILE, TABLE_FILE, summary_of, write_outputs
from gasloc_p2p.studies.progress import Progress, ending, make_progress, name_of
from gasloc_p2p.studies.record import RESULTS_FILE, Store
from gasloc_p2p.studies.run import FULL, QUICK, Plan, make_plan, open_store, run_study
from gasloc_p2p.studies.study import Setup, parse_also

FAILED_EXIT_CODE = 1


def run(
    name: str,
    *,
    out: Path,
    full: bool,
    also: Sequence[str],
    layers: Sequence[Layer],
    arguments: Sequence[str],
) -> int:
    """Run a study to its end and return the exit code.

    Args:
        name: of the study.
        out: folder of its results; an earlier run of the same command goes on there.
        full: at full scale, on GPUs.
        also: algorithms to compare, as NAME=SETTINGS.
        layers: settings, weakest first.
        arguments: of this command, as they shall be given to resume.

    Raises:
        GaslocError: it cannot be run, or not in this folder.
    """
    study = study_named(name, full=full)
    config = load(layers).config
    setup = Setup(
        layers=layers,
        seeds=config.study.seeds,
        peers=config.study.peers,
        first_seed=config.run.seed,
        also=parse_also(also),
    )
    plan = make_plan(
        study,
        setup,
        scale=FULL if full else QUICK,
        command=_command_line(layers, arguments),
        config=config,
    )
    if full:
        require_full(plan)
    make_folder(out)
    store = open_store(plan, out)
    progress = make_progress(config.display.mode, f"study {name}")
    try:
        with progress:
            if full:
                progress.say(full_text(plan))
            interrupted = not run_until_asked(
                lambda leave: _run_until(leave, plan, store, progress),
                exit_with_stdin=config.node.exit_with_stdin,
            )
        return _finish(plan, store, out, progress, interrupted=interrupted)
    finally:
        store.close()


def _command_line(layers: Sequence[Layer], arguments: Sequence[str]) -> str:
    """Return what a person types to ask for the same again."""
    variables = [
        f"{ENV_PREFIX}{key.replace('.', '_').upper()}={shlex.quote(str(value))}"
        for layer in layers
        if layer.name == "environment"
        for key, value in layer.values.items()
    ]
    return " ".join([*variables, shlex.join(["gasloc", "study", *arguments])])


async def _run_until(leave: Leave, plan: Plan, store: Store, progress: Progress) -> bool:
    """Run the plan, or leave it; return whether it came to its end."""
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(run_study(plan, store, progress))
        leaving = tasks.create_task(leave.wait())
        await asyncio.wait({running, leaving}, return_when=asyncio.FIRST_COMPLETED)
        ended = running.done()
        running.cancel()
        leaving.cancel()
    return ended


def _finish(plan: Plan, store: Store, out: Path, progress: Progress, *, interrupted: bool) -> int:
    """Write and show what there is, and say how to go on."""
    results = store.results()
    if any(outcome.result is not None for outcome in results.cells):
        write_outputs(out, results)
        summary = summary_of(results)
        for table in summary.filled_tables:
            progress.table(table)
        for verdict in summary.verdicts:
            progress.say(verdict)
        progress.say(f"written: {', '.join((RESULTS_FILE, TABLE_FILE, PLOT_FILE))} in {out}")
    if interrupted:
        finished = sum(outcome.result is not None for outcome in results.cells)
        progress.say(
            f"interrupted: {finished} of {len(plan.cells)} simulations are kept; the same command "
            "goes on from there"
        )
        return INTERRUPTED_EXIT_CODE
    failed = [outcome for outcome in results.cells if outcome.result is None]
    for outcome in failed:
        progress.say(f"{name_of(outcome.cell)}: {ending(outcome)}")
    if failed:
        progress.say(f"{len(failed)} simulations failed; the same command tries them again")
        return FAILED_EXIT_CODE
    return 0
