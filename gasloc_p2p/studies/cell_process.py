"""A process that runs cells: one JSON order per line in, JSON news out, a line each.

`python -m gasloc_p2p.studies.cell_process` is started by `studies/pool.py`. It ends at once when
its standard input closes, also in the middle of a cell, so that it never outlives its parent.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterator
from typing import TypeAlias

import msgspec

from gasloc_p2p.core.errors import GaslocError
from gasloc_p2p.studies.cell import Cell, Result

STDIN, STDOUT, STDERR = 0, 1, 2
READ_BYTES = 1 << 16


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag="progress"):
    """So many training rounds of the cell are done."""

    rounds: int


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag="finished"):
    """The cell has a result."""

    result: Result


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The cell cannot be run; an error in words."""

    error: str


News: TypeAlias = Progress | Finished | Failed


def main() -> None:
    """Run the cells that standard input orders."""
    # Whatever an extension or a library prints must not come between the lines of this protocol.
    news = os.dup(STDOUT)
    os.dup2(STDERR, STDOUT)
    orders: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read_orders, args=(orders,), name="stdin", daemon=True).start()

    # torch takes seconds to import, and the thread above must be there before.
    import torch

    torch.set_num_threads(1)
    while True:
        _run(msgspec.json.decode(orders.get(), type=Cell), news)


def _run(cell: Cell, news: int) -> None:
    from gasloc_p2p.studies.measure import run_cell

    try:
        result = run_cell(cell, lambda rounds: _tell(news, Progress(rounds=rounds)))
    except (GaslocError, ExceptionGroup) as error:
        cause = next(_leaves(error))
        if not isinstance(cause, GaslocError):
            # A defect: it ends this process, and its traceback is what gets reported.
            raise cause from None
        _tell(news, Failed(error=str(cause)))
    else:
        _tell(news, Finished(result=result))


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


def _tell(news: int, item: News) -> None:
    line = msgspec.json.encode(item) + b"\n"
    while line:
        line = line[os.write(news, line) :]


def _read_orders(orders: queue.SimpleQueue[bytes]) -> None:
    buffer = b""
    while data := os.read(STDIN, READ_BYTES):
        *lines, buffer = (buffer + data).split(b"\n")
        for line in lines:
            orders.put(line)
    os._exit(0)


if __name__ == "__main__":
    main()
