"""A `gasloc` command as a child process that reports its events and never outlives its parent."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec

from gasloc_p2p.config import ENV_PREFIX
from gasloc_p2p.node.events import Event

LINE_BYTES = 1 << 20
LEAVE_DEADLINE_S = 12.0
TAIL_CHARS = 2000


class Child:
    """One running `gasloc` command.

    It runs in a session of its own, so that a Ctrl-C in the terminal reaches the parent alone,
    which then decides. Its standard input is a pipe: when the parent goes away, however that
    happens, the pipe closes and the child leaves.
    """

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.name = name
        self._process = process
        self._log = log

    @classmethod
    async def start(
        cls, name: str, arguments: Sequence[str], *, folder: Path, before: Sequence[str] = ()
    ) -> Child:
        """Start `gasloc ARGUMENTS` with JSON events on its output.

        Args:
            name: also the name of its log file in `folder`, to which it adds.
            arguments: the command and its arguments.
            folder: existing folder for the log.
            before: a command that becomes the one that follows it, such as `nice`.
        """
        environment = {k: v for k, v in os.environ.items() if not k.startswith(ENV_PREFIX)}
        log = folder / f"{name}.log"
        own_settings = ("--set", "display.mode=json", "--set", "node.exit_with_stdin=true")
        with log.open("ab") as errors:
            process = await asyncio.create_subprocess_exec(
                *(*before, sys.executable, "-m", "gasloc_p2p", *arguments, *own_settings),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                limit=LINE_BYTES,
                start_new_session=True,
                env=environment,
            )
        return cls(name, process, log)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Exit status; None while it runs, negative if a signal ended it."""
        return self._process.returncode

    async def events(self) -> AsyncIterator[Event]:
        """Yield its events until it closes its output; lines that are no events are skipped."""
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            try:
                yield msgspec.json.decode(line, type=Event)
            except msgspec.DecodeError:
                continue

    async def wait(self) -> int:
        """Wait until it has ended."""
        return await self._process.wait()

    def interrupt(self) -> None:
        """Ask it to leave, even if it was stopped."""
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGINT)
            self._process.send_signal(signal.SIGCONT)

    async def stop(self) -> None:
        """Ask it to leave, and kill it if it does not in time."""
        self.interrupt()
        try:
            async with asyncio.timeout(LEAVE_DEADLINE_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    def last_words(self) -> str:
        """Return the end of what it wrote to standard error."""
        return self._log.read_text(encoding="utf-8", errors="replace")[-TAIL_CHARS:].strip()
