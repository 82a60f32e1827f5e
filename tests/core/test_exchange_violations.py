"""What a partner may not send, each kind of it refused and named."""

from __future__ import annotations

import pytest

from gasloc_p2p.core.exchange import ChunkArrived, Finished
from gasloc_p2p.core.types import EdgeKind
from gasloc_p2p.core.wire import FrameType, RefuseCode, pack_frame, pack_message, pack_piece
from tests.core.exchange_stages import (
    APPLIED,
    CHECK,
    CODES_B,
    FIRST,
    HELLO,
    LAST,
    READY,
    RECORDS,
    REPAIR,
    SCALES,
    SECOND,
    Stage,
    acceptor,
    announced,
    checking,
    chunk,
    dialer,
    greeted,
    opened,
    piece,
    received,
    violation,
)
from tests.core.two_sides import A, B, end, hello, key, refusal, sent


@pytest.mark.parametrize(
    ("stage", "data", "words"),
    [
        (acceptor, READY, "READY where HELLO was due"),
        (dialer, RECORDS, "RECORDS where HELLO was due"),
        (dialer, FIRST, "CHUNK where HELLO was due"),
        (dialer, READY, "READY where HELLO was due"),
        (dialer, APPLIED, "APPLIED where HELLO was due"),
        (dialer, b"\xff\0\0\0\0", "unknown frame type 255"),
        (dialer, pack_frame(FrameType.HELLO, b"?"), "malformed Hello"),
        (dialer, pack_message(hello(B, received=1)), "1 frames received, and 0 were sent"),
        (received, pack_frame(FrameType.READY), "malformed Ready"),
        (received, pack_frame(FrameType.READY, b"\x91\xcb" + bytes(8)), "malformed Ready"),
        (greeted, HELLO, "HELLO where CHUNK was due"),
        (greeted, RECORDS, "RECORDS where CHUNK was due"),
        (greeted, SCALES, "SCALES where CHUNK was due"),
        (greeted, CHECK, "CHECK where CHUNK was due"),
        (greeted, REPAIR, "REPAIR where CHUNK was due"),
        (greeted, READY, "READY where CHUNK was due"),
        (greeted, APPLIED, "APPLIED where CHUNK was due"),
        (greeted, FIRST + SECOND + READY, "READY where CHUNK was due"),
        (greeted, SECOND, "chunk 1 where chunk 0 was due"),
        (greeted, FIRST + FIRST, "chunk 0 where chunk 1 was due"),
        (greeted, chunk(0, b""), "0 bytes, expected 4"),
        (greeted, chunk(0, CODES_B[:3]), "3 bytes, expected 4"),
        (greeted, announced(FrameType.CHUNK, 0, 5), "5 bytes, expected 4"),
        (greeted, announced(FrameType.CHUNK, 2**63, 4), "where chunk 0 was due"),
        (greeted, FIRST + SECOND + chunk(2, b"1234"), "4 bytes, expected 2"),
        (greeted, pack_frame(FrameType.CHUNK, b"short"), "malformed CHUNK"),
        (greeted, FIRST + SECOND + LAST + READY, "cannot have everything"),
        (received, LAST, "CHUNK where READY was due"),
        (received, APPLIED, "APPLIED where READY was due"),
        (received, READY + READY, "READY where APPLIED was due"),
        (received, READY + APPLIED, "APPLIED before both sides were ready"),
        (opened, FIRST, "CHUNK where SCALES was due"),
        (opened, CHECK, "which it cannot have"),
        (opened, SCALES + SCALES, "SCALES where CHUNK was due"),
        (opened, piece(FrameType.SCALES, 1, b"123"), "scales 1 where scales 0 was due"),
        (opened, piece(FrameType.SCALES, 0, b"12"), "2 bytes, expected 3"),
        (checking, READY, "READY where CHECK was due"),
        (checking, CHECK + CHECK, "another check of chunk 0"),
        (checking, piece(FrameType.CHECK, 3), "which it cannot have"),
        (checking, piece(FrameType.CHECK, 0, b"\x01\x00"), "2 bytes, expected 1"),
        (checking, piece(FrameType.CHECK, 2, b"\x02"), "blocks that it does not have"),
        (checking, REPAIR, "a repair of chunk 0, which was not due"),
    ],
)
def test_a_violation_is_refused(stage: Stage, data: bytes, words: str) -> None:
    assert words in violation(stage(), data)


def test_a_violation_is_refused_before_its_data_come() -> None:
    for head in (
        announced(FrameType.CHUNK, 1, 4),
        announced(FrameType.CHUNK, 0, 16 * 2**20),
        announced(FrameType.REPAIR, 0, 2**20),
    ):
        exchange = greeted()
        assert exchange.receive(head[:-1]) == []
        assert end(exchange.receive(head[-1:])).offence


def test_chunks_before_the_records_are_a_violation() -> None:
    exchange = dialer()
    exchange.receive(pack_message(hello(B, roster_digest=b"other")))
    assert "CHUNK where RECORDS was due" in violation(exchange, FIRST)


def test_ready_while_a_chunk_waits_to_be_sent_is_a_violation() -> None:
    exchange = greeted()
    assert exchange.next_to_send()
    assert "cannot have everything" in violation(exchange, FIRST + SECOND + LAST + READY)


@pytest.mark.parametrize(
    "data",
    [
        FIRST[:-1] + b"?",
        FIRST[:13] + bytes(16) + FIRST[29:],
        piece(FrameType.CHUNK, 0, CODES_B[:4], round=6),
        piece(FrameType.CHUNK, 0, CODES_B[:4], sender=A),
        b"".join(
            pack_piece(FrameType.CHUNK, 0, CODES_B[:4], key=key(B, run_digest=b"another run"))
        ),
        SECOND[:5] + FIRST[5:13] + SECOND[13:],
        FIRST[:5] + piece(FrameType.REPAIR, 0, CODES_B[:4])[5:],
    ],
    ids=["codes", "digest", "another round", "reflected", "another run", "place", "kind"],
)
def test_a_wrong_digest_is_corrupt_on_both_sides(data: bytes) -> None:
    exchange = greeted()
    (event,) = exchange.receive(data)
    assert isinstance(event, ChunkArrived)
    assert not event.intact()
    code, reason = RefuseCode.CORRUPT, "refused by this peer: x"
    corrupt = Finished(kind=EdgeKind.CORRUPT, reason=reason, offence=True, code=code)
    assert exchange.refuse(RefuseCode.CORRUPT, "x") == [corrupt]
    data = sent(exchange)
    assert refusal(data).code is RefuseCode.CORRUPT
    told = Finished(kind=EdgeKind.CORRUPT, reason="refused by partner: x", code=code)
    assert received().receive(data) == [told]


@pytest.mark.parametrize(
    ("stage", "data", "name"), [(opened, SCALES, "scales"), (checking, CHECK, "check")]
)
def test_damaged_scales_and_checks_are_corrupt(stage: Stage, data: bytes, name: str) -> None:
    exchange = stage()
    finished = end(exchange.receive(data[:13] + bytes(16) + data[29:]))
    reason = f"refused by this peer: {name} 0 does not match its digest"
    code = RefuseCode.CORRUPT
    assert finished == Finished(kind=EdgeKind.CORRUPT, reason=reason, offence=True, code=code)
