"""What a node tells whoever watches it: a terminal, a pipe, or the parent of a test swarm."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import msgspec

from gasloc_p2p.core.types import PeerId
from gasloc_p2p.node.report import PeerReport, RoundReport


class Online(msgspec.Struct, frozen=True, kw_only=True, tag="online"):
    """The node is on the network."""

    peer_id: PeerId
    addresses: tuple[str, ...]


class Invitation(msgspec.Struct, frozen=True, kw_only=True, tag="invite"):
    """Others can join with this text."""

    invite: str


class Waiting(msgspec.Struct, frozen=True, kw_only=True, tag="waiting"):
    """The node waits, for peers or for a point in time."""

    reason: str


class Training(msgspec.Struct, frozen=True, kw_only=True, tag="training"):
    """What is trained, told once, before the first round.

    Attributes:
        model: its name.
        architecture: as transformers calls it.
        parameters: how many it has.
        precision: type of its matrix products.
        device: what it trains on.
        text: where the text comes from.
        topology, codec: those of the run.
    """

    model: str
    architecture: str
    parameters: int
    precision: str
    device: str
    text: str
    topology: str
    codec: str


class PeersChanged(msgspec.Struct, frozen=True, kw_only=True, tag="peers_changed"):
    """Others have come or gone since the round before.

    Attributes:
        round: the round that is to begin.
        peers: how many take part by now, this one included.
        joined, left, gone: how many came, said goodbye, or went without.
        names: the one that did, if there is one of a kind: by "joined", "left" and "gone".
    """

    round: int
    peers: int
    joined: int = 0
    left: int = 0
    gone: int = 0
    names: dict[str, PeerId] = {}


class RoundStarted(msgspec.Struct, frozen=True, kw_only=True, tag="round_started"):
    """A round has begun with these partners; `reason` says why its steps are not the usual ones."""

    round: int
    closing: bool
    partners: tuple[PeerId, ...]
    peers: int
    reason: str = ""


class RoundFinished(msgspec.Struct, frozen=True, kw_only=True, tag="round_finished"):
    """A round is over."""

    report: RoundReport


class PeerWork(msgspec.Struct, frozen=True, kw_only=True):
    """What one peer tells of its work in its record.

    Attributes:
        peer_id: the peer.
        tokens, rounds, bytes_sent: see `core.records.Work`.
        steps: mean inner steps in one of its rounds.
        every: it takes part in one of so many rounds.
    """

    peer_id: PeerId
    tokens: int
    rounds: int
    bytes_sent: int
    steps: float
    every: int


class WorkTold(msgspec.Struct, frozen=True, kw_only=True, tag="work_told"):
    """What the peers of the run have done so far: this one first, then those who did most."""

    peers: tuple[PeerWork, ...]


class Validated(msgspec.Struct, frozen=True, kw_only=True, tag="validated"):
    """The peer's own parameters were tried on the held-out text."""

    round: int
    val_loss: float


class Jumped(msgspec.Struct, frozen=True, kw_only=True, tag="jumped"):
    """The swarm was ahead, so rounds were skipped."""

    from_round: int
    to_round: int


class Notice(msgspec.Struct, frozen=True, kw_only=True, tag="notice"):
    """Something a person should know, in one sentence."""

    text: str


class Left(msgspec.Struct, frozen=True, kw_only=True, tag="left"):
    """The node has left the swarm; its last event."""

    report: PeerReport
    finished: bool


Event: TypeAlias = (
    Online
    | Invitation
    | Waiting
    | Training
    | PeersChanged
    | RoundStarted
    | RoundFinished
    | WorkTold
    | Validated
    | Jumped
    | Notice
    | Left
)
Observer: TypeAlias = Callable[[Event], None]
