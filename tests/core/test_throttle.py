"""The token bucket keeps its rate on both sides, in whatever pieces bytes are taken."""

from __future__ import annotations

import heapq
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gasloc_p2p.core.throttle import BURST_S, MAX_SLICE_BYTES, MIN_SLICE_BYTES, TokenBucket

RATE = 5_000_000.0


def passed_by_time(bucket: TokenBucket, sizes: list[list[int]]) -> list[tuple[float, int, int]]:
    """Let streams take their pieces, each the next one as soon as the one before has passed.

    Returns:
        (time in seconds, stream, bytes) of each piece, in the order of time.
    """
    waiting = [(0.0, stream) for stream in range(len(sizes))]
    heapq.heapify(waiting)
    left = [iter(own) for own in sizes]
    passed = []
    while waiting:
        now_s, stream = heapq.heappop(waiting)
        size = next(left[stream], None)
        if size is not None:
            due_s = now_s + bucket.take(size, now_s)
            passed.append((due_s, stream, size))
            heapq.heappush(waiting, (due_s, stream))
    return sorted(passed)


def test_a_burst_passes_at_once_and_the_rest_at_the_rate() -> None:
    bucket = TokenBucket(RATE)
    assert bucket.burst_bytes == RATE * BURST_S
    assert bucket.take(int(bucket.burst_bytes), 100.0) == 0.0
    assert bucket.take(50_000, 100.0) == pytest.approx(0.01)
    assert bucket.take(50_000, 100.0) == pytest.approx(0.02)
    assert bucket.take(0, 100.02) == pytest.approx(0.0)
    assert bucket.take(50_000, 100.02) == pytest.approx(0.01)


def test_a_rest_fills_the_bucket_no_further_than_one_burst() -> None:
    bucket = TokenBucket(RATE)
    bucket.take(10_000_000, 0.0)
    later_s = 1e6
    assert bucket.take(int(bucket.burst_bytes), later_s) == 0.0
    assert bucket.take(5_000, later_s) == pytest.approx(0.001, abs=1e-8)


@pytest.mark.parametrize(
    ("rate", "slice_bytes"),
    [
        (10_000.0, MIN_SLICE_BYTES),
        (125_000.0, 6_250),
        (1e9, MAX_SLICE_BYTES),
    ],
)
def test_a_slice_never_exceeds_the_burst(rate: float, slice_bytes: int) -> None:
    bucket = TokenBucket(rate)
    assert bucket.slice_bytes == slice_bytes
    assert bucket.burst_bytes >= slice_bytes
    assert bucket.take(slice_bytes, 0.0) == 0.0


@pytest.mark.parametrize("streams", [1, 4, 64])
def test_ten_seconds_of_greedy_streams_hold_the_rate_and_share_it(streams: int) -> None:
    bucket = TokenBucket(RATE)
    pieces = int(10 * RATE) // bucket.slice_bytes // streams + 2
    passed = passed_by_time(bucket, [[bucket.slice_bytes] * pieces for _ in range(streams)])
    within = [(stream, size) for due_s, stream, size in passed if due_s <= 10.0]
    total = sum(size for _, size in within)
    assert 10 * RATE - streams * bucket.slice_bytes <= total <= 10 * RATE + bucket.burst_bytes
    shares = [sum(size for stream, size in within if stream == s) for s in range(streams)]
    assert max(shares) - min(shares) <= 2 * bucket.slice_bytes


@given(
    st.lists(st.lists(st.integers(0, MAX_SLICE_BYTES), max_size=30), min_size=1, max_size=5),
    st.floats(1e3, 1e9),
    st.randoms(use_true_random=False),
)
def test_no_stretch_of_time_lets_more_pass(
    sizes: list[list[int]], rate: float, chance: random.Random
) -> None:
    bucket = TokenBucket(rate)
    passed = passed_by_time(bucket, sizes)
    for _ in range(10):
        begin, end = sorted(chance.choices(range(len(passed) + 1), k=2))
        stretch = passed[begin:end]
        if stretch:
            elapsed_s = stretch[-1][0] - stretch[0][0]
            # One piece fell due at the very beginning; of several at that moment, any.
            first = max(size for due_s, _, size in stretch if due_s == stretch[0][0])
            most = rate * elapsed_s + bucket.burst_bytes + first
            assert sum(size for _, _, size in stretch) <= most * (1 + 1e-9) + 1e-3


@given(st.lists(st.integers(1, 10_000_000), min_size=1, max_size=50))
def test_what_waits_passes_at_the_rate_exactly(sizes: list[int]) -> None:
    bucket = TokenBucket(RATE)
    last_s = max(bucket.take(size, 0.0) for size in sizes)
    assert last_s == pytest.approx(max(0.0, (sum(sizes) - bucket.burst_bytes) / RATE), abs=1e-6)
