"""Cells in processes of their own, several at a time."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import IO

import msgspec

from gasloc_p2p.studies.cell import Cell, Result
from gasloc_p2p.studies.cell_process import Failed, Finished, News, Progress

LINE_BYTES = 1 << 24
TAIL_CHARS = 2000

OnRounds = Callable[[Cell, int], None]
"""Told how many rounds of a cell are done; 0 when it starts."""

OnDone = Callable[[Cell, Result | None, str | None], None]
"""Told a cell's result, or the error that ended it."""


async def run_cells(
    cells: Sequence[Cell],
    *,
    jobs: int,
    on_rounds: OnRounds,
    on_done: OnDone,
    gpus: Sequence[str] = (),
) -> None:
    """Run cells in the order given, `jobs` at a time; no process is left when this ends.

    Args:
        cells: what to run.
        jobs: how many processes.
        on_rounds: told the progress of a cell.
        on_done: told how a cell ended.
        gpus: as in CUDA_VISIBLE_DEVICES; the processes get one each, in turn.
    """
    waiting = list(reversed(cells))

    async def run_some(place: int) -> None:
        gpu = gpus[place % len(gpus)] if gpus else None
        process: CellProcess | None = None
        try:
            while waiting:
                if process is None or process.ended:
                    process = await CellProcess.start(gpu=gpu)
                cell = waiting.pop()
                on_rounds(cell, 0)
                on_done(cell, *await process.run(cell, partial(on_rounds, cell)))
        finally:
            if process is not None:
                await process.close()

    async with asyncio.TaskGroup() as tasks:
        for place in range(min(jobs, len(cells))):
            tasks.create_task(run_some(place))


class CellProcess:
    """One `cell_process`, which runs one cell after the other.

    It runs in a session of its own, so that a Ctrl-C in the terminal reaches the parent alone. Its
    standard input is a pipe: when the parent goes away, however that happens, it ends.
    """

    def __init__(self, process: asyncio.subprocess.Process, log: IO[bytes]) -> None:
        self.ended = False
        self._process = process
        self._log = log

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @classmethod
    async def start(cls, *, gpu: str | None = None) -> CellProcess:
        """Start a process, on the GPU that `gpu` names if there is one."""
        environment = dict(os.environ)
        if gpu is not None:
            environment["CUDA_VISIBLE_DEVICES"] = gpu
        log = tempfile.TemporaryFile()  # noqa: SIM115 -- closed together with the process
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "gasloc_p2p.studies.cell_process"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            limit=LINE_BYTES,
            start_new_session=True,
            env=environment,
        )
        return cls(process, log)

    async def run(
        self, cell: Cell, on_rounds: Callable[[int], None]
    ) -> tuple[Result | None, str | None]:
        """Run a cell; return its result, or the error that ended it or the whole process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        # When the process is gone already, the loop below ends at once and says why.
        with suppress(BrokenPipeError, ConnectionResetError):
            self._process.stdin.write(msgspec.json.encode(cell) + b"\n")
            await self._process.stdin.drain()
        async for line in self._process.stdout:
            match msgspec.json.decode(line, type=News):
                case Progress(rounds=rounds):
                    on_rounds(rounds)
                case Finished(result=result):
                    return result, None
                case Failed(error=error):
                    return None, error
        self.ended = True
        code = await self._process.wait()
        words = self._last_words()
        return None, f"its process ended with exit code {code}: {words.splitlines()[-1]}\n{words}"

    async def close(self) -> None:
        """End the process, whatever it does, and wait until it is gone."""
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()
        self._log.close()

    def _last_words(self) -> str:
        self._log.seek(0)
        text = self._log.read().decode(errors="replace")[-TAIL_CHARS:].strip()
        return text or "it said nothing"
