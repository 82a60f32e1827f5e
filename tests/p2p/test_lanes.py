"""Streams over several lanes: spread where it helps, whole whatever becomes of the lanes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import TypeAlias

import pytest

from gasloc_p2p.core.ordering import HEADER, SEGMENT_BYTES
from gasloc_p2p.core.substrate import Stream
from gasloc_p2p.net import lanes as lanes_module
from gasloc_p2p.net import network as network_module
from gasloc_p2p.net.bonded import BondedStream
from gasloc_p2p.net.lanes import FIRST, FURTHER, MAX_LANES, NAME_BYTES, PLAIN, PROBE, RoundTrips
from gasloc_p2p.net.network import Libp2pNetwork
from gasloc_p2p.net.streams import P2PStream
from gasloc_p2p.testing.promise import read_exactly
from tests.p2p.spread import spread_at_once, stay_on_one_lane

pytestmark = pytest.mark.p2p

StartNode: TypeAlias = Callable[..., Awaitable[Libp2pNetwork]]
PROTOCOL = "gasloc/test-lanes/1"
WAIT_S = 20.0
NAME = bytes(NAME_BYTES)


class Ends:
    """A node that serves, whose ends of streams are handed over, and one that dials it."""

    def __init__(self, served: Libp2pNetwork, dialling: Libp2pNetwork) -> None:
        self.served = served
        self.dialling = dialling
        self.accepted: asyncio.Queue[Stream] = asyncio.Queue()

    async def hold(self, stream: Stream) -> None:
        self.accepted.put_nowait(stream)
        await asyncio.Event().wait()

    async def dial(self) -> tuple[Stream, Stream]:
        """Return both ends of a stream."""
        peer = self.served.peer_id
        dialled = await self.dialling.open_stream(peer, PROTOCOL, deadline_s=WAIT_S)
        return dialled, await self.accepted.get()

    async def lane(self, *words: bytes) -> P2PStream:
        """Open a lane as p2pd gives it, and say `words` on it."""
        lane = await self.dialling._open_lane(self.served.peer_id, PROTOCOL)
        await lane.write(b"".join(words))
        return lane


@pytest.fixture
async def ends(start_node: StartNode) -> Ends:
    served = await start_node(0)
    both = Ends(served, await start_node(1, await served.addresses()))
    await served.serve(PROTOCOL, both.hold)
    return both


@pytest.fixture
def spread(monkeypatch: pytest.MonkeyPatch) -> None:
    spread_at_once(monkeypatch)


async def both_ways(one: Stream, other: Stream, size_bytes: int) -> None:
    """Send different bytes both ways at once, in messages of odd sizes."""

    async def send(stream: Stream, data: bytes) -> None:
        for start in range(0, size_bytes, 77_777):
            await stream.write(data[start : start + 77_777])

    there, back = os.urandom(size_bytes), os.urandom(size_bytes)
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
        tasks.create_task(send(one, there))
        tasks.create_task(send(other, back))
        heard = [tasks.create_task(read_exactly(s, size_bytes)) for s in (other, one)]
    assert [task.result() for task in heard] == [there, back]


@pytest.mark.usefixtures("spread")
async def test_bytes_both_ways_over_all_lanes_stay_in_order(ends: Ends) -> None:
    dialled, accepted = await ends.dial()
    await both_ways(dialled, accepted, 20_000_000)
    for stream in (dialled, accepted):
        assert isinstance(stream, BondedStream)
        assert stream.lanes == MAX_LANES
    last = os.urandom(1_000_000)
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
        hearing = tasks.create_task(read_exactly(accepted, len(last)))
        await dialled.write(last)
        await dialled.aclose()
    assert hearing.result() == last
    async with asyncio.timeout(WAIT_S):
        assert await accepted.read(1) == b""


async def test_a_stream_to_a_peer_nearby_is_a_single_lane(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    stay_on_one_lane(monkeypatch)
    for _ in range(2):
        dialled, accepted = await ends.dial()
        assert isinstance(dialled, P2PStream)
        assert isinstance(accepted, P2PStream)
        await both_ways(dialled, accepted, 1_000_000)


async def test_a_stream_that_carries_little_stays_on_one_lane(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes_module, "LONG_ROUND_TRIP_S", 0.0)
    dialled, accepted = await ends.dial()
    await both_ways(dialled, accepted, lanes_module.GROW_BYTES // 2)
    assert isinstance(accepted, BondedStream)
    assert len(ends.dialling._streams) == 1
    assert accepted.lanes == 1


@pytest.mark.usefixtures("spread")
async def test_a_stream_whose_lanes_are_refused_stays_on_those_it_has(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network_module, "MAX_INBOUND_STREAMS", 3)
    dialled, accepted = await ends.dial()
    await both_ways(dialled, accepted, 5_000_000)
    assert isinstance(dialled, BondedStream)
    assert dialled.lanes == 3


@pytest.mark.usefixtures("spread")
async def test_lanes_leave_room_for_streams(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes_module, "MAX_FURTHER_LANES", 2)
    for _ in range(2):
        dialled, accepted = await ends.dial()
        await both_ways(dialled, accepted, 1_000_000)
    assert isinstance(accepted, BondedStream)
    assert accepted.lanes == 1


async def test_a_lane_that_belongs_to_nothing_or_says_nonsense_is_closed(ends: Ends) -> None:
    first = await ends.lane(FIRST, NAME)
    await ends.accepted.get()
    for words in (b"\xff", FURTHER + bytes([1]) * NAME_BYTES, FIRST + NAME, PROBE * 10):
        lane = await ends.lane(words)
        async with asyncio.timeout(WAIT_S):
            while await lane.read(1):
                pass
        lane.close()
    assert not first.is_readable
    first.close()


async def test_a_lane_of_another_peers_stream_is_refused(ends: Ends, start_node: StartNode) -> None:
    first = await ends.lane(FIRST, NAME)
    await ends.accepted.get()
    stranger = Ends(ends.served, await start_node(2, await ends.served.addresses()))
    lane = await stranger.lane(FURTHER, NAME)
    async with asyncio.timeout(WAIT_S):
        assert await lane.read(1) == b""
    lane.close()
    first.close()


@pytest.mark.parametrize("size_bytes", [0, SEGMENT_BYTES + 1, 0xFFFFFFFF])
async def test_a_segment_of_a_wrong_length_ends_the_stream(ends: Ends, size_bytes: int) -> None:
    first = await ends.lane(FIRST, NAME, HEADER.pack(0, 2), b"ok", HEADER.pack(1, size_bytes))
    accepted = await ends.accepted.get()
    async with asyncio.timeout(WAIT_S):
        assert await read_exactly(accepted, 2) == b"ok"
        assert await accepted.read(1) == b""
        assert await first.read(1) == b""
    with pytest.raises(ConnectionError):
        await accepted.write(b"more")
    first.close()


async def test_no_more_than_the_window_is_held(ends: Ends) -> None:
    first = await ends.lane(FIRST, NAME, HEADER.pack(1 << 40, 2), b"no")
    accepted = await ends.accepted.get()
    async with asyncio.timeout(WAIT_S):
        assert await accepted.read(1) == b""
    first.close()


async def test_a_lane_without_an_answer_to_its_probe_is_still_a_stream(ends: Ends) -> None:
    lane = await ends.lane(PROBE, PLAIN, b"hello")
    accepted = await ends.accepted.get()
    async with asyncio.timeout(WAIT_S):
        assert await read_exactly(accepted, 5) == b"hello"
    lane.close()


def test_round_trips_are_remembered_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes_module, "MEASURED_PEERS", 2)
    trips = RoundTrips()
    assert trips.shortest_s("a") is None
    for peer, time_s in (("a", 0.2), ("b", 0.3), ("a", 0.1), ("c", 0.4)):
        trips.measured(peer, time_s)
    assert [trips.shortest_s(peer) for peer in "abc"] == [0.1, None, 0.4]
    for _ in range(lanes_module.MEASUREMENTS):
        trips.measured("a", 0.5)
    assert trips.shortest_s("a") == 0.5
