"""A state in chunks: equal bits over any number of broken streams, and no block taken unchecked."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gasloc_p2p.core.assembly import (
    DIGEST_BYTES,
    FIRST_BLOCK_S,
    MAX_BLOCK_S,
    MIN_BLOCK_S,
    Assembly,
    Chunks,
    block_deadline_s,
    root_of,
)
from gasloc_p2p.core.transfer import MIN_CHUNK_BYTES, Offer, StateRequest, TransferError

REQUEST = StateRequest(run_digest=b"run", schema_digest=b"schema")
PER_CHUNK = MIN_CHUNK_BYTES // 4


def vectors(elements: int, memory_elements: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = (elements, memory_elements)
    theta, memory = (torch.randn(size, generator=generator) for size in sizes)
    return theta, memory


class Sender:
    """What a donor sends over one stream."""

    def __init__(self, state: tuple[Tensor, Tensor], *, round: int = 0) -> None:
        self.chunks = Chunks(state, MIN_CHUNK_BYTES)
        self.digests = self.chunks.digests()
        self.offer = Offer(
            round=round,
            elements=len(state[0]),
            memory_elements=len(state[1]),
            chunk_bytes=MIN_CHUNK_BYTES,
            root=root_of(self.digests),
        )

    def body(self, request: StateRequest) -> bytearray:
        goes_on = request.root == self.offer.root
        first = request.first_chunk if goes_on else 0
        rest = [self.chunks[index] for index in range(first, len(self.chunks))]
        return bytearray(b"".join((b"" if goes_on else self.digests, *rest)))


def feed(assembly: Assembly, body: bytes | bytearray) -> int:
    """Give the assembly what a stream brings; return how much of it made whole blocks."""
    taken = 0
    while not assembly.complete:
        block = assembly.next_block()
        piece = body[taken : taken + len(block)]
        block[: len(piece)] = piece
        if len(piece) < len(block):
            break
        assembly.close_block()
        taken += len(block)
    return taken


def same_bits(assembly: Assembly, state: Sequence[Tensor]) -> bool:
    return all(
        torch.equal(a.view(torch.int32), b.view(torch.int32))
        for a, b in zip(assembly.vectors(), state, strict=True)
    )


def test_chunks_tile_both_vectors_and_never_span_them() -> None:
    state = vectors(2 * PER_CHUNK + 1, PER_CHUNK)
    chunks = Chunks(state, MIN_CHUNK_BYTES)
    assert [len(chunks[index]) for index in range(len(chunks))] == [4096, 4096, 4, 4096]
    raw = b"".join(vector.numpy().tobytes() for vector in state)
    assert b"".join(chunks[index] for index in range(len(chunks))) == raw
    with pytest.raises(IndexError):
        chunks[len(chunks)]


def test_chunks_are_views() -> None:
    state = vectors(PER_CHUNK, 0)
    chunk = Chunks(state, MIN_CHUNK_BYTES)[0]
    state[0][0] = 1.0
    assert bytes(chunk[:4]) == b"\x00\x00\x80\x3f"


@settings(max_examples=60, deadline=None)
@given(
    elements=st.integers(1, 5 * PER_CHUNK),
    memory_elements=st.integers(0, 5 * PER_CHUNK),
    cuts=st.lists(st.integers(0, 50_000), max_size=6),
)
def test_any_cuts_give_equal_bits_and_no_whole_chunk_comes_twice(
    elements: int, memory_elements: int, cuts: list[int]
) -> None:
    state = vectors(elements, memory_elements)
    sender = Sender(state, round=9)
    assembly = Assembly(elements=elements, memory_elements=memory_elements)
    chunk_bytes_taken = 0
    for cut in (*cuts, None):
        request = assembly.request(REQUEST)
        assert request.first_chunk == assembly.verified
        assembly.accept(sender.offer)
        digest_bytes = 0 if request.root else len(sender.digests)
        taken = feed(assembly, sender.body(request)[:cut])
        chunk_bytes_taken += max(0, taken - digest_bytes)
    assert assembly.complete
    assert assembly.round == 9
    assert same_bits(assembly, state)
    assert chunk_bytes_taken == 4 * (elements + memory_elements)


@settings(max_examples=60, deadline=None)
@given(
    elements=st.integers(1, 3 * PER_CHUNK),
    memory_elements=st.integers(0, 3 * PER_CHUNK),
    data=st.data(),
)
def test_no_flipped_bit_is_taken(elements: int, memory_elements: int, data: st.DataObject) -> None:
    state = vectors(elements, memory_elements)
    sender = Sender(state)
    body = sender.body(REQUEST)
    bit = data.draw(st.integers(0, 8 * len(body) - 1))
    body[bit // 8] ^= 1 << (bit % 8)
    assembly = Assembly(elements=elements, memory_elements=memory_elements)
    assembly.accept(sender.offer)
    with pytest.raises(TransferError, match="corrupt"):
        feed(assembly, body)
    lengths = [len(sender.chunks[index]) for index in range(len(sender.chunks))]
    ends = itertools.accumulate(lengths, initial=len(sender.digests))
    assert assembly.verified == max(0, sum(end <= bit // 8 for end in ends) - 1)
    assert not assembly.complete
    with pytest.raises(RuntimeError, match="not complete"):
        assembly.vectors()


def test_a_corrupt_chunk_is_named_and_what_came_before_is_kept() -> None:
    state = vectors(3 * PER_CHUNK, 0)
    sender = Sender(state)
    body = sender.body(REQUEST)
    body[-1] ^= 1
    assembly = Assembly(elements=3 * PER_CHUNK, memory_elements=0)
    assembly.accept(sender.offer)
    with pytest.raises(TransferError, match="corrupt: chunk 3 of 3 does not match its digest"):
        feed(assembly, body)
    assert assembly.verified == 2
    assert assembly.position() == "chunk 3 of 3"


def test_a_list_of_other_digests_is_refused_before_any_chunk() -> None:
    sender = Sender(vectors(200 * PER_CHUNK, 0))
    assembly = Assembly(elements=200 * PER_CHUNK, memory_elements=0)
    assembly.accept(msgspec.structs.replace(sender.offer, root=b"x" * DIGEST_BYTES))
    assert assembly.position() == "the list of digests"
    with pytest.raises(TransferError, match="corrupt: the list of digests"):
        feed(assembly, sender.digests)
    assert assembly.verified == 0


def test_a_stream_that_breaks_within_the_digests_is_asked_for_them_again() -> None:
    state = vectors(300 * PER_CHUNK, 0)
    sender = Sender(state)
    assembly = Assembly(elements=300 * PER_CHUNK, memory_elements=0)
    assembly.accept(sender.offer)
    assert feed(assembly, sender.digests[:5000]) == MIN_CHUNK_BYTES
    assert assembly.request(REQUEST) == REQUEST
    assembly.accept(sender.offer)
    feed(assembly, sender.body(REQUEST))
    assert same_bits(assembly, state)


def test_a_donor_that_went_on_to_another_state_starts_over() -> None:
    sizes = (3 * PER_CHUNK, PER_CHUNK)
    first, second = (
        Sender(vectors(*sizes, seed=1), round=1),
        Sender(vectors(*sizes, seed=2), round=2),
    )
    assembly = Assembly(elements=sizes[0], memory_elements=sizes[1])
    assembly.accept(first.offer)
    feed(assembly, first.body(REQUEST)[:-1])
    request = assembly.request(REQUEST)
    assert (request.root, request.first_chunk) == (first.offer.root, 3)
    assembly.accept(second.offer)
    assert assembly.verified == 0
    feed(assembly, second.body(request))
    assert assembly.round == 2
    assert same_bits(assembly, vectors(*sizes, seed=2))


def test_the_next_donor_starts_from_nothing_in_the_same_memory() -> None:
    sender = Sender(vectors(2 * PER_CHUNK, 0))
    assembly = Assembly(elements=2 * PER_CHUNK, memory_elements=0)
    assert assembly.position() == "an offer"
    assembly.accept(sender.offer)
    feed(assembly, sender.body(REQUEST))
    theta, _ = assembly.vectors()
    assembly.forget()
    assert not assembly.complete
    assert assembly.position() == "an offer"
    assert assembly.request(REQUEST) == REQUEST
    assembly.accept(sender.offer)
    feed(assembly, sender.body(REQUEST))
    assert assembly.vectors()[0] is theta


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"elements": 2**40}, "offers 1099511627776 parameters, this model has 10"),
        ({"elements": 9}, "offers 9 parameters, this model has 10"),
        ({"memory_elements": 2**40}, "1099511627776 elements of outer memory, this model has 5"),
    ],
)
def test_an_offer_of_other_sizes_is_refused_before_anything_is_allocated(
    changes: dict[str, int], why: str
) -> None:
    offer = msgspec.structs.replace(Sender(vectors(10, 5)).offer, **changes)
    assembly = Assembly(elements=10, memory_elements=5)
    with pytest.raises(TransferError, match=why):
        assembly.accept(offer)
    assert assembly.position() == "an offer"
    assert assembly.request(REQUEST) == REQUEST


# Deadlines.


def test_the_first_block_of_a_stream_has_a_fixed_allowance() -> None:
    assert block_deadline_s(10**9, received_bytes=0, elapsed_s=0.0) == FIRST_BLOCK_S


@pytest.mark.parametrize(
    ("elapsed_s", "deadline_s"),
    [(0.0, 5.0), (1.0, 5.0), (1.25, 5.0), (5.0, 20.0), (30.0, 120.0), (300.0, 120.0)],
)
def test_a_block_may_take_four_times_what_the_rate_predicts(
    elapsed_s: float, deadline_s: float
) -> None:
    assert block_deadline_s(1000, received_bytes=1000, elapsed_s=elapsed_s) == deadline_s
    assert block_deadline_s(2000, received_bytes=2000, elapsed_s=elapsed_s) == deadline_s


amounts = st.integers(1, 2**50)
times_s = st.floats(0, 1e9)


@given(amounts, amounts, times_s, times_s)
def test_deadlines_stay_within_bounds_and_grow_as_a_stream_slows_down(
    block_bytes: int, received_bytes: int, elapsed_s: float, more_s: float
) -> None:
    deadlines = [
        block_deadline_s(block_bytes, received_bytes=received_bytes, elapsed_s=total_s)
        for total_s in (elapsed_s, elapsed_s + more_s)
    ]
    assert deadlines == sorted(deadlines)
    assert all(MIN_BLOCK_S <= deadline_s <= MAX_BLOCK_S for deadline_s in deadlines)


@given(st.floats(1.0, 1e12), st.floats(0.26, 3.9))
def test_a_steady_stream_is_never_given_up(rate_bytes_s: float, wobble: float) -> None:
    received_bytes, elapsed_s = 0, 0.0
    for slow in itertools.islice(itertools.cycle((1.0, wobble)), 10):
        takes_s = slow * 65536 / rate_bytes_s
        if received_bytes and takes_s < MAX_BLOCK_S:
            deadline_s = block_deadline_s(65536, received_bytes=received_bytes, elapsed_s=elapsed_s)
            assert takes_s <= deadline_s
        received_bytes += 65536
        elapsed_s += takes_s
