"""A peer that trains honestly but alone, and sends its partners something else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gasloc_p2p.config import Config
from gasloc_p2p.core.errors import ConfigError
from gasloc_p2p.core.outer import OuterRule, OuterState, outer_rule

NOBODY = "none"
"""The value of `simulate.poison` with which every peer is honest."""

SCALE = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Poison(OuterRule):
    """An outer rule that takes nothing from partners, and gives them what `attack` makes of it.

    Attributes:
        honest: the rule with which the attacker trains.
        attack: turns what an honest peer would send, [P], into what is sent.
    """

    name: ClassVar[str] = "poison"
    on_nodes: ClassVar[bool] = False

    honest: OuterRule
    attack: Callable[[Tensor], Tensor]

    def initial(self, theta: Tensor) -> OuterState:
        return self.honest.initial(theta)

    def outgoing(self, theta_start: Tensor, theta_h: Tensor, state: OuterState) -> Tensor:
        return self.attack(self.honest.outgoing(theta_start, theta_h, state))

    def step(
        self, theta_start: Tensor, theta_h: Tensor, mixed: Tensor, state: OuterState
    ) -> tuple[Tensor, OuterState]:
        alone = self.honest.outgoing(theta_start, theta_h, state)
        return self.honest.step(theta_start, theta_h, alone, state)


def attacker_rule(config: Config, theta: Tensor) -> Poison:
    """Return the rule of the attacker that `simulate.poison` asks for.

    Args:
        config: of the swarm; its outer rule is the one with which the attacker trains.
        theta: the run's initial parameters, fp32 [P].

    Raises:
        ConfigError: the outer rule sends more than one vector, which the attacks do not cover.
    """
    outer = config.outer
    honest = outer_rule(outer.rule, lr=outer.lr, momentum=outer.momentum)
    if honest.vectors != Poison.vectors:
        raise ConfigError(
            f"simulate.poison cannot be used with outer.rule = {outer.rule!r}",
            why="its peers send more than their parameters",
            fix="use another outer rule, or simulate.poison = none",
        )
    draw = torch.Generator().manual_seed(config.run.seed)

    def noise(sent: Tensor) -> Tensor:
        return torch.randn(sent.shape, generator=draw) * sent.square().mean().sqrt()

    attacks: dict[str, Callable[[Tensor], Tensor]] = {
        "random": noise,
        "scaled": lambda sent: SCALE * sent,
        "flipped": torch.neg,
        "stale": lambda sent: theta,
    }
    return Poison(
        lr=outer.lr, momentum=outer.momentum, honest=honest, attack=attacks[config.simulate.poison]
    )
