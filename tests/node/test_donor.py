"""What a donor does for joiners, and what it does not let them do."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
import pytest
import torch
from torch import Tensor

from gasloc_p2p.core.assembly import CHUNK_BYTES
from gasloc_p2p.core.substrate import Network, Stream
from gasloc_p2p.core.transfer import (
    MAX_HEAD_BYTES,
    STATE_PROTOCOL,
    BusyError,
    Offer,
    Request,
    Summary,
    SummaryRequest,
    TransferError,
    pack_message,
    unpack_answer,
)
from gasloc_p2p.node.donor import (
    MAX_SNAPSHOTS,
    MAX_TRANSFERS,
    REQUEST_DEADLINE_S,
    SNAPSHOT_IDLE_S,
    WRITE_DEADLINE_S,
)
from gasloc_p2p.node.letters import read_into, read_message
from gasloc_p2p.node.state import State
from gasloc_p2p.simulate.clock import InlineCompute
from gasloc_p2p.simulate.network import Hub
from tests.node.transfers import (
    REQUEST,
    STATE_BYTES,
    Faults,
    Server,
    Wired,
    ask,
    donor,
    in_a_swarm,
    same_bits,
    state,
    summary_of,
)

T = TypeVar("T")
SUMMARY_REQUEST = SummaryRequest(run_digest=b"run", schema_digest=b"schema")
LARGE = State(theta=torch.zeros(500_000), memory=torch.zeros(500_000), round=0)
"""More than a stream holds that nobody reads."""


def now_s() -> float:
    return asyncio.get_running_loop().time()


class Joiners:
    """Anybody who dials the one donor."""

    def __init__(self, hub: Hub, donor_id: str) -> None:
        self._hub = hub
        self._donor_id = donor_id
        self._networks: dict[str, Network] = {}

    def network(self, name: str) -> Network:
        if name not in self._networks:
            self._networks[name] = self._hub.network(name, bytes)
        return self._networks[name]

    async def dial(self, name: str, data: bytes = b"") -> Stream:
        stream = await self.network(name).open_stream(
            self._donor_id, STATE_PROTOCOL, deadline_s=5.0
        )
        if data:
            await stream.write(data)
        return stream

    async def asks(self, name: str, request: Request = REQUEST) -> tuple[Stream, Offer | Summary]:
        stream = await self.dial(name, pack_message(request))
        return stream, unpack_answer(await read_message(stream, limit_bytes=MAX_HEAD_BYTES))

    async def fetches(self, name: str) -> State:
        return await ask(self.network(name), [self._donor_id])


def with_joiners(server: Server, scenario: Callable[[Joiners], Awaitable[T]]) -> T:
    async def run(_: Network, names: list[str], hub: Hub) -> T:
        return await scenario(Joiners(hub, names[0]))

    return in_a_swarm([server], run)


async def until_closed(stream: Stream) -> float:
    while await stream.read(1 << 20):
        pass
    return now_s()


class Rounds:
    """A peer whose state is another one in each round, and that counts what it computes."""

    def __init__(self) -> None:
        self.computed = 0
        self.state = state(0, round=0)
        rounds = self

        class Counting(InlineCompute):
            async def run(self, work: Callable[[], T]) -> T:
                rounds.computed += 1
                return await super().run(work)

        self.donor = donor(lambda: self.state, compute=Counting(step_s=0.0))

    def next_round(self) -> None:
        round = self.state.round + 1
        self.state = state(round, round=round)


# Hostile and hapless joiners.


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff\xff\xff\xff",
        (MAX_HEAD_BYTES + 1).to_bytes(4, "little"),
        b"\x01\0\0\0\xc1",
        pack_message(summary_of(state())),
        bytes(4),
    ],
)
def test_garbage_ends_a_stream_at_once(garbage: bytes) -> None:
    async def scenario(joiners: Joiners) -> float:
        return await until_closed(await joiners.dial("a", garbage))

    assert with_joiners(donor(state()), scenario) == 0.0


def test_one_that_asks_for_nothing_is_given_up_and_keeps_nobody_away() -> None:
    async def scenario(joiners: Joiners) -> tuple[State, list[float]]:
        silent = [await joiners.dial(f"silent {n}", b"\x50\0"[: n % 3]) for n in range(20)]
        fetched = await joiners.fetches("a")
        return fetched, [await until_closed(stream) for stream in silent]

    fetched, closed_s = with_joiners(donor(state()), scenario)
    assert same_bits(fetched, state())
    assert closed_s == pytest.approx([REQUEST_DEADLINE_S] * 20)


def test_a_request_that_comes_byte_by_byte_has_one_deadline() -> None:
    async def scenario(joiners: Joiners) -> float:
        stream = await joiners.dial("a")
        trickling = asyncio.ensure_future(_trickle(stream, pack_message(REQUEST)))
        ended_s = await until_closed(stream)
        trickling.cancel()
        return ended_s

    assert with_joiners(donor(state()), scenario) == pytest.approx(REQUEST_DEADLINE_S)


async def _trickle(stream: Stream, data: bytes) -> None:
    for byte in data:
        await stream.write(bytes([byte]))
        await asyncio.sleep(1.0)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"run_digest": b"other"}, "the run's manifest differs"),
        ({"schema_digest": b"other"}, "the model's parameters differ"),
    ],
)
@pytest.mark.parametrize("request_", [REQUEST, SUMMARY_REQUEST])
def test_another_run_or_model_is_refused(
    changes: dict[str, bytes], why: str, request_: Request
) -> None:
    async def scenario(joiners: Joiners) -> None:
        with pytest.raises(TransferError, match=why):
            await joiners.asks("a", msgspec.structs.replace(request_, **changes))

    with_joiners(donor(state()), scenario)


def test_a_first_chunk_beyond_the_last_brings_nothing() -> None:
    async def scenario(joiners: Joiners) -> bytes:
        _, offer = await joiners.asks("a")
        assert isinstance(offer, Offer)
        beyond = msgspec.structs.replace(REQUEST, root=offer.root, first_chunk=2**62)
        stream, _ = await joiners.asks("a", beyond)
        return await stream.read(1)

    assert with_joiners(donor(state()), scenario) == b""


# How many joiners.


@pytest.mark.parametrize("handed_out", [state(), LARGE])
def test_a_third_joiner_is_refused_at_once_until_one_of_two_is_given_up(handed_out: State) -> None:
    async def scenario(joiners: Joiners) -> None:
        for name in map(str, range(MAX_TRANSFERS)):
            await joiners.asks(name)
        with pytest.raises(BusyError, match="refused: busy with other joiners"):
            await joiners.asks("third")
        assert now_s() == 0.0
        # A witness is asked for little, and always answers.
        assert isinstance((await joiners.asks("fourth", SUMMARY_REQUEST))[1], Summary)
        # They read nothing: what was written lies in the stream.
        await asyncio.sleep(WRITE_DEADLINE_S - 1)
        with pytest.raises(BusyError):
            await joiners.asks("third")
        await asyncio.sleep(2)
        await joiners.asks("third")

    with_joiners(donor(handed_out, parts=(handed_out.theta.numel(),)), scenario)


def test_a_joiner_that_dials_again_gives_up_its_earlier_stream() -> None:
    async def scenario(joiners: Joiners) -> None:
        earlier, _ = await joiners.asks("a")
        other, _ = await joiners.asks("b")
        for _ in range(5):
            again, _ = await joiners.asks("a")
            assert await until_closed(earlier) == 0.0
            earlier = again
        with pytest.raises(BusyError):
            await joiners.asks("c")
        for stream in (earlier, other):
            await stream.aclose()
        await asyncio.sleep(0)
        fetched = await joiners.fetches("c")
        assert same_bits(fetched, state())

    with_joiners(donor(state()), scenario)


# What is remembered, and for how long.


def test_joiners_of_one_round_share_a_snapshot_that_stands_still() -> None:
    peer = Rounds()
    begun = peer.state

    async def scenario(joiners: Joiners) -> list[State]:
        _, offer = await joiners.asks("a")
        second = await joiners.fetches("b")
        assert isinstance(offer, Offer)
        peer.next_round()
        resumed = msgspec.structs.replace(REQUEST, root=offer.root)
        again, same = await joiners.asks("a", resumed)
        assert same == offer
        body = await _exactly(again, STATE_BYTES)
        await again.aclose()
        theta, memory = torch.frombuffer(body, dtype=torch.float32).chunk(2)
        return [second, State(theta=theta, memory=memory, round=0)]

    for fetched in with_joiners(peer.donor, scenario):
        assert same_bits(fetched, begun)
    assert peer.computed == 1


async def _exactly(stream: Stream, size: int) -> bytearray:
    data = bytearray(size)
    await read_into(stream, memoryview(data))
    return data


def test_two_joiners_that_come_together_wait_for_one_computation() -> None:
    peer = Rounds()

    async def scenario(joiners: Joiners) -> None:
        async with asyncio.TaskGroup() as tasks:
            for name in "ab":
                tasks.create_task(joiners.fetches(name))

    with_joiners(peer.donor, scenario)
    assert peer.computed == 1


def test_a_donor_that_went_on_still_has_the_state_of_a_broken_transfer() -> None:
    peer = Rounds()
    begun = peer.state
    wired = Wired(donor=peer.donor, faults=[Faults(cut_at=5 * CHUNK_BYTES)])

    async def scenario(joiners: Joiners) -> State:
        fetching = asyncio.ensure_future(joiners.fetches("a"))
        await wired.broke.wait()
        peer.next_round()
        return await fetching

    assert same_bits(with_joiners(wired, scenario), begun)
    assert len(wired.sent) == 2
    assert sum(wired.sent) < STATE_BYTES + 2 * CHUNK_BYTES


def test_a_state_that_nobody_asked_for_in_a_minute_is_forgotten() -> None:
    peer = Rounds()

    async def scenario(joiners: Joiners) -> None:
        fetched = await joiners.fetches("a")
        old = weakref.ref(peer.state.theta)
        assert fetched.theta is not peer.state.theta
        peer.next_round()
        await asyncio.sleep(SNAPSHOT_IDLE_S - 1)
        await joiners.fetches("b")
        gc.collect()
        assert old() is not None
        await asyncio.sleep(2)
        gc.collect()
        assert old() is None

    with_joiners(peer.donor, scenario)
    assert peer.computed == 2


def test_asking_for_a_state_again_keeps_it() -> None:
    peer = Rounds()

    async def scenario(joiners: Joiners) -> None:
        _, offer = await joiners.asks("a")
        assert isinstance(offer, Offer)
        wanted = msgspec.structs.replace(REQUEST, root=offer.root)
        peer.next_round()
        for _ in range(4):
            stream, answer = await joiners.asks("a", wanted)
            await stream.aclose()
            assert answer == offer
            await asyncio.sleep(SNAPSHOT_IDLE_S - 1)
        await asyncio.sleep(2)
        _, answer = await joiners.asks("a", wanted)
        assert answer != offer

    with_joiners(peer.donor, scenario)


def test_a_state_that_is_being_handed_out_for_long_is_not_forgotten() -> None:
    peer = Rounds()

    async def scenario(joiners: Joiners) -> None:
        (_, offer), (short, _) = await joiners.asks("a"), await joiners.asks("b")
        assert isinstance(offer, Offer)
        await short.aclose()
        peer.next_round()
        await asyncio.sleep(SNAPSHOT_IDLE_S + 1)
        _, answer = await joiners.asks("a", msgspec.structs.replace(REQUEST, root=offer.root))
        assert answer == offer

    with_joiners(peer.donor, scenario)


def test_only_two_earlier_states_are_kept_alive() -> None:
    peer = Rounds()
    remembered: list[weakref.ref[Tensor]] = []

    async def scenario(joiners: Joiners) -> list[bool]:
        _, held = await joiners.asks("holds one")
        remembered.append(weakref.ref(peer.state.theta))
        for round in range(1, 6):
            peer.next_round()
            remembered.append(weakref.ref(peer.state.theta))
            assert (await joiners.fetches("a")).round == round
        peer.next_round()
        gc.collect()
        assert isinstance(held, Offer)
        return [theta() is not None for theta in remembered]

    # The one that is in use, and the newest of the others.
    alive = with_joiners(peer.donor, scenario)
    assert alive == [True, False, False, False, False, True]
    assert sum(alive) == MAX_SNAPSHOTS


# Summaries.


def test_a_summary_is_computed_once_per_state_and_keeps_none_alive() -> None:
    peer = Rounds()

    async def scenario(joiners: Joiners) -> None:
        for name in "abc":
            _, told = await joiners.asks(name, SUMMARY_REQUEST)
            assert told == summary_of(peer.state)
        assert peer.computed == 1
        old = weakref.ref(peer.state.theta)
        peer.next_round()
        gc.collect()
        assert old() is None
        _, told = await joiners.asks("a", SUMMARY_REQUEST)
        assert told == summary_of(peer.state)
        assert peer.computed == 2

    with_joiners(peer.donor, scenario)


def test_a_summary_tells_the_last_loss() -> None:
    async def scenario(joiners: Joiners) -> None:
        _, told = await joiners.asks("a", SUMMARY_REQUEST)
        assert told == summary_of(state(), val_loss=2.5)

    with_joiners(donor(state(), val_loss=2.5), scenario)


def test_a_peer_without_a_state_says_so() -> None:
    async def scenario(joiners: Joiners) -> None:
        for request in (REQUEST, SUMMARY_REQUEST):
            with pytest.raises(TransferError, match="no parameters of the run yet"):
                await joiners.asks("a", request)

    with_joiners(donor(lambda: None), scenario)
