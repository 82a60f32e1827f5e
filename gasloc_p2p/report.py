"""The report of a whole swarm; docs/report.md describes every field."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from gasloc_p2p import __version__
from gasloc_p2p.core.substrate import LocalModel
from gasloc_p2p.node.report import PeerReport


class CurvePoint(msgspec.Struct, frozen=True, kw_only=True):
    """What the peers had learned by the end of a round, in the mean over them."""

    round: int
    time_s: float
    val_loss: float


class FaultReport(msgspec.Struct, frozen=True, kw_only=True):
    """A fault that a test swarm was put through, and when its peer mixed again."""

    kind: str
    peer: int
    round: int
    absorbed_after_rounds: int | None


class SwarmReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a test swarm or a simulation did and reached."""

    version: str
    algorithm: str
    run_digest: str
    config: dict[str, dict[str, Any]]
    wall_s: float
    initial_val_loss: float
    averaged_val_loss: float | None
    solo_val_loss: float | None
    consensus_distance: float | None
    closing_consensus_distance: float | None
    simulated_s: float | None
    curve: tuple[CurvePoint, ...]
    text_overlap: float | None = None
    faults: tuple[FaultReport, ...]
    peers: tuple[PeerReport, ...]

    def write(self, path: Path) -> None:
        """Write the report as indented JSON."""
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")


def swarm_report(
    *,
    algorithm: str,
    run_digest: bytes,
    config: dict[str, dict[str, Any]],
    wall_s: float,
    judge: LocalModel,
    initial_theta: Tensor,
    peers: Sequence[PeerReport],
    thetas: Sequence[Tensor],
    closing_thetas: Sequence[Tensor],
    solo_val_loss: float | None,
    simulated_s: float | None = None,
    curve: Sequence[CurvePoint] = (),
    faults: Sequence[FaultReport] = (),
    text_overlap: float | None = None,
) -> SwarmReport:
    """Sum up a swarm from its peers' reports and parameters.

    Args:
        algorithm: the name under which the configuration was loaded.
        run_digest: digest of the run's manifest.
        config: the effective configuration.
        wall_s: seconds from the first process to the last one's end.
        judge: evaluates parameters on the held-out text.
        initial_theta: the run's initial parameters, [P] fp32.
        peers: one report per peer, in the order in which they were started.
        thetas: parameters after the last training round, [P] fp32 each.
        closing_thetas: parameters after the closing rounds, [P] fp32 each.
        solo_val_loss: mean loss of the same peers trained alone, if that was asked for.
        simulated_s: virtual seconds until the end of training, of a simulated swarm.
        curve: what the peers of a simulated swarm had learned, by virtual time.
        faults: what a test swarm was put through.
        text_overlap: see `data.overlap`; None when peers do not read a stream of documents.
    """
    averaged = mean_theta(thetas) if thetas else None
    return SwarmReport(
        version=__version__,
        algorithm=algorithm,
        run_digest=run_digest.hex(),
        config=config,
        wall_s=wall_s,
        initial_val_loss=judge.validation_loss(initial_theta),
        averaged_val_loss=judge.validation_loss(averaged) if averaged is not None else None,
        solo_val_loss=solo_val_loss,
        consensus_distance=consensus_distance(thetas) if thetas else None,
        closing_consensus_distance=consensus_distance(closing_thetas) if closing_thetas else None,
        simulated_s=simulated_s,
        curve=tuple(curve),
        faults=tuple(faults),
        text_overlap=text_overlap,
        peers=tuple(peers),
    )


def mean_theta(thetas: Sequence[Tensor]) -> Tensor:
    """Return the mean of the peers' parameters, [P] fp32, summed in fp64."""
    total = torch.zeros_like(thetas[0], dtype=torch.float64)
    for theta in thetas:
        total += theta
    return (total / len(thetas)).to(torch.float32)


def consensus_distance(thetas: Sequence[Tensor]) -> float:
    """Return the RMS over peers of ||theta_i - mean|| / ||mean||, computed in fp64."""
    stacked = torch.stack([theta.to(torch.float64) for theta in thetas])
    mean = stacked.mean(dim=0)
    deviations = (stacked - mean).norm(dim=1)
    return float((deviations.square().mean().sqrt() / mean.norm()).item())
