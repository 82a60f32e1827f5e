"""A whole swarm in one process: the node's own code on a virtual network and clock."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from gasloc_p2p.config import Config
from gasloc_p2p.core.manifest import Manifest
from gasloc_p2p.founding import found, pace_of
from gasloc_p2p.net.identity import Identity
from gasloc_p2p.node.events import Event
from gasloc_p2p.node.node import Node
from gasloc_p2p.node.result import NodeResult
from gasloc_p2p.report import SwarmReport, swarm_report
from gasloc_p2p.simulate.clock import InlineCompute, VirtualClock, VirtualTimeLoop
from gasloc_p2p.simulate.network import Hub
from gasloc_p2p.train.data import Corpus, load_corpus
from gasloc_p2p.train.learner import Learner, build_learner

SwarmObserver = Callable[[int, Event], None]
"""Told the index of a peer and what happened to it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    """A swarm that has run.

    Attributes:
        report: the swarm's report.
        results: what each peer left behind, in the order of their indices.
    """

    report: SwarmReport
    results: Sequence[NodeResult]


def simulate(config: Config, *, peers: int, observe: SwarmObserver) -> Simulation:
    """Run a swarm of `peers` to its end and report on it.

    Deterministic: the same arguments give the same report but for `wall_s`. With codec `none` and
    one thread the parameters equal those of a real swarm with the same seed, bit for bit.

    Args:
        config: settings of every peer; round 0 waits for `run.initial_peers` of them.
        peers: how many.
        observe: told what happens as it happens.
    """
    began_s = time.monotonic()
    torch.set_num_threads(config.node.threads)
    corpus = load_corpus(config.data)
    manifest = found(config, now_s=0.0)
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        results = runner.run(_swarm(config, manifest, corpus, peers, observe))
    judge = learner_of(config, peer_id="", corpus=corpus)
    report = swarm_report(
        run_digest=manifest.digest,
        config=config.model_dump(mode="json"),
        wall_s=time.monotonic() - began_s,
        learner=judge,
        initial_theta=judge.theta(),
        peers=[result.report for result in results],
        thetas=[result.theta for result in results],
        closing_thetas=[result.closing_theta for result in results],
        solo_val_loss=None,
    )
    return Simulation(report=report, results=results)


def learner_of(config: Config, *, peer_id: str, corpus: Corpus) -> Learner:
    """Return a peer's model, data and inner optimizer."""
    return build_learner(
        config.model,
        config.data,
        config.inner,
        seed=config.run.seed,
        peer_id=peer_id,
        corpus=corpus,
    )


async def _swarm(
    config: Config, manifest: Manifest, corpus: Corpus, peers: int, observe: SwarmObserver
) -> Sequence[NodeResult]:
    async with Hub(verify=Identity.verify) as hub, asyncio.TaskGroup() as tasks:
        running = []
        for index in range(peers):
            identity = Identity.derived(config.run.seed, index)
            node = Node(
                config=config,
                manifest=manifest,
                network=hub.network(identity.peer_id, identity.sign),
                clock=VirtualClock(),
                compute=InlineCompute(step_s=config.simulate.step_s),
                learner=learner_of(config, peer_id=identity.peer_id, corpus=corpus),
                pace=pace_of(config, manifest),
                verify=Identity.verify,
                observe=partial(observe, index),
            )
            running.append(tasks.create_task(node.run(asyncio.Event())))
    return [task.result() for task in running]
