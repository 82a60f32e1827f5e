"""One edge of one round as a state machine: bytes in, events and bytes out.

Each side sends Hello, Records when the rosters differ, its chunks, Ready, and Applied, in this
order; a Refuse ends the exchange from anywhere (docs/design.md section 4). Both Ready frames are
the commit point. Two generals cannot agree on more, so a side that passed it mixes whatever
happens next, and calls the edge asymmetric when it does not see the partner's Applied. Each Ready
carries a clip factor, and both sides mix with the smaller one, so the mean of the two stays.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from gasloc_p2p.core.types import BytesLike, EdgeKind, PeerId
from gasloc_p2p.core.wire import (
    Frame,
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


@dataclass(frozen=True, kw_only=True, slots=True)
class PartnerHello:
    """The partner's Hello agrees with ours; encode and call `send_codes`."""

    hello: Hello


@dataclass(frozen=True, kw_only=True, slots=True)
class PartnerRecords:
    """Signed records from a partner with another roster, for later rounds; nothing is verified."""

    records: tuple[bytes, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class CodesReceived:
    """The partner's codes are complete and intact; decode, then call `accept` or `refuse`.

    They are the caller's from here on; the exchange keeps no copy.
    """

    codes: bytearray


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreed:
    """Both sides are ready: from here on this edge is mixed.

    Attributes:
        clip: the smaller of both sides' clip factors, in (0, 1].
    """

    clip: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """The exchange is over; always the last event, and exactly one.

    Attributes:
        kind: how the edge ended.
        reason: one sentence for a person, empty when applied.
        offence: whether this side ended it because the partner, whose Hello agreed with ours, broke
            the protocol or sent what is damaged or not finite.
    """

    kind: EdgeKind
    reason: str
    offence: bool = False


Event: TypeAlias = PartnerHello | PartnerRecords | CodesReceived | Agreed | Finished

_KIND_OF_REFUSAL: Final = {
    RefuseCode.NOT_PARTNER: EdgeKind.NOT_PARTNER,
    RefuseCode.CORRUPT: EdgeKind.CORRUPT,
    RefuseCode.NON_FINITE: EdgeKind.CORRUPT,
}
_OFFENCES: Final = (RefuseCode.PROTOCOL, RefuseCode.CORRUPT, RefuseCode.NON_FINITE)


class Exchange:
    """One edge of one round, seen from one side.

    Feed what arrives to `receive`, write what `data_to_send` returns, and act on the events that
    the methods return. After every call there may be more to send. A method that is called after
    the end does nothing, because the end may have come while the caller was busy.
    """

    def __init__(
        self, *, hello: Hello, partner: PeerId, dialer: bool, records: Sequence[bytes] = ()
    ) -> None:
        """Start an exchange.

        Args:
            hello: what this side claims and expects.
            partner: identity of the other end, proved by the stream.
            dialer: whether this side opened the stream; its Hello goes first.
            records: this side's roster, most useful first; sent as far as one frame holds when
                the partner's roster differs.

        Raises:
            ProtocolError: `hello` breaks a limit, so no partner would read it.
        """
        self._hello_frame = pack_message(hello)
        read_hello(self._hello_frame)
        self._hello = hello
        self._partner = partner
        self._dialer = dialer
        self._records = records
        self._decoder = FrameDecoder(chunk_bytes=hello.chunk_bytes)
        self._chunk_count = -(-hello.code_bytes // hello.chunk_bytes)

        self._due = FrameType.HELLO
        self._before_chunks: deque[bytes] = deque([self._hello_frame] if dialer else [])
        self._after_chunks: deque[bytes] = deque()
        self._own_codes: memoryview | None = None
        self._codes = bytearray()
        self._chunks_sent = 0
        self._chunks_received = 0
        self._bytes_sent = 0
        self._bytes_received = 0
        self._own_clip: float | None = None
        self._partner_clip: float | None = None
        self._agreed = False
        self._finished = False

    @property
    def finished(self) -> bool:
        """Whether `Finished` has been returned; a Refuse or Applied may still wait to be sent."""
        return self._finished

    @property
    def bytes_sent(self) -> int:
        """Bytes that `data_to_send` has returned."""
        return self._bytes_sent

    @property
    def bytes_received(self) -> int:
        """Bytes that were fed before the end."""
        return self._bytes_received

    def receive(self, data: BytesLike) -> list[Event]:
        """Take bytes from the stream; `data` may be reused after the return."""
        if self._finished:
            return []
        events: list[Event] = []
        self._bytes_received += len(data)
        try:
            while frames := self._decoder.feed(data):
                data = b""
                for frame in frames:
                    events += self._on_frame(frame)
        except ProtocolError as fault:
            events += self.refuse(RefuseCode.PROTOCOL, str(fault))
        return events

    def end_of_stream(self) -> list[Event]:
        """The other end closed the stream, or is gone."""
        return self._end(EdgeKind.LOST, f"the stream ended {self._where()}")

    def expire(self) -> list[Event]:
        """The caller's deadline for this edge has passed."""
        return self._end(EdgeKind.TIMED_OUT, f"the deadline passed {self._where()}")

    def send_codes(self, codes: BytesLike) -> None:
        """Send this side's codes, which must not change until the end; needs `PartnerHello`.

        Raises:
            ValueError: `codes` is not as long as Hello says.
            RuntimeError: called before `PartnerHello`, or twice.
        """
        if self._finished:
            return
        if self._due is FrameType.HELLO or self._own_codes is not None:
            raise RuntimeError("send_codes is called once, after PartnerHello")
        if len(codes) != self._hello.code_bytes:
            raise ValueError(f"{len(codes)} bytes of codes, expected {self._hello.code_bytes}")
        self._own_codes = memoryview(codes)

    def accept(self, *, clip: float = 1.0) -> list[Event]:
        """Declare the partner's codes sound; Ready follows this side's last chunk.

        Args:
            clip: factor in (0, 1] by which this side shortens the difference that is mixed.

        Raises:
            RuntimeError: called before `CodesReceived`, or twice.
            ValueError: `clip` is not in (0, 1].
        """
        if self._finished:
            return []
        if self._due not in (FrameType.READY, FrameType.APPLIED) or self._own_clip is not None:
            raise RuntimeError("accept is called once, after CodesReceived")
        if not 0 < clip <= 1:
            raise ValueError(f"a clip factor lies in (0, 1], and {clip} does not")
        self._own_clip = clip
        self._after_chunks.append(pack_message(Ready(clip=clip)))
        return self._agree()

    def refuse(self, code: RefuseCode, reason: str) -> list[Event]:
        """End the exchange and tell the partner why; too late once `Agreed` has happened."""
        reason = printable(reason)
        before_commit = not (self._finished or self._agreed)
        kind = _KIND_OF_REFUSAL.get(code, EdgeKind.REFUSED)
        offence = code in _OFFENCES and self._due is not FrameType.HELLO
        events = self._end(kind, f"refused by this peer: {reason}", offence=offence)
        if before_commit:
            refusal = Refuse(code=code, reason=reason, round=self._hello.round)
            self._before_chunks.append(pack_message(refusal))
        return events

    def data_to_send(self) -> BytesLike | None:
        """Return the next frame to write, or None when there is nothing to send at present.

        Chunks are cut one at a time, so asking only when the stream has room bounds memory.
        """
        if self._before_chunks:
            data = self._before_chunks.popleft()
        elif self._own_codes is not None and self._chunks_sent < self._chunk_count:
            part = self._own_codes[self._chunk_slice(self._chunks_sent)]
            data = pack_chunk(part, round=self._hello.round, index=self._chunks_sent)
            self._chunks_sent += 1
        elif self._after_chunks and self._chunks_sent == self._chunk_count:
            data = self._after_chunks.popleft()
        else:
            return None
        self._bytes_sent += len(data)
        return data

    def _on_frame(self, frame: Frame) -> list[Event]:
        if self._finished:
            return []
        if frame.type is FrameType.REFUSE:
            return self._on_refuse(unpack_message(frame.payload, Refuse))
        if frame.type is not self._due:
            raise ProtocolError(f"{frame.type.name} where {self._due.name} was due")
        if frame.type is FrameType.HELLO:
            return self._on_hello(unpack_message(frame.payload, Hello))
        if frame.type is FrameType.RECORDS:
            records = unpack_message(frame.payload, Records).records
            return [PartnerRecords(records=records), *self._expect_chunk()]
        if frame.type is FrameType.CHUNK:
            return self._on_chunk(frame.payload)
        if frame.type is FrameType.READY:
            return self._on_ready(unpack_message(frame.payload, Ready))
        return self._on_applied()

    def _on_hello(self, theirs: Hello) -> list[Event]:
        refusal = _disagreement(self._hello, theirs, self._partner)
        if refusal is not None:
            return self.refuse(*refusal)
        self._codes = bytearray(self._hello.code_bytes)
        if not self._dialer:
            self._before_chunks.append(self._hello_frame)
        events: list[Event] = [PartnerHello(hello=theirs)]
        if theirs.roster_digest == self._hello.roster_digest:
            return events + self._expect_chunk()
        self._before_chunks.append(pack_message(records_that_fit(self._records)))
        self._due = FrameType.RECORDS
        return events

    def _expect_chunk(self) -> list[Event]:
        if self._chunks_received < self._chunk_count:
            self._due = FrameType.CHUNK
            return []
        self._due = FrameType.READY
        codes, self._codes = self._codes, bytearray()
        return [CodesReceived(codes=codes)]

    def _on_chunk(self, payload: BytesLike) -> list[Event]:
        chunk = unpack_chunk(payload)
        index = self._chunks_received
        place = self._chunk_slice(index)
        if chunk.index != index:
            raise ProtocolError(f"chunk {chunk.index} where chunk {index} was due")
        if len(chunk.data) != place.stop - place.start:
            raise ProtocolError(
                f"chunk {index} has {len(chunk.data)} bytes, expected {place.stop - place.start}"
            )
        if chunk.digest != chunk_digest(chunk.data, round=self._hello.round, index=index):
            return self.refuse(RefuseCode.CORRUPT, f"chunk {index} does not match its digest")
        # Assigning to the bytearray itself would copy the chunk once more.
        memoryview(self._codes)[place] = chunk.data
        self._chunks_received += 1
        return self._expect_chunk()

    def _on_ready(self, ready: Ready) -> list[Event]:
        if self._chunks_sent < self._chunk_count:
            raise ProtocolError("READY from a side that cannot have every chunk yet")
        self._due = FrameType.APPLIED
        self._partner_clip = ready.clip
        return self._agree()

    def _on_applied(self) -> list[Event]:
        if not self._agreed:
            raise ProtocolError("APPLIED before both sides were ready")
        return self._end(EdgeKind.APPLIED, "")

    def _on_refuse(self, refusal: Refuse) -> list[Event]:
        reason = f"refused by partner: {printable(refusal.reason)}"
        if refusal.round != self._hello.round:
            reason += f" (it is at round {refusal.round})"
        return self._end(_KIND_OF_REFUSAL.get(refusal.code, EdgeKind.REFUSED), reason)

    def _agree(self) -> list[Event]:
        """Commit once both sides are ready."""
        if self._own_clip is None or self._partner_clip is None:
            return []
        self._agreed = True
        self._after_chunks.append(pack_frame(FrameType.APPLIED))
        return [Agreed(clip=min(self._own_clip, self._partner_clip))]

    def _end(self, kind: EdgeKind, reason: str, *, offence: bool = False) -> list[Event]:
        if self._finished:
            return []
        self._finished = True
        self._own_codes = None
        if not self._agreed:
            self._before_chunks.clear()
            self._after_chunks.clear()
            self._codes = bytearray()
        elif kind is not EdgeKind.APPLIED:
            kind, reason = EdgeKind.ASYMMETRIC, f"mixed without the partner's Applied: {reason}"
        return [Finished(kind=kind, reason=reason, offence=offence)]

    def _chunk_slice(self, index: int) -> slice:
        start = index * self._hello.chunk_bytes
        return slice(start, min(start + self._hello.chunk_bytes, self._hello.code_bytes))

    def _where(self) -> str:
        due = self._due.name.capitalize()
        if self._due is FrameType.CHUNK:
            due += f" {self._chunks_received + 1} of {self._chunk_count}"
        return f"before the partner's {due}"


def _disagreement(ours: Hello, theirs: Hello, partner: PeerId) -> tuple[RefuseCode, str] | None:
    """Return why two Hellos do not make an exchange, or None when they do."""
    oldest = max(ours.protocol_min, theirs.protocol_min)
    if oldest > min(ours.protocol_max, theirs.protocol_max):
        return RefuseCode.PROTOCOL, (
            f"expected protocol {ours.protocol_min} to {ours.protocol_max}, "
            f"got {theirs.protocol_min} to {theirs.protocol_max}"
        )
    checks: tuple[tuple[RefuseCode, str, str | bytes | int, str | bytes | int], ...] = (
        (RefuseCode.IDENTITY, "peer id", partner, theirs.peer_id),
        (RefuseCode.RUN, "run digest", ours.run_digest, theirs.run_digest),
        (RefuseCode.SCHEMA, "schema digest", ours.schema_digest, theirs.schema_digest),
        (RefuseCode.CODEC, "codec", ours.codec, theirs.codec),
        (RefuseCode.SIZE, "code_bytes", ours.code_bytes, theirs.code_bytes),
        (RefuseCode.SIZE, "chunk_bytes", ours.chunk_bytes, theirs.chunk_bytes),
        (RefuseCode.NOT_PARTNER, "round", ours.round, theirs.round),
    )
    for code, what, expected, got in checks:
        if got != expected:
            return code, f"expected {what} {_shown(expected)}, got {_shown(got)}"
    return None


def _shown(value: str | bytes | int) -> str:
    return value.hex()[:16] if isinstance(value, bytes) else str(value)
