"""What may stand in the DHT: signed records and manifests, of any run, and nothing else.

Every node and every bootstrap peer applies the same rules, whatever run it is in, so one bootstrap
serves many runs. An entry is judged by its own content alone, never by the time or by other
entries: hivemind drops everything that a node returns for a key when one entry of it is refused,
so nodes that judged differently would hide the swarm from each other.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

import msgspec
from blake3 import blake3
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord, RecordValidatorBase

from gasloc_p2p.core.manifest import MAX_MANIFEST_BYTES
from gasloc_p2p.core.records import MAX_RECORD_BYTES, RecordError, RunId, open_record
from gasloc_p2p.net.identity import Identity

MANIFEST_TTL_S: Final = 7 * 86_400.0
REMEMBERED_ENTRIES: Final = 16_384
_HEADER_BYTES: Final = 5
"""The most that msgpack puts in front of a byte string."""


def record_key(run_id: str) -> str:
    """Return the DHT key under which the records of a run stand, one subkey per peer."""
    return f"gasloc/1/records/{run_id}"


def manifest_key(run_id: str, digest: bytes) -> str:
    """Return the DHT key of the manifest with this digest.

    The digest is part of the key, so that exactly one value is valid there: strangers cannot
    crowd the entry out with manifests of their own making.
    """
    return f"gasloc/1/manifests/{run_id}/{digest.hex()}"


class EntryValidator(RecordValidatorBase):  # type: ignore[misc]  # hivemind is untyped
    """Accepts an entry exactly if it is one of these, in its canonical encoding:

    - under `record_key(run)`, subkey peer id: a record that this peer signed for this run. The
      DHT's expiration must be the record's own, so nobody can outlast a newer record by storing
      an older one with a later expiration.
    - under `manifest_key(run, digest)`, subkey digest in hex: bytes with this blake3 digest, at
      most 64 KiB, JSON that names this run.

    A value without a subkey is never accepted: it would replace all entries of its key.
    """

    def __init__(self) -> None:
        # Every poll reads the same records again, from several nodes, and checking a signature
        # takes longer than all the rest.
        self._accepted: OrderedDict[bytes, None] = OrderedDict()

    def validate(self, record: DHTRecord) -> bool:
        """Whether the entry may be stored here, and be believed when another node returns it."""
        if len(record.value) > MAX_MANIFEST_BYTES + _HEADER_BYTES:
            return False
        key, subkey, value = bytes(record.key), bytes(record.subkey), bytes(record.value)
        place = msgspec.msgpack.encode((key, subkey, record.expiration_time))
        fingerprint = blake3(place).update(value).digest()
        if fingerprint in self._accepted:
            self._accepted.move_to_end(fingerprint)
            return True
        if not _is_valid(key, subkey, value, record.expiration_time):
            return False
        self._accepted[fingerprint] = None
        if len(self._accepted) > REMEMBERED_ENTRIES:
            self._accepted.popitem(last=False)
        return True


class _NamesRun(msgspec.Struct):
    """The part of a manifest that matters here; newer manifests may hold more than this one."""

    run_id: RunId


def _is_valid(key: bytes, subkey: bytes, value: bytes, expiration_s: float) -> bool:
    try:
        payload = msgspec.msgpack.decode(value, type=bytes)
    except msgspec.DecodeError:
        return False
    if msgspec.msgpack.encode(payload) != value:
        return False
    if _is_manifest(key, subkey, payload):
        return 0 <= expiration_s < float("inf")
    return _is_record(key, subkey, payload, expiration_s)


def _is_manifest(key: bytes, subkey: bytes, payload: bytes) -> bool:
    digest = blake3(payload).digest()
    if subkey != msgspec.msgpack.encode(digest.hex()) or len(payload) > MAX_MANIFEST_BYTES:
        return False
    try:
        named = msgspec.json.decode(payload, type=_NamesRun)
    except (msgspec.DecodeError, RecursionError):
        return False
    return key == _key_id(manifest_key(named.run_id, digest))


def _is_record(key: bytes, subkey: bytes, payload: bytes, expiration_s: float) -> bool:
    if len(payload) > MAX_RECORD_BYTES:
        return False
    try:
        record = open_record(payload, verify=Identity.verify)
    except RecordError:
        return False
    return (
        key == _key_id(record_key(record.run_id))
        and subkey == msgspec.msgpack.encode(record.peer_id)
        and expiration_s == record.expires_at
    )


def _key_id(key: str) -> bytes:
    key_id: bytes = DHTID.generate(source=key).to_bytes()
    return key_id
