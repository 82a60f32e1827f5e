"""Only signed records and manifests may stand in the DHT, each in its own place."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import TypeAlias

import msgspec
import pytest
from blake3 import blake3
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord
from hivemind.utils.serializer import MSGPackSerializer
from hypothesis import given
from hypothesis import strategies as st

from gasloc_p2p.core.records import Reachability, Record, open_record, sign_record
from gasloc_p2p.net.identity import Identity
from gasloc_p2p.net.validator import EntryValidator, manifest_key, record_key

MakeRecord: TypeAlias = Callable[..., bytes]

OWNER, STRANGER = Identity.derived(0, 0), Identity.derived(0, 1)

SIGNED = sign_record(
    Record(
        run_id="run",
        peer_id=OWNER.peer_id,
        seq=1,
        signed_round=0,
        first_round=0,
        lease_until=4,
        reachability=Reachability.PUBLIC,
        cycle_s=0.0,
        expires_at=1000.0,
    ),
    OWNER.sign,
)


def entry(key: str, subkey: object, value: object, expiration_s: float) -> DHTRecord:
    """Build what hivemind hands to a validator for `store(key, value, expiration, subkey)`."""
    return DHTRecord(
        DHTID.generate(source=key).to_bytes(),
        MSGPackSerializer.dumps(subkey),
        MSGPackSerializer.dumps(value),
        expiration_s,
    )


def expiration_s(signed: bytes) -> float:
    return open_record(signed, verify=Identity.verify).expires_at


def test_a_record_is_accepted_in_its_own_place_only(make_record: MakeRecord) -> None:
    signed = make_record(OWNER)
    at_s = expiration_s(signed)
    key = record_key("run")
    validator = EntryValidator()
    own_place = entry(key, OWNER.peer_id, signed, at_s)
    assert validator.validate(own_place)
    assert validator.validate(own_place)
    for wrong in (
        entry(record_key("other"), OWNER.peer_id, signed, at_s),
        entry(key, STRANGER.peer_id, signed, at_s),
        entry(key, OWNER.peer_id.encode(), signed, at_s),
        entry(key, None, signed, at_s),
        entry(key, OWNER.peer_id, signed.hex(), at_s),
        entry(key, OWNER.peer_id, [signed], at_s),
        entry(key, OWNER.peer_id, signed + b"\0", at_s),
    ):
        assert not validator.validate(wrong)


def test_a_plain_value_is_refused_whatever_it_holds(make_record: MakeRecord) -> None:
    signed = make_record(OWNER)
    for subkey in DHTProtocol.RESERVED_SUBKEYS:
        plain = entry(record_key("run"), None, signed, expiration_s(signed))
        plain = DHTRecord(plain.key, subkey, plain.value, plain.expiration_time)
        assert not EntryValidator().validate(plain)


@pytest.mark.parametrize("later_s", [1e-6, 1.0, 1e9, float("inf"), float("nan"), -1.0])
def test_a_record_cannot_be_replayed_with_another_expiration(
    make_record: MakeRecord, later_s: float
) -> None:
    signed = make_record(OWNER)
    at_s = expiration_s(signed) + later_s
    assert not EntryValidator().validate(entry(record_key("run"), OWNER.peer_id, signed, at_s))


def test_a_forged_record_is_refused(make_record: MakeRecord) -> None:
    signed = make_record(OWNER)
    payload, signature = msgspec.msgpack.decode(signed, type=tuple[bytes, bytes])
    forged = msgspec.msgpack.encode((payload, STRANGER.sign(payload)))
    changed = msgspec.msgpack.encode((payload.replace(b"run", b"rum"), signature))
    at_s = expiration_s(signed)
    assert not EntryValidator().validate(entry(record_key("run"), OWNER.peer_id, forged, at_s))
    assert not EntryValidator().validate(entry(record_key("rum"), OWNER.peer_id, changed, at_s))


def test_the_answer_does_not_depend_on_the_time(make_record: MakeRecord) -> None:
    for expires_in_s in (-3600.0, 3600.0, 1e9):
        signed = make_record(OWNER, expires_in_s=expires_in_s)
        place = entry(record_key("run"), OWNER.peer_id, signed, expiration_s(signed))
        assert EntryValidator().validate(place)


def test_a_manifest_is_accepted_under_its_run_and_digest_only() -> None:
    manifest = json.dumps({"run_id": "run", "future": {"field": [1]}}).encode()
    digest = blake3(manifest).digest()
    key, at_s = manifest_key("run", digest), time.time() + 60
    validator = EntryValidator()
    assert validator.validate(entry(key, digest.hex(), manifest, at_s))
    for wrong in (
        entry(manifest_key("other", digest), digest.hex(), manifest, at_s),
        entry(manifest_key("run", bytes(32)), digest.hex(), manifest, at_s),
        entry(key, bytes(32).hex(), manifest, at_s),
        entry(key, None, manifest, at_s),
        entry(key, digest.hex(), manifest + b" ", at_s),
        entry(key, digest.hex(), manifest, float("nan")),
        entry(key, digest.hex(), manifest, float("inf")),
    ):
        assert not validator.validate(wrong)


@pytest.mark.parametrize(
    "manifest",
    [
        b"",
        b"null",
        b"[]",
        b'{"run": "run"}',
        b'{"run_id": 7}',
        b'{"run_id": ""}',
        b'{"run_id": "\xff"}',
        b'{"run_id": "run", "deep": ' + b"[" * 60_000,
        json.dumps({"run_id": "run", "padding": "x" * 65_536}).encode(),
    ],
)
def test_anything_else_is_not_a_manifest(manifest: bytes) -> None:
    digest = blake3(manifest).digest()
    place = entry(manifest_key("run", digest), digest.hex(), manifest, time.time() + 60)
    assert not EntryValidator().validate(place)


@given(st.binary(max_size=64), st.binary(max_size=200), st.floats())
def test_arbitrary_bytes_are_refused_without_an_exception(
    subkey: bytes, value: bytes, at_s: float
) -> None:
    key = DHTID.generate(source=record_key("run")).to_bytes()
    assert not EntryValidator().validate(DHTRecord(key, subkey, value, at_s))


@given(st.data())
def test_a_record_with_damaged_bytes_is_refused_without_an_exception(data: st.DataObject) -> None:
    signed = bytearray(SIGNED)
    for _ in range(data.draw(st.integers(1, 4))):
        signed[data.draw(st.integers(0, len(signed) - 1))] ^= data.draw(st.integers(1, 255))
    place = entry(record_key("run"), OWNER.peer_id, bytes(signed), 1000.0)
    assert EntryValidator().validate(place) is (bytes(signed) == SIGNED)


def test_what_is_remembered_stays_bounded(
    make_record: MakeRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gasloc_p2p.net.validator.REMEMBERED_ENTRIES", 3)
    validator = EntryValidator()
    for seq in range(10):
        signed = make_record(OWNER, seq=seq, expires_in_s=seq)
        place = entry(record_key("run"), OWNER.peer_id, signed, expiration_s(signed))
        assert validator.validate(place)
    assert len(validator._accepted) == 3
