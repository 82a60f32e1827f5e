"""Streams over links and through partitions, to the moment."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest

from gasloc_p2p.core.substrate import Network, PeerUnreachableError, Stream
from gasloc_p2p.simulate.links import LINKS, Link, Partition, parse_partition
from gasloc_p2p.simulate.pipes import PIECE_BYTES, PIPE_BYTES
from tests.sim.linked import link, now_s, on

PROTOCOL = "gasloc/test/1"
WAIT_S = 1000.0
PIECE_A_SECOND = PIECE_BYTES * 8e-6
"""Mbit/s of a link that carries one whole piece per second."""


class Sink:
    """Serves a network and notes when the pieces of each stream arrived."""

    def __init__(self) -> None:
        self.arrivals: list[list[float]] = []
        self.data: list[bytearray] = []
        self.ended_s: list[float] = []
        self._progress = asyncio.Event()

    async def serve(self, network: Network) -> Sink:
        await network.serve(PROTOCOL, self._receive)
        return self

    async def _receive(self, stream: Stream) -> None:
        arrivals: list[float] = []
        data = bytearray()
        self.arrivals.append(arrivals)
        self.data.append(data)
        while piece := await stream.read(1 << 20):
            data += piece
            arrivals.append(now_s())
        self.ended_s.append(now_s())
        self._progress.set()
        await stream.aclose()

    async def ended(self, streams: int = 1) -> None:
        while len(self.ended_s) < streams:
            self._progress.clear()
            await self._progress.wait()


async def send(network: Network, peer: str, size: int) -> None:
    stream = await network.open_stream(peer, PROTOCOL, deadline_s=WAIT_S)
    await stream.write(random.Random(size).randbytes(size))
    await stream.aclose()


def arrivals_of(size: int, links: Sequence[Link], partitions: Sequence[Partition] = ()) -> Sink:
    """Send `size` bytes from the first peer to the second and return what the latter noted."""

    async def scenario(a: Network, b: Network) -> Sink:
        sink = await Sink().serve(b)
        await send(a, "b", size)
        await sink.ended()
        return sink

    sink = on(links, scenario, partitions)
    assert sink.data == [random.Random(size).randbytes(size)]
    return sink


# When bytes arrive.


def test_latency_delays_opening_data_and_end() -> None:
    sink = arrivals_of(3 * PIECE_BYTES, [link(latency_s=0.05), link(latency_s=0.15)])
    # Open after one round trip of .4 s, and .2 s more on the way.
    assert sink.arrivals[0] == pytest.approx([0.6] * 3, abs=1e-5)
    assert sink.ended_s == pytest.approx([0.6], abs=1e-5)


def test_the_senders_uplink_limits() -> None:
    sink = arrivals_of(1_000_000, [link(upload_mbit=8, latency_s=0.1), link()])
    # 1 MB/s from .2 s on, and .1 s on the way.
    moments = sink.arrivals[0]
    assert moments[0] == pytest.approx(0.3 + PIECE_BYTES / 1e6, abs=1e-5)
    assert moments[-1] == pytest.approx(1.3, abs=1e-5)
    assert sink.ended_s == pytest.approx([1.3], abs=1e-5)


def test_the_receivers_downlink_limits() -> None:
    sink = arrivals_of(1_000_000, [link(), link(download_mbit=8)])
    moments = sink.arrivals[0]
    assert moments[0] == pytest.approx(PIECE_BYTES / 1e6, abs=1e-5)
    assert moments[-1] == pytest.approx(1.0, abs=1e-5)


def test_a_faster_downlink_adds_nothing() -> None:
    sink = arrivals_of(4 * PIECE_BYTES, [link(PIECE_A_SECOND), link(0, 2 * PIECE_A_SECOND)])
    moments = sink.arrivals[0]
    assert moments == pytest.approx([1, 2, 3, 4], abs=1e-5)


def test_a_slower_downlink_takes_pieces_as_they_come() -> None:
    sink = arrivals_of(3 * PIECE_BYTES, [link(2 * PIECE_A_SECOND), link(0, PIECE_A_SECOND)])
    moments = sink.arrivals[0]
    assert moments == pytest.approx([1, 2, 3], abs=1e-5)


def test_upload_and_download_are_of_different_directions() -> None:
    links = [link(0, PIECE_A_SECOND), link(PIECE_A_SECOND, 0)]
    assert arrivals_of(4 * PIECE_BYTES, links).ended_s == pytest.approx([0.0], abs=1e-5)


def test_two_streams_share_an_uplink_half_and_half() -> None:
    async def scenario(a: Network, b: Network, c: Network) -> list[list[float]]:
        to_b, to_c = await Sink().serve(b), await Sink().serve(c)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(send(a, "b", 4 * PIECE_BYTES))
            tasks.create_task(send(a, "c", 3 * PIECE_BYTES))
        await to_b.ended()
        await to_c.ended()
        return [sink.arrivals[0] for sink in (to_b, to_c)]

    to_b, to_c = on([link(PIECE_A_SECOND), link(), link()], scenario)
    assert to_b == pytest.approx([1, 3, 5, 7], abs=1e-5)
    assert to_c == pytest.approx([2, 4, 6], abs=1e-5)


def test_two_senders_share_a_downlink_half_and_half() -> None:
    async def scenario(a: Network, b: Network, c: Network) -> list[list[float]]:
        sink = await Sink().serve(c)
        async with asyncio.TaskGroup() as tasks:
            for sender in (a, b):
                tasks.create_task(send(sender, "c", 4 * PIECE_BYTES))
                await asyncio.sleep(0.1)
        await sink.ended(2)
        return sink.arrivals

    fast = link(1.5 * PIECE_A_SECOND)
    # From the first byte on the downlink is never idle.
    from_a, from_b = on([fast, fast, link(0, PIECE_A_SECOND)], scenario)
    assert from_a == pytest.approx([1, 3, 5, 7], abs=1e-5)
    assert from_b == pytest.approx([2, 4, 6, 8], abs=1e-5)


def test_loss_limits_each_stream_by_itself() -> None:
    # 1460 B / .2 s x sqrt(1.5 / .01), docs/simulator.md.
    limit_bytes_s = 89_406.375
    links = [link(80, 0, latency_s=0.1, loss=0.01), link()]

    async def scenario(a: Network, b: Network) -> list[float]:
        sink = await Sink().serve(b)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(2):
                tasks.create_task(send(a, "b", 894_064))
        await sink.ended(2)
        return sink.ended_s

    alone = arrivals_of(894_064, links).ended_s
    assert alone == pytest.approx([0.3 + 894_064 / limit_bytes_s], abs=1e-4)
    # The uplink of 10 MB/s has room for both, but for the wait of one piece for another.
    both = on(links, scenario)
    assert both == pytest.approx(alone * 2, abs=PIECE_BYTES / 10e6 + 1e-4)


@pytest.mark.parametrize("name", [name for name in LINKS if name != "ideal"])
def test_the_byte_limit_throttles_no_condition(name: str) -> None:
    named = LINKS[name]
    paced = link(named.upload_mbit, named.download_mbit, named.latency_s)
    size = 6 << 20
    expected_s = size / paced.upload_bytes_s
    expected_s += 6 * named.latency_s  # Four to open, two on the way.
    assert arrivals_of(size, [paced] * 2).ended_s == pytest.approx([expected_s], rel=1e-3)


def test_the_byte_limit_throttles_no_long_fat_path() -> None:
    long = link(1000, 1000, 0.5)
    [ended_s] = arrivals_of(32 << 20, [long] * 2).ended_s
    assert ended_s == pytest.approx(3.0 + (32 << 20) / 125e6, abs=1e-3)


def test_a_writer_waits_for_a_reader_that_does_not_read() -> None:
    links = [link(80, 80, 0.1)] * 2

    async def scenario(a: Network, b: Network) -> tuple[int, int]:
        read_on = asyncio.Event()
        received = bytearray()

        async def slow(stream: Stream) -> None:
            await read_on.wait()
            while piece := await stream.read(1 << 20):
                received.extend(piece)

        await b.serve(PROTOCOL, slow)
        stream = await a.open_stream("b", PROTOCOL, deadline_s=WAIT_S)
        written = 0
        try:
            async with asyncio.timeout(100.0):
                while True:
                    await stream.write(bytes(PIECE_BYTES))
                    written += PIECE_BYTES
        except TimeoutError:
            read_on.set()
        await asyncio.sleep(10.0)
        return written, len(received)

    written, received = on(links, scenario)
    # What fills the path, 10 MB/s x .2 s, comes on top.
    assert PIPE_BYTES + 2_000_000 <= written < PIPE_BYTES + 2_000_000 + PIECE_BYTES
    assert received == written


def test_an_end_that_is_gone_gives_the_uplink_back() -> None:
    async def scenario(a: Network, b: Network, c: Network) -> list[float]:
        async def hang_up(stream: Stream) -> None:
            await stream.aclose()

        await b.serve(PROTOCOL, hang_up)
        sink = await Sink().serve(c)
        stream = await a.open_stream("b", PROTOCOL, deadline_s=WAIT_S)
        await stream.write(bytes(10 * PIECE_BYTES))
        await send(a, "c", PIECE_BYTES)
        await sink.ended()
        return sink.ended_s

    # One piece to b is on the uplink before a learns that nobody will read it.
    assert on([link(PIECE_A_SECOND), link(), link()], scenario) == pytest.approx([2.0])


# Partitions.


def test_what_has_left_arrives_and_the_rest_waits_until_the_partition_heals() -> None:
    async def scenario(a: Network, b: Network) -> Sink:
        sink = await Sink().serve(b)
        stream = await a.open_stream("b", PROTOCOL, deadline_s=WAIT_S)
        await asyncio.sleep(9.5)
        await stream.write(bytes(range(4)) * PIECE_BYTES)
        await stream.aclose()
        await sink.ended()
        return sink

    links = [link(PIECE_A_SECOND, latency_s=0.25), link()]
    sink = on(links, scenario, [parse_partition("11-20:0"), parse_partition("15-22:1")])
    # Opened at .5 s, written at 10 s; the second piece is on the uplink when the cut comes.
    moments = sink.arrivals[0]
    assert moments == pytest.approx([11.25, 23.25, 24.25, 25.25], abs=1e-5)
    assert sink.data == [bytes(range(4)) * PIECE_BYTES]
    assert sink.ended_s == pytest.approx([25.25], abs=1e-5)


def test_a_partition_cuts_ideal_links_too_but_not_within_a_side() -> None:
    ideal = [link(), link()]
    assert arrivals_of(PIECE_BYTES, ideal, [parse_partition("0-3:0")]).ended_s == [3.0]
    assert arrivals_of(PIECE_BYTES, ideal, [parse_partition("0-3:0+1")]).ended_s == [0.0]


@pytest.mark.parametrize(
    ("deadline_s", "heals_s", "ends_s", "error"),
    [
        (60.0, 100.0, 5.0, PeerUnreachableError),
        (2.0, 100.0, 2.0, TimeoutError),
        (5.0, 100.0, 5.0, TimeoutError),
        (60.0, 3.0, 3.5, None),
        (3.2, 3.0, 3.2, TimeoutError),
    ],
)
def test_dialling_across_a_partition(
    deadline_s: float, heals_s: float, ends_s: float, error: type[Exception] | None
) -> None:
    async def scenario(a: Network, b: Network) -> tuple[float, type[Exception] | None]:
        await Sink().serve(b)
        try:
            stream = await a.open_stream("b", PROTOCOL, deadline_s=deadline_s)
        except (PeerUnreachableError, TimeoutError) as failure:
            return now_s(), type(failure)
        await stream.aclose()
        return now_s(), None

    cut = Partition(from_s=0.0, until_s=heals_s, peers=frozenset({1}))
    ended_s, failure = on([link(latency_s=0.1), link(latency_s=0.15)], scenario, [cut])
    assert ended_s == pytest.approx(ends_s, abs=1e-5)
    assert failure is error


def test_a_peer_that_is_not_there_is_noticed_after_a_round_trip() -> None:
    async def scenario(a: Network, b: Network) -> float:
        await b.aclose()
        with pytest.raises(PeerUnreachableError):
            await a.open_stream("b", PROTOCOL, deadline_s=WAIT_S)
        return now_s()

    assert on([link(latency_s=0.1)] * 2, scenario) == pytest.approx(0.4)
