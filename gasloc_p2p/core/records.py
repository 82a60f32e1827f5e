"""The signed record through which a peer announces itself, for a few rounds at a time."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from typing import Annotated, Final, TypeAlias

import msgspec

from gasloc_p2p.core.stride import MAX_STRIDE, Stride
from gasloc_p2p.core.types import PeerId

LEASE_ROUNDS: Final = 4
"""The most rounds that a record may reach past the round in which it was signed."""

RECORD_TTL_S: Final = 3600.0
"""Seconds from signing a record to its expiration.

The lease, in rounds, says who takes part. The store merely has to outlive it, but not by so much
that a newcomer finds crowds of peers that left long ago.
"""

MAX_RECORD_BYTES: Final = 1024
SILENCE_S: Final = 20.0
SILENCE_CYCLES: Final = 8
FIRST_SILENCE_S: Final = 300.0
"""A peer is silent after this long; the last is for those that do not know their cycle yet."""

MAX_COUNT: Final = 2**53
"""Bound of every round and sequence number: the largest that any JSON reader keeps exact."""

SIGNATURE_PREFIX: Final = b"gasloc-p2p record 2\x00"
"""Put before the signed payload, so that no other message of this identity passes for a record."""

RunId: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
Every: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=MAX_STRIDE)]

Sign: TypeAlias = Callable[[bytes], bytes]
"""Message -> signature by this node's identity."""

Verify: TypeAlias = Callable[[PeerId, bytes, bytes], bool]
"""Peer, message, signature -> whether the peer signed the message; False for any unusable id."""


class RecordError(Exception):
    """A record is refused.

    Attributes:
        reason: one phrase for a person.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Reachability(enum.StrEnum):
    """Who can open a stream to a peer."""

    PUBLIC = "public"
    RELAYED = "relayed"
    PRIVATE = "private"


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """What a peer tells about its speed and what it has done so far; 0 where it does not know.

    Attributes:
        cycle_s: its median seconds per round, waiting for partners excluded.
        step_s: median seconds of one inner step.
        transfer_s: typical seconds of one of its exchanges, waiting excluded.
        tokens: tokens that it has trained on in this run.
        rounds: training rounds that it has taken part in.
        bytes_sent: bytes that it has sent over its edges.
    """

    cycle_s: float = 0.0
    step_s: float = 0.0
    transfer_s: float = 0.0
    tokens: Count = 0
    rounds: Count = 0
    bytes_sent: Count = 0


class Record(Work, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one peer says about itself (docs/design.md, section 3); the rest is in `Work`.

    Attributes:
        run_id: the run that the peer takes part in.
        peer_id: the peer; its id embeds the public key that verifies the signature.
        seq: rises with every record of the peer.
        signed_round: round the peer was in when it signed.
        first_round: first round in which it takes part.
        lease_until: last round in which it takes part, unless a later record says more.
        reachability: who can open a stream to it.
        every, phase, since, every_before, phase_before: the rounds in which it takes part; see
            `Stride`.
        expires_at: unix seconds after which the record is void.
    """

    run_id: RunId
    peer_id: Annotated[PeerId, msgspec.Meta(min_length=1, max_length=128)]
    seq: Count
    signed_round: Count
    first_round: Count
    lease_until: Count
    reachability: Reachability
    every: Every = 1
    phase: Count = 0
    since: Count = 0
    every_before: Every = 1
    phase_before: Count = 0
    expires_at: float

    @property
    def stride(self) -> Stride:
        """The rounds in which the peer takes part, as far as its stride is concerned."""
        return Stride(self.every, self.phase, self.since, self.every_before, self.phase_before)

    @property
    def is_goodbye(self) -> bool:
        """Whether the peer has cut its lease short because it leaves."""
        return self.lease_until - self.signed_round < LEASE_ROUNDS

    @property
    def is_gathering(self) -> bool:
        """Whether the peer waits to go on together with others, from one of several rounds.

        It can begin in any round from `first_round`, the oldest that it could go back to, to
        `signed_round`, and has not completed any.
        """
        return self.first_round <= self.signed_round and self.cycle_s == 0

    def is_silent(self, now_s: float) -> bool:
        """Whether the peer is overdue at `now_s` (unix seconds); live peers renew every round.

        One that skips rounds may have told how long one of all rounds takes, and need a few.

        A record that claims to have been signed far in the future counts as silent too.
        """
        age_s = now_s - (self.expires_at - RECORD_TTL_S)
        cycles = max(SILENCE_CYCLES, self.every, self.every_before)
        patience_s = SILENCE_S + cycles * self.cycle_s if self.cycle_s else FIRST_SILENCE_S
        return not -SILENCE_S <= age_s <= patience_s


class Verdict(enum.StrEnum):
    """What became of an observed record."""

    ACCEPTED = "accepted"
    STALE = "stale"
    """Its seq is not above the one already known: an echo or a replay; nothing changed."""
    FOREIGN_RUN = "foreign_run"
    AHEAD = "ahead"
    """Signed too far ahead of us: only counted in the estimate of the swarm's round."""
    OWN_IDENTITY_ELSEWHERE = "own_identity_elsewhere"
    """Our own peer id with a seq above all that we published: another process uses this identity.

    Before the first `renew` it may also be the record of an earlier process of ours.
    """
    FULL = "full"
    """`core/roster.py:MAX_PEERS` peers are known and this is not one of them."""


class _SignedRecord(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    payload: bytes
    signature: bytes


def sign_record(record: Record, sign: Sign) -> bytes:
    """Return the wire form of `record`: msgpack [payload, signature].

    Raises:
        RecordError: other peers would refuse the record.
    """
    # Decoding applies to our own record what others will apply, and turns an int given for a
    # float into the float whose encoding is the canonical one.
    payload = msgspec.msgpack.encode(_decode_payload(msgspec.msgpack.encode(record)))
    signature = sign(SIGNATURE_PREFIX + payload)
    signed = msgspec.msgpack.encode(_SignedRecord(payload, signature))
    _check_size(signed)
    return signed


def open_record(signed: bytes, *, verify: Verify) -> Record:
    """Return the record in its wire form `signed`, which any peer may have written.

    Raises:
        RecordError: it is too large, malformed, out of bounds, or not signed by its peer.
    """
    _check_size(signed)
    try:
        wrapper = msgspec.msgpack.decode(signed, type=_SignedRecord)
    except msgspec.DecodeError as error:
        raise RecordError(f"malformed: {error}") from error
    record = _decode_payload(wrapper.payload)
    # One record has one byte form, so equal records are equal bytes wherever they are compared.
    canonical = msgspec.msgpack.encode(record) == wrapper.payload
    if not canonical or msgspec.msgpack.encode(wrapper) != signed:
        raise RecordError("malformed: not in canonical form")
    if not verify(record.peer_id, SIGNATURE_PREFIX + wrapper.payload, wrapper.signature):
        raise RecordError("the signature is not the peer's")
    return record


def _check_size(signed: bytes) -> None:
    if len(signed) > MAX_RECORD_BYTES:
        raise RecordError(f"{len(signed)} bytes, larger than {MAX_RECORD_BYTES}")


def _decode_payload(payload: bytes) -> Record:
    try:
        record = msgspec.msgpack.decode(payload, type=Record)
    except msgspec.DecodeError as error:
        raise RecordError(f"malformed: {error}") from error
    for name in ("cycle_s", "step_s", "transfer_s", "expires_at"):
        value = getattr(record, name)
        if not (math.isfinite(value) and value >= 0):
            raise RecordError(f"{name} is {value}, not a finite number of seconds >= 0")
    if record.lease_until - record.signed_round > LEASE_ROUNDS:
        raise RecordError(
            f"lease of {record.lease_until - record.signed_round} rounds,"
            f" longer than {LEASE_ROUNDS}"
        )
    for phase, every in (("phase", "every"), ("phase_before", "every_before")):
        if getattr(record, phase) >= getattr(record, every):
            raise RecordError(
                f"{phase} {getattr(record, phase)} is not below {every} {getattr(record, every)}"
            )
    return record
