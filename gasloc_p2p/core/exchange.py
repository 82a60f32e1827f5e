"""One edge of one round as a state machine: bytes in, events and bytes out.

Each side sends Hello, Records when the rosters differ, its scales, its chunks with Checks and
Repairs in between, Ready, and Applied; a Refuse ends the exchange from anywhere (docs/design.md
section 4). Both Ready frames are the commit point. Two generals cannot agree on more, so a side
that passed it mixes whatever happens next, and calls the edge asymmetric when it does not see the
partner's Applied. Each Ready carries a clip factor, and both sides mix with the smaller one, so the
mean of the two stays. A stream that breaks before may be replaced by a fresh one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from gasloc_p2p.core.codecs.layout import Layout
from gasloc_p2p.core.exchange_events import (
    Agreed,
    ChunkArrived,
    Complete,
    Event,
    Finished,
    PartnerHello,
    PartnerRecords,
    PartnerScales,
    RepairArrived,
)
from gasloc_p2p.core.greeting import disagreement
from gasloc_p2p.core.incoming import Incoming
from gasloc_p2p.core.outgoing import Cut, Outgoing, Parts, records_that_fit
from gasloc_p2p.core.repairs import Repairs
from gasloc_p2p.core.types import BytesLike, EdgeKind, PeerId
from gasloc_p2p.core.wire import (
    DamagedError,
    Frame,
    FrameDecoder,
    FrameType,
    Head,
    Hello,
    Memory,
    ProtocolError,
    Ready,
    Refuse,
    RefuseCode,
    pack_frame,
    pack_message,
    piece_key,
    printable,
    read_hello,
    unpack_message,
)

__all__ = [
    "Agreed",
    "ChunkArrived",
    "Complete",
    "Cut",
    "Event",
    "Exchange",
    "Finished",
    "PartnerHello",
    "PartnerRecords",
    "PartnerScales",
    "RepairArrived",
]

_NOTHING: Final = Layout(
    elements=0, chunk_elements=1, block_elements=1, scale_bytes=0, checked=False, code_sizes=()
)
_KIND_OF_REFUSAL: Final = {
    RefuseCode.NOT_PARTNER: EdgeKind.NOT_PARTNER,
    RefuseCode.CORRUPT: EdgeKind.CORRUPT,
    RefuseCode.NON_FINITE: EdgeKind.CORRUPT,
}
_OFFENCES: Final = (RefuseCode.PROTOCOL, RefuseCode.CORRUPT, RefuseCode.NON_FINITE)


class Exchange:
    """One edge of one round, seen from one side.

    Feed what arrives to `receive`, write what `next_to_send` returns, and act on the events that
    the methods return, in their order. After every call there may be more to send. A method that is
    called after the end does nothing, because the end may have come while the caller was busy.
    """

    def __init__(
        self,
        *,
        hello: Hello,
        layout: Layout | None = None,
        scales: BytesLike = b"",
        partner: PeerId,
        dialer: bool,
        records: Sequence[bytes] = (),
        chunk_memory: Memory | None = None,
    ) -> None:
        """Start an exchange.

        Args:
            hello: what this side claims and expects.
            layout: how the vectors of both sides are cut; None for an exchange that says no more
                than Hello or Refuse, and hears no more.
            scales: this side's.
            partner: identity of the other end, proved by the stream.
            dialer: whether this side opened the stream; its Hello goes first.
            records: this side's roster, most useful first; sent as far as one frame holds when
                the partner's roster differs.
            chunk_memory: where a chunk's codes go, for nobody else as long as they are in use;
                None for fresh memory.

        Raises:
            ProtocolError: `hello` breaks a limit, so no partner would read it.
            ValueError: `hello`, `layout` and `scales` contradict each other.
        """
        self._hello_frame = pack_message(hello)
        read_hello(self._hello_frame)
        if layout is not None:
            said = (hello.code_bytes, hello.scale_bytes, hello.scale_bytes)
            if said != (layout.code_bytes, layout.scale_bytes, len(scales)):
                raise ValueError("Hello tells other sizes than the layout or the scales have")
        self._hello = hello
        self._partner = partner
        self._dialer = dialer
        self._records = records
        self._scales = scales
        self._layout = layout
        cut = layout or _NOTHING
        self._repairs = Repairs(cut)
        self._outgoing = Outgoing(cut, self._repairs, _key(hello, hello.peer_id))
        self._incoming = Incoming(cut, self._repairs, self._outgoing, _key(hello, partner))
        self._chunk_memory = chunk_memory
        self._decoder = FrameDecoder(self._admit, chunk_memory)

        self._own_hello = self._hello_frame if dialer else None
        self._refusal: bytes | None = None
        self._met: Hello | None = None
        self._greeted = False
        self._bytes_sent = 0
        self._bytes_received = 0
        self._completed = False
        self._own_clip: float | None = None
        self._late = hello.late
        self._agreed = False
        self._finished = False

    @property
    def finished(self) -> bool:
        """Whether `Finished` has been returned; a Refuse or Applied may still wait to be sent."""
        return self._finished

    @property
    def resumable(self) -> bool:
        """Whether a fresh stream may take the place of a broken one."""
        return self._met is not None and not (self._agreed or self._finished)

    @property
    def bytes_sent(self) -> int:
        """Bytes of all frames that `next_to_send` has returned."""
        return self._bytes_sent

    @property
    def bytes_received(self) -> int:
        """Bytes that were fed before the end."""
        return self._bytes_received

    def receive(self, data: BytesLike) -> list[Event]:
        """Take bytes from the stream; `data` may not change afterwards, events may hold views."""
        if self._finished:
            return []
        events: list[Event] = []
        self._bytes_received += len(data)
        try:
            for frame in self._decoder.feed(data):
                events += self._on_frame(frame)
                if self.finished:
                    break
        except ProtocolError as fault:
            damaged = isinstance(fault, DamagedError)
            code = RefuseCode.CORRUPT if damaged else RefuseCode.PROTOCOL
            # A partner that lost its memory breaks no rule with the Hello of a fresh start.
            events += self._refuse(code, str(fault), offence=self._greeted)
        return events

    def end_of_stream(self) -> list[Event]:
        """The other end closed the stream, or is gone, and there will be no fresh one."""
        return self._end(EdgeKind.LOST, f"the stream ended {self._where()}")

    def expire(self) -> list[Event]:
        """The caller's deadline for this edge has passed."""
        return self._end(EdgeKind.TIMED_OUT, f"the deadline passed {self._where()}")

    def reconnect(self) -> None:
        """Go on upon a fresh stream, with the first frame of each side that the other lacks.

        Chunks and repairs that arrived and were not dealt with come again as events. The exchange
        has to be `resumable`, or RuntimeError is raised.
        """
        if self._finished:
            return
        if not self.resumable:
            raise RuntimeError("an exchange is resumed between PartnerHello and Agreed")
        self._decoder = FrameDecoder(self._admit, self._chunk_memory)
        self._greeted = False
        received = self._incoming.rewind()
        self._hello_frame = pack_message(msgspec.structs.replace(self._hello, received=received))
        self._own_hello = self._hello_frame if self._dialer else None

    def checked(self, index: int, bad: bytes) -> list[Event]:
        """Say that a chunk of the partner's has been taken.

        Args:
            index: of the chunk.
            bad: bitmap of the blocks that were not understood; empty for none, and where chunks are
                not checked.

        Raises:
            RuntimeError: no such chunk waits for it.
            ValueError: `bad` is no such bitmap.
        """
        if self._finished:
            return []
        self._incoming.settle(FrameType.CHUNK, index)
        self._repairs.found(index, bad)
        return self._progress()

    def repaired(self, index: int, ok: bool) -> list[Event]:
        """Say that a repair of a chunk has been taken; RuntimeError if none waits for that.

        Args:
            index: of the chunk.
            ok: whether the blocks that were not repaired are the partner's too.
        """
        if self._finished:
            return []
        item = self._incoming.settle(FrameType.REPAIR, index)
        if not ok:
            if self._repairs.is_everything(index, item.bad):
                reason = f"chunk {index} does not match its digest after a repair of all of it"
                return self.refuse(RefuseCode.CORRUPT, reason)
            self._repairs.mismatched(index)
        return self._progress()

    def accept(self, *, clip: float = 1.0) -> list[Event]:
        """Declare the partner's codes sound; Ready follows everything else that is due.

        Args:
            clip: factor in (0, 1] by which this side shortens the difference that is mixed.

        Raises:
            RuntimeError: called before `Complete`, or twice.
            ValueError: `clip` is not in (0, 1].
        """
        if self._finished:
            return []
        if not self._completed or self._own_clip is not None:
            raise RuntimeError("accept is called once, after Complete")
        if not 0 < clip <= 1:
            raise ValueError(f"a clip factor lies in (0, 1], and {clip} does not")
        self._own_clip = clip
        self._outgoing.close_with(lambda: pack_message(Ready(clip=clip, late=self._late)))
        return self._progress()

    def let_go(self) -> bool:
        """Go on without this edge, and tell the partner; False when Ready has said otherwise."""
        self._late = self._late or not self._outgoing.ready_said
        return self._late

    def refuse(self, code: RefuseCode, reason: str) -> list[Event]:
        """End the exchange and tell the partner why; too late once `Agreed` has happened."""
        return self._refuse(code, reason, offence=code in _OFFENCES and self._met is not None)

    def next_to_send(self) -> Parts | Cut | None:
        """Return the next frame to write, or None when there is nothing to send at present.

        The data of a `Cut` are made by the caller; it counts as sent all the same. Asking only when
        the stream has room bounds memory.
        """
        item: Parts | Cut | None = None
        if self._own_hello is not None:
            item, self._own_hello = (self._own_hello,), None
        elif self._refusal is not None:
            item, self._refusal = (self._refusal,), None
        elif self._greeted and self._layout is not None and (self._agreed or not self._finished):
            item = self._outgoing.next_item()
        if item is not None:
            self._bytes_sent += item.frame_bytes if isinstance(item, Cut) else sum(map(len, item))
        return item

    def _admit(self, head: Head) -> None:
        """Refuse a frame that is out of place before any of its data is held."""
        if head.type is FrameType.REFUSE or (head.type is FrameType.HELLO and not self._greeted):
            return
        if not self._greeted:
            raise ProtocolError(f"{head.type.name} where HELLO was due")
        if self._layout is None:
            raise ProtocolError(f"{head.type.name} where nothing was due")
        self._incoming.admit(head)

    def _on_frame(self, frame: Frame) -> list[Event]:
        if frame.head.type is FrameType.REFUSE:
            return self._on_refuse(unpack_message(frame.data, Refuse))
        if frame.head.type is FrameType.HELLO:
            return self._on_hello(unpack_message(frame.data, Hello))
        return self._incoming.take(frame) + self._progress()

    def _on_hello(self, theirs: Hello) -> list[Event]:
        if self._met is not None:
            return self._on_hello_again(theirs)
        refusal = disagreement(self._hello, theirs, self._partner)
        if refusal is not None:
            return self.refuse(*refusal)
        self._greet(theirs)
        self._met = theirs
        events: list[Event] = [PartnerHello(hello=theirs)]
        if self._layout is None:
            return events
        other_roster = theirs.roster_digest != self._hello.roster_digest
        if other_roster:
            self._outgoing.open_with(pack_message(records_that_fit(self._records)))
        self._outgoing.open_with_scales(self._scales)
        return events + self._incoming.open(records=other_roster) + self._progress()

    def _on_hello_again(self, theirs: Hello) -> list[Event]:
        """Go on where the broken stream left off."""
        if msgspec.structs.replace(theirs, received=0) != self._met:
            raise ProtocolError("another Hello than before the stream broke")
        self._greet(theirs)
        return self._progress()

    def _greet(self, theirs: Hello) -> None:
        self._outgoing.resume(theirs.received)
        self._greeted = True
        if not self._dialer:
            self._own_hello = self._hello_frame

    def _on_refuse(self, refusal: Refuse) -> list[Event]:
        reason = f"refused by partner: {printable(refusal.reason)}"
        if refusal.round != self._hello.round:
            reason += f" (it is at round {refusal.round})"
        kind = _KIND_OF_REFUSAL.get(refusal.code, EdgeKind.REFUSED)
        return self._end(kind, reason, code=refusal.code)

    def _progress(self) -> list[Event]:
        """Tell when everything is here, and commit once both sides are ready."""
        if not self._incoming.complete:
            return []
        events: list[Event] = []
        if not self._completed:
            self._completed = True
            events.append(Complete())
        own, theirs = self._own_clip, self._incoming.clip
        # Nothing is agreed while the stream is broken, so that a fresh one can still save it.
        if own is not None and theirs is not None and self._greeted:
            if not self._agreed:
                self._agreed = True
                self._outgoing.close_with(lambda: pack_frame(FrameType.APPLIED))
                late = self._late or self._incoming.late
                events.append(Agreed(clip=min(own, theirs), late=late))
            if self._incoming.applied:
                events += self._end(EdgeKind.APPLIED, "")
        return events

    def _refuse(self, code: RefuseCode, reason: str, *, offence: bool) -> list[Event]:
        reason = printable(reason)
        before_commit = not (self._finished or self._agreed)
        # Whoever accepted the stream reads nothing before a Hello.
        hello = self._own_hello if self._dialer else None
        kind = _KIND_OF_REFUSAL.get(code, EdgeKind.REFUSED)
        events = self._end(kind, f"refused by this peer: {reason}", offence=offence, code=code)
        if before_commit:
            refusal = Refuse(code=code, reason=reason, round=self._hello.round)
            self._own_hello, self._refusal = hello, pack_message(refusal)
        return events

    def _end(
        self, kind: EdgeKind, reason: str, *, offence: bool = False, code: RefuseCode | None = None
    ) -> list[Event]:
        if self._finished:
            return []
        self._finished = True
        self._decoder = FrameDecoder()
        if not self._agreed:
            self._own_hello = None
        elif kind is not EdgeKind.APPLIED:
            kind, reason = EdgeKind.ASYMMETRIC, f"mixed without the partner's Applied: {reason}"
        return [Finished(kind=kind, reason=reason, offence=offence, code=code)]

    def _where(self) -> str:
        if self._greeted:
            return f"before the partner's {self._incoming}"
        return "before the partner's Hello" + (" on a fresh stream" if self._met else "")


def _key(hello: Hello, sender: PeerId) -> bytes:
    return piece_key(run_digest=hello.run_digest, round=hello.round, sender=sender)
