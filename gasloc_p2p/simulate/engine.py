"""Where the models of a simulated swarm live and how their inner steps are computed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor

from gasloc_p2p.config import Config
from gasloc_p2p.core.substrate import LocalModel
from gasloc_p2p.core.types import PeerId
from gasloc_p2p.simulate.clock import InlineCompute
from gasloc_p2p.simulate.speeds import STEADY, Machine, machines_of
from gasloc_p2p.train.data import Corpus
from gasloc_p2p.train.learner import build_learner
from gasloc_p2p.train.settings import DeviceConfig
from gasloc_p2p.train.stack import Replica, Stack

T = TypeVar("T")


class GradientModel(LocalModel, Protocol):
    """A model whose gradient can be averaged with others before the optimizer takes it."""

    def gradient(self) -> tuple[Tensor, float]:
        """Return the gradient on the next batch, fp32 [P], unclipped, and the loss."""
        ...

    def apply(self, gradient: Tensor, lr: float) -> None:
        """Clip `gradient`, fp32 [P], and do one optimizer step with it at learning rate `lr`."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """The computing side of a simulated swarm.

    Attributes:
        models: one per peer, in the order of their indices.
        computes: one per peer, runs its work in virtual time.
        gradients: returns every model's gradient on its next batch, fp32 [P] unclipped, and its
            loss, in no virtual time.
    """

    models: Sequence[GradientModel]
    computes: Sequence[InlineCompute]
    gradients: Callable[[], Sequence[tuple[Tensor, float]]]


def build_engine(config: Config, peer_ids: Sequence[PeerId], corpus: Corpus) -> Engine:
    """Return the engine that `simulate.engine` names.

    `exact` does peer by peer what a real node does, bit for bit. `batched` computes the steps of
    many peers together, on a GPU where there is one; it equals `exact` within rounding.

    Raises:
        ConfigError: a speed makes no sense.
        DataError: the text is too small.
    """
    step_s, seed = config.simulate.step_s, config.run.seed
    machines = machines_of(config.simulate.speeds, len(peer_ids))
    if config.simulate.engine == "exact":
        models = [
            build_learner(
                config.model,
                config.data,
                config.inner,
                seed=seed,
                peer_id=peer,
                corpus=corpus,
                device=simulated_device(config),
            )
            for peer in peer_ids
        ]
        return Engine(
            models=models,
            computes=[InlineCompute(step_s=step_s, machine=machine) for machine in machines],
            gradients=lambda: [model.gradient() for model in models],
        )
    stack = Stack(
        config.model,
        config.data,
        config.inner,
        seed=seed,
        peer_ids=peer_ids,
        corpus=corpus,
        threads=config.node.threads,
    )
    steps = StackedSteps(stack)
    return Engine(
        models=stack.replicas,
        computes=[StackedCompute(steps, step_s=step_s, machine=machine) for machine in machines],
        gradients=lambda: stack.gradients(range(len(peer_ids))),
    )


def simulated_device(config: Config) -> DeviceConfig:
    """Return what the learners of simulated peers run on: the CPU unless another one is named."""
    device = config.device
    return device.model_copy(update={"kind": "cpu"}) if device.kind == "auto" else device


class _Step:
    """An inner step that a peer has begun; its result is needed once its virtual time is over."""

    def __init__(self, row: int, lr: float) -> None:
        self.row = row
        self.lr = lr
        self.loss: float | None = None


class StackedSteps:
    """Computes all inner steps that are under way together, when the first of them ends.

    A step depends on nothing that happens while it lasts, so when it is computed makes no
    difference to its result.

    Args:
        stack: the models.
    """

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._under_way: list[_Step] = []

    async def step(self, row: int, lr: float, step_s: float) -> float:
        """Let `step_s` virtual seconds pass, the duration of one step of `row`; return its loss."""
        step = _Step(row, lr)
        self._under_way.append(step)
        try:
            await asyncio.sleep(step_s)
        except asyncio.CancelledError:
            # Computed later, it would move a row that may have been restored by then.
            self._under_way = [other for other in self._under_way if other is not step]
            raise
        if step.loss is None:
            self._compute()
        assert step.loss is not None
        return step.loss

    def _compute(self) -> None:
        steps, self._under_way = self._under_way, []
        losses = self._stack.step([step.row for step in steps], [step.lr for step in steps])
        for step, loss in zip(steps, losses, strict=True):
            step.loss = loss


class StackedCompute(InlineCompute):
    """One peer's share of `StackedSteps`.

    Args:
        steps: the steps of all peers.
        step_s: virtual seconds of one inner step at the common speed.
        machine: how fast the peer's is.
    """

    def __init__(self, steps: StackedSteps, *, step_s: float, machine: Machine = STEADY) -> None:
        super().__init__(step_s=step_s, machine=machine)
        self._steps = steps

    async def step(self, model: LocalModel, lr: float) -> float:
        """Let the virtual duration of one inner step of a replica pass and return its loss."""
        assert isinstance(model, Replica)
        return await self._steps.step(model.row, lr, self.step_s)
