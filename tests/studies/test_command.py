"""`gasloc study` as a person meets it: output, Ctrl-C, a parent that is killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from gasloc_p2p.commands.lifetime import INTERRUPTED_EXIT_CODE
from gasloc_p2p.core.errors import ConfigError
from gasloc_p2p.studies.record import read_results
from tests.cli.test_cli import gasloc

GONE_S = 30.0


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "gasloc_p2p", "study", *arguments]


def environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith("GASLOC_")}


@contextmanager
def running(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Start `gasloc study`, wait until it has a result, and leave nothing behind."""
    process = subprocess.Popen(
        command(*arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if "simulations done" in line:
                break
        yield process
    finally:
        process.kill()
        process.communicate()


def cell_processes(parent: subprocess.Popen[str]) -> list[psutil.Process]:
    found: list[psutil.Process] = psutil.Process(parent.pid).children(recursive=True)
    assert any("gasloc_p2p.studies.cell_process" in process.cmdline() for process in found)
    return found


def test_ctrl_c_keeps_what_is_finished(tmp_path: Path) -> None:
    with running("topology", "--out", str(tmp_path), "--set", "study.jobs=2") as process:
        children = cell_processes(process)
        assert len(children) == 2
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=GONE_S)
        assert process.returncode == INTERRUPTED_EXIT_CODE, output
    _, alive = psutil.wait_procs(children, timeout=GONE_S)
    assert not alive
    assert "the same command goes on from there" in output
    # Two ran side by side, and either may have been the first to end.
    assert re.search(r"^\| \w+ \| \d+ \| ", output, re.MULTILINE)
    results = read_results(tmp_path)
    assert results is not None
    kept = [outcome for outcome in results.cells if outcome.result is not None]
    assert kept
    assert f"interrupted: {len(kept)} of 24 simulations are kept" in output
    for name in ("table.md", "plot.svg"):
        assert (tmp_path / name).stat().st_size > 0


def test_nothing_is_left_when_the_command_is_killed(tmp_path: Path) -> None:
    """The processes are in the middle of a cell then."""
    with running("topology", "--out", str(tmp_path)) as process:
        children = cell_processes(process)
        process.kill()
        _, alive = psutil.wait_procs(children, timeout=GONE_S)
        assert not alive
    results = read_results(tmp_path)
    assert results is not None
    assert results.cells


def refused(*arguments: str) -> str:
    """Return the message of a command that is refused before anything starts."""
    result = gasloc("study", *arguments)
    assert result.returncode == ConfigError.exit_code, result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    for part in ("gasloc: ", "  why: ", "  fix: "):
        assert part in result.stderr
    return result.stderr


def test_full_scale_says_what_it_needs(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    out = tmp_path / "out"
    message = refused("multi-step", "--full", "--out", str(out))
    for words in (
        "there is no CUDA device and data.path is empty",
        "floating point operations (6 x parameters x tokens)",
        "hours at the",
        "gasloc study multi-step --full --out DIR --set data.path=FOLDER",
    ):
        assert words in message
    assert not out.exists()


def test_what_a_study_varies_is_refused(tmp_path: Path) -> None:
    message = refused("multi-step", "--out", str(tmp_path / "o"), "--set", "gossip.topology=ring")
    assert "--also 'mine=gossip.topology=ring'" in message
