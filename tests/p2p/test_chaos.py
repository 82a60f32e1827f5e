"""Real nodes that are killed, stopped, restarted and cut off, and train on."""

from __future__ import annotations

from pathlib import Path

import pytest

from gasloc_p2p.commands.chaos import FaultKind
from tests.p2p.test_testnet import run_report

pytestmark = [pytest.mark.p2p, pytest.mark.timeout(400)]


@pytest.mark.parametrize(
    ("peers", "rounds", "steps"), [(4, 20, 15), pytest.param(6, 40, 30, marks=pytest.mark.slow)]
)
def test_a_swarm_trains_on_through_faults(
    peers: int, rounds: int, steps: int, tmp_path: Path
) -> None:
    size = ("--peers", str(peers), "--rounds", str(rounds), "--local-steps", str(steps))
    report = run_report(tmp_path, "testnet", *size, "--chaos", "2")
    kinds = [fault.kind for fault in report.faults]
    assert len(kinds) >= 3
    assert set(kinds) <= set(FaultKind)
    assert [peer.exit_code for peer in report.peers] == [0] * peers
    assert report.averaged_val_loss is not None
    assert report.averaged_val_loss < 0.6 * report.initial_val_loss
    absorbed = [fault for fault in report.faults if fault.absorbed_after_rounds is not None]
    assert absorbed
    if rounds == 40:
        # In a shorter run a node that was killed is hardly up again before the end.
        assert len(absorbed) == len(report.faults)
