"""What the batched engine saves: paired timings of one inner step of many replicas.

`python -m tests.benchmarks.engines docs/benchmarks/engines.md` measures and writes the table; run
it on a machine that does nothing else. Within a pair both engines do the same steps, one right
after the other, and ratios are taken within pairs.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

from gasloc_p2p.machine import this_machine, usable_cores
from gasloc_p2p.train.data import Corpus, load_corpus
from gasloc_p2p.train.learner import build_learner
from gasloc_p2p.train.settings import DataConfig, InnerConfig, ModelConfig
from gasloc_p2p.train.stack import Stack

REPLICAS = (1, 8, 32)
BATCH_SIZES = (2, 4, 8)
PAIRS = 5
STEPS = 4
LR = 1e-3
MODEL, DATA = ModelConfig(preset="nano"), DataConfig()


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Medians over the pairs.

    Attributes:
        replicas: how many train.
        batch_size: windows of 64 tokens per inner step.
        exact_s: seconds per inner step of one replica, each replica by itself, one thread.
        cpu_ratio: CPU time of exact over that of batched, one thread each.
        wall_ratio: wall time of exact, one thread, over that of batched on all cores.
    """

    replicas: int
    batch_size: int
    exact_s: float
    cpu_ratio: float
    wall_ratio: float


def main() -> None:
    """Measure every case and write the table into the file that is named."""
    torch.set_num_threads(1)
    corpus = load_corpus(DATA)
    cases = [
        measure(replicas, batch_size, corpus) for batch_size in BATCH_SIZES for replicas in REPLICAS
    ]
    text = page(cases)
    print(text)
    if len(sys.argv) == 2:
        Path(sys.argv[1]).write_text(text)


def measure(replicas: int, batch_size: int, corpus: Corpus) -> Case:
    """Time both engines in pairs, on the same samples."""
    inner = InnerConfig(batch_size=batch_size)
    peers = [f"peer {index}" for index in range(replicas)]

    def stack(threads: int) -> Stack:
        return Stack(MODEL, DATA, inner, seed=0, peer_ids=peers, corpus=corpus, threads=threads)

    learners = [
        build_learner(MODEL, DATA, inner, seed=0, peer_id=peer, corpus=corpus) for peer in peers
    ]
    one, all_cores = stack(1), stack(usable_cores())
    rows = range(replicas)
    exact: Callable[[], object] = lambda: [learner.step(LR) for learner in learners]  # noqa: E731 -- reads like its siblings below
    batched: Sequence[Callable[[], object]] = (
        lambda: one.step(rows, [LR] * replicas),
        lambda: all_cores.step(rows, [LR] * replicas),
    )
    times = [[timed(work) for work in (exact, *batched)] for _ in range(PAIRS + 1)][1:]
    return Case(
        replicas=replicas,
        batch_size=batch_size,
        exact_s=statistics.median(wall for (wall, _), _, _ in times) / STEPS / replicas,
        cpu_ratio=statistics.median(cpu / other for (_, cpu), (_, other), _ in times),
        wall_ratio=statistics.median(wall / other for (wall, _), _, (other, _) in times),
    )


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Return wall and CPU seconds of `STEPS` calls."""
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    for _ in range(STEPS):
        work()
    return time.perf_counter() - wall_s, time.process_time() - cpu_s


def page(cases: Sequence[Case]) -> str:
    """Return the section of docs/benchmarks.md about these cases."""
    cores = usable_cores()
    rows = "\n".join(
        f"| {case.batch_size} | {case.replicas} | {1e3 * case.exact_s:.1f} "
        f"| {case.cpu_ratio:.2f} | {case.wall_ratio:.2f} |"
        for case in cases
    )
    return f"""## engines: What does the batched engine save?

Time of one inner step of `nano` for many replicas, engine `exact` over engine `batched`; above 1,
batched is quicker. `exact` steps each replica by itself on one thread, as separate runs do.

| Windows per step | Replicas | exact, ms per replica | CPU time, exact / batched, one thread \
| Wall time, exact on one thread / batched on {cores} |
|---|---|---|---|---|
{rows}

Medians of {PAIRS} pairs of {STEPS} steps. The sum of both models' matrix products is the same, so
on a CPU batching can save only what surrounds them, and saves most where batches are small.

Made with

    python -m tests.benchmarks.engines docs/benchmarks/engines.md

on {datetime.now(UTC):%Y-%m-%d} on {this_machine().sentence()}.
"""


if __name__ == "__main__":
    main()
