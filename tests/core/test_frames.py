"""Cutting a stream into frames: limits come before memory, and splits do not matter."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gasloc_p2p.core.wire import (
    MAX_CHECK_BYTES,
    MAX_CHUNK_BYTES,
    MAX_HELLO_BYTES,
    MAX_READY_BYTES,
    MAX_RECORDS_BYTES,
    MAX_REFUSE_BYTES,
    MAX_REPAIR_BYTES,
    PIECE_OVERHEAD_BYTES,
    PIECES,
    SCALES_BYTES,
    FrameDecoder,
    FrameType,
    Head,
    ProtocolError,
    pack_frame,
    pack_head,
    pack_message,
)
from tests.core.test_wire import (
    HELLO,
    REFUSE,
    at_most_allocating,
    drain,
    frames_of,
    header,
    piece,
    split,
)

frames_then_noise = st.tuples(
    st.lists(
        st.one_of(
            st.just(pack_message(HELLO)),
            st.just(pack_message(REFUSE)),
            st.just(pack_frame(FrameType.READY)),
            st.builds(piece, st.sampled_from(PIECES), st.just(3), st.binary(max_size=16)),
        ),
        max_size=6,
    ).map(b"".join),
    st.binary(max_size=12),
).map(b"".join)


@settings(deadline=None)
@given(data=frames_then_noise, cuts=st.lists(st.integers(0, 2000), max_size=12))
def test_frames_do_not_depend_on_splits(data: bytes, cuts: list[int]) -> None:
    at_once = drain([data])
    assert drain(split(data, cuts)) == at_once
    assert drain([bytes([byte]) for byte in data]) == at_once
    if not at_once[1]:
        assert data.startswith(b"".join(pack_head(head) + body for head, body in at_once[0]))


@pytest.mark.parametrize(
    ("kind", "limit"),
    [
        (FrameType.HELLO, MAX_HELLO_BYTES),
        (FrameType.RECORDS, MAX_RECORDS_BYTES),
        (FrameType.SCALES, 24 + SCALES_BYTES),
        (FrameType.CHUNK, 24 + MAX_CHUNK_BYTES),
        (FrameType.CHECK, 24 + MAX_CHECK_BYTES),
        (FrameType.REPAIR, 24 + MAX_REPAIR_BYTES),
        (FrameType.READY, MAX_READY_BYTES),
        (FrameType.APPLIED, 0),
        (FrameType.REFUSE, MAX_REFUSE_BYTES),
    ],
)
def test_a_length_is_checked_before_the_payload(kind: FrameType, limit: int) -> None:
    if limit > 0:
        assert frames_of(header(kind, limit) + bytes(min(limit, 24) - 1)) == []
    with pytest.raises(ProtocolError, match=f"{kind.name} of {limit + 1} bytes"):
        frames_of(header(kind, limit + 1))


def test_a_fault_stays() -> None:
    decoder = FrameDecoder()
    good = pack_frame(FrameType.READY)
    feeding = decoder.feed(good + header(99, 0) + good)
    assert next(feeding).head.type is FrameType.READY
    for data in (None, good, b""):
        with pytest.raises(ProtocolError, match="unknown frame type 99"):
            list(feeding if data is None else decoder.feed(data))


def test_a_frame_is_admitted_before_its_data_come() -> None:
    told: list[Head] = []

    def admit(head: Head) -> None:
        told.append(head)
        if head.index == 1:
            raise ProtocolError("not this one")

    decoder = FrameDecoder(admit)
    first, second = piece(FrameType.CHUNK, 0, b"codes"), piece(FrameType.CHUNK, 1, b"codes")
    feeding = decoder.feed(pack_message(REFUSE) + first + second[:29])
    assert next(feeding).head == told[-1]
    assert next(feeding).head == told[-1]
    for again in (feeding, decoder.feed(second[29:])):
        with pytest.raises(ProtocolError, match="not this one"):
            next(again)
    assert [head.type for head in told[:3]] == [FrameType.REFUSE, *[FrameType.CHUNK] * 2]
    assert list(FrameDecoder(admit).feed(second[:28])) == []


def test_an_announced_length_allocates_nothing() -> None:
    for kind, size in ((FrameType.CHUNK, MAX_CHUNK_BYTES), (FrameType.REPAIR, MAX_REPAIR_BYTES)):
        with at_most_allocating(64 * 1024):
            head = pack_head(Head(type=kind, size=size, index=0, digest=bytes(16)))
            assert frames_of(head + b"few") == []
        with at_most_allocating(64 * 1024), pytest.raises(ProtocolError):
            frames_of(header(kind, 2**32 - 1))


def test_a_large_chunk_in_small_pieces_needs_memory_for_one() -> None:
    size = 1024 * 1024
    data = piece(FrameType.CHUNK, 0, bytes(size))
    decoder = FrameDecoder()
    pieces = split(data, list(range(0, len(data), 1000)))
    with at_most_allocating(size + size // 2):
        frames = [frame for part in pieces for frame in decoder.feed(part)]
        assert [len(frame.data) for frame in frames] == [size]


def test_a_frame_that_arrives_whole_is_not_copied() -> None:
    size = 1024 * 1024
    data = piece(FrameType.CHUNK, 0, bytes(size)) * 4
    with at_most_allocating(64 * 1024):
        frames = frames_of(data)
        assert len(frames) == 4
    for frame in frames:
        assert isinstance(frame.data, memoryview)
        assert frame.data.obj is data


def test_a_chunk_that_comes_in_pieces_goes_where_it_is_told() -> None:
    asked: list[int] = []
    memory = bytearray(b"old bytes")

    def chunk_memory(size: int) -> memoryview:
        asked.append(size)
        return memoryview(memory)[:size]

    decoder = FrameDecoder(chunk_memory=chunk_memory)
    codes, repair = piece(FrameType.CHUNK, 0, b"codes"), piece(FrameType.REPAIR, 0, b"repair")
    assert list(decoder.feed(codes[:PIECE_OVERHEAD_BYTES])) == []
    assert asked == [], "it is asked for before there are data"
    frames = [
        bytes(frame.data)
        for part in (codes[PIECE_OVERHEAD_BYTES:-3], codes[-3:-1], codes[-1:] + repair[:-2])
        for frame in decoder.feed(part)
    ]
    frames += [bytes(frame.data) for frame in decoder.feed(repair[-2:] + codes)]
    assert frames == [b"codes", b"repair", b"codes"]
    assert asked == [5]
    assert memory == b"codesytes"
