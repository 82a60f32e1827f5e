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

from gasloc_p2p.core.outgoing import records_that_fit
from gasloc_p2p.core.wire import (
    FRAME_OVERHEAD_BYTES,
    MAX_CHUNK_BYTES,
    MAX_HELLO_BYTES,
    MAX_READY_BYTES,
    MAX_REASON_CHARS,
    MAX_RECORD_BYTES,
    MAX_RECORDS,
    MAX_RECORDS_BYTES,
    PIECE_OVERHEAD_BYTES,
    PIECES,
    Frame,
    FrameDecoder,
    FrameType,
    Head,
    Hello,
    ProtocolError,
    Ready,
    Records,
    Refuse,
    RefuseCode,
    pack_frame,
    pack_head,
    pack_message,
    pack_piece,
    piece_digest,
    piece_key,
    printable,
    read_hello,
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
    scale_bytes=2,
    unconfirmed=(3, 5),
    received=4,
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


KEY = piece_key(run_digest=b"run", round=7, sender="a")


def piece(kind: FrameType, index: int, data: bytes) -> bytes:
    return b"".join(pack_piece(kind, index, data, key=KEY))


def frames_of(data: bytes) -> list[Frame]:
    return list(FrameDecoder().feed(data))


def drain(pieces: list[bytes]) -> tuple[list[tuple[Head, bytes]], str]:
    """Feed every piece; return the frames, and the fault that ended them or ''."""
    decoder = FrameDecoder()
    seen: list[tuple[Head, bytes]] = []
    try:
        for data in pieces:
            for frame in decoder.feed(data):
                seen.append((frame.head, bytes(frame.data)))  # noqa: PERF401  # a fault may follow
    except ProtocolError as fault:
        return seen, str(fault)
    return seen, ""


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    places = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[a:b] for a, b in pairwise(places)]


# Messages


@pytest.mark.parametrize("message", [HELLO, REFUSE, READY, RECORDS])
def test_a_message_survives_the_wire(message: Hello | Refuse | Ready | Records) -> None:
    (frame,) = frames_of(pack_message(message))
    assert frame.head == Head(type=message.frame_type, size=len(frame.data))
    assert unpack_message(frame.data, type(message)) == message


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
    payload = bytes([0x90 + 14]) + msgspec.msgpack.encode(HELLO)[1:] + deep
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
        (10, -1),
        (11, list(range(9))),
        (11, [-1]),
        (12, -1),
        (12, 2**63),
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
    (frame,) = frames_of(pack_message(chosen))
    assert unpack_message(frame.data, Records) == chosen
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


# Pieces


@pytest.mark.parametrize("kind", PIECES)
def test_a_piece_survives_the_wire(kind: FrameType) -> None:
    data = memoryview(b"codes")
    head, body = pack_piece(kind, 2, data, key=KEY)
    assert body is data
    assert len(head) == PIECE_OVERHEAD_BYTES
    (frame,) = frames_of(head + data)
    digest = piece_digest(kind, 2, b"codes", key=KEY)
    assert frame == Frame(Head(type=kind, size=5, index=2, digest=digest), b"codes")
    assert len(digest) == 16


def test_a_head_survives_the_wire() -> None:
    for data in (piece(FrameType.CHUNK, 2**64 - 1, b"codes"), pack_message(REFUSE)):
        (frame,) = frames_of(data)
        assert pack_head(frame.head) + bytes(frame.data) == data


def test_a_digest_belongs_to_one_place() -> None:
    senders = [
        (run, round, sender)
        for run in (b"", b"r", b"rs")
        for round in (0, 2**63 - 1)
        for sender in ("", "s", "ss")
    ]
    keys = {piece_key(run_digest=run, round=round, sender=s) for run, round, s in senders}
    assert len(keys) == len(senders)
    places = [(key, kind, index) for key in keys for kind in PIECES for index in (0, 1, 2**64 - 1)]
    digests = {piece_digest(kind, index, b"codes", key=key) for key, kind, index in places}
    assert len(digests) == len(places)


@pytest.mark.parametrize("kind", PIECES)
def test_a_short_piece_is_a_protocol_error(kind: FrameType) -> None:
    size = PIECE_OVERHEAD_BYTES - FRAME_OVERHEAD_BYTES
    (frame,) = frames_of(header(kind, size) + bytes(size))
    assert bytes(frame.data) == b""
    with pytest.raises(ProtocolError, match=f"malformed {kind.name}: {size - 1} bytes"):
        frames_of(header(kind, size - 1))


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
