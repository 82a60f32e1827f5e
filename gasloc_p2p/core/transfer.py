"""What a joiner and a donor say to each other when a peer's state is handed over.

The joiner opens a stream and sends a request; a message is four bytes of little-endian length and
MessagePack. To a StateRequest the donor answers with an Offer, the digests of all chunks unless
the joiner asked for that very root, and the chunks from the first one that is missing
(`core/assembly.py`); to a SummaryRequest with a Summary; to either with a Refusal instead
(docs/design.md section 3).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Annotated, Final, TypeAlias

import msgspec
from msgspec import Meta

from gasloc_p2p.core.types import BytesLike, PeerId
from gasloc_p2p.core.wire import printable

STATE_PROTOCOL: Final = "gasloc/state/2"
MIN_CHUNK_BYTES: Final = 4 * 1024
MAX_CHUNK_BYTES: Final = 1024 * 1024
MAX_HEAD_BYTES: Final = 4 * 1024
"""Longest request, offer and refusal."""
LENGTH_BYTES: Final = 4
ROOT_BYTES: Final = 32
NORM_BYTES: Final = 9
"""Size of a norm in MessagePack."""

_Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_Digest: TypeAlias = Annotated[bytes, Meta(max_length=64)]
_Root: TypeAlias = Annotated[bytes, Meta(min_length=ROOT_BYTES, max_length=ROOT_BYTES)]


class TransferError(Exception):
    """What the other end sent is not acceptable, or it refused; the message says why."""


class BusyError(TransferError):
    """The donor hands out its state to others; it may be asked again later."""


class StateRequest(msgspec.Struct, frozen=True, kw_only=True, tag="state"):
    """A joiner asks for the donor's state.

    Attributes:
        run_digest: identity of the run.
        schema_digest: names, shapes and order of the parameters.
        root: the state that an earlier stream began to hand over, or empty.
        first_chunk: the first chunk of it that is missing.
    """

    run_digest: _Digest
    schema_digest: _Digest
    root: _Digest = b""
    first_chunk: _Count = 0


class SummaryRequest(msgspec.Struct, frozen=True, kw_only=True, tag="summary"):
    """A joiner asks for a few numbers about the donor's state, to compare another one with."""

    run_digest: _Digest
    schema_digest: _Digest


class Refusal(msgspec.Struct, frozen=True, kw_only=True, tag="refusal"):
    """The donor's only answer: it does not do what it was asked for.

    Attributes:
        reason: a few words for a person.
        busy: whether the joiner may come back later.
    """

    reason: str
    busy: bool = False


class Offer(msgspec.Struct, frozen=True, kw_only=True, tag="offer"):
    """The donor hands over a state; its digests and chunks follow.

    Attributes:
        round: the round at whose start the donor held it.
        elements: elements P of the parameter vector.
        memory_elements: elements of the outer rule's memory.
        chunk_bytes: size in bytes of every chunk but the last one of each vector.
        root: digest over the digests of all chunks.
    """

    round: _Count
    elements: _Count
    memory_elements: _Count
    chunk_bytes: Annotated[int, Meta(ge=MIN_CHUNK_BYTES, le=MAX_CHUNK_BYTES)]
    root: _Root


class Summary(msgspec.Struct, frozen=True, kw_only=True, tag="summary"):
    """A few numbers about a peer's state; hostile until `check_summary` has passed.

    Attributes:
        round: the round at whose start the peer held it.
        theta_norms: L2 norm of each parameter tensor, in schema order.
        memory_norms: L2 norm of each part of the outer rule's memory.
        val_loss: the peer's last loss on held-out text in nats per token, None if it has none.
    """

    round: _Count
    theta_norms: tuple[float, ...]
    memory_norms: tuple[float, ...]
    val_loss: float | None = None


Request: TypeAlias = StateRequest | SummaryRequest
Answer: TypeAlias = Offer | Refusal | Summary


def pack_message(message: Request | Answer) -> bytes:
    """Return a message as it is sent, its length first."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def message_bytes(head: BytesLike, *, limit_bytes: int) -> int:
    """Return the length that the first `LENGTH_BYTES` of a message announce.

    Raises:
        TransferError: it is above `limit_bytes`.
    """
    length = int.from_bytes(head, "little")
    if length > limit_bytes:
        raise TransferError(f"a message of {length} bytes is too long")
    return length


def summary_limit_bytes(norms: int) -> int:
    """Return the longest answer to a request for a summary with so many norms in all."""
    return MAX_HEAD_BYTES + NORM_BYTES * norms


def unpack_request(body: BytesLike) -> Request:
    """Return the request in a message's body.

    Raises:
        TransferError: it is not exactly one request within its limits.
    """
    try:
        return msgspec.msgpack.decode(body, type=StateRequest | SummaryRequest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as fault:
        raise TransferError(f"unreadable request: {printable(str(fault))}") from None


def unpack_answer(body: BytesLike) -> Offer | Summary:
    """Return the answer in a message's body.

    Raises:
        BusyError: the donor serves others.
        TransferError: it refuses, or this is not exactly one answer within its limits.
    """
    try:
        answer = msgspec.msgpack.decode(body, type=Offer | Refusal | Summary)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as fault:
        raise TransferError(f"unreadable answer: {printable(str(fault))}") from None
    if isinstance(answer, Refusal):
        raise (BusyError if answer.busy else TransferError)(f"refused: {printable(answer.reason)}")
    return answer


def donor_order(joiner: PeerId, donors: Iterable[PeerId]) -> list[PeerId]:
    """Return `donors` in an order that depends on who asks, so that joiners spread over them."""

    def preference(donor: PeerId) -> bytes:
        return hashlib.sha256(f"{joiner}/{donor}".encode()).digest()

    return sorted(donors, key=preference)
