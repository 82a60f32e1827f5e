"""One simulation of a study: what is asked, and what came out."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec
from blake3 import blake3

from gasloc_p2p import __version__

Label: TypeAlias = str | int | float


class SwarmCell(msgspec.Struct, frozen=True, kw_only=True, tag="swarm", omit_defaults=True):
    """A swarm that trains.

    Attributes:
        labels: where the result belongs in tables and plots.
        algorithm: name in `gasloc_p2p.algorithms.ALGORITHMS`.
        peers: how many.
        seed: the run's seed.
        settings: every `section.key` that is not left at its default or at the algorithm's.
        judged: whether the swarm's standings are taken on the way.
    """

    labels: dict[str, Label]
    algorithm: str
    peers: int
    seed: int
    settings: dict[str, Any]
    judged: bool = False


class MixCell(msgspec.Struct, frozen=True, kw_only=True, tag="mix"):
    """Random vectors that are mixed, without any learning.

    Attributes:
        labels: where the result belongs in tables and plots.
        peers: how many.
        seed: of the vectors and of the graphs.
        topology: name of the topology.
        rule: name of the outer rule.
        lr: eta.
        momentum: gamma.
        rounds: how many rounds.
        fresh: whether every round mixes new vectors and counts by itself, in squared norms;
            otherwise the state is carried on and the rate is that of the norm in the long run.
    """

    labels: dict[str, Label]
    peers: int
    seed: int
    topology: str
    rule: str
    lr: float
    momentum: float
    rounds: int
    fresh: bool


Cell: TypeAlias = SwarmCell | MixCell


class CurvePoint(msgspec.Struct, frozen=True, kw_only=True):
    """The swarm's mean validation loss at a virtual time."""

    round: int
    time_s: float
    val_loss: float | None


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """A swarm after some rounds in the mean over its peers; see `simulate/standings.py`."""

    rounds: int
    time_s: float
    averaged_val_loss: float | None
    own_val_loss: float | None


class SwarmResult(msgspec.Struct, frozen=True, kw_only=True, tag="swarm"):
    """What a swarm reached; losses in nats per token, None where they are not finite.

    Attributes:
        initial_val_loss: of the initial parameters.
        averaged_val_loss: of the averaged model after the last training round.
        own_val_loss: mean over the honest peers of their own model's loss.
        consensus_distance: after the last training round, relative to the mean's norm.
        closing_consensus_distance: the same after the closing rounds.
        bytes_sent: over all peers and rounds.
        simulated_s: virtual seconds of training.
        wall_s: real seconds.
        curve: validation losses on the way, when the peers try their models.
        bits_per_parameter: sent in one direction of an edge that was mixed, everything counted, in
            the mean over all edges and rounds; None without any.
        repaired_shares: of the blocks that were exchanged, by round, closing rounds too; empty for
            codecs that repair nothing.
        train_tokens: that all peers trained on; None in results of versions that did not count.
        standings: on the way, of a cell that is `judged`.
    """

    initial_val_loss: float | None
    averaged_val_loss: float | None
    own_val_loss: float | None
    consensus_distance: float | None
    closing_consensus_distance: float | None
    bytes_sent: int
    simulated_s: float | None
    wall_s: float
    curve: tuple[CurvePoint, ...] = ()
    bits_per_parameter: float | None = None
    repaired_shares: tuple[float, ...] = ()
    train_tokens: int | None = None
    standings: tuple[Standing, ...] = ()

    @property
    def diverged(self) -> bool:
        """Whether the averaged model ended non-finite, or worse than it began."""
        if self.averaged_val_loss is None or self.initial_val_loss is None:
            return True
        return self.averaged_val_loss > self.initial_val_loss


class MixResult(msgspec.Struct, frozen=True, kw_only=True, tag="mix"):
    """How fast vectors came together.

    Attributes:
        factor: per round; of the squared distance to the mean for fresh vectors, of the distance
            itself otherwise.
        wall_s: real seconds.
    """

    factor: float
    wall_s: float


Result: TypeAlias = SwarmResult | MixResult


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """A cell that has run: its result, or the error that ended it."""

    key: str
    cell: Cell
    result: Result | None = None
    error: str | None = None


def cell_key(cell: Cell) -> str:
    """Return what identifies a cell's result: a digest of its definition and the version."""
    definition = msgspec.json.encode((__version__, cell), order="deterministic")
    return blake3(definition).hexdigest(length=10)
