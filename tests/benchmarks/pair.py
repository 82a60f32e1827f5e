"""Two processes of `tests.benchmarks.exchanging`, on loopback or over an emulated link."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Final

import msgspec

from tests.benchmarks.exchanging import Measured, Plan
from tests.benchmarks.tapnet import EmulatedLink

CHUNK_BYTES: Final = 1 << 20
LOOPBACK: Final = "127.0.0.1"
EXCHANGE_S: Final = 300.0
LEAVING_S: Final = 15.0
LINE_BYTES: Final = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """Two processes that are ready to exchange."""

    ends: tuple[Process, Process]

    async def exchange(self) -> tuple[float, list[Measured]]:
        """Do an exchange; return its seconds, and what each end measured."""
        began_s = time.monotonic()
        for end in self.ends:
            assert end.stdin is not None
            end.stdin.write(b"go\n")
        measured = [msgspec.json.decode(await line_of(end), type=Measured) for end in self.ends]
        # The clock of all processes is the machine's.
        return max(one.ended_s for one in measured) - began_s, measured


@asynccontextmanager
async def pair(
    codec: str,
    *,
    elements: int,
    edges: int = 1,
    chunk_bytes: int = CHUNK_BYTES,
    link: EmulatedLink | None = None,
) -> AsyncIterator[Pair]:
    """Start two processes.

    Args:
        codec: name of the codec.
        elements: fp32 parameters.
        edges: how many exchanges at a time.
        chunk_bytes: wished size of a chunk of codes.
        link: between the two; None for loopback.
    """
    async with AsyncExitStack() as undo:
        ends = []
        contact: tuple[str, ...] = ()
        for index in range(2):
            address = link.addresses[index] if link is not None else LOOPBACK
            plan = Plan(
                end=index,
                listen=(f"/ip4/{address}/tcp/0",),
                contact=contact,
                codec=codec,
                elements=elements,
                chunk_bytes=chunk_bytes,
                edges=edges,
            )
            inside = link.inside(index) if link is not None else ()
            command = (sys.executable, "-m", "tests.benchmarks.exchanging")
            end = await asyncio.create_subprocess_exec(
                *inside, *command, msgspec.json.encode(plan).decode(),
                stdin=PIPE, stdout=PIPE, limit=LINE_BYTES,
            )  # fmt: skip
            undo.push_async_callback(leave, end)
            contact = contact or tuple(json.loads(await line_of(end)))
            ends.append(end)
        await line_of(ends[1])
        for end in ends:
            assert await line_of(end) == "ready"
        yield Pair(ends=(ends[0], ends[1]))


async def line_of(end: Process) -> str:
    """Return the next line that a process prints.

    Raises:
        SystemExit: it has ended.
    """
    assert end.stdout is not None
    async with asyncio.timeout(EXCHANGE_S):
        line = (await end.stdout.readline()).decode().strip()
    if not line:
        raise SystemExit("an end has failed; see above")
    return line


async def leave(end: Process) -> None:
    """Close a process's standard input, and kill it if it does not end then."""
    assert end.stdin is not None
    end.stdin.close()
    try:
        async with asyncio.timeout(LEAVING_S):
            await end.wait()
    except TimeoutError:
        end.kill()
        await end.wait()
