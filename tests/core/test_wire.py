"""Frames and messages: what is allowed on the stream, and that limits come before memory."""

from __future__ import annotations

import math
import struct
import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gasloc_p2p.core.wire import (
    CHUNK_OVERHEAD_BYTES,
    FRAME_OVERHEAD_BYTES,
    MAX_CHUNK_BYTES,
    MAX_HELLO_BYTES,
    MAX_READY_BYTES,
    MAX_REASON_CHARS,
    MAX_RECORD_BYTES,
    MAX_RECORDS,
    MAX_RECORDS_BYTES,
    MAX_REFUSE_BYTES,
    FrameDecoder,
    FrameType,
    Hello,
    ProtocolError,
    Ready,
    Records,
    Refuse,
    RefuseCode,
    chunk_digest,
    pack_chunk,
    pack_frame,
    pack_message,
    printable,
    read_hello,
    records_that_fit,
    unpack_chunk,
    unpack_message,
)

HELLO = Hello(
    protocol_min=1,
    protocol_max=2,
    peer_id="12D3KooWexample",
    run_digest=b"r" * 32,
    schema_digest=b"s" * 32,
    round=7,
    roster_digest=b"o" * 32,
    codec="bf16",
    code_bytes=100,
    chunk_bytes=16,
    scales=b"\x01\x02",
    unconfirmed=(3, 5),
)
REFUSE = Refuse(code=RefuseCode.LEAVING, reason="shutting down", round=7)
RECORDS = Records(records=(b"one", b"two"))
READY = Ready(clip=0.1)


@contextmanager
def at_most_allocating(limit_bytes: int) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= limit_bytes


def header(kind: int, length: int) -> bytes:
    return struct.pack("<BI", kind, length)


def fields(message: Hello | Refuse | Ready | Records) -> list[object]:
    decoded: list[object] = msgspec.msgpack.decode(msgspec.msgpack.encode(message))
    return decoded


def drain(pieces: list[bytes], *, chunk_bytes: int) -> tuple[list[tuple[FrameType, bytes]], str]:
    """Feed every piece; return the frames, and the fault that ended them or ''."""
    decoder = FrameDecoder(chunk_bytes=chunk_bytes)
    seen: list[tuple[FrameType, bytes]] = []
    for piece in pieces:
        data = piece
        try:
            while frames := decoder.feed(data):
                seen += [(frame.type, bytes(frame.payload)) for frame in frames]
                data = b""
        except ProtocolError as fault:
            return seen, str(fault)
    return seen, ""


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    places = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[a:b] for a, b in pairwise(places)]


# Messages


@pytest.mark.parametrize("message", [HELLO, REFUSE, READY, RECORDS])
def test_a_message_survives_the_wire(message: Hello | Refuse | Ready | Records) -> None:
    (frame,) = FrameDecoder(chunk_bytes=16).feed(pack_message(message))
    assert frame.type is message.frame_type
    assert unpack_message(frame.payload, type(message)) == message


def test_a_message_keeps_nothing_of_the_buffer_it_was_read_from() -> None:
    buffer = bytearray(pack_message(HELLO))
    hello = read_hello(buffer)
    buffer[:] = bytes(len(buffer))
    buffer += b"resizable"
    assert hello == HELLO


def test_hello_ignores_what_a_later_release_appends() -> None:
    payload = msgspec.msgpack.encode([*fields(HELLO), "a later field", 1])
    assert unpack_message(payload, Hello) == HELLO


@pytest.mark.parametrize("message", [REFUSE, READY, RECORDS])
def test_other_messages_have_no_more_fields(message: Refuse | Ready | Records) -> None:
    payload = msgspec.msgpack.encode([*fields(message), "more"])
    with pytest.raises(ProtocolError, match=type(message).__name__):
        unpack_message(payload, type(message))


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode(None),
        msgspec.msgpack.encode({"code": "run"}),
        msgspec.msgpack.encode(REFUSE)[:-1],
        msgspec.msgpack.encode(REFUSE) + b"\x00",
        msgspec.msgpack.encode(["no such code", "", 0]),
        msgspec.msgpack.encode(["run", "x" * (MAX_REASON_CHARS + 1), 0]),
        msgspec.msgpack.encode(["run", "", -1]),
        msgspec.msgpack.encode(["run", "", 2**63]),
        msgspec.msgpack.encode(["run", "", True]),
        b"\x93\xa3run\xa1\xff\x00",
        b"\xdd\xff\xff\xff\xff",
    ],
)
def test_a_malformed_refuse_is_a_protocol_error(payload: bytes) -> None:
    with pytest.raises(ProtocolError, match="malformed Refuse"):
        unpack_message(payload, Refuse)


def test_deep_nesting_is_a_protocol_error() -> None:
    deep = b"\x91" * 60_000 + b"\x90"
    payload = bytes([0x90 + 13]) + msgspec.msgpack.encode(HELLO)[1:] + deep
    with pytest.raises(ProtocolError, match="malformed Hello"):
        unpack_message(payload, Hello)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (0, -1),
        (2, "x" * 129),
        (3, b"x" * 65),
        (5, 1.0),
        (7, "x" * 33),
        (8, -1),
        (9, 0),
        (9, MAX_CHUNK_BYTES + 1),
        (11, list(range(9))),
        (11, [-1]),
    ],
)
def test_hello_fields_have_limits(place: int, value: object) -> None:
    assert unpack_message(msgspec.msgpack.encode(fields(HELLO)), Hello) == HELLO
    payload = fields(HELLO)
    payload[place] = value
    with pytest.raises(ProtocolError, match="malformed Hello"):
        unpack_message(msgspec.msgpack.encode(payload), Hello)


@pytest.mark.parametrize(
    "records", [[b""], [b"x" * (MAX_RECORD_BYTES + 1)], [b"x"] * (MAX_RECORDS + 1), ["text"]]
)
def test_records_have_limits(records: list[object]) -> None:
    with pytest.raises(ProtocolError, match="malformed Records"):
        unpack_message(msgspec.msgpack.encode([records]), Records)


@pytest.mark.parametrize("clip", [0.0, -0.5, 1.0 + 2**-52, math.nan, math.inf, True, "1", None])
def test_a_clip_factor_has_limits(clip: object) -> None:
    with pytest.raises(ProtocolError, match="malformed Ready"):
        unpack_message(msgspec.msgpack.encode([clip]), Ready)


@pytest.mark.parametrize("clip", [1.0, 0.1, sys.float_info.min, 1 / 3])
def test_a_clip_factor_arrives_bit_for_bit(clip: float) -> None:
    payload = msgspec.msgpack.encode(Ready(clip=clip))
    assert unpack_message(payload, Ready).clip == clip
    assert len(payload) <= MAX_READY_BYTES


@settings(deadline=None)
@given(st.lists(st.sampled_from([0, 1, 31, 32, 255, 256, 4096, 4097])), st.integers(0, 2000))
def test_chosen_records_always_fit_one_frame(sizes: list[int], repeat: int) -> None:
    records = [bytes(size) for size in sizes * (1 + repeat // 10)]
    chosen = records_that_fit(records)
    (frame,) = FrameDecoder(chunk_bytes=1).feed(pack_message(chosen))
    assert unpack_message(frame.payload, Records) == chosen
    sound = [record for record in records if 0 < len(record) <= MAX_RECORD_BYTES]
    assert list(chosen.records) == sound[: len(chosen.records)]


def test_as_many_records_are_chosen_as_fit() -> None:
    many = [b"x"] * (MAX_RECORDS + 5)
    assert len(records_that_fit(many).records) == MAX_RECORDS
    large = [b"x" * MAX_RECORD_BYTES] * 100
    assert len(records_that_fit(large).records) == MAX_RECORDS_BYTES // (MAX_RECORD_BYTES + 3)
    assert records_that_fit([b"", b"a", b"x" * 5000, b"b"]).records == (b"a", b"b")


def test_printable_leaves_nothing_for_a_terminal() -> None:
    assert printable("round 7, it's é ok") == "round 7, it's é ok"
    assert printable("\x1b[31m\n\r\u202e\ud800x") == "\ufffd[31m\ufffd\ufffd\ufffd\ufffdx"
    assert len(printable("x" * 1000)) == MAX_REASON_CHARS


# Chunks


def test_a_chunk_survives_the_wire() -> None:
    (frame,) = FrameDecoder(chunk_bytes=16).feed(pack_chunk(b"codes", round=7, index=2))
    chunk = unpack_chunk(frame.payload)
    assert (chunk.index, bytes(chunk.data)) == (2, b"codes")
    assert chunk.digest == chunk_digest(b"codes", round=7, index=2)
    assert len(chunk.digest) == 16


def test_a_digest_belongs_to_one_place() -> None:
    places = [(r, i) for r in (0, 1, 2**63 - 1) for i in (0, 1, 2**40)]
    digests = {chunk_digest(b"codes", round=r, index=i) for r, i in places}
    assert len(digests) == len(places)


def test_a_short_chunk_is_a_protocol_error() -> None:
    assert bytes(unpack_chunk(bytes(CHUNK_OVERHEAD_BYTES)).data) == b""
    with pytest.raises(ProtocolError, match="malformed Chunk"):
        unpack_chunk(bytes(CHUNK_OVERHEAD_BYTES - 1))


# read_hello


def test_read_hello_waits_for_the_whole_frame() -> None:
    whole = pack_message(HELLO)
    for size in range(len(whole)):
        assert read_hello(whole[:size]) is None
    assert read_hello(whole) == HELLO
    assert read_hello(bytearray(whole + b"more follows")) == HELLO


@pytest.mark.parametrize(
    "buffer",
    [
        pack_message(REFUSE),
        pack_frame(FrameType.READY),
        header(FrameType.HELLO, MAX_HELLO_BYTES + 1),
        header(0, 0),
        b"GET / HTTP/1.1\r\n",
        pack_frame(FrameType.HELLO, b"\x90"),
    ],
)
def test_read_hello_refuses_anything_else(buffer: bytes) -> None:
    with pytest.raises(ProtocolError):
        read_hello(buffer)


@settings(deadline=None)
@given(st.binary(max_size=64))
def test_read_hello_survives_random_bytes(buffer: bytes) -> None:
    try:
        hello = read_hello(buffer)
    except ProtocolError:
        hello = None
    assert hello is None


# FrameDecoder

frames_then_noise = st.tuples(
    st.lists(
        st.one_of(
            st.just(pack_message(HELLO)),
            st.just(pack_message(REFUSE)),
            st.just(pack_frame(FrameType.READY)),
            st.binary(max_size=16).map(lambda data: pack_chunk(data, round=1, index=3)),
        ),
        max_size=6,
    ).map(b"".join),
    st.binary(max_size=12),
).map(b"".join)


@settings(deadline=None)
@given(data=frames_then_noise, cuts=st.lists(st.integers(0, 2000), max_size=12))
def test_frames_do_not_depend_on_splits(data: bytes, cuts: list[int]) -> None:
    at_once = drain([data], chunk_bytes=16)
    assert drain(split(data, cuts), chunk_bytes=16) == at_once
    assert drain([bytes([byte]) for byte in data], chunk_bytes=16) == at_once
    if not at_once[1]:
        whole = b"".join(header(kind, len(payload)) + payload for kind, payload in at_once[0])
        assert data.startswith(whole)


@pytest.mark.parametrize(
    ("kind", "limit"),
    [
        (FrameType.HELLO, MAX_HELLO_BYTES),
        (FrameType.RECORDS, MAX_RECORDS_BYTES),
        (FrameType.CHUNK, 1000 + CHUNK_OVERHEAD_BYTES),
        (FrameType.READY, MAX_READY_BYTES),
        (FrameType.APPLIED, 0),
        (FrameType.REFUSE, MAX_REFUSE_BYTES),
    ],
)
def test_a_length_is_checked_before_the_payload(kind: FrameType, limit: int) -> None:
    decoder = FrameDecoder(chunk_bytes=1000)
    (frame,) = decoder.feed(header(kind, limit) + bytes(limit))
    assert (frame.type, len(frame.payload)) == (kind, limit)
    with pytest.raises(ProtocolError, match=f"{kind.name} of {limit + 1} bytes"):
        decoder.feed(header(kind, limit + 1))


def test_a_fault_stays() -> None:
    decoder = FrameDecoder(chunk_bytes=16)
    good = pack_frame(FrameType.READY)
    assert [frame.type for frame in decoder.feed(good + header(99, 0) + good)] == [FrameType.READY]
    for _ in range(2):
        with pytest.raises(ProtocolError, match="unknown frame type 99"):
            decoder.feed(good)


def test_an_announced_length_allocates_nothing() -> None:
    decoder = FrameDecoder(chunk_bytes=MAX_CHUNK_BYTES)
    with at_most_allocating(64 * 1024):
        data = header(FrameType.CHUNK, CHUNK_OVERHEAD_BYTES + MAX_CHUNK_BYTES) + b"few"
        assert decoder.feed(data) == []
    with at_most_allocating(64 * 1024), pytest.raises(ProtocolError):
        FrameDecoder(chunk_bytes=MAX_CHUNK_BYTES).feed(header(FrameType.CHUNK, 2**32 - 1))


def test_a_large_chunk_in_small_pieces_needs_memory_for_one() -> None:
    size = 1024 * 1024
    data = pack_chunk(bytes(size), round=0, index=0)
    decoder = FrameDecoder(chunk_bytes=size)
    pieces = split(data, list(range(0, len(data), 1000)))
    with at_most_allocating(size + size // 2):
        frames = [frame for piece in pieces for frame in decoder.feed(piece)]
        assert len(frames) == 1
        assert len(frames[0].payload) == len(data) - FRAME_OVERHEAD_BYTES


def test_a_frame_that_arrives_whole_is_not_copied() -> None:
    size = 1024 * 1024
    data = pack_chunk(bytes(size), round=0, index=0) * 4
    decoder = FrameDecoder(chunk_bytes=size)
    with at_most_allocating(64 * 1024):
        assert len(decoder.feed(data)) == 4
