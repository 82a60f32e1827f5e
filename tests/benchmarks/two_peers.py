"""Two real peers train `134m` over the wire on one machine: how much memory, bytes and time?

    python -m tests.benchmarks.two_peers docs/benchmarks/two-peers.md

measures and writes the table. It returns 1 where both nodes with their p2pd and a bootstrap take
more than 14 GiB together, or an exchange failed.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import psutil

from gasloc_p2p.core.types import MIXED_KINDS
from gasloc_p2p.machine import this_machine
from gasloc_p2p.node.events import RoundFinished
from gasloc_p2p.node.report import RoundReport
from gasloc_p2p.train.model import VOCABULARY, preset_config
from tests.p2p.real import RealNode, real_swarm

PRESET: Final = "134m"
SEQUENCE_LENGTH: Final = 128
SHARED: Final = (
    f"model.preset={PRESET}",
    f"model.sequence_length={SEQUENCE_LENGTH}",
    "inner.batch_size=1",
    "inner.local_steps=2",
    "run.rounds=3",
    "run.closing_rounds=1",
    "run.initial_peers=2",
    "gossip.codec=mod4",
    "pace.adapt_steps=false",
    "pace.edge_floor_s=120",
    "pace.edge_ceiling_s=600",
)
OWN: Final = ("data.validation_tokens=512",)
LIMIT_BYTES: Final = 14 << 30
PERIOD_S: Final = 0.2
PATIENCE_S: Final = 900.0
GIB: Final = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What a run took.

    Attributes:
        peak_bytes: the most resident memory of all processes together.
        rounds: what each node reported, closing rounds included.
        seconds: from the first process to the end of the last.
    """

    peak_bytes: int
    rounds: Sequence[Sequence[RoundReport]]
    seconds: float

    @property
    def mixed(self) -> int:
        """Ends of edges that were mixed."""
        edges = (edge for node in self.rounds for report in node for edge in report.edges)
        return sum(edge.kind in MIXED_KINDS for edge in edges)

    @property
    def holds(self) -> bool:
        """Whether every exchange worked, within the memory."""
        wanted = sum(len(node) for node in self.rounds)
        return self.peak_bytes <= LIMIT_BYTES and self.mixed == wanted == 8


async def measure(folder: Path) -> Measured:
    """Run both nodes to their end."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    async with real_swarm(folder) as swarm, asyncio.TaskGroup() as tasks:
        entry = await swarm.bootstrap()
        founder = await swarm.found("big", entry, *SHARED, *OWN)
        nodes = [founder, await swarm.join("joiner", founder, *OWN)]
        peak = Peak()
        watching = tasks.create_task(peak.watch())
        async with asyncio.timeout(PATIENCE_S):
            for node in nodes:
                code = await node.child.wait()
                if code != 0:
                    raise RuntimeError(f"a node ended with {code}: {node.child.last_words()}")
        watching.cancel()
    return Measured(
        peak_bytes=peak.bytes,
        rounds=[reports_of(node) for node in nodes],
        seconds=loop.time() - began_s,
    )


class Peak:
    """The most memory that the processes started here have together."""

    bytes = 0

    async def watch(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            self.bytes = max(self.bytes, await asyncio.to_thread(self._now_bytes))
            await asyncio.sleep(PERIOD_S)

    @staticmethod
    def _now_bytes() -> int:
        total = 0
        for process in psutil.Process().children(recursive=True):
            try:
                total += process.memory_info().rss
            except psutil.NoSuchProcess:
                continue
        return total


def reports_of(node: RealNode) -> list[RoundReport]:
    """Return what a node reported of its rounds."""
    return [event.report for event in node.of(RoundFinished)]


def page(measured: Measured) -> str:
    """Return the section of docs/benchmarks.md about this measurement."""
    rows = "\n".join(row(reports) for reports in zip(*measured.rounds, strict=True))
    return f"""## two-peers: Do two peers that train `{PRESET}` fit a machine with 16 GB?

Two nodes with a p2pd each and a bootstrap on one machine, {SEQUENCE_LENGTH} tokens in a step, two
steps a round, codec `mod4`, parameters over loopback. At most {measured.peak_bytes / GIB:.1f} GiB
resident at one time in all processes together (limit {LIMIT_BYTES / GIB:.0f}), looked at every
{PERIOD_S:g} s; {measured.seconds:.0f} s from the first process to the last.

| Round | Steps | Loss | Training, s | Exchange and mix, s | Sent by each, MB | Bits a parameter |
|---|---|---|---|---|---|---|
{rows}

Training and exchange: the longer of both nodes. Bits count everything that was sent.

Made with

    python -m tests.benchmarks.two_peers docs/benchmarks/two-peers.md

on {datetime.now(UTC):%Y-%m-%d} on {this_machine().sentence()}.
"""


def row(reports: Sequence[RoundReport]) -> str:
    """Return the line of one round of both nodes."""
    one = reports[0]
    losses = [report.train_loss for report in reports if report.train_loss is not None]
    sent = max(report.bytes_sent for report in reports)
    cells = (
        f"{one.round}, closing" if one.closing else f"{one.round}",
        f"{one.local_steps}",
        f"{sum(losses) / len(losses):.2f}" if losses else "–",
        f"{max(report.train_s for report in reports):.1f}",
        f"{max(report.exchange_s for report in reports):.1f}",
        f"{sent / 1e6:.1f}",
        f"{8 * sent / elements():.2f}",
    )
    return f"| {' | '.join(cells)} |"


def elements() -> int:
    """Return how many parameters the model has, without making it."""
    import torch
    from transformers import LlamaForCausalLM

    config = preset_config(PRESET, vocabulary=VOCABULARY, sequence_length=SEQUENCE_LENGTH)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    return sum(parameter.numel() for parameter in model.parameters())


def main() -> int:
    """Measure, print and, if a file is named, write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("page", nargs="?", type=Path, help="file to write the table into")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measured = asyncio.run(measure(Path(folder)))
    text = page(measured)
    print(text)
    if given.page is not None:
        given.page.write_text(text)
    return 0 if measured.holds else 1


if __name__ == "__main__":
    raise SystemExit(main())
