"""How a long-running command ends: signals, and a parent that goes away."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")

INTERRUPTED_EXIT_CODE = 130
ORPHAN_GRACE_S = 10.0
STDIN = 0


def run_until_asked(
    main: Callable[[asyncio.Event], Coroutine[Any, Any, T]], *, exit_with_stdin: bool = False
) -> T:
    """Run `main` on a fresh event loop; it gets an event that is set when it shall end.

    The first SIGINT or SIGTERM sets the event, the second ends the process at once. p2pd notices
    by itself when its node is gone.

    Args:
        main: takes the event and ends soon after it is set.
        exit_with_stdin: also end when standard input is closed, that is when the parent is gone.
    """

    async def supervised() -> T:
        leave = asyncio.Event()
        _on_signals(leave)
        if exit_with_stdin:
            _watch_stdin(asyncio.get_running_loop(), leave)
        return await main(leave)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(supervised())


def _on_signals(leave: asyncio.Event) -> None:
    def asked() -> None:
        if leave.is_set():
            os._exit(INTERRUPTED_EXIT_CODE)
        leave.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, asked)


def _watch_stdin(loop: asyncio.AbstractEventLoop, leave: asyncio.Event) -> None:
    """Follow standard input in a thread, so that even a blocked event loop cannot outlive it."""

    def watch() -> None:
        # Not sys.stdin: its lock would be held by this thread while the interpreter ends.
        while os.read(STDIN, 1024):
            pass
        try:
            loop.call_soon_threadsafe(leave.set)
        except RuntimeError:
            return
        threading.Event().wait(ORPHAN_GRACE_S)
        os._exit(INTERRUPTED_EXIT_CODE)

    threading.Thread(target=watch, name="stdin-watch", daemon=True).start()
