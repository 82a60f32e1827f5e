"""`gasloc testnet` as a person runs it: its report, its equality with a simulation, its end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TypeAlias

import msgspec
import psutil
import pytest

from gasloc_p2p.report import SwarmReport
from tests.p2p.real import QUICK as QUICK_RUN
from tests.p2p.real import real_swarm, sets

pytestmark = [pytest.mark.p2p, pytest.mark.timeout(300)]

QUICK = ("--rounds", "4", "--local-steps", "5", "--set", "data.validation_tokens=1024")
GONE_S = 20.0

RunTestnet: TypeAlias = Callable[[int, str], tuple[SwarmReport, Path]]


def environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith("GASLOC_")}


def run_report(folder: Path, command: str, *arguments: str) -> SwarmReport:
    """Run `gasloc testnet` or `simulate` and read its report."""
    return run_and_report(folder, command, *arguments)[0]


def run_and_report(folder: Path, command: str, *arguments: str) -> tuple[SwarmReport, str]:
    """Run a command and return its report and what it printed."""
    file = folder / f"{command}.json"
    result = subprocess.run(
        [sys.executable, "-m", "gasloc_p2p", command, *arguments, "--report", str(file)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=environment(),
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return msgspec.json.decode(file.read_bytes(), type=SwarmReport), result.stdout


def small(peers: int, topology: str) -> tuple[str, ...]:
    """Return the arguments of a run that takes seconds."""
    # How many steps real peers do otherwise follows from how busy this machine is.
    same = ("--set", "pace.adapt_steps=false")
    return ("--peers", str(peers), "--topology", topology, "--seed", "3", *QUICK, *same)


@pytest.fixture(scope="module")
def run_testnet(tmp_path_factory: pytest.TempPathFactory) -> RunTestnet:
    """Return a function that runs a swarm, once for all tests: its report and its kept files."""

    @cache
    def run(peers: int, topology: str) -> tuple[SwarmReport, Path]:
        folder = tmp_path_factory.mktemp("testnet")
        keep = folder / "kept"
        report = run_report(folder, "testnet", *small(peers, topology), "--keep", str(keep))
        return report, keep

    return run


@pytest.mark.parametrize(
    ("peers", "topology"),
    [
        (4, "pairs"),
        pytest.param(3, "complete", marks=pytest.mark.slow),
        pytest.param(5, "ring", marks=pytest.mark.slow),
    ],
)
def test_a_real_swarm_equals_a_simulated_one_bit_for_bit(
    peers: int, topology: str, run_testnet: RunTestnet, tmp_path: Path
) -> None:
    real, _ = run_testnet(peers, topology)
    simulated = run_report(tmp_path, "simulate", *small(peers, topology))
    assert [p.theta_digest for p in real.peers] == [p.theta_digest for p in simulated.peers]
    assert None not in {p.theta_digest for p in real.peers}
    assert [p.edges for p in real.peers] == [p.edges for p in simulated.peers]
    assert [p.train_loss for p in real.peers] == [p.train_loss for p in simulated.peers]
    assert real.averaged_val_loss == simulated.averaged_val_loss
    assert real.closing_consensus_distance == simulated.closing_consensus_distance
    assert real.run_digest == simulated.run_digest
    if peers == 4:
        assert {p.edges.applied for p in real.peers} == {9}


def test_kept_files_hold_what_the_report_says(run_testnet: RunTestnet) -> None:
    _, keep = run_testnet(4, "pairs")
    for name in ("bootstrap.log", "peer-0.log", "founder.toml", "joiner.toml"):
        assert (keep / name).is_file()
    for index in range(4):
        home = keep / f"peer-{index}"
        assert (home / "identity").stat().st_mode & 0o777 == 0o600
        assert (home / "theta.safetensors").is_file()
        assert (home / "report.json").is_file()


@contextmanager
def endless_testnet(folder: Path) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """Start a test swarm and yield it, and all its processes, once it is in mid-round."""
    arguments = ("--peers", "2", "--rounds", "100000", "--local-steps", "20")
    parent = subprocess.Popen(
        [sys.executable, "-m", "gasloc_p2p", "testnet", *arguments, "--keep", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
    )
    family = [psutil.Process(parent.pid)]
    try:
        assert parent.stdout is not None
        for line in parent.stdout:
            if line.startswith("round 2/"):
                break
        family += family[0].children(recursive=True)
        yield parent, family
    finally:
        for process in family:
            if process.is_running():
                process.kill()
        parent.communicate()


def assert_gone(family: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(family, timeout=GONE_S)
    assert not alive


def test_ctrl_c_in_mid_round_ends_every_process(tmp_path: Path) -> None:
    with endless_testnet(tmp_path) as (parent, family):
        assert sum(process.name() == "p2pd" for process in family) == 3
        assert len(family) == 1 + 3 + 3
        parent.send_signal(signal.SIGINT)
        output, _ = parent.communicate(timeout=30)
        assert parent.returncode == 130
        assert "every node has been ended" in output
        assert_gone(family)
    assert (tmp_path / "peer-0" / "report.json").is_file(), "the nodes left, and were not killed"


def test_nothing_is_left_when_the_parent_is_killed(tmp_path: Path) -> None:
    with endless_testnet(tmp_path) as (parent, family):
        parent.kill()
        assert_gone(family)


@pytest.mark.slow
def test_the_demonstration_learns_and_learns_better_together(tmp_path: Path) -> None:
    report = run_report(tmp_path, "testnet", "--compare-solo")
    assert report.averaged_val_loss is not None
    assert report.solo_val_loss is not None
    assert report.averaged_val_loss <= 0.5 * report.initial_val_loss
    assert report.averaged_val_loss <= 0.99 * report.solo_val_loss
    assert {peer.edges.applied for peer in report.peers} == {32 + 5}


@pytest.mark.slow
@pytest.mark.timeout(3600)
async def test_fifty_simultaneous_starts_of_four_peers_make_one_swarm_each(
    tmp_path: Path,
) -> None:
    shared = ("run.id=together", "run.initial_peers=4", "run.rounds=2", "pace.edge_floor_s=20")
    for attempt in range(50):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        async with real_swarm(folder) as swarm:
            entry = f"net.bootstrap={json.dumps(list(await swarm.bootstrap()))}"
            # Four founders of one and the same run, none of which knows of the others.
            nodes = [
                await swarm.launch(f"peer-{index}", "start", *sets(entry, *QUICK_RUN, *shared))
                for index in range(4)
            ]
            async with asyncio.TaskGroup() as tasks:
                codes = [tasks.create_task(node.ended()) for node in nodes]
            assert [code.result() for code in codes] == [0] * 4
        for node in nodes:
            assert set(node.peers_by_round().values()) == {4}
            assert all(edges == [("applied", "")] for edges in node.edges().values())
