"""What an `Exchange` tells its caller."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from gasloc_p2p.core.types import BytesLike, EdgeKind
from gasloc_p2p.core.wire import FrameType, Hello, RefuseCode, piece_digest


@dataclass(frozen=True, kw_only=True, slots=True)
class PartnerHello:
    """The partner's Hello agrees with ours."""

    hello: Hello


@dataclass(frozen=True, kw_only=True, slots=True)
class PartnerRecords:
    """Signed records from a partner with another roster, for later rounds; nothing is verified."""

    records: tuple[bytes, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PartnerScales:
    """The partner's scales are complete, b"" where the codec has none; chunks may be cut now."""

    scales: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkArrived:
    """A chunk of the partner's codes; take it, then call `checked` or `refuse`.

    Attributes:
        index: of the chunk.
        data: its codes, which are the caller's from here on; the exchange keeps no copy.
        digest: that came with it.
        key: of the partner's digests.
    """

    index: int
    data: BytesLike
    digest: bytes
    key: bytes = field(repr=False)

    def intact(self) -> bool:
        """Whether the data match their digest; hashes, so call it off the loop."""
        return self.digest == piece_digest(FrameType.CHUNK, self.index, self.data, key=self.key)


@dataclass(frozen=True, kw_only=True, slots=True)
class RepairArrived:
    """Blocks of a chunk to put in place of those that were taken; then call `repaired` or `refuse`.

    Attributes:
        index: of the chunk.
        bad: bitmap of the blocks.
        data: the repair, which is the caller's from here on.
        digest: that came with it.
        key: of the partner's digests.
    """

    index: int
    bad: bytes
    data: BytesLike
    digest: bytes
    key: bytes = field(repr=False)

    def intact(self) -> bool:
        """Whether the data match their digest; hashes, so call it off the loop."""
        return self.digest == piece_digest(FrameType.REPAIR, self.index, self.data, key=self.key)


@dataclass(frozen=True, kw_only=True, slots=True)
class Complete:
    """All of the partner's codes are here, checked and repaired; call `accept` or `refuse`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreed:
    """Both sides are ready: from here on this edge is mixed.

    Attributes:
        clip: the smaller of both sides' clip factors, in (0, 1].
        late: whether the round of either side goes on without this edge, so that of both must.
    """

    clip: float
    late: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """The exchange is over; always the last event, and exactly one.

    Attributes:
        kind: how the edge ended.
        reason: one sentence for a person, empty when applied.
        offence: whether this side ended it because the partner, whose Hello agreed with ours, broke
            the protocol or sent what is damaged or not finite.
        code: why either side refused; None when neither did.
    """

    kind: EdgeKind
    reason: str
    offence: bool = False
    code: RefuseCode | None = None


Event: TypeAlias = (
    PartnerHello
    | PartnerRecords
    | PartnerScales
    | ChunkArrived
    | RepairArrived
    | Complete
    | Agreed
    | Finished
)
