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


@pytest.mark.p2p
@pytest.mark.timeout(600)
def test_the_research_tutorial_works_as_written(tmp_path: Path) -> None:
    text = TUTORIAL.read_text()
    for name, program in re.findall(r"^```python\n# (\S+)\n(.*?)^```", text, flags=re.M | re.S):
        (tmp_path / name).write_text(program)
    commands = re.findall(r"^    (gasloc .*)$", text, flags=re.M)
    assert len(commands) >= 7
    for command in commands:
        run(command, tmp_path)
    assert {path.name for path in (tmp_path / "mine").iterdir()} >= {
        "results.json",
        "table.md",
        "plot.svg",
    }
    assert "heavy ball" in (tmp_path / "mine" / "table.md").read_text()


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
        env={"PYTHONPATH": str(Path(gasloc_p2p.__file__).parents[1]), "HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
        check=False,
    )
    expected = UnstableError.exit_code if command.endswith(REFUSED) else 0
    assert done.returncode == expected, f"{command}\n{done.stdout}\n{done.stderr}"
    if expected:
        assert "momentum to at most" in done.stderr
