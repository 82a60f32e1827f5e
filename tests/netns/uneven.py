"""Four nodes, one of them behind a link ten times slower: how much of the time does each compute?

At the full rate the parameters of one peer take a tenth of the time of a round's inner steps. How
long those take depends on what else this machine does, so after each round the links get their
rates anew. Counted is a stretch of rounds in the middle of a long run, once the nodes know these
rates: from the end of the round before the first that counts to the end of the last, everything in
between included.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gasloc_p2p.core.types import MIXED_KINDS
from gasloc_p2p.node.events import Invitation, Online, RoundFinished
from gasloc_p2p.node.report import EdgeReport, RoundReport
from tests.netns.star import Star, star
from tests.p2p.real import RealNode, RealSwarm, real_swarm, sets

NODES: Final = 4
SLOW: Final = NODES - 1
SLOWER: Final = 10
MODEL: Final = "tiny"
ELEMENTS: Final = 1_016_960
LOCAL_STEPS: Final = 100
FIRST_MBIT: Final = 50.0
TIMED_ROUND: Final = 1
"""The first after which links get their rates; before that one does not know the machine."""
TRANSFER_SHARE: Final = 0.1
"""Transfer of one peer's parameters at the full rate, by the time of a round's inner steps."""
SHARED: Final = (
    f"model.preset={MODEL}",
    "inner.batch_size=1",
    f"inner.local_steps={LOCAL_STEPS}",
    "inner.schedule=constant",
    "run.rounds=1000",
    f"run.initial_peers={NODES}",
)
OWN: Final = ("node.validate_every_rounds=0",)
"""Validation is no part of a round, and would take a larger share of so short ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mode:
    """A way to run the swarm.

    Attributes:
        name: also that of the run.
        settings: what it changes.
        first: the first round that counts.
        rounds: how many count.
    """

    name: str
    settings: Sequence[str]
    first: int
    rounds: int

    @property
    def last(self) -> int:
        """The last round that counts."""
        return self.first + self.rounds - 1


MODES: Final = (
    Mode(name="default", settings=(), first=10, rounds=24),
    Mode(
        name="overlap",
        settings=("gossip.overlap=true", "outer.rule=local"),
        first=6,
        rounds=8,
    ),
    Mode(
        name="diloco",
        settings=("gossip.topology=complete", "pace.adapt_steps=false"),
        first=2,
        rounds=3,
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """The rounds of one node that count.

    Attributes:
        peer_id: the node.
        wall_s: seconds from the end of the round before them to the end of the last of them.
        rounds: what it reported.
    """

    peer_id: str
    wall_s: float
    rounds: Sequence[RoundReport]

    @property
    def computes(self) -> float:
        """Share of the wall time in which it did inner steps."""
        return self.train_s / self.wall_s

    @property
    def train_s(self) -> float:
        """Seconds of inner steps."""
        return sum(report.train_s for report in self.rounds)

    @property
    def steps(self) -> int:
        """Inner steps."""
        return sum(report.local_steps for report in self.rounds)

    @property
    def edges(self) -> list[EdgeReport]:
        """Edges that ended in these rounds."""
        return list(itertools.chain.from_iterable(report.edges for report in self.rounds))

    @property
    def mixed(self) -> list[EdgeReport]:
        """Edges after which the partner's parameters were mixed."""
        return [edge for edge in self.edges if edge.kind in MIXED_KINDS]


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What one mode came to.

    Attributes:
        mode: the mode.
        mbit: the full rate in the rounds that count, their median.
        nodes: the stretch of each, the slow one last.
        exit_codes: of the nodes.
    """

    mode: Mode
    mbit: float
    nodes: Sequence[Stretch]
    exit_codes: Sequence[int | None]

    @property
    def fast(self) -> Sequence[Stretch]:
        """All nodes but the slow one."""
        return self.nodes[:SLOW]

    @property
    def slow(self) -> Stretch:
        """The node behind the slow link."""
        return self.nodes[SLOW]

    @property
    def transfer_share(self) -> float:
        """Transfer at the full rate by the time of `LOCAL_STEPS` inner steps of the fast nodes."""
        step_s = sum(node.train_s for node in self.fast) / sum(node.steps for node in self.fast)
        return ELEMENTS * 32e-6 / self.mbit / (LOCAL_STEPS * step_s)


async def measure(mode: Mode, folder: Path) -> Measured:
    """Run the swarm in a mode until its rounds that count are over, and end it.

    Args:
        mode: the mode.
        folder: an empty one, for the nodes' homes and logs.
    """
    async with star(_rates(FIRST_MBIT)) as machines:
        async with real_swarm(folder) as swarm:
            nodes = await _start(swarm, machines, mode)
            rates_mbit = []
            for round in range(TIMED_ROUND, mode.last + 1):
                reports = [await _reach_end(node, round) for node in nodes[:SLOW]]
                rates_mbit.append(full_mbit(reports))
                if round < mode.last:
                    await asyncio.to_thread(_shape, machines, rates_mbit[-1])
            stretches = [_stretch(node, mode) for node in nodes]
        return Measured(
            mode=mode,
            mbit=statistics.median(rates_mbit[mode.first - TIMED_ROUND - 1 : -1]),
            nodes=stretches,
            exit_codes=[node.child.exit_code for node in nodes],
        )


def full_mbit(reports: Sequence[RoundReport]) -> float:
    """Return the rate at which one peer's parameters take a tenth of such a round's inner steps."""
    step_s = statistics.median(report.train_s / report.local_steps for report in reports)
    return ELEMENTS * 32e-6 / (TRANSFER_SHARE * LOCAL_STEPS * step_s)


def _shape(machines: Star, mbit: float) -> None:
    for end, rate in enumerate(_rates(mbit)):
        machines.shape(end, rate)


def _rates(mbit: float) -> list[float]:
    """Return the rate of each end for this full rate."""
    return [mbit / SLOWER if end == SLOW else mbit for end in range(NODES)]


async def _start(swarm: RealSwarm, machines: Star, mode: Mode) -> list[RealNode]:
    """Start a bootstrap in the switch and a node at every end, the slow one last."""

    async def launch(name: str, end: int | None, *arguments: str) -> RealNode:
        return await swarm.launch(
            name, *arguments, address=machines.address(end), before=machines.inside(end)
        )

    online = await (await launch("bootstrap", None, "bootstrap")).first(Online)
    entry = f"net.bootstrap={json.dumps(online.addresses)}"
    shared = sets(entry, f"run.id={mode.name}", *SHARED, *OWN, *mode.settings)
    founder = await launch("peer-0", 0, "start", *shared)
    invite = (await founder.first(Invitation)).invite
    return [
        founder,
        *[await launch(f"peer-{end}", end, "join", invite, *sets(*OWN)) for end in range(1, NODES)],
    ]


def _finished(node: RealNode) -> list[tuple[float, RoundReport]]:
    """Return the rounds that a node has finished, and when."""
    return [
        (at_s, event.report)
        for at_s, event in zip(node.times_s, node.events, strict=True)
        if isinstance(event, RoundFinished)
    ]


async def _reach_end(node: RealNode, round: int) -> RoundReport:
    """Wait until a node has finished `round` or a later one, and return its report."""
    return await node.until(
        lambda: next((report for _, report in _finished(node) if report.round >= round), None)
    )


def _stretch(node: RealNode, mode: Mode) -> Stretch:
    began, *counted = [
        (at_s, report)
        for at_s, report in _finished(node)
        if mode.first - 1 <= report.round <= mode.last
    ]
    return Stretch(
        peer_id=node.peer_id,
        wall_s=counted[-1][0] - began[0],
        rounds=[report for _, report in counted],
    )
