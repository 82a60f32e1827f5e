"""The record store over links and through partitions."""

from __future__ import annotations

import asyncio

import pytest
from blake3 import blake3

from gasloc_p2p.core.records import Reachability, Record, sign_record
from gasloc_p2p.core.substrate import Network
from gasloc_p2p.simulate.links import parse_partition
from gasloc_p2p.simulate.network import Hub
from tests.sim.conftest import in_virtual_time
from tests.sim.linked import link, now_s, on


def record_of(peer: str, seq: int) -> bytes:
    record = Record(
        run_id="run",
        peer_id=peer,
        seq=seq,
        signed_round=seq,
        first_round=0,
        lease_until=seq + 4,
        reachability=Reachability.PUBLIC,
        cycle_s=1.0,
        expires_at=1000.0 + seq,
    )
    return sign_record(record, bytes)


def test_asking_the_store_takes_a_round_trip_to_the_backbone() -> None:
    async def scenario(a: Network, b: Network) -> None:
        assert await a.publish_record(record_of("a", 1), deadline_s=1.0)
        assert now_s() == pytest.approx(0.2)
        assert list(await b.fetch_records("run", deadline_s=1.0)) == [record_of("a", 1)]
        assert now_s() == pytest.approx(0.8)
        assert await a.publish_manifest("run", b"manifest", deadline_s=1.0)
        assert now_s() == pytest.approx(1.0)
        # An answer that would be late is none.
        assert list(await b.fetch_records("run", deadline_s=0.5)) == []
        assert not await b.publish_record(record_of("b", 1), deadline_s=0.5)
        assert not await b.publish_manifest("run", b"other", deadline_s=0.5)
        assert await b.fetch_manifest("run", b"digest", deadline_s=0.5) is None
        assert now_s() == pytest.approx(3.0)

    on([link(latency_s=0.1), link(latency_s=0.3)], scenario)


def test_each_side_of_a_partition_has_the_records_that_reached_it() -> None:
    async def scenario(*networks: Network) -> None:
        async def publish(seq: int) -> None:
            for name, network in zip("abc", networks, strict=True):
                assert await network.publish_record(record_of(name, seq), deadline_s=1.0)
                assert not await network.publish_record(record_of(name, seq), deadline_s=1.0)

        async def expect(*views: tuple[int, int, int]) -> None:
            for network, view in zip(networks, views, strict=True):
                found = await network.fetch_records("run", deadline_s=1.0)
                assert list(found) == [record_of(*pair) for pair in zip("abc", view, strict=True)]

        await publish(1)
        await asyncio.sleep(11)  # In the first partition, before the second one.
        await expect((1, 1, 1), (1, 1, 1), (1, 1, 1))
        await publish(2)
        await publish(3)
        await expect((3, 1, 1), (1, 3, 3), (1, 3, 3))
        await asyncio.sleep(10)  # In both: everybody is alone.
        await publish(4)
        await expect((4, 1, 1), (1, 4, 3), (1, 3, 4))
        await asyncio.sleep(10)  # Only the second one is left.
        await expect((4, 4, 3), (4, 4, 3), (1, 3, 4))
        await publish(5)
        await expect((5, 5, 3), (5, 5, 3), (1, 3, 5))
        await asyncio.sleep(10)
        await expect((5, 5, 5), (5, 5, 5), (5, 5, 5))

    on([link()] * 3, scenario, [parse_partition("10-30:0"), parse_partition("20-40:2")])


def test_a_manifest_is_found_where_it_was_published() -> None:
    digest = blake3(b"manifest").digest()

    async def scenario(a: Network, b: Network, c: Network) -> list[bytes | None]:
        await asyncio.sleep(11)
        await a.publish_manifest("run", b"manifest", deadline_s=1.0)
        found = [await n.fetch_manifest("run", digest, deadline_s=1.0) for n in (a, b, c)]
        await c.publish_manifest("run", b"manifest", deadline_s=1.0)
        found.append(await b.fetch_manifest("run", digest, deadline_s=1.0))
        await asyncio.sleep(10)
        found.append(await b.fetch_manifest("run", digest, deadline_s=1.0))
        return found

    found = on([link()] * 3, scenario, [parse_partition("10-20:1")])
    assert found == [b"manifest", None, b"manifest", None, b"manifest"]


def test_a_peer_that_comes_back_has_its_old_link() -> None:
    async def main() -> float:
        async with Hub(verify=lambda *_: True, links=[link(latency_s=0.1), link()]) as hub:
            await hub.network("a", bytes).aclose()
            hub.network("b", bytes)
            again = hub.network("a", bytes)
            await again.fetch_records("run", deadline_s=1.0)
            return now_s()

    assert in_virtual_time(main) == pytest.approx(0.2)
