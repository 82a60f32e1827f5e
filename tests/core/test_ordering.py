"""Segments that arrive over several lanes come out in order, within the window."""

from __future__ import annotations

import random

import pytest

from gasloc_p2p.core.ordering import (
    HEADER,
    SEGMENT_BYTES,
    WINDOW_SEGMENTS,
    Arrivals,
    Order,
    OrderError,
)


def segment(number: int, data: bytes) -> bytes:
    return HEADER.pack(number, len(data)) + data


def feed(arrivals: Arrivals, data: bytes, piece_bytes: int = 1 << 20) -> bytes:
    """Give a lane what it wants of `data`; return what it does not want yet."""
    while data and (wanted := min(arrivals.wanted_bytes, piece_bytes)):
        arrivals.take(data[:wanted])
        data = data[wanted:]
    return data


@pytest.mark.parametrize("lane_count", [1, 2, 8])
@pytest.mark.parametrize("seed", range(5))
def test_whatever_the_lanes_do_the_bytes_come_out_in_order(lane_count: int, seed: int) -> None:
    rng = random.Random(seed)
    messages = [rng.randbytes(rng.randint(1, 300)) for _ in range(3 * WINDOW_SEGMENTS)]
    order = Order()
    lanes = [Arrivals(order) for _ in range(lane_count)]
    unread = [b""] * lane_count
    for number, message in enumerate(messages):
        unread[rng.randrange(lane_count)] += segment(number, message)
    out = b""
    while any(unread):
        lane = rng.randrange(lane_count)
        some, rest = unread[lane][:5000], unread[lane][5000:]
        unread[lane] = feed(lanes[lane], some, rng.randint(1, 400)) + rest
        while data := order.take(rng.randint(1, 1000)):
            out += data
    assert out == b"".join(messages)


def test_a_segment_beyond_the_window_waits_in_its_lane() -> None:
    order = Order()
    early, late = Arrivals(order), Arrivals(order)
    assert feed(late, segment(WINDOW_SEGMENTS, b"late")) == b"late"
    assert late.wanted_bytes == 0
    assert feed(early, segment(0, b"early")) == b""
    assert order.take(100) == b"early"
    assert late.wanted_bytes == 4
    assert feed(late, b"late") == b""
    assert order.take(100) == b""


@pytest.mark.parametrize("size_bytes", [0, SEGMENT_BYTES + 1])
def test_a_segment_of_a_wrong_length_is_refused(size_bytes: int) -> None:
    with pytest.raises(OrderError, match=str(size_bytes)):
        feed(Arrivals(Order()), HEADER.pack(0, size_bytes))


@pytest.mark.parametrize("taken", [False, True])
def test_a_segment_that_comes_twice_is_refused(taken: bool) -> None:
    order = Order()
    feed(Arrivals(order), segment(0, b"a"))
    if taken:
        assert order.take(1) == b"a"
    with pytest.raises(OrderError, match="twice"):
        feed(Arrivals(order), segment(0, b"a"))
