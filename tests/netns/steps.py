"""How long an inner step takes when so many peers train on this machine at once."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.synchronize import Barrier
from typing import Final

from gasloc_p2p.train.settings import DataConfig, InnerConfig, ModelConfig

MODEL: Final = ModelConfig(preset="tiny")
INNER: Final = InnerConfig(batch_size=1)
MEASURED_S: Final = 4.0


def inner_step(at_once: int) -> tuple[float, int]:
    """Return the median over `at_once` busy peers of their seconds per step, and the elements."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(at_once)
    with ProcessPoolExecutor(
        at_once, mp_context=context, initializer=_join, initargs=(barrier,)
    ) as peers:
        found = list(peers.map(_step_for_a_while, range(at_once)))
    return statistics.median(step_s for step_s, _ in found), found[0][1]


def _join(barrier: Barrier) -> None:
    global _together
    _together = barrier


_together: Barrier


def _step_for_a_while(index: int) -> tuple[float, int]:
    import torch

    from gasloc_p2p.train.learner import build_learner

    torch.set_num_threads(1)
    learner = build_learner(MODEL, DataConfig(), INNER, seed=0, peer_id=f"peer {index}")
    learner.step(INNER.lr)
    _together.wait()
    began_s, steps = time.perf_counter(), 0
    while time.perf_counter() - began_s < MEASURED_S:
        learner.step(INNER.lr)
        steps += 1
    return (time.perf_counter() - began_s) / steps, learner.elements
