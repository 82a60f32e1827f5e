"""How a long-running command ends: signals, and a parent that goes away."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Literal, TypeVar

import uvloop

T = TypeVar("T")

INTERRUPTED_EXIT_CODE = 130
ORPHAN_GRACE_S = 10.0
STDIN = 0


class Leave(asyncio.Event):
    """Set when the command shall end; knows whether anybody listens to it by now."""

    listening = False

    async def wait(self) -> Literal[True]:
        """Wait until the command shall end; from now on that is up to the caller."""
        self.listening = True
        return await super().wait()


def run_until_asked(
    main: Callable[[Leave], Coroutine[Any, Any, T]], *, exit_with_stdin: bool = False
) -> T:
    """Run `main` on a fresh event loop; it gets an event that is set when it shall end.

    The first SIGINT or SIGTERM sets the event, and cancels `main` if it does not listen to it yet.
    The second ends the process at once; p2pd notices by itself when its node is gone.

    Args:
        main: takes the event and ends soon after it is set.
        exit_with_stdin: also end when standard input is closed, that is when the parent is gone.

    Raises:
        SystemExit: `main` was cancelled before it listened.
    """

    async def supervised() -> T:
        loop, leave, itself = asyncio.get_running_loop(), Leave(), asyncio.current_task()
        assert itself is not None

        def ask() -> None:
            if leave.is_set():
                os._exit(INTERRUPTED_EXIT_CODE)
            leave.set()
            if not leave.listening:
                itself.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, ask)
        if exit_with_stdin:
            _watch_stdin(loop, ask)
        return await main(leave)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            return runner.run(supervised())
        except asyncio.CancelledError:
            raise SystemExit(INTERRUPTED_EXIT_CODE) from None


def _watch_stdin(loop: asyncio.AbstractEventLoop, ask: Callable[[], None]) -> None:
    """Follow standard input in a thread, so that even a blocked event loop cannot outlive it."""

    def watch() -> None:
        # Not sys.stdin: its lock would be held by this thread while the interpreter ends.
        while os.read(STDIN, 1024):
            pass
        try:
            loop.call_soon_threadsafe(ask)
        except RuntimeError:
            return
        threading.Event().wait(ORPHAN_GRACE_S)
        os._exit(INTERRUPTED_EXIT_CODE)

    threading.Thread(target=watch, name="stdin-watch", daemon=True).start()
