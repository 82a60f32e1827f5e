"""What the partner may say next behind its Hello, and what is known of what it said."""

from __future__ import annotations

from gasloc_p2p.core.arrivals import Arrivals, Item
from gasloc_p2p.core.codecs.layout import Layout
from gasloc_p2p.core.exchange_events import (
    ChunkArrived,
    Event,
    PartnerRecords,
    PartnerScales,
    RepairArrived,
)
from gasloc_p2p.core.outgoing import Outgoing
from gasloc_p2p.core.repairs import Repairs
from gasloc_p2p.core.types import BytesLike
from gasloc_p2p.core.wire import (
    SCALES_BYTES,
    DamagedError,
    Frame,
    FrameType,
    Head,
    ProtocolError,
    Ready,
    Records,
    piece_digest,
    unpack_message,
)


class Incoming:
    """The frames of the partner behind its Hello, each admitted before its data are held.

    Args:
        layout: how the vector is cut.
        repairs: which Checks and Repairs are due.
        outgoing: what this side has said, on which depends what the partner may say.
        key: of the partner's digests; see `wire.piece_key`.
    """

    def __init__(self, layout: Layout, repairs: Repairs, outgoing: Outgoing, key: bytes) -> None:
        self.clip: float | None = None
        """The partner's clip factor, once it is ready."""
        self.late = False
        self.applied = False
        """Whether the partner says that it has mixed."""
        self._layout = layout
        self._repairs = repairs
        self._outgoing = outgoing
        self._key = key
        self._arrivals = Arrivals()
        self._records_due = False
        self._scales = bytearray()
        self._chunks = 0

    @property
    def due(self) -> FrameType:
        """The frame that must come before any later one."""
        if self._records_due:
            return FrameType.RECORDS
        if len(self._scales) < self._layout.scale_bytes:
            return FrameType.SCALES
        if self._chunks < self._layout.chunks:
            return FrameType.CHUNK
        if not self._repairs.partner_checked_all:
            return FrameType.CHECK
        if self.clip is None:
            owes = self._repairs.partner_owes_before_ready
            return FrameType.REPAIR if owes else FrameType.READY
        return FrameType.REPAIR if self._repairs.partner_owes else FrameType.APPLIED

    @property
    def complete(self) -> bool:
        """Whether everything is here and has been dealt with, except Ready and Applied."""
        return (
            self.due in (FrameType.READY, FrameType.APPLIED)
            and not self._repairs.partner_owes
            and self._arrivals.all_settled
        )

    def __str__(self) -> str:
        """Name the frame that is due, for a person."""
        name = self.due.name.capitalize()
        if self.due is FrameType.CHUNK:
            name += f" {self._chunks + 1} of {self._layout.chunks}"
        return name

    def open(self, *, records: bool) -> list[Event]:
        """Begin behind the partner's first Hello, with Records or without."""
        self._records_due = records
        return [] if records else self._scales_taken()

    def rewind(self) -> int:
        """Return how many frames at the beginning are settled, and expect the others again."""
        return self._arrivals.rewind()

    def settle(self, kind: FrameType, index: int) -> Item:
        """Deal with a piece that has arrived; see `Arrivals.settle`."""
        return self._arrivals.settle(kind, index)

    def admit(self, head: Head) -> None:
        """Let a frame come.

        Raises:
            ProtocolError: it is out of place, or has another size than it must have.
        """
        known = self._arrivals.known()
        if known is None:
            self._admit_fresh(head)
        elif head != known.head:
            raise ProtocolError(
                f"{head.type.name} is not the {known.head.type.name} from before the stream broke"
            )

    def _admit_fresh(self, head: Head) -> None:
        due = self.due
        match head.type:
            case FrameType.SCALES if due is FrameType.SCALES:
                start = len(self._scales)
                size = min(SCALES_BYTES, self._layout.scale_bytes - start)
                _expect(head, start // SCALES_BYTES, size)
            case FrameType.CHUNK if due is FrameType.CHUNK:
                _expect(head, self._chunks, self._layout.code_sizes[self._chunks])
            case FrameType.CHECK if self._layout.checked and self.clip is None:
                self._repairs.admit_check(head.index, head.size, sent=self._outgoing.chunks)
            case FrameType.REPAIR if self._layout.checked:
                self._repairs.admit_repair(head.index, head.size)
            case FrameType.READY if due is FrameType.READY:
                if not (self._outgoing.all_chunks_said and self._repairs.partner_has_all):
                    raise ProtocolError("READY from a side that cannot have everything yet")
            case FrameType.APPLIED if due is FrameType.APPLIED and not self.applied:
                if not self._outgoing.ready_said:
                    raise ProtocolError("APPLIED before both sides were ready")
            case FrameType.RECORDS if due is FrameType.RECORDS:
                pass
            case _:
                raise ProtocolError(f"{head.type.name} where {due.name} was due")

    def take(self, frame: Frame) -> list[Event]:
        """Take a frame that was admitted.

        Raises:
            ProtocolError: its data are malformed.
            DamagedError: its data do not match its digest, as far as that is checked here.
        """
        item = self._arrivals.known()
        if item is not None:
            self._arrivals.again()
            return [] if item.settled else [self._piece(item, frame.data)]
        item = Item(head=frame.head)
        events = self._take_fresh(item, frame.data)
        self._arrivals.add(item)
        return events

    def _take_fresh(self, item: Item, data: BytesLike) -> list[Event]:
        head = item.head
        match head.type:
            case FrameType.RECORDS:
                records = unpack_message(data, Records).records
                self._records_due = False
                return [PartnerRecords(records=records), *self._scales_taken()]
            case FrameType.SCALES:
                self._verify(head, data)
                self._scales += data
                return self._scales_taken()
            case FrameType.CHUNK:
                self._chunks += 1
                item.settled = False
                return [self._piece(item, data)]
            case FrameType.CHECK:
                self._verify(head, data)
                self._repairs.heard(head.index, bytes(data))
            case FrameType.REPAIR:
                item.bad = self._repairs.arrived(head.index)
                item.settled = False
                return [self._piece(item, data)]
            case FrameType.READY:
                ready = unpack_message(data, Ready)
                self.clip, self.late = ready.clip, ready.late
            case _:
                self.applied = True
        return []

    def _scales_taken(self) -> list[Event]:
        if len(self._scales) < self._layout.scale_bytes:
            return []
        self._outgoing.start_chunks()
        return [PartnerScales(scales=bytes(self._scales))]

    def _verify(self, head: Head, data: BytesLike) -> None:
        if head.digest != piece_digest(head.type, head.index, data, key=self._key):
            name = f"{head.type.name.lower()} {head.index}"
            raise DamagedError(f"{name} does not match its digest")

    def _piece(self, item: Item, data: BytesLike) -> Event:
        head = item.head
        if head.type is FrameType.CHUNK:
            return ChunkArrived(index=head.index, data=data, digest=head.digest, key=self._key)
        return RepairArrived(
            index=head.index, bad=item.bad, data=data, digest=head.digest, key=self._key
        )


def _expect(head: Head, index: int, size: int) -> None:
    name = head.type.name.lower()
    if head.index != index:
        raise ProtocolError(f"{name} {head.index} where {name} {index} was due")
    if head.size != size:
        raise ProtocolError(f"{name} {index} has {head.size} bytes, expected {size}")
