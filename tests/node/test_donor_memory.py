"""Which states a donor remembers, and for how long."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import weakref
from collections.abc import Callable
from typing import TypeVar

import msgspec
import pytest
import torch
from torch import Tensor

from gasloc_p2p.core.assembly import CHUNK_BYTES
from gasloc_p2p.core.substrate import Stream
from gasloc_p2p.core.transfer import Offer, TransferError
from gasloc_p2p.node.donor import MAX_SNAPSHOTS, SNAPSHOT_IDLE_S
from gasloc_p2p.node.letters import read_into
from gasloc_p2p.node.state import State
from gasloc_p2p.simulate.clock import InlineCompute
from tests.node.transfers import (
    REQUEST,
    STATE_BYTES,
    SUMMARY_REQUEST,
    Faults,
    Joiners,
    Wired,
    donor,
    same_bits,
    state,
    summary_of,
    with_joiners,
)

T = TypeVar("T")


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


def test_a_state_of_equal_bits_is_the_same_state() -> None:
    peer = Rounds()

    async def scenario(joiners: Joiners) -> None:
        earlier, offer = await joiners.asks("a")
        await earlier.aclose()
        peer.state = dataclasses.replace(peer.state, theta=peer.state.theta.clone())
        await asyncio.sleep(SNAPSHOT_IDLE_S / 2)
        later, answer = await joiners.asks("b")
        await later.aclose()
        peer.next_round()
        await asyncio.sleep(SNAPSHOT_IDLE_S / 2 + 1)
        assert isinstance(offer, Offer)
        _, again = await joiners.asks("c", msgspec.structs.replace(REQUEST, root=offer.root))
        assert offer == answer == again

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
        async with asyncio.TaskGroup() as tasks:
            asking = [tasks.create_task(joiners.asks(name, SUMMARY_REQUEST)) for name in "abc"]
        assert [told for _, told in map(asyncio.Task.result, asking)] == [
            summary_of(peer.state)
        ] * 3
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
