"""Goodput between two processes on loopback: libp2p streams beside plain asyncio TCP."""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import IO, Final

import msgspec

from gasloc_p2p.bench.far_end import HOST, LISTEN, NEAR, PROTOCOL, SEED, Greeting
from gasloc_p2p.bench.transfer import (
    PIECE_BYTES,
    ByteStream,
    Direction,
    TcpStream,
    Transport,
    transfer,
)
from gasloc_p2p.core.errors import DaemonError, StartError
from gasloc_p2p.core.substrate import PeerUnreachableError
from gasloc_p2p.machine import Machine, this_machine
from gasloc_p2p.net.identity import Identity
from gasloc_p2p.net.network import Libp2pNetwork
from gasloc_p2p.net.settings import NetConfig

SIZE_BYTES: Final = 96 << 20
"""Of one transfer, in each of its directions."""
PASSES: Final = 5
START_DEADLINE_S: Final = 60.0
OPEN_DEADLINE_S: Final = 10.0
TRANSFER_DEADLINE_S: Final = 60.0
LEAVE_DEADLINE_S: Final = 12.0
MEGABYTE: Final = 1e6
TAIL_CHARS: Final = 500


class StreamFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One transport in one direction; docs/bench.md describes every field."""

    transport: Transport
    direction: Direction
    goodput_mb_s: float


class StreamBench(msgspec.Struct, frozen=True, kw_only=True):
    """All figures, libp2p's by TCP's, and the machine that they were measured on."""

    streams: tuple[StreamFigures, ...]
    ratio: dict[Direction, float]
    machine: Machine


async def bench_streams(
    *, told: Callable[[str], None], size_bytes: int = SIZE_BYTES, passes: int = PASSES
) -> StreamBench:
    """Measure one stream of each transport to another process, in turns.

    Medians count; one more pass comes before them, unmeasured.

    Args:
        told: called with what happens next, for a person.
        size_bytes: of one transfer, in each of its directions.
        passes: how many times everything is measured.

    Raises:
        StartError: the other process did not start.
        DaemonError: p2pd did not start, or a transfer did not come to its end.
    """
    told("starting two nodes on loopback")
    async with AsyncExitStack() as undo:
        far = await undo.enter_async_context(far_end())
        streams = await _open_streams(far, undo)
        taken_s: dict[tuple[Transport, Direction], list[float]] = {}
        for number in range(passes + 1):
            told(f"pass {number} of {passes}" if number else "warming up")
            for direction in Direction:
                for transport, stream in streams.items():
                    took_s = await _timed(stream, direction, size_bytes)
                    if number:
                        taken_s.setdefault((transport, direction), []).append(took_s)
        told("leaving")
    rates = {
        key: size_bytes
        * (2 if key[1] is Direction.BOTH else 1)
        / MEGABYTE
        / statistics.median(all_s)
        for key, all_s in taken_s.items()
    }
    return StreamBench(
        streams=tuple(
            StreamFigures(transport=transport, direction=direction, goodput_mb_s=rate)
            for (transport, direction), rate in rates.items()
        ),
        ratio={
            direction: rates[Transport.P2P, direction] / rates[Transport.TCP, direction]
            for direction in Direction
        },
        machine=this_machine(),
    )


@asynccontextmanager
async def far_end() -> AsyncIterator[Greeting]:
    """Run the other process, and end it.

    It has a session of its own, so that Ctrl-C in a terminal reaches this process alone.

    Raises:
        StartError: it ended, or was not up in time.
    """
    # Without a name, so that it is gone with the process, however that ends.
    with tempfile.TemporaryFile() as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "gasloc_p2p.bench.far_end"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
        try:
            yield await _greeting(process, log)
        finally:
            await _stop(process)


async def _greeting(process: asyncio.subprocess.Process, log: IO[bytes]) -> Greeting:
    assert process.stdout is not None
    line = b""
    try:
        async with asyncio.timeout(START_DEADLINE_S):
            line = await process.stdout.readline()
    except TimeoutError:
        why = f"it was not up within {START_DEADLINE_S:.0f} s"
    else:
        why = _end_of(log)
    if not line:
        raise StartError(
            "the other process of the measurement did not start",
            why=why,
            fix="if this machine is very busy, try again",
        )
    return msgspec.json.decode(line, type=Greeting)


def _end_of(log: IO[bytes]) -> str:
    log.seek(0)
    return log.read().decode(errors="replace")[-TAIL_CHARS:].strip()


async def _stop(process: asyncio.subprocess.Process) -> None:
    """Ask it to leave by closing its standard input, and kill it if it does not in time."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        async with asyncio.timeout(LEAVE_DEADLINE_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


async def _open_streams(far: Greeting, undo: AsyncExitStack) -> Mapping[Transport, ByteStream]:
    """Connect to the far end over each transport; `undo` closes what is opened."""
    network = await Libp2pNetwork.create(
        Identity.derived(SEED, NEAR), NetConfig(listen=LISTEN, bootstrap=far.addresses)
    )
    undo.push_async_callback(network.aclose)
    try:
        async with asyncio.timeout(OPEN_DEADLINE_S):
            reader, writer = await asyncio.open_connection(HOST, far.tcp_port, limit=PIECE_BYTES)
        undo.callback(writer.close)
        p2p = await network.open_stream(far.peer_id, PROTOCOL, deadline_s=OPEN_DEADLINE_S)
    except (TimeoutError, OSError, PeerUnreachableError) as error:
        raise _unanswered(error) from None
    return {Transport.TCP: TcpStream(reader=reader, writer=writer), Transport.P2P: p2p}


async def _timed(stream: ByteStream, direction: Direction, size_bytes: int) -> float:
    began_s = time.perf_counter()
    try:
        async with asyncio.timeout(TRANSFER_DEADLINE_S):
            await transfer(stream, direction, size_bytes)
    except (TimeoutError, OSError) as error:
        raise _unanswered(error) from None
    return time.perf_counter() - began_s


def _unanswered(error: Exception) -> DaemonError:
    return DaemonError(
        "the other process of the measurement does not answer",
        why=str(error) or type(error).__name__,
        fix="if this machine is very busy, try again",
    )
