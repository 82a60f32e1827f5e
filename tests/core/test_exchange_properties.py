"""Two exchanges against each other under arbitrary splits, interleavings, cuts and bit flips."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gasloc_p2p.core.exchange import (
    Agreed,
    CodesReceived,
    Event,
    Exchange,
    Finished,
    PartnerHello,
    PartnerRecords,
)
from gasloc_p2p.core.types import EdgeKind
from gasloc_p2p.core.wire import (
    FrameDecoder,
    FrameType,
    Hello,
    Ready,
    Records,
    Refuse,
    RefuseCode,
    pack_chunk,
    pack_frame,
    pack_message,
)

A, B = "12D3KooWa", "12D3KooWb"
CHUNK_BYTES = 4
RECORDS_A, RECORDS_B = (b"record a",), (b"record b", b"record c")
MIXED = (EdgeKind.APPLIED, EdgeKind.ASYMMETRIC)


def hello(peer_id: str, *, code_bytes: int, roster_digest: bytes) -> Hello:
    return Hello(
        protocol_min=1,
        protocol_max=1,
        peer_id=peer_id,
        run_digest=b"run",
        schema_digest=b"schema",
        round=3,
        roster_digest=roster_digest,
        codec="none",
        code_bytes=code_bytes,
        chunk_bytes=CHUNK_BYTES,
        scales=b"",
    )


@dataclass(kw_only=True)
class Side:
    """One exchange, its caller's pending work, and the bytes on their way to it."""

    exchange: Exchange
    own_codes: bytes
    clip: float = 1.0
    cut_at: int | None = None
    flip_bit: int | None = None
    inbox: bytearray = field(default_factory=bytearray)
    arrived: int = 0
    pending: list[str] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    after_end: bytearray = field(default_factory=bytearray)

    def take(self, events: list[Event]) -> None:
        self.events += events
        self.pending += ["encode" for event in events if isinstance(event, PartnerHello)]
        self.pending += ["decode" for event in events if isinstance(event, CodesReceived)]

    def work(self) -> None:
        """Do one thing that the caller has to do."""
        if not self.pending:
            return
        if self.pending.pop(0) == "encode":
            self.exchange.send_codes(self.own_codes)
        else:
            self.take(self.exchange.accept(clip=self.clip))

    def write_to(self, other: Side) -> None:
        """Send one piece; the way to `other` may cut it or flip a bit in it."""
        piece = self.exchange.data_to_send()
        if piece is None:
            return
        if self.exchange.finished:
            self.after_end += piece
        data = bytearray(piece)
        start = self.exchange.bytes_sent - len(data)
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
        (last,) = [event for event in self.events if isinstance(event, Finished)]
        assert self.events[-1] is last
        return last

    @property
    def agreed(self) -> list[Agreed]:
        return [event for event in self.events if isinstance(event, Agreed)]


def sides(code_bytes: int, *, same_roster: bool) -> tuple[Side, Side]:
    codes_a = bytes(i % 251 for i in range(code_bytes))
    codes_b = bytes((7 * i + 1) % 251 for i in range(code_bytes))
    hello_a = hello(A, code_bytes=code_bytes, roster_digest=b"x")
    hello_b = hello(B, code_bytes=code_bytes, roster_digest=b"x" if same_roster else b"y")
    a = Exchange(hello=hello_a, partner=B, dialer=True, records=RECORDS_A)
    b = Exchange(hello=hello_b, partner=A, dialer=False, records=RECORDS_B)
    return (
        Side(exchange=a, own_codes=codes_a, clip=0.5),
        Side(exchange=b, own_codes=codes_b, clip=0.25),
    )


def step(a: Side, b: Side, action: int, amount: int) -> None:
    side, other = ((a, b), (b, a))[action % 2]
    match action // 2:
        case 0:
            side.write_to(other)
        case 1:
            side.read(amount)
        case _:
            side.work()


def settle(a: Side, b: Side) -> None:
    """Go on fairly until nothing moves, then end both streams."""
    while True:
        before = (a.exchange.bytes_sent, b.exchange.bytes_sent, len(a.events), len(b.events))
        # What the last work of a pass makes ready to send is only sent in the next one.
        had_work = bool(a.pending or b.pending)
        for action in range(6):
            step(a, b, action, 2**20)
        after = (a.exchange.bytes_sent, b.exchange.bytes_sent, len(a.events), len(b.events))
        if before == after and not had_work:
            break
    a.take(a.exchange.end_of_stream())
    b.take(b.exchange.end_of_stream())


def check(a: Side, b: Side) -> None:
    """What holds for every pair of outcomes, whatever happened on the way."""
    for side, other in ((a, b), (b, a)):
        kind = side.finished.kind
        assert bool(side.agreed) == (kind in MIXED)
        assert side.agreed == ([Agreed(clip=0.25)] if kind in MIXED else []) or other.flip_bit
        codes = [bytes(e.codes) for e in side.events if isinstance(e, CodesReceived)]
        assert codes == [other.own_codes] or not (codes or side.agreed)
        assert (side.finished.reason == "") == (kind is EdgeKind.APPLIED)
        if kind is EdgeKind.APPLIED:
            assert other.finished.kind in MIXED
        if not side.agreed:
            assert other.finished.kind is not EdgeKind.APPLIED
        late = [f.type for f in FrameDecoder(chunk_bytes=CHUNK_BYTES).feed(side.after_end)]
        allowed = [FrameType.READY, FrameType.APPLIED] if side.agreed else [FrameType.REFUSE]
        assert late == allowed[len(allowed) - len(late) :]


script = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 60)), max_size=120)
sizes = st.integers(0, 19)


@settings(deadline=None)
@given(sizes, st.booleans(), script)
@example(0, True, [])
@example(0, False, [])
@example(0, True, [(0, 1), (3, 45)])
def test_without_faults_both_sides_apply(
    code_bytes: int, same_roster: bool, actions: Sequence[tuple[int, int]]
) -> None:
    a, b = sides(code_bytes, same_roster=same_roster)
    for action, amount in actions:
        step(a, b, action, amount)
    settle(a, b)
    check(a, b)
    for side, records in ((a, RECORDS_B), (b, RECORDS_A)):
        swapped = [] if same_roster else [PartnerRecords(records=records)]
        assert [event for event in side.events if isinstance(event, PartnerRecords)] == swapped
        order = [PartnerHello, *[PartnerRecords] * len(swapped), CodesReceived, Agreed, Finished]
        assert [type(event) for event in side.events] == order
    assert a.finished.kind is b.finished.kind is EdgeKind.APPLIED
    assert a.exchange.bytes_sent == b.exchange.bytes_received
    assert b.exchange.bytes_sent == a.exchange.bytes_received


@settings(max_examples=200, deadline=None)
@given(
    sizes, st.booleans(), script, st.none() | st.integers(0, 400), st.none() | st.integers(0, 400)
)
def test_cuts_leave_no_more_than_two_generals(
    code_bytes: int,
    same_roster: bool,
    actions: Sequence[tuple[int, int]],
    cut_a: int | None,
    cut_b: int | None,
) -> None:
    a, b = sides(code_bytes, same_roster=same_roster)
    a.cut_at, b.cut_at = cut_a, cut_b
    for action, amount in actions:
        step(a, b, action, amount)
    settle(a, b)
    check(a, b)


def test_every_single_cut_of_one_exchange() -> None:
    kinds = set()
    whole = sides(9, same_roster=False)
    settle(*whole)
    for cut_a in (True, False):
        for at in range(whole[0 if cut_a else 1].exchange.bytes_sent + 1):
            a, b = sides(9, same_roster=False)
            (a if cut_a else b).cut_at = at
            settle(a, b)
            check(a, b)
            kinds.add((a.finished.kind, b.finished.kind))
    assert kinds == {
        (EdgeKind.LOST, EdgeKind.LOST),
        (EdgeKind.LOST, EdgeKind.ASYMMETRIC),
        (EdgeKind.ASYMMETRIC, EdgeKind.LOST),
        (EdgeKind.APPLIED, EdgeKind.ASYMMETRIC),
        (EdgeKind.ASYMMETRIC, EdgeKind.APPLIED),
        (EdgeKind.APPLIED, EdgeKind.APPLIED),
    }


# How a side stops: its own kind, and the partner's when neither side was agreed.
STOPS = {
    "end": (EdgeKind.LOST, EdgeKind.LOST),
    "expire": (EdgeKind.TIMED_OUT, EdgeKind.LOST),
    RefuseCode.LEAVING: (EdgeKind.REFUSED, EdgeKind.REFUSED),
    RefuseCode.RUN: (EdgeKind.REFUSED, EdgeKind.REFUSED),
    RefuseCode.NOT_PARTNER: (EdgeKind.NOT_PARTNER, EdgeKind.NOT_PARTNER),
    RefuseCode.NON_FINITE: (EdgeKind.CORRUPT, EdgeKind.CORRUPT),
    RefuseCode.CORRUPT: (EdgeKind.CORRUPT, EdgeKind.CORRUPT),
}


def stop(side: Side, how: str) -> None:
    if how == "end":
        side.take(side.exchange.end_of_stream())
    elif how == "expire":
        side.take(side.exchange.expire())
    else:
        side.take(side.exchange.refuse(RefuseCode(how), "stopped"))


@pytest.mark.parametrize("how", STOPS)
@settings(max_examples=60, deadline=None)
@given(sizes, st.booleans(), script, st.integers(0, 120), st.booleans())
def test_stopping_at_any_moment_leaves_no_more_than_two_generals(
    how: str,
    code_bytes: int,
    same_roster: bool,
    actions: Sequence[tuple[int, int]],
    moment: int,
    on_a: bool,
) -> None:
    a, b = sides(code_bytes, same_roster=same_roster)
    stopper, other = (a, b) if on_a else (b, a)
    # A fair tail, one frame at a time, reaches the moments around the commit point.
    fair = [(action, 2**20) for _ in range(20) for action in range(6)]
    for action, amount in [*actions, *fair][:moment]:
        step(a, b, action, amount)
    was_finished = stopper.exchange.finished
    stop(stopper, how)
    assert stopper.exchange.finished
    settle(a, b)
    check(a, b)
    if not was_finished:
        kind, told = STOPS[how]
        assert stopper.finished.kind is (EdgeKind.ASYMMETRIC if stopper.agreed else kind)
        if not (a.agreed or b.agreed):
            assert other.finished.kind is told
            if isinstance(how, RefuseCode):
                assert stopper.finished.reason == "refused by this peer: stopped"
                assert other.finished.reason == "refused by partner: stopped"


@settings(max_examples=200, deadline=None)
@given(sizes, st.booleans(), script, st.integers(0, 400 * 8), st.booleans())
def test_a_flipped_bit_is_never_mixed(
    code_bytes: int, same_roster: bool, actions: Sequence[tuple[int, int]], bit: int, on_a: bool
) -> None:
    a, b = sides(code_bytes, same_roster=same_roster)
    (a if on_a else b).flip_bit = bit
    for action, amount in actions:
        step(a, b, action, amount)
    settle(a, b)
    check(a, b)


def test_every_flipped_bit_in_the_chunks_is_detected() -> None:
    a, b = sides(10, same_roster=True)
    hello_bytes = len(a.exchange.data_to_send() or b"")
    chunk_bytes = 3 * (5 + 24) + 10
    for bit in range(hello_bytes * 8, (hello_bytes + chunk_bytes) * 8):
        a, b = sides(10, same_roster=True)
        a.flip_bit = bit
        settle(a, b)
        assert b.finished.kind in (EdgeKind.CORRUPT, EdgeKind.REFUSED, EdgeKind.LOST)
        assert a.finished.kind not in MIXED
        place = bit // 8 - hello_bytes
        if place % (5 + 24 + CHUNK_BYTES) >= 5 + 8:
            assert a.finished.kind is b.finished.kind is EdgeKind.CORRUPT


hostile_pieces = st.one_of(
    st.binary(max_size=40),
    st.sampled_from(
        [
            pack_message(hello(peer, code_bytes=10, roster_digest=digest))
            for peer in (A, B)
            for digest in (b"x", b"y")
        ]
    ),
    st.sampled_from(
        [
            pack_message(Records(records=(b"a record",))),
            pack_message(Refuse(code=RefuseCode.CORRUPT, reason="no", round=3)),
            pack_frame(FrameType.READY),
            pack_message(Ready(clip=0.5)),
            pack_frame(FrameType.APPLIED),
        ]
    ),
    st.builds(
        lambda size, index: pack_chunk(bytes(size), round=3, index=index),
        st.integers(0, CHUNK_BYTES),
        st.integers(0, 3),
    ),
)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 4), st.lists(hostile_pieces, max_size=12), st.booleans())
@example(0, [b"\x01\xff\xff\x00\x00" + b"\xff" * 99], True)
def test_random_bytes_end_in_finished(steps: int, pieces: list[bytes], dialer: bool) -> None:
    a, b = sides(10, same_roster=True)
    side = a if dialer else b
    for _ in range(steps):
        for action in range(6):
            step(a, b, action, 30)
    for piece in pieces:
        side.take(side.exchange.receive(piece))
    side.take(side.exchange.end_of_stream())
    assert side.finished.reason or side.finished.kind is EdgeKind.APPLIED


@settings(deadline=None)
@given(sizes, st.booleans(), st.lists(st.integers(1, 40), min_size=1, max_size=60))
def test_events_do_not_depend_on_splits(
    code_bytes: int, same_roster: bool, lengths: Sequence[int]
) -> None:
    def play(lengths: Sequence[int]) -> list[Event]:
        a, b = sides(code_bytes, same_roster=same_roster)
        for _ in range(20):
            for side, other in ((a, b), (b, a)):
                side.write_to(other)
                for length in lengths:
                    other.read(length)
                other.read(2**20)
                other.work()
        return a.events

    assert play(lengths) == play([2**20])


@pytest.mark.parametrize("code_bytes", [2**27, 2**26 - 1, 2**62])
def test_an_announced_size_that_differs_allocates_nothing(code_bytes: int) -> None:
    ours = hello(A, code_bytes=2**26, roster_digest=b"x")
    theirs = hello(B, code_bytes=2**26, roster_digest=b"x")
    wrong = hello(B, code_bytes=code_bytes, roster_digest=b"x")
    tracemalloc.start()
    try:
        refusing = Exchange(hello=ours, partner=B, dialer=False)
        refusing.receive(pack_message(wrong))
        refusing_peak = tracemalloc.get_traced_memory()[1]
        Exchange(hello=ours, partner=B, dialer=False).receive(pack_message(theirs))
        agreeing_peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert refusing.finished
    assert refusing_peak < 2**20
    assert agreeing_peak >= 2**26
