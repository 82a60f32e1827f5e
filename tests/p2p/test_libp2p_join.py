"""Joining tells one fault from another, and goes on with whoever answers."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import psutil
import pytest
from hivemind.dht.node import DHTNode
from hivemind.p2p import P2P
from hivemind.utils.multiaddr import Multiaddr

from gasloc_p2p.core.errors import (
    BootstrapUnreachableError,
    ConfigError,
    DaemonError,
    PortInUseError,
)
from gasloc_p2p.net import join as join_module
from gasloc_p2p.net.daemon import Daemon
from gasloc_p2p.net.identity import Identity
from gasloc_p2p.net.network import Libp2pNetwork
from gasloc_p2p.net.settings import NetConfig

pytestmark = pytest.mark.p2p

StartNode: TypeAlias = Callable[..., Awaitable[Libp2pNetwork]]
LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
JOINER, NOBODY = Identity.derived(0, 7), Identity.derived(0, 8).peer_id
IMPOSTOR = "answers on TCP but is not the peer with that id, or does not speak this protocol"


@asynccontextmanager
async def mute_listener() -> AsyncIterator[str]:
    """Accept connections and say nothing; yields a bootstrap address of it."""
    server = await asyncio.start_server(lambda _reader, _writer: None, "127.0.0.1", 0)
    async with server:
        yield f"/ip4/127.0.0.1/tcp/{server.sockets[0].getsockname()[1]}/p2p/{NOBODY}"


def refused_address(peer: str = NOBODY) -> str:
    """Return a bootstrap address of `peer` on a port where nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"/ip4/127.0.0.1/tcp/{free.getsockname()[1]}/p2p/{peer}"


async def fail_to_join(
    *bootstrap: str, attempts: int = 1, warn: Callable[[str], None] = lambda _: None
) -> BootstrapUnreachableError:
    before = psutil.Process().children()
    config = NetConfig(listen=LOOPBACK, bootstrap=bootstrap, join_attempts=attempts)
    with pytest.raises(BootstrapUnreachableError) as caught:
        await Libp2pNetwork.create(JOINER, config, warn=warn)
    assert psutil.Process().children() == before
    return caught.value


async def test_a_refused_address_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join_module, "FIRST_PAUSE_S", 0.01)
    address, said = refused_address(), list[str]()
    error = await fail_to_join(address, attempts=3, warn=said.append)
    assert error.why == f"{address}: connection refused: nobody listens on that port"
    assert error.exit_code != 0
    assert len([line for line in said if "trying again" in line]) == 2


async def test_a_mute_peer_and_a_wrong_id_are_told_from_a_dead_one(start_node: StartNode) -> None:
    live = (await start_node(0)).peer_id
    first = (await (await start_node(1)).addresses())[0]
    wrong_id = f"{first.rpartition('/')[0]}/{live}"
    refused = refused_address()
    async with mute_listener() as mute:
        error = await fail_to_join(mute, refused, wrong_id)
    assert error.why.splitlines() == [
        f"{mute}: {IMPOSTOR}",
        f"{refused}: connection refused: nobody listens on that port",
        f"{wrong_id}: {IMPOSTOR}",
    ]


async def test_two_dead_bootstrap_peers_of_three_are_passed_over(start_node: StartNode) -> None:
    first = await start_node(0)
    address = (await first.addresses())[0]
    refused = refused_address()
    wrong_id = f"{address.rpartition('/')[0]}/{Identity.derived(0, 9).peer_id}"
    # Another address of the peer that does answer is nothing to report.
    stale = refused_address(first.peer_id)
    config = NetConfig(listen=LOOPBACK, bootstrap=(refused, wrong_id, stale, address))
    said = list[str]()
    node = await Libp2pNetwork.create(JOINER, config, warn=said.append)
    try:
        assert said == [
            f"bootstrap peer {refused} is left out: connection refused: nobody listens on that "
            "port",
            f"bootstrap peer {wrong_id} {IMPOSTOR}",
        ]
        peers = {str(peer.peer_id) for peer in await node._parts.p2p.list_peers()}
        assert first.peer_id in peers
    finally:
        await node.aclose()


async def test_a_swarm_of_another_kind_is_not_joined() -> None:
    # p2pd alone is a libp2p peer like any other, and has no place in the DHT.
    daemon = await Daemon.start(Identity.derived(0, 8), NetConfig(listen=LOOPBACK), bootstrap=())
    try:
        p2p = await P2P.replicate(Multiaddr(f"/unix{daemon.control_path}"))
        address = str((await p2p.get_visible_maddrs())[0])
        error = await fail_to_join(address)
        assert error.why == f"{address}: {IMPOSTOR}"
        await p2p.shutdown()
    finally:
        await daemon.stop()


async def test_a_daemon_that_dies_while_joining_is_named(
    start_node: StartNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = (await (await start_node(0)).addresses())[0]
    monkeypatch.setattr(join_module, "DHT_DEADLINE_S", 0.5)
    create = DHTNode.create

    async def create_late(p2p: Any, **options: Any) -> Any:
        (own,) = [c for c in psutil.Process().children() if c.pid not in before]
        own.kill()
        return await create(p2p=p2p, **options)

    before = {child.pid for child in psutil.Process().children()}
    monkeypatch.setattr(DHTNode, "create", create_late)
    with pytest.raises(DaemonError, match="does not answer"):
        await Libp2pNetwork.create(JOINER, NetConfig(listen=LOOPBACK, bootstrap=(address,)))


async def test_a_held_port_is_named_before_p2pd_shares_it(start_node: StartNode) -> None:
    address = (await (await start_node(0)).addresses())[0]
    port = address.split("/")[4]
    config = NetConfig(listen=(f"/ip4/127.0.0.1/tcp/{port}",))
    with pytest.raises(PortInUseError, match=f"port {port} is in use"):
        await Libp2pNetwork.create(JOINER, config)


async def test_a_fixed_port_can_be_taken_again_at_once() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        listen = f"/ip4/127.0.0.1/tcp/{free.getsockname()[1]}"
    for _ in range(2):
        node = await Libp2pNetwork.create(JOINER, NetConfig(listen=(listen,)))
        try:
            assert await node.addresses() == (f"{listen}/p2p/{JOINER.peer_id}",)
        finally:
            await node.aclose()


async def test_an_announced_address_is_the_one_that_is_told() -> None:
    config = NetConfig(listen=LOOPBACK, announce=("/ip4/203.0.113.7/tcp/4001",))
    node = await Libp2pNetwork.create(JOINER, config)
    try:
        assert await node.addresses() == (f"/ip4/203.0.113.7/tcp/4001/p2p/{JOINER.peer_id}",)
    finally:
        await node.aclose()


async def test_an_unusable_address_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match=r"net\.bootstrap"):
        await Libp2pNetwork.create(JOINER, NetConfig(bootstrap=("/ip4/127.0.0.1/tcp/1",)))
