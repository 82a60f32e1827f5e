"""The clock and the threads of a real node."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import SupportsFloat, TypeVar

from gasloc_p2p.core.substrate import LocalModel

T = TypeVar("T")


class WallClock:
    """The machine's own clock."""

    def unix_s(self) -> float:
        """Return seconds since the Unix epoch."""
        return time.time()


class ThreadCompute:
    """Runs tensor work in one thread, so that calls keep their order and the loop stays free.

    Files are written and read in another one.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="torch")
        self._files = ThreadPoolExecutor(max_workers=1, thread_name_prefix="files")
        self._at_work = False
        self._text_ready: Callable[[], Awaitable[None]] | None = None

    def wait_for_text(self, ready: Callable[[], Awaitable[None]]) -> None:
        """From now on wait for `ready()` before an inner step, with the thread free for others."""
        self._text_ready = ready

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work` in the thread and return its result."""
        return await asyncio.get_running_loop().run_in_executor(
            self._executor, partial(self._do, work)
        )

    def _do(self, work: Callable[[], T]) -> T:
        self._at_work = True
        try:
            return work()
        finally:
            self._at_work = False

    async def step(self, model: LocalModel, lr: float) -> SupportsFloat:
        """Do one inner step of `model` in the thread and return its loss."""
        if self._text_ready is not None:
            await self._text_ready()
        return await self.run(partial(model.step, lr))

    async def aside(self, work: Callable[[], T]) -> T:
        """Run `work` in the thread for files and return its result."""
        return await asyncio.get_running_loop().run_in_executor(self._files, work)

    def close(self) -> None:
        """Let the threads end once they are idle."""
        for executor in (self._executor, self._files):
            executor.shutdown(wait=False, cancel_futures=True)

    def end_process(self) -> None:
        """End the process if the thread is in the midst of a step, whose result nobody needs.

        One of a large model takes minutes, and the interpreter would wait for it.
        """
        if self._at_work:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
