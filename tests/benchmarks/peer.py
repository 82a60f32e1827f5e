"""What a whole peer costs beside its inner steps, and how late its event loop is.

    python -m tests.benchmarks.peer docs/benchmarks/peer.md

First a node alone in its run, and a bare PyTorch loop with the same model and batch, take turns on
one core. Then two nodes train and exchange, and the event loop of one of them is watched. Linux, on
a machine that does nothing else. It returns 1 where the peer is below 90 % of the loop's tokens per
second, or the 99th percentile of the delays is 50 ms or more.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import torch

from gasloc_p2p.core.types import MIXED_KINDS
from gasloc_p2p.machine import this_machine
from gasloc_p2p.node.events import RoundFinished, RoundStarted
from gasloc_p2p.train.settings import DeviceConfig
from tests.benchmarks.training import bare_loop, learner
from tests.p2p.real import RealNode, real_swarm, sets

TURNS: Final = 3
BARE_S: Final = 15.0
CORE: Final = 0
BATCH_SIZE: Final = 8
SEQUENCE_LENGTH: Final = 128
LEAST_SHARE: Final = 0.9
MOST_DELAY_S: Final = 0.05
STEPS: Final = 20
SHARED: Final = (
    "model.preset=tiny",
    f"inner.batch_size={BATCH_SIZE}",
    f"inner.local_steps={STEPS}",
    "run.closing_rounds=1",
    "pace.adapt_steps=false",
)
OWN: Final = ("node.validate_every_rounds=0",)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What was found.

    Attributes:
        peer, bare: tokens per second of each turn.
        delays_s: of the event loop, while it trained and exchanged.
        exchanges: edges that were mixed meanwhile.
    """

    peer: list[float]
    bare: list[float]
    delays_s: list[float]
    exchanges: int

    @property
    def share(self) -> float:
        """Median over the turns of the peer's speed as a part of the loop's."""
        return statistics.median(p / b for p, b in zip(self.peer, self.bare, strict=True))

    def delay_s(self, percent: float) -> float:
        """Return this percentile of the delays."""
        ranked = sorted(self.delays_s)
        return ranked[min(len(ranked) - 1, int(len(ranked) * percent / 100))]


async def peer_tokens_per_s(folder: Path, turn: int) -> float:
    """Run a node alone and return its tokens per second, from its first round to its last."""
    settings = (*SHARED, *OWN, "run.rounds=12", "run.initial_peers=1", f"run.id=turn-{turn}")
    async with real_swarm(folder) as swarm:
        node = await swarm.launch(
            f"turn-{turn}",
            "start",
            *sets(*settings),
            before=("taskset", "-c", str(CORE)),
        )
        await node.child.wait()
        return tokens_per_s(node)


def tokens_per_s(node: RealNode) -> float:
    """Return the tokens per second of a node's training rounds, all between them included."""
    times_s = dict[str, float]()
    steps = 0
    for event, time_s in zip(node.events, node.times_s, strict=True):
        if isinstance(event, RoundStarted) and event.round == 1:
            times_s["begin"] = time_s
        if (
            isinstance(event, RoundFinished)
            and event.report.round >= 1
            and not event.report.closing
        ):
            times_s["end"] = time_s
            steps += event.report.local_steps
    return steps * BATCH_SIZE * SEQUENCE_LENGTH / (times_s["end"] - times_s["begin"])


def bare_tokens_per_s() -> float:
    """Run the loop in a process of its own on the same core."""
    command = [sys.executable, "-m", "tests.benchmarks.peer", "--bare"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(done.stdout)


def run_bare() -> float:
    """Return the tokens per second of the loop here."""
    os.sched_setaffinity(0, {CORE})
    torch.set_num_threads(1)
    cpu = DeviceConfig(kind="cpu")
    loop = bare_loop("tiny", learner("tiny", BATCH_SIZE, cpu), compile=False)
    loop(2)
    began_s, steps = time.perf_counter(), 0
    while time.perf_counter() - began_s < BARE_S:
        loop(5)
        steps += 5
    return steps * BATCH_SIZE * SEQUENCE_LENGTH / (time.perf_counter() - began_s)


async def delays(folder: Path) -> tuple[list[float], int]:
    """Train with two nodes; return the delays of one's event loop, and its exchanges."""
    file = folder / "delays.json"
    settings = (*SHARED, *OWN, "run.rounds=20", "run.initial_peers=2", "gossip.codec=mod4")
    async with real_swarm(folder) as swarm:
        founder = await swarm.launch(
            "founder",
            "start",
            *sets(*settings, "run.id=watched"),
            before=(sys.executable, "-m", "tests.benchmarks.probed", str(file)),
        )
        joiner = await swarm.join("joiner", founder, *OWN)
        for node in (founder, joiner):
            await node.child.wait()
        edges = [edge for event in founder.of(RoundFinished) for edge in event.report.edges]
    return json.loads(file.read_text()), sum(edge.kind in MIXED_KINDS for edge in edges)


async def measure() -> Measured:
    """Do all that is measured, one after the other."""
    peer, bare = [], []
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(TURNS):
            bare.append(await asyncio.to_thread(bare_tokens_per_s))
            peer.append(await peer_tokens_per_s(Path(folder), turn))
        delays_s, exchanges = await delays(Path(folder))
    return Measured(peer=peer, bare=bare, delays_s=delays_s, exchanges=exchanges)


def page(found: Measured) -> str:
    """Return the section of docs/benchmarks.md about these measurements."""
    turns = zip(found.peer, found.bare, strict=True)
    rows = "\n".join(f"| {p:,.0f} | {b:,.0f} | {p / b:.1%} |" for p, b in turns)
    percentiles = ", ".join(f"{1e3 * found.delay_s(p):.1f} ms ({p:g} %)" for p in (50, 99, 99.9))
    return f"""## peer: What does a whole peer cost beside its inner steps?

A node alone in its run, its p2pd included, and a bare PyTorch loop with the same model (`tiny`),
batch ({BATCH_SIZE} windows of {SEQUENCE_LENGTH} tokens), AdamW and clipping, in turns on one core.
A node's time runs from its second round to the end of its last, and holds {STEPS} steps a round,
records, outer steps and checkpoints. Median {found.share:.1%}, at least {LEAST_SHARE:.0%} wanted.

| Peer, tokens/s | Loop, tokens/s | Peer of loop |
|---|---|---|
{rows}

The event loop of one of two nodes that train `tiny` and mixed {found.exchanges} exchanges over
`mod4`, on {os.cpu_count()} cores together, is late by {percentiles}; below
{1e3 * MOST_DELAY_S:.0f} ms at 99 % wanted. Looked at every 5 ms from the start of the node to its
end, {len(found.delays_s):,} times.

Made with

    python -m tests.benchmarks.peer docs/benchmarks/peer.md

on {datetime.now(UTC):%Y-%m-%d} on {this_machine().sentence()}.
"""


def main() -> int:
    """Measure, print and, if a file is named, write the section."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("page", nargs="?", type=Path, help="file to write the section into")
    parser.add_argument("--bare", action="store_true", help="run the loop alone, print its speed")
    given = parser.parse_args()
    if given.bare:
        print(run_bare())
        return 0
    found = asyncio.run(measure())
    text = page(found)
    print(text)
    if given.page is not None:
        given.page.write_text(text)
    return 0 if found.share >= LEAST_SHARE and found.delay_s(99) < MOST_DELAY_S else 1


if __name__ == "__main__":
    raise SystemExit(main())
