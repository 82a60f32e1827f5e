"""Two exchanges against each other under arbitrary splits, interleavings, cuts and bit flips."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gasloc_p2p.core.codecs.layout import Layout
from gasloc_p2p.core.exchange import (
    Agreed,
    ChunkArrived,
    Complete,
    Event,
    Exchange,
    Finished,
    PartnerHello,
    PartnerRecords,
    PartnerScales,
)
from gasloc_p2p.core.types import EdgeKind
from gasloc_p2p.core.wire import (
    PIECES,
    FrameType,
    Head,
    Ready,
    Records,
    Refuse,
    RefuseCode,
    pack_frame,
    pack_head,
    pack_message,
    pack_piece,
)
from tests.core.two_sides import (
    CHECKED,
    MIXED,
    PLAIN,
    RECORDS,
    A,
    B,
    Side,
    check,
    hello,
    key,
    layout,
    run,
    settle,
    sides,
    step,
)

script = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 60)), max_size=120)
layouts = st.builds(
    lambda elements, checked, scale_bytes: layout(
        elements, checked=checked, scale_bytes=scale_bytes
    ),
    st.integers(0, 15),
    st.booleans(),
    st.sampled_from([0, 3]),
)


@settings(deadline=None)
@given(layouts, st.booleans(), script)
@example(layout(0, checked=False), True, [])
@example(layout(0, checked=True), False, [])
@example(layout(0, checked=False), True, [(0, 1), (3, 45)])
def test_without_faults_both_sides_apply(
    cut: Layout, same_roster: bool, actions: Sequence[tuple[int, int]]
) -> None:
    a, b = sides(cut, same_roster=same_roster)
    for action, amount in actions:
        step(a, b, action, amount)
    settle(a, b)
    check(a, b)
    for side in (a, b):
        swapped = [] if same_roster else [PartnerRecords(records=RECORDS[side.other])]
        assert [event for event in side.events if isinstance(event, PartnerRecords)] == swapped
        order = [PartnerHello, *[PartnerRecords] * len(swapped), PartnerScales]
        order += [ChunkArrived] * cut.chunks + [Complete, Agreed, Finished]
        assert [type(event) for event in side.events] == order
    assert a.finished.kind is b.finished.kind is EdgeKind.APPLIED
    assert a.exchange.bytes_sent == b.exchange.bytes_received
    assert b.exchange.bytes_sent == a.exchange.bytes_received


@settings(max_examples=200, deadline=None)
@given(layouts, st.booleans(), script, *[st.none() | st.integers(0, 500)] * 2)
def test_cuts_leave_no_more_than_two_generals(
    cut: Layout,
    same_roster: bool,
    actions: Sequence[tuple[int, int]],
    cut_a: int | None,
    cut_b: int | None,
) -> None:
    a, b = sides(cut, same_roster=same_roster)
    a.cut_at, b.cut_at = cut_a, cut_b
    for action, amount in actions:
        step(a, b, action, amount)
    settle(a, b)
    check(a, b)


@pytest.mark.parametrize("cut", [CHECKED, PLAIN])
def test_every_single_cut_of_one_exchange(cut: Layout) -> None:
    kinds = set()
    whole = sides(cut, same_roster=False)
    settle(*whole)
    for cut_a in (True, False):
        for at in range(whole[0 if cut_a else 1].exchange.bytes_sent + 1):
            a, b = sides(cut, same_roster=False)
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
@given(layouts, st.booleans(), script, st.integers(0, 150), st.booleans())
def test_stopping_at_any_moment_leaves_no_more_than_two_generals(
    how: str,
    cut: Layout,
    same_roster: bool,
    actions: Sequence[tuple[int, int]],
    moment: int,
    on_a: bool,
) -> None:
    a, b = sides(cut, same_roster=same_roster)
    stopper, other = (a, b) if on_a else (b, a)
    # A fair tail, one frame at a time, reaches the moments around the commit point.
    fair = [(action, 2**20) for _ in range(25) for action in range(6)]
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
@given(layouts, st.booleans(), script, st.integers(0, 500 * 8), st.booleans())
def test_a_flipped_bit_is_never_mixed(
    cut: Layout, same_roster: bool, actions: Sequence[tuple[int, int]], bit: int, on_a: bool
) -> None:
    a, b = sides(cut, same_roster=same_roster)
    a.finding = b.finding = lambda index: b"\x01"
    (a if on_a else b).flip_bit = bit
    for action, amount in actions:
        step(a, b, action, amount)
    settle(a, b)
    check(a, b)


def test_a_flipped_bit_in_every_byte_of_the_pieces_is_detected() -> None:
    def flipped(bit: int | None) -> tuple[Side, Side]:
        a, b = sides(CHECKED)
        a.finding = b.finding = lambda index: b"\x01" if index == 0 else b""
        a.flip_bit = bit
        settle(a, b)
        return a, b

    whole, _ = flipped(None)
    place = 0
    corrupt = [EdgeKind.CORRUPT]
    for frame in whole.said:
        piece = frame[0] in PIECES
        for byte in range(len(frame) if piece else 0):
            # Behind type, length and index stand the digest and what it protects.
            allowed = corrupt if byte >= 13 else [*corrupt, EdgeKind.REFUSED, EdgeKind.LOST]
            a, b = flipped(8 * (place + byte) + byte % 8)
            assert b.finished.kind in allowed
            assert a.finished.kind not in MIXED
        place += len(frame)
    assert [frame[0] for frame in whole.said if frame[0] in PIECES].count(FrameType.REPAIR) == 1


def hostile_piece(kind: FrameType, index: int, data: bytes) -> bytes:
    return b"".join(pack_piece(kind, index, data, key=key(B)))


piece_types = st.sampled_from(
    [FrameType.SCALES, FrameType.CHUNK, FrameType.CHECK, FrameType.REPAIR]
)
hostile_pieces = st.one_of(
    st.binary(max_size=40),
    st.sampled_from(
        [
            pack_message(hello(peer, cut, roster_digest=digest))
            for peer in (A, B)
            for cut in (CHECKED, PLAIN)
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
    st.builds(hostile_piece, piece_types, st.integers(0, 3), st.binary(max_size=4)),
    st.builds(
        lambda kind, index, size: pack_head(
            Head(type=kind, size=size, index=index, digest=bytes(16))
        ),
        piece_types,
        st.integers(0, 2**64 - 1),
        st.sampled_from([0, 1, 2**16, 2**24, 2**32 - 25]),
    ),
)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([CHECKED, PLAIN]),
    st.integers(0, 12),
    st.lists(hostile_pieces, max_size=12),
    st.booleans(),
)
@example(PLAIN, 0, [b"\x01\xff\xff\x00\x00" + b"\xff" * 99], True)
def test_random_bytes_end_in_finished(
    cut: Layout, steps: int, pieces: list[bytes], dialer: bool
) -> None:
    a, b = sides(cut)
    a.finding = b.finding = lambda index: b"\x01"
    side = a if dialer else b
    for _ in range(steps):
        for action in range(6):
            step(a, b, action, 30)
    for data in pieces:
        side.take(side.exchange.receive(data))
        side.work()
    side.take(side.exchange.end_of_stream())
    assert side.finished.reason or side.finished.kind is EdgeKind.APPLIED


@settings(deadline=None)
@given(layouts, st.booleans(), st.lists(st.integers(1, 40), min_size=1, max_size=60))
def test_events_do_not_depend_on_splits(
    cut: Layout, same_roster: bool, lengths: Sequence[int]
) -> None:
    def play(lengths: Sequence[int]) -> list[Event]:
        a, b = sides(cut, same_roster=same_roster)
        a.finding = b.finding = lambda index: b"\x01"
        for _ in range(30):
            for side, other in ((a, b), (b, a)):
                side.write_to(other)
                for length in lengths:
                    other.read(length)
                other.read(2**20)
                other.work()
        return a.events

    assert play(lengths) == play([2**20])


MUTATIONS: dict[str, Callable[[bytes, bytes], bytes]] = {
    "replay": lambda frame, following: frame + frame + following,
    "swap": lambda frame, following: following + frame,
    "truncate": lambda frame, following: frame[:-1] + following,
    "drop": lambda frame, following: following,
}


@pytest.mark.parametrize("mutation", MUTATIONS)
@pytest.mark.parametrize("cut", [CHECKED, PLAIN])
def test_a_mutated_frame_is_refused_or_lost(cut: Layout, mutation: str) -> None:
    """Repeat, exchange, shorten or leave out every single frame of a side."""

    def play(at: int | None) -> tuple[Side, Side]:
        a, b = sides(cut)
        a.finding = b.finding = lambda index: b"\x01" if index == 0 else b""
        held = b""
        for _ in range(30):
            known = len(a.said)
            a.write_to(b)
            if at is not None and known == at < len(a.said):
                held, b.inbox[:] = bytes(b.inbox), b""
            elif held and len(a.said) > known:
                b.inbox[:], held = MUTATIONS[mutation](held, bytes(b.inbox)), b""
            for _ in range(2):
                b.read(2**20)
                b.work()
                b.write_to(a)
                a.read(2**20)
                a.work()
        a.take(a.exchange.end_of_stream())
        b.take(b.exchange.end_of_stream())
        check(a, b)
        return a, b

    whole, _ = play(None)
    assert whole.finished.kind is EdgeKind.APPLIED
    # The partner waits for Hello, Scales and Ready, so nothing follows those without an answer.
    for at in range(1, len(whole.said) - 2):
        a, b = play(at)
        two = {FrameType(frame[0]) for frame in a.said[at : at + 2]}
        # Checks and repairs of different chunks may come in any order, chunks may not.
        free = two <= {FrameType.CHUNK, FrameType.CHECK, FrameType.REPAIR}
        if mutation == "swap" and free and two != {FrameType.CHUNK}:
            continue
        assert b.finished.kind not in MIXED


@pytest.mark.parametrize("code_bytes", [2**27, 2**26 - 1, 2**62])
def test_an_announced_size_allocates_nothing(code_bytes: int) -> None:
    cut = Layout(
        elements=2**26,
        chunk_elements=2**24,
        block_elements=1,
        scale_bytes=2**26,
        checked=False,
        code_sizes=(2**24,) * 4,
    )
    scales = bytes(2**26)
    ours, theirs = (hello(peer, cut, chunk_bytes=2**24) for peer in (A, B))
    wrong = hello(B, cut, chunk_bytes=2**24, code_bytes=code_bytes)
    head = pack_head(Head(type=FrameType.SCALES, size=2**16, index=0, digest=bytes(16)))

    def fresh() -> Exchange:
        return Exchange(hello=ours, layout=cut, scales=scales, partner=B, dialer=False)

    tracemalloc.start()
    try:
        refusing, waiting = fresh(), fresh()
        refusing.receive(pack_message(wrong))
        waiting.receive(head)
        agreeing = fresh()
        agreeing.receive(pack_message(theirs) + head)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert refusing.finished
    assert waiting.finished
    assert not agreeing.finished
    assert peak < 2**20


def test_run_needs_no_end_of_the_stream() -> None:
    a, b = sides(CHECKED)
    run(a, b)
    assert a.finished.kind is b.finished.kind is EdgeKind.APPLIED
