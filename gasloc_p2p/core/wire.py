"""Frames and messages of one exchange: what is on the stream, and how much of it is allowed.

A frame is one byte of type, four bytes of little-endian payload length, and the payload. A
payload is MessagePack, except that APPLIED is empty and CHUNK is eight bytes of little-endian
index, a 16-byte digest, and the codes themselves.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple, TypeAlias, TypeVar

import msgspec
from blake3 import blake3
from msgspec import Meta

from gasloc_p2p.core.types import BytesLike, PeerId

PROTOCOL_VERSION = 2
"""The exchange protocol that this release speaks."""

MAX_HELLO_BYTES = 64 * 1024
MAX_RECORD_BYTES = 4 * 1024
MAX_RECORDS = 1024
MAX_RECORDS_BYTES = 4 * 64 * 1024
MAX_REFUSE_BYTES = 4 * 1024
MAX_READY_BYTES = 16
MAX_CHUNK_BYTES = 16 * 1024 * 1024
MAX_REASON_CHARS = 500
MAX_UNCONFIRMED = 8

_HEADER = struct.Struct("<BI")
_CHUNK_HEAD = struct.Struct("<Q16s")
_CHUNK_DIGEST = struct.Struct("<16sQQ")
_CHUNK_DOMAIN = b"gasloc chunk v1\0"

CHUNK_OVERHEAD_BYTES = _CHUNK_HEAD.size
FRAME_OVERHEAD_BYTES = _HEADER.size


class ProtocolError(Exception):
    """Bytes on the stream are not what the protocol allows; the message says which."""


class FrameType(enum.IntEnum):
    """First byte of a frame; the values are in the order in which a side may send them."""

    HELLO = 1
    RECORDS = 2
    CHUNK = 3
    READY = 4
    APPLIED = 5
    REFUSE = 6


class RefuseCode(enum.StrEnum):
    """Why a side ends an exchange."""

    PROTOCOL = "protocol"
    RUN = "run"
    SCHEMA = "schema"
    CODEC = "codec"
    SIZE = "size"
    IDENTITY = "identity"
    NOT_PARTNER = "not_partner"
    CORRUPT = "corrupt"
    NON_FINITE = "non_finite"
    EXCLUDED = "excluded"
    LEAVING = "leaving"


_Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_Digest: TypeAlias = Annotated[bytes, Meta(max_length=64)]
_Record: TypeAlias = Annotated[bytes, Meta(min_length=1, max_length=MAX_RECORD_BYTES)]


class Hello(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What a side claims and expects; both sides must agree before anything is allocated.

    Fields after the last one are ignored, so that releases with different protocol ranges can
    read each other's.

    Attributes:
        protocol_min: oldest protocol that the sender speaks.
        protocol_max: newest protocol that the sender speaks.
        peer_id: the sender's claimed identity; the stream's must be the same.
        run_digest: identity of the run.
        schema_digest: names, shapes and order of the parameters.
        round: round that this exchange belongs to.
        roster_digest: the sender's roster of that round.
        codec: name of the codec.
        code_bytes: size in bytes of the codes each side sends.
        chunk_bytes: size in bytes of every chunk but the last.
        scales: what the codec wants the partner to know.
        unconfirmed: earlier rounds that the sender mixed with this partner without its Applied.
    """

    frame_type: ClassVar[FrameType] = FrameType.HELLO

    protocol_min: _Count
    protocol_max: _Count
    peer_id: Annotated[PeerId, Meta(max_length=128)]
    run_digest: _Digest
    schema_digest: _Digest
    round: _Count
    roster_digest: _Digest
    codec: Annotated[str, Meta(max_length=32)]
    code_bytes: _Count
    chunk_bytes: Annotated[int, Meta(ge=1, le=MAX_CHUNK_BYTES)]
    scales: bytes
    unconfirmed: Annotated[tuple[_Count, ...], Meta(max_length=MAX_UNCONFIRMED)] = ()


class Records(
    msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True
):
    """Signed roster records that the partner may lack; opaque here."""

    frame_type: ClassVar[FrameType] = FrameType.RECORDS

    records: Annotated[tuple[_Record, ...], Meta(max_length=MAX_RECORDS)]


class Ready(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """The partner's codes are accepted.

    Attributes:
        clip: factor in (0, 1] by which the sender shortens the difference that is mixed; both sides
            use the smaller of the two.
    """

    frame_type: ClassVar[FrameType] = FrameType.READY

    clip: Annotated[float, Meta(gt=0, le=1)]


class Refuse(
    msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True
):
    """The sender's last frame: why it ends the exchange, and its own round."""

    frame_type: ClassVar[FrameType] = FrameType.REFUSE

    code: RefuseCode
    reason: Annotated[str, Meta(max_length=MAX_REASON_CHARS)]
    round: _Count


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """One piece of the codes; `data` may be a view on the bytes that were fed."""

    index: int
    digest: bytes
    data: memoryview


class Frame(NamedTuple):
    """One frame; `payload` may be a view on the bytes that were fed."""

    type: FrameType
    payload: BytesLike


_PAYLOAD_LIMITS: Mapping[FrameType, int] = {
    FrameType.HELLO: MAX_HELLO_BYTES,
    FrameType.RECORDS: MAX_RECORDS_BYTES,
    FrameType.CHUNK: CHUNK_OVERHEAD_BYTES + MAX_CHUNK_BYTES,
    FrameType.READY: MAX_READY_BYTES,
    FrameType.APPLIED: 0,
    FrameType.REFUSE: MAX_REFUSE_BYTES,
}

_Message = TypeVar("_Message", bound=Hello | Records | Ready | Refuse)


def pack_frame(kind: FrameType, *parts: BytesLike) -> bytes:
    """Return one frame whose payload is `parts` joined."""
    return b"".join((_HEADER.pack(kind, sum(map(len, parts))), *parts))


def pack_message(message: Hello | Records | Ready | Refuse) -> bytes:
    """Return the frame of a message."""
    return pack_frame(message.frame_type, msgspec.msgpack.encode(message))


def unpack_message(payload: BytesLike, kind: type[_Message]) -> _Message:
    """Return the message in a frame's payload, copied out of it.

    Raises:
        ProtocolError: the payload is not exactly one message of this kind within its limits.
    """
    try:
        return msgspec.msgpack.decode(payload, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as fault:
        raise ProtocolError(f"malformed {kind.__name__}: {fault}") from fault


def pack_chunk(data: BytesLike, *, round: int, index: int) -> bytes:
    """Return the frame of chunk `index` of a round's codes."""
    head = _CHUNK_HEAD.pack(index, chunk_digest(data, round=round, index=index))
    return pack_frame(FrameType.CHUNK, head, data)


def unpack_chunk(payload: BytesLike) -> Chunk:
    """Return the chunk in a frame's payload; its digest is not checked.

    Raises:
        ProtocolError: the payload is too short.
    """
    if len(payload) < CHUNK_OVERHEAD_BYTES:
        raise ProtocolError(f"malformed Chunk: {len(payload)} bytes")
    index, digest = _CHUNK_HEAD.unpack_from(payload)
    return Chunk(index=index, digest=digest, data=memoryview(payload)[CHUNK_OVERHEAD_BYTES:])


def chunk_digest(data: BytesLike, *, round: int, index: int) -> bytes:
    """Return 16 bytes of blake3 over `data` and its place, so that no other chunk has the same."""
    hasher = blake3(_CHUNK_DIGEST.pack(_CHUNK_DOMAIN, round, index))
    return hasher.update(data).digest(length=16)


def records_that_fit(records: Iterable[bytes]) -> Records:
    """Return the first of `records` that one frame may carry, without those that are too large."""
    chosen: list[bytes] = []
    # Three bytes is the longest head of a record of this size, and eight hold the frame's own.
    room = MAX_RECORDS_BYTES - 8
    for record in records:
        if not 0 < len(record) <= MAX_RECORD_BYTES:
            continue
        room -= len(record) + 3
        if room < 0 or len(chosen) == MAX_RECORDS:
            break
        chosen.append(record)
    return Records(records=tuple(chosen))


def printable(text: str) -> str:
    """Return a peer's text, cut to `MAX_REASON_CHARS`, without anything a terminal obeys."""
    return "".join(
        char if char.isprintable() else "\N{REPLACEMENT CHARACTER}"
        for char in text[:MAX_REASON_CHARS]
    )


def read_hello(buffer: BytesLike) -> Hello | None:
    """Return the Hello at the start of a stream, or None while `buffer` holds only part of it.

    `buffer` is left as it is. At most `FRAME_OVERHEAD_BYTES + MAX_HELLO_BYTES` bytes are needed.

    Raises:
        ProtocolError: the stream does not start with a well-formed Hello.
    """
    if len(buffer) < _HEADER.size:
        return None
    kind, length = _unpack_header(buffer, _PAYLOAD_LIMITS)
    if kind is not FrameType.HELLO:
        raise ProtocolError(f"{kind.name} where HELLO was due")
    end = _HEADER.size + length
    if len(buffer) < end:
        return None
    return unpack_message(memoryview(buffer)[_HEADER.size : end], Hello)


def _unpack_header(head: BytesLike, limits: Mapping[FrameType, int]) -> tuple[FrameType, int]:
    number, length = _HEADER.unpack_from(head)
    try:
        kind = FrameType(number)
    except ValueError:
        raise ProtocolError(f"unknown frame type {number}") from None
    if length > limits[kind]:
        raise ProtocolError(f"{kind.name} of {length} bytes, at most {limits[kind]} allowed")
    return kind, length


class FrameDecoder:
    """Cuts a stream into frames, however it arrives.

    Holds at most one frame, and never more of it than has arrived.
    """

    def __init__(self, *, chunk_bytes: int) -> None:
        """Allow chunks of up to `chunk_bytes`."""
        self._limits = {**_PAYLOAD_LIMITS, FrameType.CHUNK: CHUNK_OVERHEAD_BYTES + chunk_bytes}
        self._head = bytearray()
        self._body = bytearray()

    def feed(self, data: BytesLike) -> list[Frame]:
        """Return the frames that are complete with `data`, which must not change while in use.

        Frames before a malformed one are returned first, and the fault is raised by the next
        call; so `feed(b"")` until it returns nothing sees the same whatever the split.

        Raises:
            ProtocolError: a frame has an unknown type or is too long; so does every later call.
        """
        frames: list[Frame] = []
        rest = memoryview(data)
        try:
            while (step := self._next_frame(rest)) is not None:
                frame, rest = step
                frames.append(frame)
        except ProtocolError:
            # The header stays in place, so the next call meets the same fault.
            if not frames:
                raise
        return frames

    def _next_frame(self, rest: memoryview) -> tuple[Frame, memoryview] | None:
        wanted = _HEADER.size - len(self._head)
        self._head += rest[:wanted]
        rest = rest[wanted:]
        if len(self._head) < _HEADER.size:
            return None
        kind, length = _unpack_header(self._head, self._limits)
        wanted = length - len(self._body)
        if len(rest) < wanted:
            self._body += rest
            return None
        payload: BytesLike = rest[:wanted]
        if self._body:
            self._body += payload
            payload, self._body = self._body, bytearray()
        self._head.clear()
        return Frame(kind, payload), rest[wanted:]
