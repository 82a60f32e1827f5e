"""Faults in a real test swarm: nodes that are killed, stopped, restarted and cut off while it runs.

Everything follows from the seed and from the rounds that the nodes report, so a seed gives the
same faults again, though not at the same instant.
"""

from __future__ import annotations

import enum
import os
import random
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import psutil

from gasloc_p2p.core.errors import ConfigError
from gasloc_p2p.core.types import MIXED_KINDS
from gasloc_p2p.node.events import Event, Left, RoundFinished, RoundStarted
from gasloc_p2p.report import FaultReport

FIRST_ROUND: Final = 3
QUIET_ROUNDS: Final = 10
"""Rounds at the end without a fault, in which the last one is absorbed."""
SPACING_ROUNDS: Final = 3
STOPPED_ROUNDS: Final = 2


class FaultKind(enum.StrEnum):
    """What happens to a node."""

    KILL = "kill"
    """The process ends at once (SIGKILL) and the same command is given again."""
    STOP = "stop"
    """The process stands still (SIGSTOP) while others do two rounds, then goes on."""
    RESTART = "restart"
    """The process is asked to leave (SIGTERM), and the same command is given again."""
    CUT = "cut"
    """The process loses its libp2p daemon (SIGKILL), and with it all connections."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One fault: what happens to whom once it has begun which round."""

    kind: FaultKind
    peer: int
    round: int


def plan_faults(seed: int, *, peers: int, rounds: int) -> list[Fault]:
    """Return the faults of a run: every kind in turn, each on a peer drawn from the seed.

    Raises:
        ConfigError: the run is too short, or has no two peers.
    """
    last = rounds - QUIET_ROUNDS
    if last < FIRST_ROUND or peers < 2:
        raise ConfigError(
            f"a run of {peers} peers and {rounds} rounds leaves no room for chaos",
            why="faults need a peer that others can do without, and rounds in which to absorb them",
            fix=f"use at least 2 peers and {FIRST_ROUND + QUIET_ROUNDS} rounds",
        )
    draw = random.Random(seed)
    kinds = list(FaultKind)
    draw.shuffle(kinds)
    return [
        Fault(kind=kinds[index % len(kinds)], peer=draw.randrange(peers), round=round)
        for index, round in enumerate(range(FIRST_ROUND, last + 1, SPACING_ROUNDS))
    ]


class Chaos:
    """Carries out faults when their rounds come, and follows how they are absorbed.

    Args:
        faults: in the order of their rounds.
        until_round: one that comes due later, since its peer was away, is left out.
        pid_of: process id of a peer's node.
        say: told what happens.
    """

    def __init__(
        self,
        faults: Sequence[Fault],
        *,
        until_round: int,
        pid_of: Callable[[int], int],
        say: Callable[[str], None],
    ) -> None:
        self._due = list(faults)
        self._until_round = until_round
        self._pid_of = pid_of
        self._say = say
        self._back: set[int] = set()
        self._stopped: dict[int, int] = {}
        self._reports: list[FaultReport] = []

    @property
    def reports(self) -> tuple[FaultReport, ...]:
        """What was done so far, and how long each fault was felt."""
        return tuple(self._reports)

    def observe(self, peer: int, event: Event) -> None:
        """Take in what a node reports; what is due happens at once."""
        match event:
            case RoundStarted(round=round, closing=False):
                self._go_on(round)
                self._strike(peer, round)
            case RoundFinished(report=report):
                if report.edges and all(edge.kind in MIXED_KINDS for edge in report.edges):
                    self._absorb(peer, report.round)
            case Left():
                self._go_on(None)
            case _:
                pass

    def comes_back(self, peer: int) -> bool:
        """Whether a node that has just ended is to be started again; asked once for each end."""
        wanted = peer in self._back
        self._back.discard(peer)
        return wanted

    def _strike(self, peer: int, round: int) -> None:
        fault = next((f for f in self._due if f.peer == peer and f.round <= round), None)
        if fault is None or round > self._until_round:
            return
        self._due.remove(fault)
        if peer in self._stopped or peer in self._back:
            return
        node = psutil.Process(self._pid_of(peer))
        match fault.kind:
            case FaultKind.KILL:
                self._back.add(peer)
                node.kill()
            case FaultKind.RESTART:
                self._back.add(peer)
                node.terminate()
            case FaultKind.STOP:
                self._stopped[peer] = round + STOPPED_ROUNDS
                node.suspend()
            case FaultKind.CUT:
                for child in node.children():
                    if child.name() == "p2pd":
                        child.kill()
        self._reports.append(
            FaultReport(kind=fault.kind.value, peer=peer, round=round, absorbed_after_rounds=None)
        )
        self._say(f"chaos: {fault.kind.value} peer {peer} in round {round}")

    def _go_on(self, round: int | None) -> None:
        """Let stopped nodes run again once somebody is far enough, or nobody gets further."""
        for peer, until in list(self._stopped.items()):
            if round is None or round >= until:
                del self._stopped[peer]
                os.kill(self._pid_of(peer), signal.SIGCONT)

    def _absorb(self, peer: int, round: int) -> None:
        """A peer has mixed with all its partners: what befell it before is over."""
        self._reports = [
            msgspec.structs.replace(report, absorbed_after_rounds=round - report.round)
            if report.peer == peer and report.absorbed_after_rounds is None and round > report.round
            else report
            for report in self._reports
        ]
