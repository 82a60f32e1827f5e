"""Values that every layer shares."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    from gasloc_p2p.core.codecs import Coder

PeerId: TypeAlias = str
"""Base58 text of a libp2p peer id; compares and sorts as text."""

Edge: TypeAlias = tuple[PeerId, PeerId]
"""An undirected edge (a, b) with a < b."""

BytesLike: TypeAlias = bytes | bytearray | memoryview


class EdgeKind(enum.StrEnum):
    """How one edge of one round ended."""

    APPLIED = "applied"
    ASYMMETRIC = "asymmetric"
    TIMED_OUT = "timed_out"
    REFUSED = "refused"
    CORRUPT = "corrupt"
    NOT_PARTNER = "not_partner"
    LOST = "lost"


MIXED_KINDS: Final = (EdgeKind.APPLIED, EdgeKind.ASYMMETRIC)
"""Ends of an edge after which the partner's parameters are mixed."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EdgeOutcome:
    """How one edge ended, seen from this side.

    Attributes:
        partner: the peer at the other end.
        kind: how it ended; `APPLIED` and `ASYMMETRIC` edges are mixed, all others give their
            weight back to this peer.
        reason: one sentence for a person, empty when applied.
        code: the `RefuseCode` of the side that refused; empty when neither did.
        coder: holds the partner's contribution, as codes; present exactly when the edge is mixed.
        clip: the common factor in (0, 1] by which the difference is mixed; 1 if it is not clipped.
        length: norm of the difference to this peer's own contribution; 0 if none arrived.
        offence: what the partner did that no honest peer does; empty for nothing.
        excluded: whether this peer left the partner out for earlier offences.
        unconfirmed: earlier rounds that the partner mixed without knowing whether this peer did.
        bytes_sent: bytes written to the stream.
        bytes_received: bytes read from the stream.
        elapsed_s: seconds from the start of the edge to its end.
        wait_s: part of `elapsed_s` before the partner's Hello arrived.
        resumed: how many times a broken stream was replaced.
        repaired_blocks: blocks that were sent again because the partner had taken them wrongly.
    """

    partner: PeerId
    kind: EdgeKind
    reason: str = ""
    code: str = ""
    coder: Coder | None = None
    clip: float = 1.0
    length: float = 0.0
    offence: str = ""
    excluded: bool = False
    unconfirmed: tuple[int, ...] = ()
    bytes_sent: int = 0
    bytes_received: int = 0
    elapsed_s: float = 0.0
    wait_s: float = 0.0
    resumed: int = 0
    repaired_blocks: int = 0

    @property
    def mixes(self) -> bool:
        """Whether the partner's parameters take part in this round's mix."""
        return self.kind in MIXED_KINDS
