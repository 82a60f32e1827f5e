"""A whole swarm in one process: the node's own code on a virtual network and clock."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from gasloc_p2p.algorithms import ALGORITHMS
from gasloc_p2p.config import Config
from gasloc_p2p.core.errors import ConfigError
from gasloc_p2p.core.manifest import Manifest
from gasloc_p2p.core.outer import OuterRule
from gasloc_p2p.data.supply import load_text
from gasloc_p2p.founding import found, pace_of
from gasloc_p2p.net.identity import Identity
from gasloc_p2p.node.node import Node
from gasloc_p2p.node.result import NodeResult
from gasloc_p2p.report import SwarmReport, swarm_report
from gasloc_p2p.simulate.clock import VirtualClock, VirtualTimeLoop
from gasloc_p2p.simulate.collective import AllReduce, require_collective, run_collective
from gasloc_p2p.simulate.engine import Engine, build_engine, simulated_device
from gasloc_p2p.simulate.links import check_partitions, links_of, parse_partition
from gasloc_p2p.simulate.network import Hub
from gasloc_p2p.simulate.observer import SwarmObserver, Timeline
from gasloc_p2p.simulate.poison import NOBODY, attacker_rule
from gasloc_p2p.simulate.standings import Standing, Standings
from gasloc_p2p.train.data import Corpus
from gasloc_p2p.train.learner import Learner, build_learner


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    """A swarm that has run.

    Attributes:
        report: the swarm's report.
        results: what each peer left behind, in the order of their indices.
        honest: those of them that sent what they should.
        standings: of the honest ones on the way, if that was asked for.
    """

    report: SwarmReport
    results: Sequence[NodeResult]
    honest: Sequence[NodeResult]
    standings: Sequence[Standing]


def simulate(
    config: Config,
    *,
    peers: int,
    observe: SwarmObserver,
    algorithm: str = "gasloc",
    judged: bool = False,
) -> Simulation:
    """Run a swarm of `peers` to its end and report on it.

    Deterministic: the same arguments give the same report but for `wall_s`. With engine `exact`,
    codec `none` and one thread the parameters equal those of a real swarm with the same seed, bit
    for bit.

    Args:
        config: settings of every peer; round 0 waits for `run.initial_peers` of them.
        peers: how many.
        observe: told what happens as it happens.
        algorithm: one of `ALGORITHMS`, whose settings `config` has; it says whether nodes gossip
            or everybody waits for an all-reduce.
        judged: whether to take `standings`, which costs a validation a round.

    Raises:
        ConfigError: a link, a partition, a speed or an attack makes no sense, or a setting that the
            algorithm lacks.
    """
    began_s = time.monotonic()
    stacked = config.simulate.engine == "batched"
    # The batched engine has threads of its own, which torch's would only hinder.
    torch.set_num_threads(1 if stacked else config.node.threads)
    links = links_of(config.simulate.links, peers)
    partitions = [parse_partition(text) for text in config.simulate.partitions]
    check_partitions(partitions, peers)
    collective = ALGORITHMS[algorithm].collective
    if collective:
        require_collective(algorithm, config)
    attacker = _attacker(config, peers, collective=collective)
    manifest = found(config, now_s=0.0)
    identities = [Identity.derived(config.run.seed, index) for index in range(peers)]
    peer_ids = [identity.peer_id for identity in identities]
    engine = build_engine(config, peer_ids, load_text(config.model, config.data))
    initial_theta = engine.models[0].theta()
    standings = None
    if judged:
        counting = {i: model for i, model in enumerate(engine.models) if i != attacker}
        standings = Standings(observe, counting, initial_theta)
        observe = standings.observe
    timeline = Timeline(observe, attacker=attacker)
    rules = {} if attacker is None else {attacker: attacker_rule(config, initial_theta)}

    async def run() -> Sequence[NodeResult]:
        if collective:
            return await run_collective(
                algorithm,
                config,
                engine=engine,
                peer_ids=peer_ids,
                all_reduce=AllReduce(links=links, partitions=partitions),
                observe=timeline.observe,
            )
        hub = Hub(verify=Identity.verify, links=links, partitions=partitions)
        return await _swarm(config, manifest, hub, identities, engine, rules, timeline.observe)

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        results = runner.run(run())
    honest = [result for index, result in enumerate(results) if index != attacker]
    report = swarm_report(
        algorithm=algorithm,
        run_digest=manifest.digest,
        config=config.model_dump(mode="json"),
        wall_s=time.monotonic() - began_s,
        judge=engine.models[0],
        initial_theta=initial_theta,
        peers=[result.report for result in results],
        thetas=[result.theta for result in honest],
        closing_thetas=[result.closing_theta for result in honest],
        solo_val_loss=None,
        simulated_s=timeline.trained_s,
        curve=timeline.curve(),
    )
    return Simulation(
        report=report,
        results=results,
        honest=honest,
        standings=standings.points if standings is not None else (),
    )


def _attacker(config: Config, peers: int, *, collective: bool) -> int | None:
    """Return the index of the peer that sends poison; None when all are honest.

    Raises:
        ConfigError: there is nobody whom it could send it to.
    """
    if config.simulate.poison == NOBODY:
        return None
    if collective or peers < 2:
        raise ConfigError(
            f"simulate.poison = {config.simulate.poison} has nobody to send it to",
            why="an all-reduce has no partners" if collective else "there is one peer",
            fix="use --algorithm gasloc and at least 2 peers",
        )
    return peers - 1


def learner_of(config: Config, *, peer_id: str, corpus: Corpus) -> Learner:
    """Return a peer's model, data and inner optimizer."""
    return build_learner(
        config.model,
        config.data,
        config.inner,
        seed=config.run.seed,
        peer_id=peer_id,
        corpus=corpus,
        device=simulated_device(config),
    )


async def _swarm(
    config: Config,
    manifest: Manifest,
    hub: Hub,
    identities: Sequence[Identity],
    engine: Engine,
    rules: Mapping[int, OuterRule],
    observe: SwarmObserver,
) -> Sequence[NodeResult]:
    async with hub, asyncio.TaskGroup() as tasks:
        running = []
        for index, identity in enumerate(identities):
            node = Node(
                config=config,
                manifest=manifest,
                network=hub.network(identity.peer_id, identity.sign),
                clock=VirtualClock(),
                compute=engine.computes[index],
                learner=engine.models[index],
                pace=pace_of(config, manifest),
                verify=Identity.verify,
                observe=partial(observe, index),
                rule=rules.get(index),
            )
            running.append(tasks.create_task(node.run(asyncio.Event())))
    return [task.result() for task in running]
