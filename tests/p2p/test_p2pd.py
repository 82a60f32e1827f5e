"""p2pd is this process's own child: it comes up, it is watched, and it never stays behind."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import stat
import sys
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import uvloop

from gasloc_p2p.core.errors import DaemonError
from gasloc_p2p.net import daemon as daemon_module
from gasloc_p2p.net.daemon import BootstrapRefusedError, Daemon
from gasloc_p2p.net.identity import Identity
from gasloc_p2p.net.settings import NetConfig
from tests.p2p.real import stop_process

pytestmark = pytest.mark.p2p

LOOPBACK = NetConfig(listen=("/ip4/127.0.0.1/tcp/0",))
WAIT_S = 10.0

ATTACH_AND_WAIT = """
import asyncio
from gasloc_p2p.net.identity import Identity
from gasloc_p2p.net.network import Libp2pNetwork
from gasloc_p2p.net.settings import NetConfig

async def main():
    config = NetConfig(listen=("/ip4/127.0.0.1/tcp/0",))
    network = await Libp2pNetwork.create(Identity.derived(0, 0), config)
    print(network.daemon.pid, network.daemon.directory, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""

LIVE_AND_LEAVE = """
import asyncio, gc, uvloop
from gasloc_p2p.net.identity import Identity
from gasloc_p2p.net.network import Libp2pNetwork
from gasloc_p2p.net.settings import NetConfig

async def main():
    listen = ("/ip4/127.0.0.1/tcp/0",)
    first = await Libp2pNetwork.create(Identity.derived(0, 0), NetConfig(listen=listen))
    config = NetConfig(listen=listen, bootstrap=await first.addresses())
    second = await Libp2pNetwork.create(Identity.derived(0, 1), config)

    async def hold(stream):
        await stream.write(await stream.read(5))
        await asyncio.Event().wait()

    await first.serve("hold/1", hold)
    stream = await second.open_stream(first.peer_id, "hold/1", deadline_s=5)
    await stream.write(b"hello")
    assert await stream.read(5) == b"hello"
    await second.fetch_records("run", deadline_s=5)
    await first.aclose()
    await second.aclose()
    assert first.daemon.returncode is not None and second.daemon.returncode is not None

for run in (asyncio.run, uvloop.run):
    run(main())
    gc.collect()
"""


def children() -> set[int]:
    """Return the p2pd processes of this test process."""
    return {child.pid for child in psutil.Process().children() if child.name() == "p2pd"}


def assert_gone(pid: int) -> None:
    """Wait until the process `pid` is gone; it may be nobody's child any more."""
    try:
        process = psutil.Process(pid)
    except psutil.NoSuchProcess:
        return
    _, alive = psutil.wait_procs([process], timeout=WAIT_S)
    for orphan in alive:
        orphan.kill()
    assert not alive


async def test_a_daemon_runs_in_private_and_ends_on_request() -> None:
    before = children()
    daemon = await Daemon.start(Identity.derived(0, 0), LOOPBACK, bootstrap=())
    assert children() - before == {daemon.pid}
    assert stat.S_IMODE(daemon.directory.stat().st_mode) == 0o700
    assert daemon.control_path.is_socket()
    assert [entry.name for entry in daemon.directory.iterdir()] == ["p2pd.sock"]
    assert len(str(daemon.directory)) < 60
    assert os.getsid(daemon.pid) == daemon.pid != os.getsid(0)
    await daemon.stop()
    await daemon.stop()
    # p2pd may have time to end in its own way.
    assert await daemon.exited() in (0, -signal.SIGTERM)
    assert not daemon.directory.exists()
    assert children() == before


async def test_a_daemon_that_dies_is_noticed() -> None:
    daemon = await Daemon.start(Identity.derived(0, 0), LOOPBACK, bootstrap=())
    os.kill(daemon.pid, signal.SIGKILL)
    async with asyncio.timeout(WAIT_S):
        assert await daemon.exited() == -signal.SIGKILL
    assert daemon.returncode == -signal.SIGKILL
    await daemon.stop()


async def test_a_daemon_that_ignores_the_request_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(daemon_module, "STOP_GRACE_S", 0.1)
    daemon = await Daemon.start(Identity.derived(0, 0), LOOPBACK, bootstrap=())
    stop_process(daemon.pid)
    await daemon.stop()
    assert daemon.returncode == -signal.SIGKILL


async def test_why_a_daemon_did_not_start_is_said_in_its_own_words() -> None:
    elsewhere = NetConfig(listen=("/ip4/203.0.113.7/tcp/4001",))
    before = children()
    with pytest.raises(DaemonError, match="did not start") as caught:
        await Daemon.start(Identity.derived(0, 0), elsewhere, bootstrap=())
    assert "failed to listen" in caught.value.why
    assert children() == before


async def test_dead_bootstrap_peers_are_told_apart_from_other_faults() -> None:
    nobody = f"/ip4/127.0.0.1/tcp/1/p2p/{Identity.derived(0, 1).peer_id}"
    with pytest.raises(BootstrapRefusedError):
        await Daemon.start(Identity.derived(0, 0), LOOPBACK, bootstrap=(nobody,))


async def test_a_start_that_takes_too_long_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon_module, "STARTUP_DEADLINE_S", 0.0)
    before = children()
    with pytest.raises(DaemonError, match="not up within"):
        await Daemon.start(Identity.derived(0, 0), LOOPBACK, bootstrap=())
    assert children() == before


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_cancelled_start_leaves_nothing(run: Callable[[Any], None]) -> None:
    before = children()

    async def start_and_cancel(turns: int) -> None:
        starting = asyncio.ensure_future(
            Daemon.start(Identity.derived(0, 0), LOOPBACK, bootstrap=())
        )
        for _ in range(turns):
            await asyncio.sleep(0)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting

    for turns in (1, 2, 3, 5, 8, 13, 50):
        run(start_and_cancel(turns))
        assert children() == before


async def test_no_daemon_is_left_when_its_node_is_killed() -> None:
    node = await asyncio.create_subprocess_exec(
        sys.executable, "-c", ATTACH_AND_WAIT, stdout=asyncio.subprocess.PIPE
    )
    assert node.stdout is not None
    async with asyncio.timeout(60):
        pid, directory = (await node.stdout.readline()).decode().split()
    assert psutil.Process(int(pid)).name() == "p2pd"
    node.kill()
    await node.wait()
    await asyncio.to_thread(assert_gone, int(pid))
    await asyncio.to_thread(shutil.rmtree, directory)


async def test_leaving_makes_no_noise_on_either_event_loop() -> None:
    node = await asyncio.create_subprocess_exec(
        *(sys.executable, "-W", "always::ResourceWarning", "-c", LIVE_AND_LEAVE),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    async with asyncio.timeout(60):
        output, _ = await node.communicate()
    assert output == b""
    assert node.returncode == 0
