"""Peers come and go, and partitions begin while a swarm runs."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar

import pytest

from gasloc_p2p.core.substrate import PeerUnreachableError, Stream
from gasloc_p2p.simulate.links import LINKS
from gasloc_p2p.simulate.network import Hub
from gasloc_p2p.testing.clock import in_virtual_time
from tests.sim.linked import now_s
from tests.sim.test_store import record_of

PROTOCOL = "gasloc/test/1"
WHO: ContextVar[str] = ContextVar("who", default="nobody")


async def hang_up(stream: Stream) -> None:
    await stream.aclose()


@pytest.mark.parametrize("link", ["ideal", "lan"])
def test_a_partition_that_begins_now_cuts_dials_streams_and_the_store(link: str) -> None:
    async def main() -> tuple[list[float], list[list[bytes]]]:
        arrivals: list[float] = []

        async def note(stream: Stream) -> None:
            while await stream.read(1):
                arrivals.append(now_s())

        async with Hub(verify=lambda *_: True, links=[LINKS[link]] * 3) as hub:
            a, b, c = (hub.network(name, bytes) for name in "abc")
            await b.serve(PROTOCOL, note)
            await a.publish_record(record_of("a", 1), deadline_s=1.0)
            await asyncio.sleep(10.0)
            stream = await a.open_stream("b", PROTOCOL, deadline_s=1.0)
            await stream.write(b"1")
            await asyncio.sleep(1.0)
            hub.partition({0, 2}, seconds=20.0)
            await a.publish_record(record_of("a", 2), deadline_s=1.0)
            views = [list(await n.fetch_records("run", deadline_s=1.0)) for n in (a, b, c)]
            with pytest.raises(PeerUnreachableError):
                await a.open_stream("b", PROTOCOL, deadline_s=60.0)
            if link != "ideal":
                await stream.write(b"2")
            await asyncio.sleep(20.0)
            views.append(list(await b.fetch_records("run", deadline_s=1.0)))
            await (await a.open_stream("b", PROTOCOL, deadline_s=1.0)).aclose()
        return arrivals, views

    arrivals, views = in_virtual_time(main)
    old, new = [record_of("a", 1)], [record_of("a", 2)]
    assert views == [new, old, new, new]
    # Streams that were opened over ideal links, before there was any partition, know of none.
    assert arrivals == pytest.approx([10.0] if link == "ideal" else [10.0, 31.0], abs=0.01)


def test_the_old_network_of_a_peer_that_came_back_takes_nothing_away() -> None:
    async def main() -> None:
        async with Hub(verify=lambda *_: True) as hub:
            old, dialer = hub.network("a", bytes), hub.network("b", bytes)
            again = hub.network("a", bytes)
            await again.serve(PROTOCOL, hang_up)
            await old.aclose()
            await (await dialer.open_stream("a", PROTOCOL, deadline_s=1.0)).aclose()
            await again.aclose()
            with pytest.raises(PeerUnreachableError):
                await dialer.open_stream("a", PROTOCOL, deadline_s=1.0)

    in_virtual_time(main)


def test_a_network_may_close_from_one_of_its_own_handlers() -> None:
    async def main() -> float:
        async with Hub(verify=lambda *_: True) as hub:
            a, b = hub.network("a", bytes), hub.network("b", bytes)

            async def leave(stream: Stream) -> None:
                await b.aclose()

            await b.serve(PROTOCOL, leave)
            stream = await a.open_stream("b", PROTOCOL, deadline_s=1.0)
            assert await stream.read(1) == b""
            return now_s()

    assert in_virtual_time(main) == 0.0


def test_a_handler_runs_in_the_context_of_the_peer_that_serves() -> None:
    async def main() -> list[str]:
        seen: list[str] = []

        async def look(stream: Stream) -> None:
            seen.append(WHO.get())
            await stream.aclose()

        async with Hub(verify=lambda *_: True) as hub:
            a, b = hub.network("a", bytes), hub.network("b", bytes)
            WHO.set("server")
            await b.serve(PROTOCOL, look)
            WHO.set("dialer")
            stream = await a.open_stream("b", PROTOCOL, deadline_s=1.0)
            assert await stream.read(1) == b""
        return seen

    assert in_virtual_time(main) == ["server"]
