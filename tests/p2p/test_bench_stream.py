"""`gasloc bench stream` between two real nodes, and what is left when it is cut short."""

from __future__ import annotations

import asyncio
import signal
import sys

import psutil
import pytest

from gasloc_p2p.bench.stream import bench_streams, far_end
from gasloc_p2p.bench.transfer import Direction, Transport
from gasloc_p2p.commands.lifetime import INTERRUPTED_EXIT_CODE

pytestmark = pytest.mark.p2p

GONE_S = 20.0


async def test_every_transport_is_measured_in_every_direction() -> None:
    told: list[str] = []
    found = await bench_streams(told=told.append, size_bytes=300_000, passes=2)
    rates = {(one.transport, one.direction): one.goodput_mb_s for one in found.streams}
    assert set(rates) == {(t, d) for t in Transport for d in Direction}
    assert all(rate > 0 for rate in rates.values())
    for direction in Direction:
        by_tcp = rates[Transport.P2P, direction] / rates[Transport.TCP, direction]
        assert found.ratio[direction] == pytest.approx(by_tcp)
    assert [text for text in told if "pass" in text] == ["pass 1 of 2", "pass 2 of 2"]


@pytest.mark.parametrize(
    ("number", "exit_code"),
    [(signal.SIGINT, INTERRUPTED_EXIT_CODE), (signal.SIGKILL, -signal.SIGKILL)],
)
async def test_whatever_ends_it_takes_its_nodes_along(
    number: signal.Signals, exit_code: int
) -> None:
    command = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gasloc_p2p", "bench", "stream"),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    assert command.stderr is not None
    async with asyncio.timeout(GONE_S):
        while b"warming up" not in await command.stderr.readline():
            assert not command.stderr.at_eof()
    descendants = psutil.Process(command.pid).children(recursive=True)
    names = [one.name() for one in descendants]
    assert names.count("p2pd") == 2, names
    assert len(descendants) == 3, names
    command.send_signal(number)
    async with asyncio.timeout(GONE_S):
        assert await command.wait() == exit_code
    _, alive = await asyncio.to_thread(psutil.wait_procs, descendants, GONE_S)
    assert not alive


async def test_the_far_end_leaves_when_it_is_no_longer_needed() -> None:
    async with far_end() as greeting:
        assert greeting.addresses
        children = psutil.Process().children()
        (far,) = [one for one in children if "gasloc_p2p.bench.far_end" in one.cmdline()]
        reader, writer = await asyncio.open_connection("127.0.0.1", greeting.tcp_port)
        # An order that nobody makes: all that comes back is the end.
        writer.write(b"\x03" + b"\xff" * 8)
        async with asyncio.timeout(GONE_S):
            assert await reader.read() == b""
        writer.close()
    assert not far.is_running()
