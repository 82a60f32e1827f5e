"""The commands of docs/tutorial-research.md do what it says."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import gasloc_p2p
from gasloc_p2p.core.errors import UnstableError

TUTORIAL = Path(__file__).resolve().parents[2] / "docs" / "tutorial-research.md"
REFUSED = "# refused"
COMMAND_S = 240
COMMANDS = re.findall(r"^    (gasloc .*)$", TUTORIAL.read_text(), flags=re.M)


def commands_of(program: str) -> list[str]:
    """Return the tutorial's commands that begin with `program`, in its order."""
    return [command for command in COMMANDS if command.startswith(f"{program} ")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with the files that the tutorial has its reader write."""
    programs = re.findall(r"^```python\n# (\S+)\n(.*?)^```", TUTORIAL.read_text(), re.M | re.S)
    for name, program in programs:
        (tmp_path / name).write_text(program)
    return tmp_path


def test_every_command_is_run_here() -> None:
    tried = [commands_of(f"gasloc {name}") for name in ("simulate", "study", "testnet")]
    assert min(map(len, tried)) >= 1
    assert sum(map(len, tried)) == len(COMMANDS) >= 7


@pytest.mark.parametrize("command", commands_of("gasloc simulate"))
def test_a_simulation_works_as_written(command: str, folder: Path) -> None:
    run(command, folder)


@pytest.mark.timeout(2 * COMMAND_S)
def test_a_study_works_as_written(folder: Path) -> None:
    for command in commands_of("gasloc study"):
        run(command, folder)
    assert {path.name for path in (folder / "mine").iterdir()} >= {
        "results.json",
        "table.md",
        "plot.svg",
    }
    assert "heavy ball" in (folder / "mine" / "table.md").read_text()


@pytest.mark.p2p
@pytest.mark.timeout(2 * COMMAND_S)
def test_a_swarm_of_nodes_works_as_written(folder: Path) -> None:
    for command in commands_of("gasloc testnet"):
        run(command, folder)


def test_the_rule_of_the_tutorial_has_ten_lines() -> None:
    [program] = re.findall(r"^# heavy_ball\.py\n(.*?)^```", TUTORIAL.read_text(), re.M | re.S)
    assert len([line for line in program.splitlines() if line.strip()]) <= 10


def run(command: str, folder: Path) -> None:
    """Run one command of the tutorial and check how it ends."""
    program, *arguments = shlex.split(command, comments=True)
    assert program == "gasloc"
    done = subprocess.run(
        [sys.executable, "-m", "gasloc_p2p", *arguments],
        cwd=folder,
        env={
            "PYTHONPATH": str(Path(gasloc_p2p.__file__).parents[1]),
            "HOME": str(folder),
            # Readers have time for more.
            "GASLOC_DATA_VALIDATION_TOKENS": "1024",
            "GASLOC_INNER_BATCH_SIZE": "2",
        },
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
        check=False,
    )
    expected = UnstableError.exit_code if command.endswith(REFUSED) else 0
    assert done.returncode == expected, f"{command}\n{done.stdout}\n{done.stderr}"
    if expected:
        assert "momentum to at most" in done.stderr
