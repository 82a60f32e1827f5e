"""Four nodes, one of them behind a link ten times slower: how much of the time does each compute?

At the full rate the parameters of one peer take a tenth of the time of a round's inner steps.
Counted is a stretch of rounds in the middle of a long run, once rates are known: from the end of
the round before the first that counts to the end of the last, everything in between included.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gasloc_p2p.core.types import MIXED_KINDS
from gasloc_p2p.node.events import Invitation, Online, RoundFinished
from gasloc_p2p.node.report import EdgeReport, RoundReport
from tests.netns.star import Star, star
from tests.netns.steps import INNER, MODEL
from tests.p2p.real import RealNode, RealSwarm, real_swarm, sets

NODES: Final = 4
SLOW: Final = NODES - 1
SLOWER: Final = 10
LOCAL_STEPS: Final = 150
TRANSFER_SHARE: Final = 0.1
"""Transfer of one peer's parameters at the full rate, by the time of a round's inner steps."""
SHARED: Final = (
    f"model.preset={MODEL.preset}",
    f"inner.batch_size={INNER.batch_size}",
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
        computing: how many peers compute at once; the slow one does little if it does not overlap.
    """

    name: str
    settings: Sequence[str]
    first: int
    rounds: int
    computing: int

    @property
    def last(self) -> int:
        """The last round that counts."""
        return self.first + self.rounds - 1


MODES: Final = (
    Mode(name="default", settings=(), first=5, rounds=10, computing=NODES - 1),
    Mode(
        name="overlap",
        settings=("gossip.overlap=true", "outer.rule=local"),
        first=5,
        rounds=10,
        computing=NODES,
    ),
    Mode(
        name="diloco",
        settings=("gossip.topology=complete", "pace.adapt_steps=false"),
        first=1,
        rounds=3,
        computing=NODES,
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
        mbit: the full rate.
        transfer_s: seconds that one peer's parameters take at that rate.
        nodes: the stretch of each, the slow one last.
        exit_codes: of the nodes.
    """

    mode: Mode
    mbit: float
    transfer_s: float
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
        step_s = sum(n.train_s for n in self.fast) / sum(n.steps for n in self.fast)
        return self.transfer_s / (LOCAL_STEPS * step_s)


async def measure(
    mode: Mode, folder: Path, *, steps_s: Mapping[int, float], elements: int
) -> Measured:
    """Run the swarm in a mode until its rounds that count are over, and end it.

    Args:
        mode: the mode.
        folder: an empty one, for the nodes' homes and logs.
        steps_s: seconds of an inner step, by how many peers compute at once.
        elements: of the model; they travel as fp32.
    """
    transfer_s = TRANSFER_SHARE * LOCAL_STEPS * steps_s[mode.computing]
    mbit = elements * 32e-6 / transfer_s
    rates = [mbit / SLOWER if end == SLOW else mbit for end in range(NODES)]
    async with star(rates) as machines:
        async with real_swarm(folder) as swarm:
            nodes = await _start(swarm, machines, mode)
            for node in nodes[:SLOW]:
                await _reach_end(node, mode.last)
            stretches = [_stretch(node, mode) for node in nodes]
        return Measured(
            mode=mode,
            mbit=mbit,
            transfer_s=transfer_s,
            nodes=stretches,
            exit_codes=[node.child.exit_code for node in nodes],
        )


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


async def _reach_end(node: RealNode, last: int) -> None:
    """Wait until a node has finished round `last`, with patience for each round by itself."""
    for round in range(last + 1):
        await node.until(
            lambda: any(report.round >= round for _, report in _finished(node)) or None  # noqa: B023 -- it is called in this turn of the loop only
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
