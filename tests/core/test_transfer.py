"""Messages of a state transfer: read back as sent, refused when they are anything else."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gasloc_p2p.core.transfer import (
    LENGTH_BYTES,
    MAX_CHUNK_BYTES,
    MAX_HEAD_BYTES,
    MIN_CHUNK_BYTES,
    ROOT_BYTES,
    BusyError,
    Offer,
    Refusal,
    StateRequest,
    Summary,
    SummaryRequest,
    TransferError,
    donor_order,
    message_bytes,
    pack_message,
    summary_limit_bytes,
    unpack_answer,
    unpack_request,
)

OFFER = Offer(
    round=3, elements=10, memory_elements=10, chunk_bytes=MIN_CHUNK_BYTES, root=bytes(ROOT_BYTES)
)
SUMMARY = Summary(round=3, theta_norms=(1.0, 2.5), memory_norms=(0.0,), val_loss=2.5)
REQUESTS = (
    StateRequest(run_digest=b"run", schema_digest=b"schema"),
    StateRequest(run_digest=b"run", schema_digest=b"schema", root=b"root", first_chunk=7),
    SummaryRequest(run_digest=b"run", schema_digest=b"schema"),
)
ANSWERS = (OFFER, SUMMARY, Summary(round=0, theta_norms=(), memory_norms=()))


@pytest.mark.parametrize("message", REQUESTS)
def test_a_request_is_read_as_it_was_sent(message: StateRequest | SummaryRequest) -> None:
    packed = pack_message(message)
    head, body = packed[:LENGTH_BYTES], packed[LENGTH_BYTES:]
    assert message_bytes(head, limit_bytes=MAX_HEAD_BYTES) == len(body)
    assert unpack_request(body) == message


@pytest.mark.parametrize("message", ANSWERS)
def test_an_answer_is_read_as_it_was_sent(message: Offer | Summary) -> None:
    assert unpack_answer(pack_message(message)[LENGTH_BYTES:]) == message


@given(st.integers(min_value=0, max_value=2**32 - 1))
def test_a_message_above_its_limit_is_refused(length: int) -> None:
    head = length.to_bytes(LENGTH_BYTES, "little")
    if length <= MAX_HEAD_BYTES:
        assert message_bytes(head, limit_bytes=MAX_HEAD_BYTES) == length
    else:
        with pytest.raises(TransferError, match=f"a message of {length} bytes is too long"):
            message_bytes(head, limit_bytes=MAX_HEAD_BYTES)


@given(st.binary(max_size=200))
def test_anything_else_is_unreadable(garbage: bytes) -> None:
    for unpack in (unpack_request, unpack_answer):
        with pytest.raises(TransferError):
            unpack(garbage)


@pytest.mark.parametrize("nested", [b"\x91" * 4000, b"\x81\xa4type" + b"\x91" * 4000])
def test_deep_nesting_is_unreadable(nested: bytes) -> None:
    for unpack in (unpack_request, unpack_answer):
        with pytest.raises(TransferError):
            unpack(nested)


@pytest.mark.parametrize(
    "changes",
    [
        {"chunk_bytes": MIN_CHUNK_BYTES - 1},
        {"chunk_bytes": MAX_CHUNK_BYTES + 1},
        {"root": b"short"},
        {"root": bytes(ROOT_BYTES + 1)},
        {"elements": -1},
        {"memory_elements": 2**63},
        {"round": -1},
    ],
)
def test_an_offer_beyond_its_limits_is_unreadable(changes: dict[str, int]) -> None:
    offer = pack_message(msgspec.structs.replace(OFFER, **changes))
    with pytest.raises(TransferError, match="unreadable answer"):
        unpack_answer(offer[LENGTH_BYTES:])


def test_a_refusal_is_raised_with_its_reason_made_printable() -> None:
    with pytest.raises(TransferError, match="refused: no �") as refused:
        unpack_answer(pack_message(Refusal(reason="no \x1b"))[LENGTH_BYTES:])
    assert not isinstance(refused.value, BusyError)
    with pytest.raises(BusyError, match="refused: later"):
        unpack_answer(pack_message(Refusal(reason="later", busy=True))[LENGTH_BYTES:])


def test_what_a_peer_wrote_cannot_steer_a_terminal() -> None:
    evil = msgspec.msgpack.encode({"type": "\x1b[2J"})
    with pytest.raises(TransferError) as refused:
        unpack_answer(evil)
    assert str(refused.value).isprintable()


@given(st.lists(st.floats(), max_size=300), st.floats())
def test_a_summary_fits_its_limit(norms: list[float], val_loss: float) -> None:
    summary = Summary(
        round=2**63 - 1, theta_norms=tuple(norms), memory_norms=tuple(norms), val_loss=val_loss
    )
    assert len(pack_message(summary)) - LENGTH_BYTES <= summary_limit_bytes(2 * len(norms))


def test_joiners_ask_donors_in_different_orders() -> None:
    donors = [f"donor {index}" for index in range(5)]
    orders = {joiner: donor_order(joiner, donors) for joiner in map(str, range(1000))}
    assert all(sorted(order) == donors for order in orders.values())
    assert donor_order("7", reversed(donors)) == orders["7"]
    first = Counter(order[0] for order in orders.values())
    # 200 each; 40 is above three standard deviations.
    assert all(160 < count < 240 for count in first.values())
