"""Which faults a seed stands for, and that they befall processes when their rounds come."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from gasloc_p2p.commands.chaos import (
    FIRST_ROUND,
    QUIET_ROUNDS,
    Chaos,
    Fault,
    FaultKind,
    plan_faults,
)
from gasloc_p2p.core.errors import ConfigError
from gasloc_p2p.core.types import EdgeKind
from gasloc_p2p.node.events import RoundStarted
from tests.testing.test_trace import finished

ASLEEP = [sys.executable, "-c", "import signal; signal.pause()"]


def started(round: int) -> RoundStarted:
    return RoundStarted(round=round, closing=False, partners=(), peers=2)


@pytest.fixture
def nodes() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two processes that do nothing until a signal comes."""
    processes = [subprocess.Popen(ASLEEP) for _ in range(2)]
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def chaos_of(nodes: list[subprocess.Popen[bytes]], *faults: Fault) -> Chaos:
    return Chaos(faults, until_round=20, pid_of=lambda peer: nodes[peer].pid, say=lambda text: None)


def test_a_seed_stands_for_faults_of_every_kind() -> None:
    plan = plan_faults(7, peers=6, rounds=32)
    assert plan == plan_faults(7, peers=6, rounds=32)
    assert plan != plan_faults(8, peers=6, rounds=32)
    assert {fault.kind for fault in plan} == set(FaultKind)
    assert {fault.peer for fault in plan} <= set(range(6))
    assert all(FIRST_ROUND <= fault.round <= 32 - QUIET_ROUNDS for fault in plan)


@pytest.mark.parametrize(("peers", "rounds"), [(1, 40), (4, 12)])
def test_a_run_without_room_for_faults_is_refused(peers: int, rounds: int) -> None:
    with pytest.raises(ConfigError, match="no room for chaos"):
        plan_faults(0, peers=peers, rounds=rounds)


@pytest.mark.parametrize(
    ("kind", "status"),
    [(FaultKind.KILL, -signal.SIGKILL), (FaultKind.RESTART, -signal.SIGTERM)],
)
def test_a_process_that_is_ended_is_to_come_back(
    kind: FaultKind, status: int, nodes: list[subprocess.Popen[bytes]]
) -> None:
    chaos = chaos_of(nodes, Fault(kind=kind, peer=1, round=4))
    chaos.observe(1, started(3))
    chaos.observe(0, started(4))
    assert chaos.reports == ()
    chaos.observe(1, started(4))
    assert nodes[1].wait(timeout=10) == status
    assert nodes[0].poll() is None
    assert chaos.comes_back(1)
    assert not chaos.comes_back(1), "once for each end"


def test_a_process_that_is_stopped_goes_on_once_others_are_two_rounds_further(
    nodes: list[subprocess.Popen[bytes]],
) -> None:
    chaos = chaos_of(nodes, Fault(kind=FaultKind.STOP, peer=1, round=4))
    chaos.observe(1, started(4))
    os.waitid(os.P_PID, nodes[1].pid, os.WSTOPPED)
    chaos.observe(0, started(5))
    assert psutil.Process(nodes[1].pid).status() == psutil.STATUS_STOPPED
    chaos.observe(0, started(6))
    os.waitid(os.P_PID, nodes[1].pid, os.WCONTINUED)


def test_a_fault_is_absorbed_in_the_first_later_round_that_is_mixed(
    nodes: list[subprocess.Popen[bytes]],
) -> None:
    chaos = chaos_of(nodes, Fault(kind=FaultKind.CUT, peer=1, round=4))
    chaos.observe(1, started(4))
    chaos.observe(1, finished(4))
    chaos.observe(1, finished(5, EdgeKind.LOST))
    chaos.observe(0, finished(6))
    assert chaos.reports[0].absorbed_after_rounds is None
    chaos.observe(1, finished(7))
    chaos.observe(1, finished(8))
    [report] = chaos.reports
    assert (report.kind, report.peer, report.round) == ("cut", 1, 4)
    assert report.absorbed_after_rounds == 3


def test_a_fault_that_comes_due_too_late_is_left_out(nodes: list[subprocess.Popen[bytes]]) -> None:
    chaos = chaos_of(nodes, Fault(kind=FaultKind.KILL, peer=1, round=4))
    chaos.observe(1, started(21))
    assert chaos.reports == ()
    assert nodes[1].poll() is None
