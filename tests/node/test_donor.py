"""What a donor does for joiners, and what it does not let them do."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
import torch

from gasloc_p2p.core.substrate import Stream
from gasloc_p2p.core.transfer import (
    MAX_HEAD_BYTES,
    BusyError,
    Offer,
    Request,
    Summary,
    TransferError,
    pack_message,
)
from gasloc_p2p.node.donor import (
    MAX_TRANSFERS,
    REQUEST_DEADLINE_S,
    WRITE_DEADLINE_S,
)
from gasloc_p2p.node.state import State
from tests.node.transfers import (
    REQUEST,
    SUMMARY_REQUEST,
    Joiners,
    donor,
    same_bits,
    state,
    summary_of,
    with_joiners,
)

LARGE = State(theta=torch.zeros(500_000), memory=torch.zeros(500_000), round=0)
"""More than a stream holds that nobody reads."""


def now_s() -> float:
    return asyncio.get_running_loop().time()


async def until_closed(stream: Stream) -> float:
    while await stream.read(1 << 20):
        pass
    return now_s()


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
