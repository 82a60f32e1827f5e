"""The algorithms with a barrier, for comparison: DiLoCo and DDP over a ring all-reduce.

No gossip and no node: all peers wait for one mean, and the slowest link decides how long it takes
(`ring_all_reduce_s`). Models, samples and virtual time are those of a swarm of nodes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from math import fsum
from statistics import fmean

import torch
from torch import Tensor

from gasloc_p2p.config import Config
from gasloc_p2p.core.errors import ConfigError
from gasloc_p2p.core.outer import OuterRule, OuterState, outer_rule
from gasloc_p2p.core.types import PeerId
from gasloc_p2p.node.events import Left, Observer, RoundFinished, RoundStarted, Validated
from gasloc_p2p.node.peer import inner_lr
from gasloc_p2p.node.report import RoundReport, peer_report
from gasloc_p2p.node.result import NodeResult
from gasloc_p2p.simulate.clock import InlineCompute
from gasloc_p2p.simulate.engine import Engine, GradientModel
from gasloc_p2p.simulate.links import Link, Partition, ring_all_reduce_s
from gasloc_p2p.simulate.observer import SwarmObserver
from gasloc_p2p.train.parameters import theta_digest

FP32_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Spent:
    """What means have cost: their number, virtual seconds, and bytes that each peer sent."""

    all_reduces: int
    seconds: float
    bytes_sent: int

    def __add__(self, other: Spent) -> Spent:
        return Spent(
            all_reduces=self.all_reduces + other.all_reduces,
            seconds=self.seconds + other.seconds,
            bytes_sent=self.bytes_sent + other.bytes_sent,
        )

    def __sub__(self, other: Spent) -> Spent:
        return Spent(
            all_reduces=self.all_reduces - other.all_reduces,
            seconds=self.seconds - other.seconds,
            bytes_sent=self.bytes_sent - other.bytes_sent,
        )


class AllReduce:
    """The mean over all peers, and the virtual time and bytes that it costs.

    Args:
        links: one per peer.
        partitions: while one lasts, no mean gets through.

    Attributes:
        spent: the cost so far.
    """

    def __init__(self, *, links: Sequence[Link], partitions: Sequence[Partition]) -> None:
        self._links = links
        self._partitions = partitions
        self.spent = Spent(all_reduces=0, seconds=0.0, bytes_sent=0)

    async def mean(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the mean of one tensor per peer once every peer would have it."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        payload_bytes = FP32_BYTES * tensors[0].numel()
        healed_s = _whole_from_s(self._partitions, len(tensors), began_s)
        await asyncio.sleep(healed_s - began_s + ring_all_reduce_s(self._links, payload_bytes))
        peers = len(tensors)
        self.spent += Spent(
            all_reduces=1,
            seconds=loop.time() - began_s,
            bytes_sent=round(2 * (peers - 1) / peers * payload_bytes),
        )
        return mean_of(tensors)


def _whole_from_s(partitions: Sequence[Partition], peers: int, at_s: float) -> float:
    """Return when, from `at_s` on, all peers can reach each other."""
    for partition in sorted(partitions, key=lambda partition: partition.from_s):
        separates = len(partition.peers) < peers
        if separates and partition.from_s <= at_s < partition.until_s:
            at_s = partition.until_s
    return at_s


def mean_of(tensors: Sequence[Tensor]) -> Tensor:
    """Return the mean, summed in fp64, in the dtype of the tensors."""
    total = torch.zeros_like(tensors[0], dtype=torch.float64)
    for tensor in tensors:
        total += tensor
    return (total / len(tensors)).to(tensors[0].dtype)


@dataclass(kw_only=True, slots=True)
class Trained:
    """What one peer did in a round, and how long it waited for the slowest one's compute.

    Attributes:
        losses: of its inner steps.
        steps_s: virtual seconds of each.
        waits_s: virtual seconds of each wait.
    """

    losses: list[float] = field(default_factory=list)
    steps_s: list[float] = field(default_factory=list)
    waits_s: list[float] = field(default_factory=list)

    @property
    def train_s(self) -> float:
        """Virtual seconds of all its steps."""
        return fsum(self.steps_s)


@dataclass(kw_only=True, slots=True)
class DiLoCo:
    """Local steps everywhere, then one outer step on everybody's mean.

    Source: docs/design.md section 2, baselines; it is `gasloc` on the complete graph.

    Attributes:
        rule: the outer rule.
        theta: the one model that all peers share between rounds, [P].
        state: the rule's memory.
    """

    rule: OuterRule
    theta: Tensor
    state: OuterState

    async def round(
        self, engine: Engine, lrs: Sequence[float], all_reduce: AllReduce
    ) -> list[Trained]:
        """Do one round with a local step per learning rate; return what each peer did."""

        async def train(model: GradientModel, compute: InlineCompute) -> Trained:
            trained = Trained()
            for lr in lrs:
                trained.steps_s.append(compute.step_s)
                trained.losses.append(float(await compute.step(model, lr)))
            return trained

        async with asyncio.TaskGroup() as tasks:
            training = [
                tasks.create_task(train(model, compute))
                for model, compute in zip(engine.models, engine.computes, strict=True)
            ]
        mean = await all_reduce.mean([model.theta() for model in engine.models])
        self.theta, self.state = self.rule.step(self.theta, mean, mean, self.state)
        for model in engine.models:
            model.load(self.theta)
        found = [task.result() for task in training]
        slowest_s = max(trained.train_s for trained in found)
        for trained in found:
            trained.waits_s.append(slowest_s - trained.train_s)
        return found


class DDP:
    """Gradients averaged before every single optimizer step.

    Source: docs/design.md section 2, baselines.
    """

    async def round(
        self, engine: Engine, lrs: Sequence[float], all_reduce: AllReduce
    ) -> list[Trained]:
        """Do one optimizer step per learning rate; return what each peer did."""
        everybody = [Trained() for _ in engine.models]
        for lr in lrs:
            found = engine.gradients()
            steps_s = [compute.step_s for compute in engine.computes]
            slowest_s = max(steps_s)
            await asyncio.sleep(slowest_s)
            mean = await all_reduce.mean([gradient for gradient, _ in found])
            for model in engine.models:
                model.apply(mean, lr)
            for trained, step_s, (_, loss) in zip(everybody, steps_s, found, strict=True):
                trained.steps_s.append(step_s)
                trained.waits_s.append(slowest_s - step_s)
                trained.losses.append(loss)
        return everybody


def require_collective(algorithm: str, config: Config) -> None:
    """Refuse settings that have no meaning with an all-reduce.

    Raises:
        ConfigError: rounds go by the clock, or a codec was chosen.
    """
    for key, value, wanted in (
        ("pace.mode", config.pace.mode, "steps"),
        ("gossip.codec", config.gossip.codec, "none"),
    ):
        if value != wanted:
            raise ConfigError(
                f"{key} = {value!r} cannot be simulated with --algorithm {algorithm}",
                why="its peers wait for one fp32 mean of all of them; there is no gossip",
                fix=f"use {key} = {wanted!r}, or --algorithm gasloc --topology complete",
            )


async def run_collective(
    algorithm: str,
    config: Config,
    *,
    engine: Engine,
    peer_ids: Sequence[PeerId],
    all_reduce: AllReduce,
    observe: SwarmObserver,
) -> list[NodeResult]:
    """Run `diloco` or `ddp` to its end; what each peer leaves behind is the same model."""
    outer, inner = config.outer, config.inner
    theta = engine.models[0].theta()
    method: DiLoCo | DDP = DDP()
    if algorithm == "diloco":
        rule = outer_rule(outer.rule, lr=outer.lr, momentum=outer.momentum)
        method = DiLoCo(rule=rule, theta=theta, state=rule.initial(theta))
    rounds: list[list[RoundReport]] = [[] for _ in peer_ids]
    val_loss: float | None = None
    for t in range(config.run.rounds):
        for index in range(len(peer_ids)):
            observe(index, _started(t, len(peer_ids)))
        lrs = [inner_lr(config, t + h / inner.local_steps) for h in range(inner.local_steps)]
        before = all_reduce.spent
        everybody = await method.round(engine, lrs, all_reduce)
        val_loss = _validate(config, engine, t)
        for index, trained in enumerate(everybody):
            if val_loss is not None:
                observe(index, Validated(round=t, val_loss=val_loss))
            report = _report(t, trained, all_reduce.spent - before)
            rounds[index].append(report)
            observe(index, RoundFinished(report=report))
    shared = engine.models[0].theta()
    return [
        _result(peer_id, rounds[index], shared, val_loss, partial(observe, index))
        for index, peer_id in enumerate(peer_ids)
    ]


def _started(t: int, peers: int) -> RoundStarted:
    return RoundStarted(round=t, closing=False, partners=(), peers=peers)


def _validate(config: Config, engine: Engine, t: int) -> float | None:
    """Return the shared model's validation loss where the settings ask for it."""
    every, last = config.node.validate_every_rounds, t == config.run.rounds - 1
    if last or (every and (t + 1) % every == 0):
        return engine.models[0].validation_loss()
    return None


def _report(t: int, trained: Trained, spent: Spent) -> RoundReport:
    wait_s = fsum(trained.waits_s)
    return RoundReport(
        round=t,
        closing=False,
        local_steps=len(trained.losses),
        train_loss=fmean(trained.losses),
        edges=(),
        all_reduces=spent.all_reduces,
        bytes_sent=spent.bytes_sent,
        bytes_received=spent.bytes_sent,
        train_s=trained.train_s,
        exchange_s=spent.seconds + wait_s,
        wait_s=wait_s,
    )


def _result(
    peer_id: PeerId,
    rounds: Sequence[RoundReport],
    theta: Tensor,
    val_loss: float | None,
    observe: Observer,
) -> NodeResult:
    report = peer_report(
        peer_id=peer_id, rounds=rounds, val_loss=val_loss, theta_digest=theta_digest(theta)
    )
    observe(Left(report=report, finished=True))
    return NodeResult(report=report, theta=theta, closing_theta=theta, finished=True)
