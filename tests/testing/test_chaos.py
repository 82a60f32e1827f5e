"""Swarms come through random faults; one that does not is told how to be seen again."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from gasloc_p2p.core.errors import ConfigError
from gasloc_p2p.testing.__main__ import main
from gasloc_p2p.testing.chaos import Case, ChaosFailure

QUICK_SEEDS, SEEDS = 4, 200
QUICK_NANO_SEEDS, NANO_SEEDS = 0, 3

NEVER_GIVES_UP = """
from gasloc_p2p.node.peer import Peer

Peer.edge_deadline_s = lambda *_, **__: 1e9
"""
REPEATS_A_ROUND = """
from gasloc_p2p.core.pace import StepsPace

sound, again = StepsPace.next_round, set()

def next_round(self, own_round, swarm_round, now_s):
    if own_round == 7 and id(self) not in again:
        again.add(id(self))
        return 7
    return sound(self, own_round, swarm_round, now_s)

StepsPace.next_round = next_round
"""


def seeds(quick: int, total: int) -> list[object]:
    return [
        pytest.param(seed, marks=() if seed < quick else pytest.mark.slow) for seed in range(total)
    ]


@pytest.mark.parametrize("seed", seeds(QUICK_SEEDS, SEEDS))
def test_16_peers_come_through_40_rounds(seed: int) -> None:
    Case(seed=seed).run()


@pytest.mark.parametrize("seed", seeds(QUICK_NANO_SEEDS, NANO_SEEDS))
def test_language_models_do_too(seed: int) -> None:
    Case(seed=seed, model="nano").run()


def replayed(command: str) -> subprocess.CompletedProcess[str]:
    """Run a command that was printed, as a person would."""
    python, *arguments = shlex.split(command)
    assert python == "python"
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONHASHSEED": "5"},
    )


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        (NEVER_GIVES_UP, r"round \d+ of peer \d took [\d.]+ s, at most [\d.]+ s are allowed"),
        (REPEATS_A_ROUND, r"peer \d did round 7 after 7"),
    ],
    ids=["never gives up", "repeats a round"],
)
def test_a_broken_node_is_caught_and_its_failure_can_be_repeated(
    broken: str, complaint: str, tmp_path: Path
) -> None:
    """The node is broken in a process of its own, as an extension may do anything."""
    extension = tmp_path / "broken node.py"
    extension.write_text(broken)
    case = Case(seed=4, peers=6, rounds=24, settings=(f"node.extensions={extension}",))
    first = replayed(case.command)
    assert first.returncode == 1, first.stdout + first.stderr
    verdict = first.stdout[first.stdout.index("FAILED: ") :]
    assert re.match(f"FAILED: seed 4: {complaint}", verdict, re.DOTALL)
    [command] = [
        line.partition("replay: ")[2] for line in verdict.splitlines() if "replay: " in line
    ]
    assert command == case.command
    again = replayed(command)
    assert again.returncode == 1
    assert again.stdout == first.stdout
    assert "digest: " in verdict


def test_the_command_tells_the_story(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos", "--seed", "3", "--peers", "4", "--rounds", "20"]) == 0
    printed = capsys.readouterr().out
    case = Case(seed=3, peers=4, rounds=20)
    for fault in str(case.plan).splitlines():
        assert fault in printed
    assert printed.count("  peer ") >= 4
    assert f"digest: {case.run().digest}" in printed


def test_a_failure_names_its_case() -> None:
    case = Case(
        seed=3, peers=4, rounds=20, model="nano", settings=("run.id=a b", "outer.momentum=0.5")
    )
    assert case.command == (
        "python -m gasloc_p2p.testing chaos --seed 3 --peers 4 --rounds 20 --model nano "
        "--set 'run.id=a b' --set outer.momentum=0.5"
    )
    trace = Case(seed=3, peers=4, rounds=20).run()
    failure = ChaosFailure(case, "it broke", trace)
    assert str(failure).splitlines() == [
        "seed 3: it broke",
        f"  replay: {case.command}",
        f"  digest: {trace.digest}",
    ]


def test_what_cannot_be_run_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos", "--seed", "0", "--rounds", "5"]) == 2
    assert "at least 2 peers and 18 rounds" in capsys.readouterr().err
    assert main(["chaos", "--seed", "0", "--set", "outer.momentun=0.5"]) == 2
    assert "outer.momentum" in capsys.readouterr().err
    with pytest.raises(ConfigError):
        Case(seed=0, settings=("outer.momentun=0.5",)).config()
