"""Records and manifests reach every node, and strangers in the DHT cannot take them away."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any, TypeAlias

import pytest
from blake3 import blake3
from hivemind.dht.node import DHTNode
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p import P2P
from hivemind.utils.multiaddr import Multiaddr
from hivemind.utils.serializer import MSGPackSerializer
from hivemind.utils.timed_storage import ValueWithExpiration

from gasloc_p2p.core.records import RecordError, open_record
from gasloc_p2p.net.daemon import Daemon
from gasloc_p2p.net.identity import Identity
from gasloc_p2p.net.network import Libp2pNetwork
from gasloc_p2p.net.settings import NetConfig
from gasloc_p2p.net.validator import record_key

pytestmark = pytest.mark.p2p

StartNode: TypeAlias = Callable[..., Awaitable[Libp2pNetwork]]
MakeRecord: TypeAlias = Callable[..., bytes]
StartStranger: TypeAlias = Callable[..., Awaitable[Any]]
WAIT_S = 10.0
HOUR_S = 3600.0


@pytest.fixture
async def start_stranger() -> AsyncIterator[StartStranger]:
    """Return a function that starts a DHT node of hivemind's own, which checks nothing."""
    async with AsyncExitStack() as strangers:

        async def start(index: int, bootstrap: tuple[str, ...] = (), **options: Any) -> Any:
            daemon = await Daemon.start(
                Identity.derived(seed=1, index=index),
                NetConfig(listen=("/ip4/127.0.0.1/tcp/0",)),
                bootstrap=bootstrap,
            )
            strangers.push_async_callback(daemon.stop)
            p2p = await P2P.replicate(Multiaddr(f"/unix{daemon.control_path}"))
            strangers.push_async_callback(p2p.shutdown)
            return await DHTNode.create(p2p=p2p, initial_peers=list(bootstrap), **options)

        yield start


@pytest.fixture
async def swarm(start_node: StartNode, make_record: MakeRecord) -> list[Libp2pNetwork]:
    """Three nodes that have each published a record."""
    first = await start_node(0)
    bootstrap = await first.addresses()
    nodes = [first, await start_node(1, bootstrap), await start_node(2, bootstrap)]
    for index, node in enumerate(nodes):
        signed = make_record(Identity.derived(0, index))
        assert await node.publish_record(signed, deadline_s=WAIT_S)
    return nodes


async def records(node: Libp2pNetwork, run_id: str = "run") -> set[bytes]:
    return set(await node.fetch_records(run_id, deadline_s=WAIT_S))


def hold_no_replica(node: Libp2pNetwork, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `node` depend on what others answer, as most nodes of a large swarm do."""
    monkeypatch.setattr(node._parts.dht.protocol.storage, "get", lambda _key: None)


async def test_every_node_sees_every_record_and_the_newest_one(
    swarm: list[Libp2pNetwork], make_record: MakeRecord
) -> None:
    before = await records(swarm[0])
    assert len(before) == 3
    assert await records(swarm[1]) == await records(swarm[2]) == before
    assert await records(swarm[0], "other") == set()
    newer = make_record(Identity.derived(0, 1), seq=2, expires_in_s=700.0)
    assert await swarm[1].publish_record(newer, deadline_s=WAIT_S)
    for node in swarm:
        after = await records(node)
        assert newer in after
        assert len(after & before) == 2


async def test_publishing_the_same_record_again_is_no_failure(
    swarm: list[Libp2pNetwork], make_record: MakeRecord
) -> None:
    signed = make_record(Identity.derived(0, 1), seq=2, expires_in_s=700.0)
    assert await swarm[1].publish_record(signed, deadline_s=WAIT_S)
    assert await swarm[1].publish_record(signed, deadline_s=WAIT_S)
    with pytest.raises(RecordError):
        await swarm[1].publish_record(signed[:-1], deadline_s=WAIT_S)


async def test_a_manifest_is_found_by_run_and_digest(swarm: list[Libp2pNetwork]) -> None:
    manifest = json.dumps({"run_id": "run", "padding": "x" * 60_000}).encode()
    digest = blake3(manifest).digest()
    assert await swarm[1].publish_manifest("run", manifest, deadline_s=WAIT_S)
    assert await swarm[2].publish_manifest("run", manifest, deadline_s=WAIT_S)
    for node in swarm:
        assert await node.fetch_manifest("run", digest, deadline_s=WAIT_S) == manifest
        assert await node.fetch_manifest("other", digest, deadline_s=WAIT_S) is None
        assert await node.fetch_manifest("run", bytes(32), deadline_s=WAIT_S) is None
    assert not await swarm[1].publish_manifest("other", manifest, deadline_s=WAIT_S)
    oversized = json.dumps({"run_id": "run", "padding": "x" * 66_000}).encode()
    assert not await swarm[1].publish_manifest("run", oversized, deadline_s=WAIT_S)


async def test_a_stranger_can_wipe_what_nobody_checks(start_stranger: StartStranger) -> None:
    """Shows that the attacks of the tests below are real."""
    first = await start_stranger(0)
    address = tuple(str(a) for a in await first.get_visible_maddrs())
    attacker = await start_stranger(1, address)
    key, now_s = record_key("run"), time.time()
    assert await first.store(key, b"record", now_s + 60, subkey="peer")
    assert await attacker.store(key, b"", now_s + HOUR_S)
    found = await first.get(key, latest=True)
    assert found.value == b""


async def test_records_survive_a_stranger_that_stores_anything(
    swarm: list[Libp2pNetwork], make_record: MakeRecord, start_stranger: StartStranger
) -> None:
    before = await records(swarm[0])
    victim = Identity.derived(0, 1)
    replayed = next(r for r in before if victim.peer_id.encode() in r)
    key, later_s = record_key("run"), time.time() + HOUR_S
    attacker = await start_stranger(9, await swarm[0].addresses())
    # Storing through the DHT puts each of these on every node that accepts it.
    await attacker.store(key, b"wiped", later_s, exclude_self=True)
    await attacker.store(key, replayed, later_s, subkey=victim.peer_id, exclude_self=True)
    await attacker.store(key, b"junk", later_s, subkey="12D3KooWjunk", exclude_self=True)
    foreign = make_record(Identity.derived(0, 5), run_id="other")
    await attacker.store(key, foreign, later_s, subkey=victim.peer_id, exclude_self=True)
    for node in swarm:
        assert await records(node) == before
    newer = make_record(victim, seq=2, expires_in_s=700.0)
    assert await swarm[1].publish_record(newer, deadline_s=WAIT_S)
    assert newer in await records(swarm[2])


async def test_records_survive_a_stranger_that_asks_others_to_cache(
    swarm: list[Libp2pNetwork],
    make_record: MakeRecord,
    start_stranger: StartStranger,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = await records(swarm[0])
    attacker = await start_stranger(9, await swarm[0].addresses())
    key_id, own = DHTID.generate(source=record_key("run")), Identity.derived(1, 9)
    signed = make_record(own, expires_in_s=1e9)
    expires_at_s = open_record(signed, verify=Identity.verify).expires_at
    for node in swarm:
        accepted = await attacker.protocol.call_store(
            attacker.p2p.peer_id.from_base58(node.peer_id),
            keys=[key_id],
            values=[MSGPackSerializer.dumps(signed)],
            expiration_time=expires_at_s,
            subkeys=[own.peer_id],
            in_cache=True,
        )
        assert accepted == [True]
    hold_no_replica(swarm[2], monkeypatch)
    assert await records(swarm[2]) == before


@pytest.mark.parametrize("poison", ["plain value", "dictionary", "hidden records"])
async def test_records_survive_a_stranger_that_returns_anything(
    swarm: list[Libp2pNetwork],
    start_stranger: StartStranger,
    poison: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = await records(swarm[0])
    key_id = DHTID.generate(source=record_key("run"))
    # The node whose id is the key's own is asked first and believed to know best.
    attacker = await start_stranger(9, await swarm[0].addresses(), node_id=key_id)
    hold_no_replica(swarm[2], monkeypatch)
    reader = swarm[2]._parts.dht
    reader.num_workers = 1
    assert await reader.protocol.call_ping(attacker.peer_id) == key_id
    answer: Any = MSGPackSerializer.dumps(b"wiped")
    if poison != "plain value":
        answer = DictionaryDHTValue()
    if poison == "dictionary":
        answer.store("12D3KooWjunk", MSGPackSerializer.dumps(b"junk"), time.time() + HOUR_S)
    asked = []

    def poisoned(key: object) -> Any:
        asked.append(key)
        return ValueWithExpiration(answer, float("inf"))

    monkeypatch.setattr(attacker.protocol.storage, "get", poisoned)
    assert await records(swarm[2]) == before
    assert asked == [key_id]
