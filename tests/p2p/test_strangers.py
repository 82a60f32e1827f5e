"""What does not belong together is told so: strangers, foreign runs, unreachable bootstraps."""

from __future__ import annotations

import asyncio
import signal
from functools import partial
from pathlib import Path

import pytest

from gasloc_p2p.core.errors import BootstrapUnreachableError, ManifestError
from gasloc_p2p.core.exchange import Exchange, Finished
from gasloc_p2p.core.manifest import Invite, parse_invite, parse_manifest
from gasloc_p2p.core.types import EdgeKind
from gasloc_p2p.core.wire import PROTOCOL_VERSION, Hello, pack_message
from gasloc_p2p.net.identity import Identity
from gasloc_p2p.net.network import Libp2pNetwork
from gasloc_p2p.net.settings import NetConfig
from gasloc_p2p.node.dialling import EXCHANGE_PROTOCOL
from gasloc_p2p.node.events import Invitation, Notice
from tests.cli.test_cli import assert_explained, gasloc_process
from tests.p2p.real import RealNode, real_swarm, stop_process

pytestmark = [pytest.mark.p2p, pytest.mark.timeout(180)]

DEADLINE_S = 20.0


def hello_of(peer_id: str, *, run_digest: bytes = bytes(32)) -> Hello:
    return Hello(
        protocol_min=PROTOCOL_VERSION,
        protocol_max=PROTOCOL_VERSION,
        peer_id=peer_id,
        run_digest=run_digest,
        schema_digest=bytes(32),
        round=0,
        roster_digest=b"",
        codec="none",
        code_bytes=435_456,
        chunk_bytes=1_048_576,
        scale_bytes=0,
    )


async def dial(network: Libp2pNetwork, node: RealNode, hello: Hello) -> Finished:
    """Play the dialer of an exchange with a real node and return how it ended."""
    exchange = Exchange(hello=hello, partner=node.peer_id, dialer=True)
    async with asyncio.timeout(DEADLINE_S):
        stream = await network.open_stream(node.peer_id, EXCHANGE_PROTOCOL, deadline_s=DEADLINE_S)
        try:
            await stream.write(pack_message(hello))
            assert exchange.next_to_send() is not None
            while True:
                data = await stream.read(65_536)
                events = exchange.receive(data) if data else exchange.end_of_stream()
                for event in events:
                    if isinstance(event, Finished):
                        return event
        finally:
            await stream.aclose()


def notice_about(node: RealNode, peer_id: str) -> str | None:
    return next((n.text for n in node.of(Notice) if peer_id in n.text), None)


async def test_a_stranger_is_refused_with_the_reason_on_both_sides(tmp_path: Path) -> None:
    async with real_swarm(tmp_path) as swarm:
        entry = await swarm.bootstrap()
        [node] = await swarm.nodes_of_run("run", entry, 1, "run.rounds=100000")
        digest = parse_invite((await node.first(Invitation)).invite).digest
        await node.reached(0)
        config = NetConfig(listen=("/ip4/127.0.0.1/tcp/0",), bootstrap=tuple(entry))
        for index, words in enumerate(("peer id", "run digest", "schema digest")):
            identity = Identity.derived(seed=99, index=index)
            hello = hello_of(
                node.peer_id if words == "peer id" else identity.peer_id,
                run_digest=digest if words == "schema digest" else bytes(32),
            )
            network = await Libp2pNetwork.create(identity, config)
            try:
                ended = await dial(network, node, hello)
            finally:
                await network.aclose()
            assert ended.kind is EdgeKind.REFUSED
            assert ended.reason.startswith(f"refused by partner: expected {words}")
            notice = await node.until(partial(notice_about, node, identity.peer_id))
            assert f"refused by this peer: expected {words}" in notice
        node.signal(signal.SIGINT)
        assert await node.ended() == 0


async def test_an_invite_with_a_foreign_manifest_is_explained(tmp_path: Path) -> None:
    async with real_swarm(tmp_path) as swarm:
        entry = await swarm.bootstrap()
        invite = Invite(run_id="nobodys", bootstrap=tuple(entry), digest=bytes(32)).encode()
        result = await asyncio.to_thread(
            gasloc_process,
            *("join", invite, "--set", f"node.home={tmp_path / 'joiner'}"),
            *("--set", "net.listen=/ip4/127.0.0.1/tcp/0"),
        )
    assert_explained(result, ManifestError, "nobodys")


async def test_an_invite_is_good_before_its_founder_has_a_model(tmp_path: Path) -> None:
    async with real_swarm(tmp_path) as swarm:
        entry = await swarm.bootstrap()
        founder = await swarm.found("run", entry)
        invite = parse_invite((await founder.first(Invitation)).invite)
        stop_process(founder.child.pid)
        config = NetConfig(listen=("/ip4/127.0.0.1/tcp/0",), bootstrap=tuple(entry))
        network = await Libp2pNetwork.create(Identity.derived(seed=99, index=0), config)
        try:
            found = await network.fetch_manifest("run", invite.digest, deadline_s=DEADLINE_S)
        finally:
            await network.aclose()
        assert found is not None
        assert parse_manifest(found, invite.digest).run_id == "run"


def test_an_unreachable_bootstrap_is_named_with_its_reason(tmp_path: Path) -> None:
    peer = Identity.derived(seed=99, index=0).peer_id
    address = f"/ip4/127.0.0.1/tcp/1/p2p/{peer}"
    result = gasloc_process(
        "start",
        *("--set", f"net.bootstrap={address}", "--set", f"node.home={tmp_path}"),
        *("--set", "net.join_attempts=1", "--set", "net.listen=/ip4/127.0.0.1/tcp/0"),
    )
    assert_explained(result, BootstrapUnreachableError, address, "refused")
