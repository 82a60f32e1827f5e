"""Frames and messages of one exchange: what is on the stream, and how much of it is allowed.

A frame is one byte of type, four bytes of little-endian payload length, and the payload. The
payload of HELLO, RECORDS, READY and REFUSE is MessagePack, and that of APPLIED is empty. SCALES,
CHUNK, CHECK and REPAIR are pieces: eight bytes of little-endian index, a 16-byte digest, and data.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Final, NamedTuple, TypeAlias, TypeVar

import msgspec
from blake3 import blake3
from msgspec import Meta

from gasloc_p2p.core.types import BytesLike, PeerId

PROTOCOL_VERSION = 4
"""The exchange protocol that this release speaks."""

MAX_HELLO_BYTES = 64 * 1024
MAX_RECORD_BYTES = 4 * 1024
MAX_RECORDS = 1024
MAX_RECORDS_BYTES = 4 * 64 * 1024
MAX_REFUSE_BYTES = 4 * 1024
MAX_READY_BYTES = 16
MAX_CHUNK_BYTES = 16 * 1024 * 1024
MAX_CHECK_BYTES = MAX_CHUNK_BYTES // 4
MAX_REPAIR_BYTES = 4 * MAX_CHUNK_BYTES + 8
MAX_REASON_CHARS = 500
MAX_UNCONFIRMED = 8
SCALES_BYTES = 64 * 1024  # in every SCALES frame but the last

_HEADER = struct.Struct("<BI")
_PIECE = struct.Struct("<Q16s")
_PLACE = struct.Struct("<BQ")
_SENDER = struct.Struct("<HQH")
_KEY_CONTEXT = "gasloc_p2p exchange 4 pieces"
_DIGEST_BYTES = 16

FRAME_OVERHEAD_BYTES = _HEADER.size
PIECE_OVERHEAD_BYTES = _HEADER.size + _PIECE.size


class ProtocolError(Exception):
    """Bytes on the stream are not what the protocol allows; the message says which."""


class DamagedError(ProtocolError):
    """A piece does not match its digest."""


class FrameType(enum.IntEnum):
    """First byte of a frame."""

    HELLO = 1
    RECORDS = 2
    SCALES = 3
    CHUNK = 4
    CHECK = 5
    REPAIR = 6
    READY = 7
    APPLIED = 8
    REFUSE = 9


PIECES: Final = (FrameType.SCALES, FrameType.CHUNK, FrameType.CHECK, FrameType.REPAIR)
"""Types of frames with an index and a digest."""


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
        protocol_min, protocol_max: oldest and newest protocol that the sender speaks.
        peer_id: the sender's claimed identity; the stream's must be the same.
        run_digest, schema_digest: of the run; of names, shapes and order of the parameters.
        round: round that this exchange belongs to.
        roster_digest: the sender's roster of that round.
        codec: name of the codec.
        code_bytes: size in bytes of the codes each side sends.
        chunk_bytes: wished size in bytes of a chunk of codes.
        scale_bytes: size in bytes of the scales each side sends.
        unconfirmed: earlier rounds that the sender mixed with this partner without its Applied.
        received: frames behind the partner's first Hello that the sender has dealt with; not 0
            only on a fresh stream in the place of a broken one.
        late: the sender's round goes on without this edge, and so must the receiver's.
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
    scale_bytes: _Count
    unconfirmed: Annotated[tuple[_Count, ...], Meta(max_length=MAX_UNCONFIRMED)] = ()
    received: _Count = 0
    late: bool = False


class Records(
    msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True
):
    """Signed roster records that the partner may lack; opaque here."""

    frame_type: ClassVar[FrameType] = FrameType.RECORDS

    records: Annotated[tuple[_Record, ...], Meta(max_length=MAX_RECORDS)]


class Ready(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """All of the partner's codes are here, understood and accepted.

    Attributes:
        clip: factor in (0, 1] by which the sender shortens the difference; the smaller one counts.
        late: as in Hello, if that has turned out since.
    """

    frame_type: ClassVar[FrameType] = FrameType.READY

    clip: Annotated[float, Meta(gt=0, le=1)]
    late: bool = False


class Refuse(
    msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True
):
    """The sender's last frame: why it ends the exchange, and its own round."""

    frame_type: ClassVar[FrameType] = FrameType.REFUSE

    code: RefuseCode
    reason: Annotated[str, Meta(max_length=MAX_REASON_CHARS)]
    round: _Count


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """What is known of a frame before its data.

    Attributes:
        type: what the frame is.
        size: bytes of its data: the payload, without the index and digest of a piece.
        index: which piece; 0 for other frames.
        digest: of the data of a piece; empty for other frames.
    """

    type: FrameType
    size: int
    index: int = 0
    digest: bytes = b""


class Frame(NamedTuple):
    """One frame; `data` may be a view on the bytes that were fed."""

    head: Head
    data: BytesLike


_PAYLOAD_LIMITS: Mapping[FrameType, int] = {
    FrameType.HELLO: MAX_HELLO_BYTES,
    FrameType.RECORDS: MAX_RECORDS_BYTES,
    FrameType.SCALES: _PIECE.size + SCALES_BYTES,
    FrameType.CHUNK: _PIECE.size + MAX_CHUNK_BYTES,
    FrameType.CHECK: _PIECE.size + MAX_CHECK_BYTES,
    FrameType.REPAIR: _PIECE.size + MAX_REPAIR_BYTES,
    FrameType.READY: MAX_READY_BYTES,
    FrameType.APPLIED: 0,
    FrameType.REFUSE: MAX_REFUSE_BYTES,
}

Memory: TypeAlias = Callable[[int], memoryview]
"""Returns so many bytes to write to, whatever is in them."""

_Message = TypeVar("_Message", bound=Hello | Records | Ready | Refuse)


def pack_frame(kind: FrameType, payload: BytesLike = b"") -> bytes:
    """Return the frame with this payload."""
    return b"".join((_HEADER.pack(kind, len(payload)), payload))


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


def pack_head(head: Head) -> bytes:
    """Return what stands before the data of a frame."""
    if head.type not in PIECES:
        return _HEADER.pack(head.type, head.size)
    return _HEADER.pack(head.type, _PIECE.size + head.size) + _PIECE.pack(head.index, head.digest)


def pack_piece(
    kind: FrameType, index: int, data: BytesLike, *, key: bytes
) -> tuple[bytes, BytesLike]:
    """Return the frame of a piece in two parts, the second of which is `data` itself."""
    digest = piece_digest(kind, index, data, key=key)
    head = Head(type=kind, size=len(data), index=index, digest=digest)
    return pack_head(head), data


def piece_key(*, run_digest: bytes, round: int, sender: PeerId) -> bytes:
    """Return 32 bytes that key the digests of one sender's pieces in one round of one run."""
    name = sender.encode()
    lengths = _SENDER.pack(len(run_digest), round, len(name))
    return blake3(lengths + run_digest + name, derive_key_context=_KEY_CONTEXT).digest()


def piece_digest(kind: FrameType, index: int, data: BytesLike, *, key: bytes) -> bytes:
    """Return 16 bytes of blake3 over a piece and its place, so that no other piece has the same.

    Args:
        kind: one of `PIECES`.
        index: which piece of its kind.
        data: the piece.
        key: see `piece_key`.
    """
    hasher = blake3(_PLACE.pack(kind, index), key=key)
    return hasher.update(data).digest(length=_DIGEST_BYTES)


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
    kind, length = _unpack_header(buffer)
    if kind is not FrameType.HELLO:
        raise ProtocolError(f"{kind.name} where HELLO was due")
    end = _HEADER.size + length
    if len(buffer) < end:
        return None
    return unpack_message(memoryview(buffer)[_HEADER.size : end], Hello)


def _unpack_header(raw: BytesLike) -> tuple[FrameType, int]:
    number, length = _HEADER.unpack_from(raw)
    try:
        kind = FrameType(number)
    except ValueError:
        raise ProtocolError(f"unknown frame type {number}") from None
    if length > _PAYLOAD_LIMITS[kind]:
        limit = _PAYLOAD_LIMITS[kind]
        raise ProtocolError(f"{kind.name} of {length} bytes, at most {limit} allowed")
    if kind in PIECES and length < _PIECE.size:
        raise ProtocolError(f"malformed {kind.name}: {length} bytes")
    return kind, length


def _no_objection(head: Head) -> None:
    """Let every frame pass that keeps the limits of its type."""


class FrameDecoder:
    """Cuts a stream into frames, however it arrives.

    Holds at most one frame, and never more of it than has arrived, but for `chunk_memory`.

    Args:
        admit: told what a frame is before any of its data is held; raises `ProtocolError` when
            such a frame is out of place.
        chunk_memory: where the data of a chunk go once it is admitted; None for fresh memory.
    """

    def __init__(
        self,
        admit: Callable[[Head], None] = _no_objection,
        chunk_memory: Memory | None = None,
    ) -> None:
        self._admit = admit
        self._chunk_memory = chunk_memory
        self._raw = bytearray()
        self._head: Head | None = None
        self._data: bytearray | memoryview = bytearray()
        self._held = 0

    def feed(self, data: BytesLike) -> Iterator[Frame]:
        """Yield the frames that are complete with `data`, which must not change while in use.

        A frame is read when it is asked for, so what happens in between decides on the next one.
        What is not asked for is lost.

        Raises:
            ProtocolError: a frame has an unknown type, is too long or is not admitted; so it is
                with every later call.
        """
        rest = memoryview(data)
        while True:
            rest = self._read_head(rest)
            if self._head is None:
                return
            wanted = self._head.size - self._held
            if len(rest) < wanted:
                self._hold(self._head, rest)
                return
            body: BytesLike = rest[:wanted]
            rest = rest[wanted:]
            if self._held:
                self._hold(self._head, body)
                body, self._data, self._held = self._data, bytearray(), 0
            head, self._head = self._head, None
            self._raw.clear()
            yield Frame(head, body)

    def _hold(self, head: Head, piece: BytesLike) -> None:
        """Put a piece of a frame's data behind those that came before."""
        if piece and not self._held and head.type is FrameType.CHUNK and self._chunk_memory:
            self._data = self._chunk_memory(head.size)
        if isinstance(self._data, bytearray):
            self._data += piece
        else:
            self._data[self._held : self._held + len(piece)] = piece
        self._held += len(piece)

    def _read_head(self, rest: memoryview) -> memoryview:
        """Take what the head still lacks from `rest`, and return what is left."""
        rest = self._fill(_HEADER.size, rest)
        if self._head is not None or len(self._raw) < _HEADER.size:
            return rest
        kind, length = _unpack_header(self._raw)
        head = Head(type=kind, size=length)
        if kind in PIECES:
            rest = self._fill(PIECE_OVERHEAD_BYTES, rest)
            if len(self._raw) < PIECE_OVERHEAD_BYTES:
                return rest
            index, digest = _PIECE.unpack_from(self._raw, _HEADER.size)
            size = length - _PIECE.size
            head = Head(type=kind, size=size, index=index, digest=digest)
        self._admit(head)
        self._head = head
        return rest

    def _fill(self, size: int, rest: memoryview) -> memoryview:
        missing = max(0, size - len(self._raw))
        self._raw += rest[:missing]
        return rest[missing:]
