"""Two exchanges, their callers, and the streams between them, for tests."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from gasloc_p2p.core.codecs.layout import Layout, cut
from gasloc_p2p.core.exchange import (
    Agreed,
    ChunkArrived,
    Complete,
    Cut,
    Event,
    Exchange,
    Finished,
    RepairArrived,
)
from gasloc_p2p.core.types import BytesLike, EdgeKind
from gasloc_p2p.core.wire import (
    Frame,
    FrameDecoder,
    FrameType,
    Hello,
    Refuse,
    RefuseCode,
    piece_key,
    unpack_message,
)

A, B = "12D3KooWa", "12D3KooWb"
ROUND = 7
RECORDS = {A: (b"record a",), B: (b"record b", b"record c")}
MIXED = (EdgeKind.APPLIED, EdgeKind.ASYMMETRIC)
SKIPPED = (FrameType.HELLO, FrameType.REPAIR)
"""What may come before the last words."""


def layout(elements: int, *, checked: bool, scale_bytes: int = 0) -> Layout:
    """Chunks of 4 elements, each one byte; blocks of 2 if they are checked."""
    return cut(
        elements,
        chunk_elements=4,
        block_elements=2 if checked else 1,
        size=lambda n: n,
        scale_bytes=scale_bytes,
        checked=checked,
    )


PLAIN = layout(10, checked=False)
CHECKED = layout(10, checked=True, scale_bytes=3)


def hello(peer_id: str, cut: Layout = PLAIN, /, **changes: Any) -> Hello:
    base = Hello(
        protocol_min=1,
        protocol_max=1,
        peer_id=peer_id,
        run_digest=b"r" * 32,
        schema_digest=b"s" * 32,
        round=ROUND,
        roster_digest=b"o" * 32,
        codec="bf16",
        code_bytes=cut.code_bytes,
        chunk_bytes=4,
        scale_bytes=cut.scale_bytes,
    )
    return msgspec.structs.replace(base, **changes)


def key(sender: str, round: int = ROUND, run_digest: bytes = b"r" * 32) -> bytes:
    return piece_key(run_digest=run_digest, round=round, sender=sender)


def scales_of(sender: str, cut: Layout) -> bytes:
    return bytes((len(sender) + i + ord(sender[-1])) % 256 for i in range(cut.scale_bytes))


def data_of(sender: str, item: Cut) -> bytes:
    """Return what `sender` puts into a chunk or repair; another one for each."""
    seed = sum(sender.encode()) + 17 * item.index + 5 * sum(item.bad) + 3 * item.kind
    return bytes((seed + 7 * i) % 256 for i in range(item.size))


def made(sender: str, item: tuple[BytesLike, ...] | Cut) -> bytes:
    return b"".join(item.frame(data_of(sender, item)) if isinstance(item, Cut) else item)


def sent(exchange: Exchange, sender: str = A) -> bytes:
    """Return all that an exchange has to say at present."""
    said = bytearray()
    while (item := exchange.next_to_send()) is not None:
        said += made(sender, item)
    return bytes(said)


def frames(data: BytesLike) -> list[Frame]:
    return list(FrameDecoder().feed(data))


def types(data: BytesLike) -> list[FrameType]:
    return [frame.head.type for frame in frames(data)]


def refusal(data: bytes) -> Refuse:
    (frame,) = frames(data)
    assert frame.head.type is FrameType.REFUSE
    return unpack_message(frame.data, Refuse)


def end(events: list[Event]) -> Finished:
    (last,) = [event for event in events if isinstance(event, Finished)]
    assert events[-1] is last
    return last


def no_bad_blocks(index: int) -> bytes:
    return b""


def always(index: int) -> bool:
    return True


@dataclass(kw_only=True)
class Side:
    """One exchange, its caller's pending work, and the bytes on their way to it."""

    name: str
    cut: Layout
    exchange: Exchange
    clip: float
    finding: Callable[[int], bytes] = no_bad_blocks
    matches: Callable[[int], bool] = always
    cut_at: int | None = None
    flip_bit: int | None = None
    inbox: bytearray = field(default_factory=bytearray)
    pending: deque[ChunkArrived | RepairArrived | Complete] = field(default_factory=deque)
    events: list[Event] = field(default_factory=list)
    after_end: bytearray = field(default_factory=bytearray)
    said: list[bytes] = field(default_factory=list)
    taken: dict[int, bytes] = field(default_factory=dict)
    repaired: dict[int, bytes] = field(default_factory=dict)
    given: dict[int, bytes] = field(default_factory=dict)

    @property
    def other(self) -> str:
        return B if self.name == A else A

    def take(self, events: list[Event]) -> None:
        self.events += events
        work = ChunkArrived | RepairArrived | Complete
        self.pending += [event for event in events if isinstance(event, work)]

    def work(self) -> None:
        """Do one thing that the caller has to do."""
        if not self.pending:
            return
        event = self.pending.popleft()
        if isinstance(event, Complete):
            self.take(self.exchange.accept(clip=self.clip))
        elif not event.intact():
            self.take(self.exchange.refuse(RefuseCode.CORRUPT, "damaged"))
        elif isinstance(event, ChunkArrived):
            self.taken[event.index] = bytes(event.data)
            bad = self.finding(event.index) if self.cut.checked else b""
            self.take(self.exchange.checked(event.index, bad))
        else:
            self._repair(event)

    def _repair(self, event: RepairArrived) -> None:
        whole = event.bad == self.cut.everything(event.index)
        ok = whole or self.matches(event.index)
        if ok:
            self.repaired[event.index] = event.bad
        self.take(self.exchange.repaired(event.index, ok))

    def write_to(self, other: Side) -> None:
        """Send one frame; the way to `other` may cut it or flip a bit in it."""
        start = self.exchange.bytes_sent
        item = self.exchange.next_to_send()
        if item is None:
            return
        if isinstance(item, Cut) and item.kind is FrameType.REPAIR:
            self.given[item.index] = item.bad
        data = bytearray(made(self.name, item))
        assert self.exchange.bytes_sent == start + len(data)
        self.said.append(bytes(data))
        if self.exchange.finished:
            self.after_end += data
        if self.flip_bit is not None and 0 <= (at := self.flip_bit // 8 - start) < len(data):
            data[at] ^= 1 << (self.flip_bit % 8)
        if self.cut_at is not None:
            del data[max(0, self.cut_at - start) :]
        other.inbox += data

    def read(self, count: int) -> None:
        data = bytes(self.inbox[:count])
        del self.inbox[:count]
        self.take(self.exchange.receive(data))

    @property
    def finished(self) -> Finished:
        return end(self.events)

    @property
    def agreed(self) -> list[Agreed]:
        return [event for event in self.events if isinstance(event, Agreed)]


def sides(cut: Layout, *, same_roster: bool = True) -> tuple[Side, Side]:
    def side(name: str, other: str, clip: float) -> Side:
        roster = b"x" if same_roster else name.encode()
        exchange = Exchange(
            hello=hello(name, cut, roster_digest=roster),
            layout=cut,
            scales=scales_of(name, cut),
            partner=other,
            dialer=name == A,
            records=RECORDS[name],
        )
        return Side(name=name, cut=cut, exchange=exchange, clip=clip)

    return side(A, B, 0.5), side(B, A, 0.25)


def step(a: Side, b: Side, action: int, amount: int) -> None:
    side, other = ((a, b), (b, a))[action % 2]
    match action // 2:
        case 0:
            side.write_to(other)
        case 1:
            side.read(amount)
        case _:
            side.work()


def run(a: Side, b: Side) -> None:
    """Go on fairly until nothing moves."""
    while True:
        before = (a.exchange.bytes_sent, b.exchange.bytes_sent, len(a.events), len(b.events))
        # What the last work of a pass makes ready to send is only sent in the next one.
        had_work = bool(a.pending or b.pending)
        for action in range(6):
            step(a, b, action, 2**20)
        after = (a.exchange.bytes_sent, b.exchange.bytes_sent, len(a.events), len(b.events))
        if before == after and not had_work:
            return


def settle(a: Side, b: Side) -> None:
    """Go on fairly until nothing moves, then end both streams."""
    run(a, b)
    a.take(a.exchange.end_of_stream())
    b.take(b.exchange.end_of_stream())


def check(a: Side, b: Side) -> None:
    """What holds for every pair of outcomes, whatever happened on the way."""
    for side, other in ((a, b), (b, a)):
        kind = side.finished.kind
        assert bool(side.agreed) == (kind in MIXED)
        assert side.agreed == ([Agreed(clip=0.25)] if kind in MIXED else []) or other.flip_bit
        assert (side.finished.reason == "") == (kind is EdgeKind.APPLIED)
        if side.agreed:
            assert side.taken == {
                index: data_of(other.name, chunk(index, size))
                for index, size in enumerate(side.cut.code_sizes)
            }
            assert {**other.given, **side.repaired} == other.given
        if kind is EdgeKind.APPLIED:
            assert other.finished.kind in MIXED
            assert side.repaired == side.given == other.repaired == other.given
        if not side.agreed:
            assert other.finished.kind is not EdgeKind.APPLIED
        late = [kind for kind in types(side.after_end) if kind not in SKIPPED]
        allowed = [FrameType.READY, FrameType.APPLIED] if side.agreed else [FrameType.REFUSE]
        assert late == allowed[len(allowed) - len(late) :]


def chunk(index: int, size: int) -> Cut:
    return Cut(kind=FrameType.CHUNK, index=index, size=size, key=b"")
