"""What a round and a whole run leave behind, as plain values that turn into JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import SupportsFloat

import msgspec

from gasloc_p2p.core.types import EdgeKind, EdgeOutcome, PeerId


class EdgeReport(msgspec.Struct, frozen=True, kw_only=True):
    """One edge of one round, without the parameters it carried; see `EdgeOutcome`.

    `late` says how many rounds after its own it ended.
    """

    partner: PeerId
    kind: EdgeKind
    reason: str = ""
    code: str = ""
    clip: float = 1.0
    excluded: bool = False
    resumed: int = 0
    repaired_blocks: int = 0
    late: int = 0


class RoundReport(msgspec.Struct, frozen=True, kw_only=True):
    """One round of one peer.

    Attributes:
        round: round number; closing rounds follow the training rounds.
        closing: whether this was a gossip round without training.
        local_steps: inner steps done.
        train_loss: mean loss of these steps in nats per token, None without steps.
        edges: how the edges ended that did so in this round, those of earlier rounds last.
        under_way: edges of this round that go on beside later ones.
        all_reduces: times that the whole swarm took a mean instead; the simulator's baselines do.
        bytes_sent, bytes_received: bytes over all edges.
        train_s, exchange_s, wait_s: seconds of training, of exchanging, and of the exchange
            the part before the partner answered.
        reverted: whether numbers were not finite, so that this peer returned to the round's start.
        every: rounds of the swarm that this one took.
        reason: why other than the usual number of steps was planned; empty when it was not.
        tokens: that it trained on.
        mfu: part of the device's measured peak that its inner steps used; None where unknown.
    """

    round: int
    closing: bool
    local_steps: int
    train_loss: float | None
    edges: tuple[EdgeReport, ...]
    under_way: int = 0
    all_reduces: int = 0
    bytes_sent: int
    bytes_received: int
    train_s: float
    exchange_s: float
    wait_s: float
    reverted: bool = False
    every: int = 1
    reason: str = ""
    tokens: int = 0
    mfu: float | None = None

    @property
    def tokens_per_s(self) -> float:
        """Tokens in a second of inner steps; 0 without any."""
        return self.tokens / self.train_s if self.train_s > 0 else 0.0

    @property
    def unpaired(self) -> bool:
        """Whether the peer exchanged with nobody in this round."""
        own = any(edge.late == 0 for edge in self.edges)
        return not (own or self.under_way or self.all_reduces)


class EdgeCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Edges of all rounds by outcome; `unpaired` counts rounds without a partner.

    `clipped` are among those that were mixed, `excluded` among the refused ones; `late` are those
    that ended in a later round than their own; `cut` were under way for longer than this peer
    stayed; `resumed` counts streams that broke and were replaced.
    """

    applied: int = 0
    timed_out: int = 0
    refused: int = 0
    corrupt: int = 0
    asymmetric: int = 0
    not_partner: int = 0
    unpaired: int = 0
    lost: int = 0
    clipped: int = 0
    excluded: int = 0
    late: int = 0
    cut: int = 0
    resumed: int = 0


class PeerReport(msgspec.Struct, frozen=True, kw_only=True):
    """One peer's part of a run; docs/report.md describes every field."""

    peer_id: PeerId
    exit_code: int
    rounds: int
    local_steps: tuple[int, ...]
    train_loss: tuple[float | None, ...]
    every: tuple[int, ...] = ()
    reason: tuple[str, ...] = ()
    under_way: tuple[int, ...] = ()
    val_loss: float | None
    edges: EdgeCounts
    bytes_sent: int
    bytes_received: int
    train_s: float
    exchange_s: float
    wait_s: float
    reverted: int = 0
    repaired_blocks: int = 0
    refusals: dict[str, int] = {}
    theta_digest: str | None


def round_report(
    *,
    round: int,
    closing: bool,
    losses: Sequence[SupportsFloat],
    outcomes: Sequence[tuple[int, EdgeOutcome]],
    under_way: int = 0,
    reverted: bool,
    train_s: float,
    exchange_s: float,
    wait_s: float,
    every: int = 1,
    reason: str = "",
    tokens: int = 0,
    mfu: float | None = None,
) -> RoundReport:
    """Sum up one round from what its parts returned.

    Args:
        outcomes: how edges ended in its course, with the rounds that they belong to.
        under_way: edges of this round that have not ended.
        wait_s: seconds of waiting for partners that had not answered yet.
    """
    return RoundReport(
        round=round,
        closing=closing,
        local_steps=len(losses),
        train_loss=sum(map(float, losses)) / len(losses) if losses else None,
        edges=tuple(
            EdgeReport(
                partner=edge.partner,
                kind=edge.kind,
                reason=edge.reason,
                code=edge.code,
                clip=edge.clip,
                excluded=edge.excluded,
                resumed=edge.resumed,
                repaired_blocks=edge.repaired_blocks,
                late=round - began,
            )
            for began, edge in outcomes
        ),
        under_way=under_way,
        bytes_sent=sum(edge.bytes_sent for _, edge in outcomes),
        bytes_received=sum(edge.bytes_received for _, edge in outcomes),
        train_s=train_s,
        exchange_s=exchange_s,
        wait_s=wait_s,
        reverted=reverted,
        every=every,
        reason=reason,
        tokens=tokens,
        mfu=mfu,
    )


def peer_report(
    *,
    peer_id: PeerId,
    rounds: Sequence[RoundReport],
    val_loss: float | None,
    theta_digest: str | None,
    exit_code: int = 0,
) -> PeerReport:
    """Sum up a peer's rounds; edges and bytes include the closing rounds."""
    training = [report for report in rounds if not report.closing]
    edges = [edge for report in rounds for edge in report.edges]
    counts = Counter(edge.kind.value for edge in edges)
    late = sum(edge.late > 0 for edge in edges)
    return PeerReport(
        peer_id=peer_id,
        exit_code=exit_code,
        rounds=len(training),
        local_steps=tuple(report.local_steps for report in training),
        train_loss=tuple(report.train_loss for report in training),
        every=tuple(report.every for report in training),
        reason=tuple(report.reason for report in training),
        under_way=tuple(report.under_way for report in training),
        val_loss=val_loss,
        edges=EdgeCounts(
            **counts,
            unpaired=sum(report.unpaired for report in rounds),
            clipped=sum(edge.clip < 1 for edge in edges),
            excluded=sum(edge.excluded for edge in edges),
            late=late,
            # Each that was under way at the end of its round is told of again when it ends.
            cut=sum(report.under_way for report in rounds) - late,
            resumed=sum(edge.resumed for edge in edges),
        ),
        repaired_blocks=sum(edge.repaired_blocks for edge in edges),
        refusals=dict(Counter(edge.code for edge in edges if edge.code)),
        bytes_sent=sum(report.bytes_sent for report in rounds),
        bytes_received=sum(report.bytes_received for report in rounds),
        train_s=sum(report.train_s for report in rounds),
        exchange_s=sum(report.exchange_s for report in rounds),
        wait_s=sum(report.wait_s for report in rounds),
        reverted=sum(report.reverted for report in rounds),
        theta_digest=theta_digest,
    )
