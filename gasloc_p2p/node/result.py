"""What a node leaves behind, in memory and on disk."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from gasloc_p2p.core.errors import DiskError, GaslocError
from gasloc_p2p.node.report import PeerReport

REPORT_FILE = "report.json"
THETA_FILE = "theta.safetensors"


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeResult:
    """One peer's part of a run.

    Attributes:
        report: what it did and reached.
        theta: parameters after the last training round, [P] fp32.
        closing_theta: parameters after the closing gossip rounds, [P] fp32.
        finished: False when the node left before the end of the run.
        begun: False when it left before its first round, with the run's initial parameters.
        unsaved: what to tell if the last checkpoint could not be written.
    """

    report: PeerReport
    theta: Tensor
    closing_theta: Tensor
    finished: bool
    begun: bool = True
    unsaved: GaslocError | None = None

    def write(self, home: Path) -> bool:
        """Write the report and both parameter vectors into `home`, each file in one step.

        Returns:
            False when nothing was written, since a peer that had not begun again has nothing that
            is better than the results of its earlier rounds.

        Raises:
            DiskError: they cannot be written, as on a full disk; what was there stays.
        """
        if not self.begun and (home / REPORT_FILE).is_file():
            return False
        tensors = {"theta": self.theta, "closing_theta": self.closing_theta.clone()}
        metadata = {"finished": str(self.finished).lower()}
        report = msgspec.json.format(msgspec.json.encode(self.report), indent=2) + b"\n"
        theta_file, report_file = home / THETA_FILE, home / REPORT_FILE
        try:
            home.mkdir(parents=True, exist_ok=True, mode=0o700)
            save_file(tensors, _partial(theta_file), metadata=metadata)
            _partial(report_file).write_bytes(report)
            for file in (theta_file, report_file):
                _partial(file).replace(file)
        except (OSError, SafetensorError) as error:
            for file in (theta_file, report_file):
                # A part of a file must not take the room that the next try needs.
                with suppress(OSError):
                    _partial(file).unlink(missing_ok=True)
            raise DiskError(
                f"the results cannot be written to {home}",
                why=str(error),
                fix="make room there, then give the same command again: it goes on from the last "
                "checkpoint",
            ) from None
        return True


def _partial(file: Path) -> Path:
    return file.with_name(file.name + ".partial")


def read_report(home: Path) -> PeerReport | None:
    """Return the report in `home`; None when the node wrote none."""
    file = home / REPORT_FILE
    return msgspec.json.decode(file.read_bytes(), type=PeerReport) if file.is_file() else None


def read_thetas(home: Path) -> tuple[Tensor, Tensor] | None:
    """Return `theta` and `closing_theta` in `home`; None when the node wrote none."""
    file = home / THETA_FILE
    if not file.is_file():
        return None
    tensors = load_file(file)
    return tensors["theta"], tensors["closing_theta"]
