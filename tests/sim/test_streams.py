"""What the simulated network promises of its streams beyond what every network does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest

from gasloc_p2p.core.substrate import Network, PeerUnreachableError, Stream
from gasloc_p2p.simulate.links import LINKS, Link, Partition, parse_link, parse_partition
from gasloc_p2p.simulate.network import Hub
from tests.sim.conftest import in_virtual_time

PROTOCOL = "gasloc/test/1"
WAIT_S = 1000.0

CONDITIONS: dict[str, tuple[Sequence[Link], Sequence[Partition]]] = {
    "none given": ((), ()),
    **{name: ([named] * 2, ()) for name, named in LINKS.items()},
    "one ideal end": ([LINKS["ideal"], LINKS["cable"]], ()),
    "no limit but latency": ([parse_link("0/0/0.1/0")] * 2, ()),
    "lossy": ([parse_link("0/0/0/0.05")] * 2, ()),
    "partitions": ([LINKS["lan"]] * 2, [parse_partition(f"{t}.01-{t + 5}:1") for t in range(6)]),
}
every_condition = pytest.mark.parametrize("condition", CONDITIONS)


def under(condition: str, scenario: Callable[[Network, Network], Awaitable[None]]) -> None:
    """Run `scenario` with the networks of two peers, "first" and "second"."""
    links, partitions = CONDITIONS[condition]

    async def main() -> None:
        async with Hub(verify=lambda *_: True, links=links, partitions=partitions) as hub:
            await scenario(hub.network("first", bytes), hub.network("second", bytes))

    in_virtual_time(main)


async def dial(network: Network, peer: str) -> Stream:
    """Open a stream, with patience for partitions."""
    while True:
        try:
            return await network.open_stream(peer, PROTOCOL, deadline_s=WAIT_S)
        except PeerUnreachableError:
            assert asyncio.get_running_loop().time() < WAIT_S


async def write_forever(stream: Stream) -> None:
    while True:
        await stream.write(bytes(65_536))
        await asyncio.sleep(0)


async def read_exactly(stream: Stream, size: int) -> bytes:
    received = bytearray()
    while len(received) < size:
        piece = await stream.read(size - len(received))
        assert piece, f"the stream ended after {len(received)} bytes"
        received += piece
    return bytes(received)


@every_condition
def test_last_words_arrive_although_the_other_end_is_still_sending(condition: str) -> None:
    async def scenario(first: Network, second: Network) -> None:
        refusal = b"R" * 1000

        async def refuse(stream: Stream) -> None:
            await stream.read(1)
            await stream.write(refusal)
            await stream.aclose()

        async def write_until_closed(stream: Stream) -> None:
            with pytest.raises(ConnectionError):
                await write_forever(stream)

        await first.serve(PROTOCOL, refuse)
        stream = await dial(second, "first")
        async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
            tasks.create_task(write_until_closed(stream))
            assert await read_exactly(stream, len(refusal)) == refusal
            assert await stream.read(1) == b""
        await stream.aclose()

    under(condition, scenario)


@every_condition
def test_a_closed_end_reads_nothing_more(condition: str) -> None:
    async def scenario(first: Network, second: Network) -> None:
        async def send(stream: Stream) -> None:
            await stream.write(bytes(200_000))
            await stream.aclose()

        await first.serve(PROTOCOL, send)
        stream = await dial(second, "first")
        await read_exactly(stream, 1)
        await stream.aclose()
        assert await stream.read(1) == b""
        await asyncio.sleep(60.0)
        assert await stream.read(1) == b""

    under(condition, scenario)


@every_condition
def test_a_peer_that_cannot_be_reached_is_named(condition: str) -> None:
    async def scenario(first: Network, second: Network) -> None:
        for peer, protocol in (("first", "gasloc/unknown/1"), ("stranger", PROTOCOL)):
            with pytest.raises(PeerUnreachableError, match=peer):
                await second.open_stream(peer, protocol, deadline_s=WAIT_S)

    under(condition, scenario)
