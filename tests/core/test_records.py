"""The signed record: what is accepted, and that nothing else is."""

from __future__ import annotations

import base58
import msgspec
import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import given, settings
from hypothesis import strategies as st

from gasloc_p2p.core.records import (
    LEASE_ROUNDS,
    MAX_RECORD_BYTES,
    SIGNATURE_PREFIX,
    Reachability,
    Record,
    RecordError,
    open_record,
    sign_record,
)
from gasloc_p2p.core.types import PeerId

timeless = settings(deadline=None)
"""An example may take long on a busy machine."""

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
OTHER_KEY = Ed25519PrivateKey.from_private_bytes(bytes(32))
ID_PREFIX = bytes.fromhex("002408011220")


def peer_id_of(key: Ed25519PrivateKey) -> PeerId:
    raw = key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
    return base58.b58encode(ID_PREFIX + raw).decode()


def verify(peer: PeerId, message: bytes, signature: bytes) -> bool:
    try:
        raw = base58.b58decode(peer)
        Ed25519PublicKey.from_public_bytes(raw[len(ID_PREFIX) :]).verify(signature, message)
    except (ValueError, InvalidSignature):
        return False
    return True


def valid_fields() -> dict[str, object]:
    return {
        "cycle_s": 1.5,
        "step_s": 0.25,
        "transfer_s": 0.5,
        "tokens": 4096,
        "rounds": 8,
        "bytes_sent": 10**9,
        "run_id": "run",
        "peer_id": peer_id_of(KEY),
        "seq": 7,
        "signed_round": 10,
        "first_round": 3,
        "lease_until": 14,
        "reachability": "relayed",
        "every": 2,
        "phase": 1,
        "since": 9,
        "every_before": 3,
        "phase_before": 2,
        "expires_at": 1.7e9,
    }


def signed_fields(fields: object, key: Ed25519PrivateKey = KEY) -> bytes:
    """Sign any payload at all, as a hostile peer would."""
    payload = msgspec.msgpack.encode(fields)
    return msgspec.msgpack.encode([payload, key.sign(SIGNATURE_PREFIX + payload)])


def reason_for(signed: bytes) -> str:
    with pytest.raises(RecordError) as caught:
        open_record(signed, verify=verify)
    assert str(caught.value) == caught.value.reason
    return caught.value.reason


records = st.builds(
    Record,
    run_id=st.text(st.characters(codec="utf-8"), min_size=1, max_size=64),
    peer_id=st.just(peer_id_of(KEY)),
    seq=st.integers(0, 2**53),
    signed_round=st.integers(0, 2**53 - LEASE_ROUNDS),
    first_round=st.integers(0, 2**53),
    reachability=st.sampled_from(Reachability),
    every=st.just(16),
    phase=st.integers(0, 15),
    since=st.integers(0, 2**53),
    every_before=st.just(15),
    phase_before=st.integers(0, 14),
    cycle_s=st.floats(0, 1e9) | st.integers(0, 100),
    step_s=st.floats(0, 1e9) | st.integers(0, 100),
    transfer_s=st.floats(0, 1e9) | st.integers(0, 100),
    tokens=st.integers(0, 2**53),
    rounds=st.integers(0, 2**53),
    bytes_sent=st.integers(0, 2**53),
    expires_at=st.floats(0, 1e12),
    lease_until=st.just(0),
).flatmap(
    lambda record: st.integers(0, record.signed_round + LEASE_ROUNDS).map(
        lambda lease: msgspec.structs.replace(record, lease_until=lease)
    )
)


@timeless
@given(records)
def test_a_signed_record_opens_to_itself(record: Record) -> None:
    signed = sign_record(record, KEY.sign)
    opened = open_record(signed, verify=verify)
    assert opened == record
    assert isinstance(opened.cycle_s, float)
    assert sign_record(opened, KEY.sign) == signed


def test_fields_of_the_wire_form_are_the_documented_ones() -> None:
    opened = open_record(signed_fields(valid_fields()), verify=verify)
    assert msgspec.to_builtins(opened) == valid_fields()


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("cycle_s", float("nan"), "cycle_s is nan"),
        ("cycle_s", float("inf"), "cycle_s is inf"),
        ("cycle_s", -1.0, "cycle_s is -1.0"),
        ("expires_at", float("inf"), "expires_at is inf"),
        ("expires_at", -0.5, "expires_at is -0.5"),
        ("signed_round", -1, "$.signed_round"),
        ("seq", -1, "$.seq"),
        ("seq", 2**53 + 1, "$.seq"),
        ("first_round", 2**53 + 1, "$.first_round"),
        ("first_round", 2**64 - 1, "$.first_round"),
        ("lease_until", -1, "$.lease_until"),
        ("lease_until", 15, "lease of 5 rounds"),
        ("every", 0, "$.every"),
        ("every", 17, "$.every"),
        ("every_before", 0, "$.every_before"),
        ("every_before", 17, "$.every_before"),
        ("since", -1, "$.since"),
        ("phase_before", 3, "phase_before 3 is not below every_before 3"),
        ("step_s", float("inf"), "step_s is inf"),
        ("transfer_s", -0.1, "transfer_s is -0.1"),
        ("tokens", -1, "$.tokens"),
        ("rounds", 2**53 + 1, "$.rounds"),
        ("bytes_sent", 0.5, "$.bytes_sent"),
        ("phase", -1, "$.phase"),
        ("phase", 2, "phase 2 is not below every 2"),
        ("reachability", "everywhere", "$.reachability"),
        ("run_id", "", "$.run_id"),
        ("run_id", "r" * 65, "$.run_id"),
        ("peer_id", "", "$.peer_id"),
        ("peer_id", b"\x00", "$.peer_id"),
        ("seq", True, "$.seq"),
        ("seq", 1.0, "$.seq"),
        ("extra", 1, "extra"),
        ("cycle_s", 1, "canonical"),
    ],
)
def test_a_value_out_of_bounds_is_refused_by_name(field: str, value: object, reason: str) -> None:
    assert reason in reason_for(signed_fields(valid_fields() | {field: value}))


def test_the_longest_lease_is_accepted() -> None:
    fields = valid_fields() | {"signed_round": 10, "lease_until": 10 + LEASE_ROUNDS}
    assert open_record(signed_fields(fields), verify=verify).lease_until == 14


def test_a_missing_field_is_named() -> None:
    fields = valid_fields()
    del fields["seq"]
    assert "seq" in reason_for(signed_fields(fields))


def test_another_order_of_fields_is_refused() -> None:
    fields = dict(reversed(valid_fields().items()))
    assert reason_for(signed_fields(fields)) == "malformed: not in canonical form"


def test_a_longer_form_of_the_wrapper_is_refused() -> None:
    signed = signed_fields(valid_fields())
    assert signed[0] == 0x92
    assert reason_for(b"\xdc\x00\x02" + signed[1:]) == "malformed: not in canonical form"


def test_size_is_checked_before_anything_is_parsed() -> None:
    assert reason_for(b"\xc1" * (MAX_RECORD_BYTES + 1)) == "1025 bytes, larger than 1024"
    assert reason_for(b"\xc1" * MAX_RECORD_BYTES).startswith("malformed")


@pytest.mark.parametrize("where", ["payload", "signature", "signer", "prefix"])
def test_a_false_signature_is_refused(where: str) -> None:
    payload = msgspec.msgpack.encode(valid_fields())
    signature = KEY.sign(SIGNATURE_PREFIX + payload)
    if where == "payload":
        payload = msgspec.msgpack.encode(valid_fields() | {"seq": 8})
    elif where == "signature":
        signature = bytes([signature[0] ^ 1]) + signature[1:]
    elif where == "signer":
        signature = OTHER_KEY.sign(SIGNATURE_PREFIX + payload)
    else:
        signature = KEY.sign(payload)
    signed = msgspec.msgpack.encode([payload, signature])
    assert reason_for(signed) == "the signature is not the peer's"


def test_our_own_record_is_refused_before_it_is_published() -> None:
    record = open_record(signed_fields(valid_fields()), verify=verify)
    with pytest.raises(RecordError, match="lease of 5 rounds"):
        sign_record(msgspec.structs.replace(record, lease_until=15), KEY.sign)
    with pytest.raises(RecordError, match="larger than 1024"):
        sign_record(record, lambda message: bytes(1024))


@timeless
@given(st.binary(max_size=64) | st.just(b"\x91" * 1024) | st.just(b"\x92\xc6\xff\xff\xff\xff"))
def test_any_bytes_are_refused_with_a_reason(data: bytes) -> None:
    assert reason_for(data)
    assert reason_for(msgspec.msgpack.encode([data, bytes(64)]))


@timeless
@given(st.integers(0), st.integers(0, 255))
def test_one_wrong_byte_is_never_accepted(at: int, value: int) -> None:
    signed = bytearray(signed_fields(valid_fields()))
    at %= len(signed)
    signed[at] = value if signed[at] != value else value ^ 1
    assert reason_for(bytes(signed))
