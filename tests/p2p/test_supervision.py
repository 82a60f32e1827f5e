"""A node outlives its p2pd, its bootstrap and its neighbours, and finds its swarm again."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

import psutil
import pytest

from gasloc_p2p.core.errors import BootstrapUnreachableError, DaemonError
from gasloc_p2p.core.substrate import Network, PeerUnreachableError, Stream
from gasloc_p2p.net import company as company_module
from gasloc_p2p.net import contacts as contacts_module
from gasloc_p2p.net import daemon as daemon_module
from gasloc_p2p.net import solitude as solitude_module
from gasloc_p2p.net import supervised as supervised_module
from gasloc_p2p.net import watch as watch_module
from gasloc_p2p.net.contacts import CONTACTS_FILE
from gasloc_p2p.net.identity import Identity
from gasloc_p2p.net.network import Libp2pNetwork
from gasloc_p2p.net.settings import NetConfig
from gasloc_p2p.net.supervised import SupervisedNetwork
from tests.p2p.real import stop_process

pytestmark = pytest.mark.p2p

MakeRecord: TypeAlias = Callable[..., bytes]
LOOPBACK = NetConfig(listen=("/ip4/127.0.0.1/tcp/0",))
PROTOCOL = "gasloc/test/1"
WAIT_S = 20.0
BACK = "back on the network as"


class Said:
    """What a node said, and an end to waiting for it."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._more = asyncio.Event()

    def __call__(self, line: str) -> None:
        self.lines.append(line)
        self._more.set()

    async def until(self, words: str, *, times: int = 1) -> str:
        async with asyncio.timeout(WAIT_S):
            while len(lines := [line for line in self.lines if words in line]) < times:
                self._more.clear()
                await self._more.wait()
        return lines[-1]


class Watched:
    """A supervised node that echoes what is sent to it."""

    def __init__(self, network: SupervisedNetwork, said: Said, supervising: asyncio.Task[None]):
        self.network = network
        self.said = said
        self.supervising = supervising

    @property
    def pid(self) -> int:
        assert self.network.daemon is not None
        return self.network.daemon.pid

    def kill_p2pd(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


Start: TypeAlias = Callable[..., Awaitable[Watched]]


async def echo(stream: Stream) -> None:
    while piece := await stream.read(1024):
        await stream.write(piece)
    await stream.aclose()


async def talk(caller: Network, called: Network) -> None:
    """Have `caller` open a stream to `called`, and a few bytes go there and back."""
    stream = await caller.open_stream(called.peer_id, PROTOCOL, deadline_s=WAIT_S)
    async with asyncio.timeout(WAIT_S):
        await stream.write(b"hello")
        assert await stream.read(5) == b"hello"
    await stream.aclose()


@asynccontextmanager
async def watched_nodes() -> AsyncIterator[Start]:
    """Provide a function that starts node `index`; all of them are gone afterwards."""
    before = p2pds()
    async with asyncio.TaskGroup() as tasks, AsyncExitStack() as nodes:

        async def start(
            index: int,
            bootstrap: Sequence[str] = (),
            *,
            listen: str = "/ip4/127.0.0.1/tcp/0",
            home: Path | None = None,
        ) -> Watched:
            said = Said()
            network = await SupervisedNetwork.create(
                Identity.derived(0, index),
                NetConfig(listen=(listen,), bootstrap=tuple(bootstrap), join_attempts=1),
                contacts_file=None if home is None else home / CONTACTS_FILE,
                warn=said,
            )
            nodes.push_async_callback(network.aclose)
            await network.serve(PROTOCOL, echo)
            return Watched(network, said, tasks.create_task(network.supervise()))

        yield start
    assert p2pds() == before


def p2pds() -> set[int]:
    return {child.pid for child in psutil.Process().children() if child.name() == "p2pd"}


def routing_table(node: Watched) -> Any:
    assert node.network._current is not None
    return node.network._current.neighbours._parts.dht.protocol.routing_table


def listen_of(address: str) -> str:
    return address.rpartition("/p2p/")[0]


async def records(network: Network) -> set[bytes]:
    return set(await network.fetch_records("run", deadline_s=5.0))


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(company_module, "CHECK_PERIOD_S", 0.3)
    monkeypatch.setattr(solitude_module, "FIRST_PAUSE_S", 0.1)
    monkeypatch.setattr(solitude_module, "LONGEST_PAUSE_S", 0.3)
    monkeypatch.setattr(supervised_module, "STEADY_S", 0.0)


@pytest.fixture
async def written(monkeypatch: pytest.MonkeyPatch) -> Said:
    """What stands in the file of contacts, each time that it is written."""
    contents, loop, write = Said(), asyncio.get_running_loop(), contacts_module._write

    def write_and_tell(path: Path, contacts: Mapping[str, Sequence[str]]) -> None:
        write(path, contacts)
        loop.call_soon_threadsafe(contents, path.read_text())

    monkeypatch.setattr(contacts_module, "_write", write_and_tell)
    return contents


async def test_a_killed_p2pd_is_replaced_and_streams_go_both_ways_again() -> None:
    async with watched_nodes() as start:
        first = await start(0)
        node = await start(1, await first.network.addresses())
        await talk(node.network, first.network)
        rebuilt: list[str] = []
        node.network.on_rebuilt = lambda: rebuilt.append(node.network.peer_id)
        peer_id, addresses = node.network.peer_id, await node.network.addresses()
        node.kill_p2pd()
        await node.said.until("the libp2p daemon ended (exit code -9); rebuilding")
        with pytest.raises(PeerUnreachableError, match="own network is being rebuilt"):
            await node.network.open_stream(first.network.peer_id, PROTOCOL, deadline_s=WAIT_S)
        assert not await node.network.publish_manifest("run", b"{}", deadline_s=WAIT_S)
        assert await node.network.fetch_manifest("run", bytes(32), deadline_s=WAIT_S) is None
        assert await records(node.network) == set()
        said = await node.said.until(BACK)
        assert peer_id in said
        assert said.endswith("peers there: 1")
        assert rebuilt == [peer_id]
        assert await node.network.addresses() == addresses
        await talk(node.network, first.network)
        await talk(first.network, node.network)
        # It is the same node in the DHT too, and not a second one.
        assert len(routing_table(first).uid_to_peer_id) == 1


async def test_a_request_under_way_ends_with_p2pd_and_nothing_complains(
    make_record: MakeRecord, caplog: pytest.LogCaptureFixture
) -> None:
    async with watched_nodes() as start:
        node = await start(0, await (await start(1)).network.addresses())
        async with asyncio.TaskGroup() as tasks:
            stop_process(node.pid)
            publishing = tasks.create_task(
                node.network.publish_record(make_record(Identity.derived(0, 0)), deadline_s=600.0)
            )
            # Long enough for the request to lie in the socket, which p2pd never reads.
            assert not (await asyncio.wait({publishing}, timeout=0.3))[0]
            node.kill_p2pd()
            await node.said.until(BACK)
            async with asyncio.timeout(WAIT_S):
                assert not await publishing
    gc.collect()
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


async def test_a_p2pd_that_drops_its_connections_is_not_complained_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    network = await Libp2pNetwork.create(Identity.derived(0, 0), LOOPBACK)
    stop_process(network.daemon.pid)
    assert not await network.is_well(deadline_s=0.3)
    network.daemon.kill()
    await network.daemon.exited()
    await network.aclose()
    del network
    gc.collect()
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


async def test_a_silent_p2pd_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "PROBE_PERIOD_S", 0.1)
    monkeypatch.setattr(watch_module, "PROBE_DEADLINE_S", 0.7)
    async with watched_nodes() as start:
        first = await start(0)
        node = await start(1, await first.network.addresses())
        stop_process(node.pid)
        await node.said.until("the libp2p daemon does not answer; rebuilding")
        await node.said.until(BACK)
        await talk(first.network, node.network)
        await talk(node.network, first.network)
        assert not any("rebuilding" in line for line in first.said.lines)


async def test_another_port_is_taken_if_somebody_has_the_old_one() -> None:
    async with watched_nodes() as start:
        first = await start(0)
        node = await start(1, await first.network.addresses())
        (old,) = await node.network.addresses()
        with socket.socket() as thief:
            # Bound without listening, it waits in line for the port that p2pd shares.
            thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            thief.bind(("127.0.0.1", int(old.split("/")[4])))
            node.kill_p2pd()
            await node.said.until(BACK)
        (new,) = await node.network.addresses()
        assert new != old
        assert f"this node is now at {new}" in node.said.lines
        await talk(first.network, node.network)
        # Somebody who has never met it finds it by its id.
        await talk((await start(2, await first.network.addresses())).network, node.network)


async def test_what_a_node_held_for_the_swarm_outlives_its_p2pd(make_record: MakeRecord) -> None:
    async with watched_nodes() as start:
        founder = await start(0)
        signed = make_record(Identity.derived(0, 0))
        assert await founder.network.publish_record(signed, deadline_s=5.0)
        founder.kill_p2pd()
        await founder.said.until(BACK)
        joiner = await start(1, await founder.network.addresses())
        assert await records(joiner.network) == {signed}


async def test_rebuilding_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(company_module, "CHECK_PERIOD_S", 600.0)

    def held() -> tuple[int, int, int]:
        itself = psutil.Process()
        return itself.num_fds(), len(itself.children()), len(asyncio.all_tasks())

    async with watched_nodes() as start:
        first = await start(0)
        node = await start(1, await first.network.addresses())
        counts = []
        for times in range(1, 7):
            await talk(first.network, node.network)
            node.kill_p2pd()
            await node.said.until(BACK, times=times)
            counts.append(held())
        # What came of an answer a moment ago may still be there, but not something of every time.
        grown = [after - before for before, after in zip(counts[0], counts[-1], strict=True)]
        assert max(grown) < len(counts) - 1, counts


async def test_a_p2pd_that_cannot_be_started_ends_supervision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervised_module, "REBUILD_LIMIT_S", 0.5)
    said = Said()
    network = await SupervisedNetwork.create(Identity.derived(0, 0), LOOPBACK, warn=said)
    assert network.daemon is not None
    os.kill(network.daemon.pid, signal.SIGKILL)
    monkeypatch.setattr(daemon_module, "_binary", lambda: Path("/nonexistent/p2pd"))
    with pytest.raises(DaemonError, match="could not be brought back within") as caught:
        await network.supervise()
    assert "/nonexistent/p2pd" in caught.value.why
    assert len([line for line in said.lines if "trying again" in line]) >= 2
    await network.aclose()


@pytest.mark.parametrize("moment", ["well", "rebuilding", "alone"])
async def test_closing_ends_supervision_at_once(moment: str) -> None:
    async with watched_nodes() as start:
        first = await start(0)
        node = await start(1, await first.network.addresses())
        if moment == "alone":
            await first.network.aclose()
            await node.said.until("alone: ")
        if moment == "rebuilding":
            node.kill_p2pd()
            await node.said.until("rebuilding")
        async with asyncio.timeout(3.0):
            await node.network.aclose()
            await node.supervising
        await node.network.aclose()
        with pytest.raises(PeerUnreachableError):
            await node.network.open_stream(first.network.peer_id, PROTOCOL, deadline_s=1.0)
        assert len(p2pds()) == (0 if moment == "alone" else 1)


async def test_a_dead_bootstrap_is_got_around_and_used_again(
    tmp_path: Path, make_record: MakeRecord, written: Said
) -> None:
    async with watched_nodes() as start:
        bootstrap = await start(0)
        entry = await bootstrap.network.addresses()
        first = await start(1, entry)
        earlier = await start(2, entry, home=tmp_path)
        await written.until(first.network.peer_id)
        await earlier.network.aclose()
        signed = make_record(Identity.derived(0, 1))
        assert await first.network.publish_record(signed, deadline_s=5.0)
        await bootstrap.network.aclose()
        await first.said.until(f"bootstrap peer {bootstrap.network.peer_id} does not answer")
        with pytest.raises(BootstrapUnreachableError):
            await start(3, entry)
        again = await start(2, entry, home=tmp_path)
        await again.said.until("joined through peers that this node has met before")
        assert await records(again.network) == {signed}
        await start(0, listen=listen_of(entry[0]))
        await first.said.until(f"bootstrap peer {bootstrap.network.peer_id} answers again")
        newcomer = await start(4, entry)
        assert await records(newcomer.network) == {signed}


@pytest.mark.parametrize("known_as", ["bootstrap", "contact"])
async def test_two_swarms_become_one_when_anybody_knows_both(
    tmp_path: Path, make_record: MakeRecord, known_as: str
) -> None:
    async with watched_nodes() as start:
        islands = []
        for index in (0, 10):
            founder = await start(index)
            member = await start(index + 1, await founder.network.addresses())
            signed = make_record(Identity.derived(0, index + 1))
            assert await member.network.publish_record(signed, deadline_s=5.0)
            islands.append((founder, member, signed))
        (founder, member, signed), (other, far, other_signed) = islands
        assert await records(founder.network) == await records(member.network) == {signed}
        entry, bridge = await founder.network.addresses(), await other.network.addresses()
        if known_as == "bootstrap":
            between = await start(2, (*entry, *bridge))
        else:
            (tmp_path / CONTACTS_FILE).write_text(json.dumps(bridge))
            between = await start(2, entry, home=tmp_path)
            await between.said.until("2 peers of another part of the swarm found: joined")
        for node in (founder, member, other, far, between):
            assert await records(node.network) == {signed, other_signed}


async def test_a_lone_node_says_so_and_finds_the_swarm_when_it_is_back() -> None:
    async with watched_nodes() as start:
        bootstrap = await start(0)
        entry = await bootstrap.network.addresses()
        node = await start(1, entry)
        await bootstrap.network.aclose()
        await node.said.until("alone: none of 1 known address answers")
        node.kill_p2pd()
        assert (await node.said.until(BACK)).endswith("peers there: 0")
        await start(0, listen=listen_of(entry[0]))
        assert "1 peer there" in await node.said.until("no longer alone")


async def test_a_founder_finds_its_swarm_again_by_itself(
    tmp_path: Path, make_record: MakeRecord, written: Said
) -> None:
    async with watched_nodes() as start:
        founder = await start(0, home=tmp_path)
        joiner = await start(1, await founder.network.addresses())
        signed = make_record(Identity.derived(0, 1))
        await written.until(joiner.network.peer_id)
        await founder.network.aclose()
        await joiner.network.publish_record(signed, deadline_s=5.0)
        founder = await start(0, home=tmp_path)
        assert await records(founder.network) == {signed}
