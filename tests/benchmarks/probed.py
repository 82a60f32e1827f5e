"""A `gasloc` command that also notes how late its event loop is.

`python -m tests.benchmarks.probed FILE PYTHON -m gasloc_p2p ARGUMENTS` runs the command in this
process and writes the delays into FILE at its end, seconds as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final

from gasloc_p2p.cli import main as run_command
from gasloc_p2p.commands import node
from gasloc_p2p.commands.lifetime import run_until_asked

PERIOD_S: Final = 0.005


async def watch(delays_s: list[float]) -> None:
    """Sleep again and again, and note by how much each sleep was too long."""
    now_s = asyncio.get_running_loop().time
    while True:
        due_s = now_s() + PERIOD_S
        await asyncio.sleep(PERIOD_S)
        delays_s.append(max(0.0, now_s() - due_s))


def main() -> None:
    """Run the command with a watch on its loop."""
    file, arguments = Path(sys.argv[1]), sys.argv[5:]
    delays_s: list[float] = []

    def probed(main: Callable[[Any], Coroutine[Any, Any, Any]], **options: bool) -> Any:
        async def watched(leave: Any) -> Any:
            async with asyncio.TaskGroup() as tasks:
                watching = tasks.create_task(watch(delays_s))
                try:
                    return await main(leave)
                finally:
                    watching.cancel()

        return run_until_asked(watched, **options)

    node.run_until_asked = probed  # type: ignore[attr-defined]  # the name that the command calls
    sys.argv = ["gasloc", *arguments]
    try:
        run_command()
    finally:
        file.write_text(json.dumps(delays_s))


if __name__ == "__main__":
    main()
