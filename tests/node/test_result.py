"""What a node leaves behind, and what happens when there is no room for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gasloc_p2p.core.errors import DiskError
from gasloc_p2p.node.report import peer_report
from gasloc_p2p.node.result import NodeResult, read_report, read_thetas


def result(value: float) -> NodeResult:
    theta = torch.full((8,), value)
    return NodeResult(
        report=peer_report(peer_id=f"peer {value}", rounds=(), val_loss=None, theta_digest=None),
        theta=theta,
        closing_theta=theta,
        finished=True,
    )


def test_results_are_read_back(tmp_path: Path) -> None:
    result(1.0).write(tmp_path / "home")
    report, thetas = read_report(tmp_path / "home"), read_thetas(tmp_path / "home")
    assert report == result(1.0).report
    assert thetas is not None
    assert torch.equal(thetas[0], result(1.0).theta)


@pytest.mark.parametrize("file", ["theta.safetensors", "report.json"])
def test_a_failed_write_is_explained_and_leaves_what_was_there(file: str, tmp_path: Path) -> None:
    result(1.0).write(tmp_path)
    partial = tmp_path / f"{file}.partial"
    if file == "report.json":
        partial.symlink_to("/dev/full")
    else:
        partial.mkdir()
    with pytest.raises(DiskError, match="the results cannot be written") as caught:
        result(2.0).write(tmp_path)
    assert caught.value.why
    assert partial.is_dir() or not partial.is_symlink(), "it takes no room"
    assert read_report(tmp_path) == result(1.0).report
    thetas = read_thetas(tmp_path)
    assert thetas is not None
    assert torch.equal(thetas[0], result(1.0).theta)


@pytest.mark.parametrize("earlier", [True, False])
def test_a_peer_that_did_not_begin_again_leaves_its_earlier_results(
    earlier: bool, tmp_path: Path
) -> None:
    if earlier:
        assert result(1.0).write(tmp_path)
    assert replace(result(2.0), begun=False).write(tmp_path) is not earlier
    assert read_report(tmp_path) == result(1.0 if earlier else 2.0).report


def test_a_home_that_cannot_be_made_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(DiskError, match="the results cannot be written"):
        result(1.0).write(tmp_path / "file" / "home")
