"""How good a swarm as a whole is on the way, its averaged model included."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean

from torch import Tensor

from gasloc_p2p.core.substrate import LocalModel
from gasloc_p2p.node.events import Event, RoundFinished, Validated
from gasloc_p2p.report import mean_theta
from gasloc_p2p.simulate.observer import SwarmObserver


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """A swarm at one moment; losses are those of the held-out text in nats per token.

    Attributes:
        rounds: training rounds that its peers have done, in the mean over them.
        time_s: virtual second.
        averaged_val_loss: of the mean of the parameters with which each peer ended its last round.
        own_val_loss: mean over the peers of the last loss that each found its own model to have.
    """

    rounds: int
    time_s: float
    averaged_val_loss: float
    own_val_loss: float


class Standings:
    """Passes events on, and takes the swarm's standing after every n rounds that n peers finish.

    Where all do the same rounds that is the end of each round. A peer that is behind, or that takes
    part in fewer rounds, counts with what it had last. The first standing is that at the start.

    Args:
        observe: who is told next.
        models: those that count, by the index of their peer.
        initial_theta: the run's initial parameters, fp32 [P].

    Attributes:
        points: the standings, in the order of time.
    """

    def __init__(
        self, observe: SwarmObserver, models: Mapping[int, LocalModel], initial_theta: Tensor
    ) -> None:
        self._observe = observe
        self._models = models
        self._judge = next(iter(models.values()))
        initial_val_loss = self._judge.validation_loss(initial_theta)
        self._thetas = dict.fromkeys(models, initial_theta)
        self._own_val_losses = dict.fromkeys(models, initial_val_loss)
        self._finished = 0
        self.points = [
            Standing(
                rounds=0,
                time_s=0.0,
                averaged_val_loss=initial_val_loss,
                own_val_loss=initial_val_loss,
            )
        ]

    def observe(self, index: int, event: Event) -> None:
        """Note what a peer has reached, and pass the event on."""
        if index in self._models:
            self._note(index, event)
        self._observe(index, event)

    def _note(self, index: int, event: Event) -> None:
        match event:
            case Validated(val_loss=val_loss):
                self._own_val_losses[index] = val_loss
            case RoundFinished(report=report) if not report.closing:
                self._thetas[index] = self._models[index].theta()
                self._finished += 1
                if self._finished % len(self._models) == 0:
                    self.points.append(self._standing())

    def _standing(self) -> Standing:
        return Standing(
            rounds=self._finished // len(self._models),
            time_s=asyncio.get_running_loop().time(),
            averaged_val_loss=self._judge.validation_loss(mean_theta([*self._thetas.values()])),
            own_val_loss=fmean(self._own_val_losses.values()),
        )
