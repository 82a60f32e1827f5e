"""The outer step: what a peer gives to the mix, and what it does with what comes back.

Each rule is a row of the table in docs/design.md section 2. Throughout, g = theta^H - theta is the
pseudo-gradient, eta the outer learning rate, gamma the outer momentum, and y = theta + eta g.
Rules are found by name in `OUTER_RULES`, where `register_outer_rule` puts one's own.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from gasloc_p2p.core.errors import ConfigError
from gasloc_p2p.core.registry import Registry


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OuterState:
    """What a rule remembers from one round to the next.

    Attributes:
        memory: momentum or earlier parameters, as the rule defines; shape and dtype of theta.
    """

    memory: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class OuterRule(ABC):
    """One outer update, applied by each peer alone; a subclass needs a `name` and a `step`.

    Every method takes and returns tensors of one dtype (fp32 or fp64), changes none of its
    arguments, and treats every parameter alike and by itself: the last dimension is that of the
    parameters, of which a node passes a part at a time, and others may come before it.

    Attributes:
        lr: eta.
        momentum: gamma.
        name: the rule's name in a configuration.
        vectors: how many vectors as long as theta `outgoing` consists of.
        on_nodes: whether nodes run it too, and not the simulator alone.
    """

    name: ClassVar[str]
    vectors: ClassVar[int] = 1
    on_nodes: ClassVar[bool] = True

    lr: float
    momentum: float

    def initial(self, theta: Tensor) -> OuterState:
        """Return the memory with which a peer that holds `theta` begins; zeros by default."""
        return OuterState(memory=torch.zeros_like(theta))

    def outgoing(self, theta_start: Tensor, theta_h: Tensor, state: OuterState) -> Tensor:
        """Return what this peer contributes to the mix; `theta_h` by default.

        It is `vectors` times as long as theta, one vector after the other.

        Args:
            theta_start: parameters at the start of the round.
            theta_h: parameters after the H local steps; the result may be this very tensor.
            state: memory at the start of the round.
        """
        return theta_h

    @abstractmethod
    def step(
        self, theta_start: Tensor, theta_h: Tensor, mixed: Tensor, state: OuterState
    ) -> tuple[Tensor, OuterState]:
        """Return the parameters and the memory with which the next round starts.

        Args:
            theta_start: parameters at the start of the round.
            theta_h: parameters after the H local steps.
            mixed: the mix of the neighbours' and this peer's `outgoing`; the parameters that are
                returned may be this very tensor, the memory may not share it.
            state: memory at the start of the round.
        """


OUTER_RULES: Registry[type[OuterRule]] = Registry("outer rule")
"""Every outer rule by name, the default first."""

R = TypeVar("R", bound=OuterRule)


def register_outer_rule(rule: type[R]) -> type[R]:
    """Make a class of outer rules known by its `name`; a class decorator.

    Raises:
        ConfigError: the name is malformed or taken, or the class has no `step`.
    """
    if inspect.isabstract(rule):
        raise ConfigError(
            f"the outer rule {rule.name!r} is not complete",
            why="an outer rule says in `step` how a round changes the parameters",
            fix="define `step`; see OuterRule in gasloc_p2p/core/outer.py",
        )
    OUTER_RULES.register(rule.name, rule)
    return rule


@register_outer_rule
@dataclass(frozen=True, kw_only=True, slots=True)
class Nesterov(OuterRule):
    """Mix theta^H, then step along D = theta - mixed with Nesterov momentum (the default).

    v' = gamma v + D; theta' = theta - eta (D + gamma v'). The memory is v, zero at first.
    Source: docs/design.md section 2, the algorithm.
    """

    name: ClassVar[str] = "nesterov"

    def step(
        self, theta_start: Tensor, theta_h: Tensor, mixed: Tensor, state: OuterState
    ) -> tuple[Tensor, OuterState]:
        descent = theta_start - mixed
        velocity = torch.add(descent, state.memory, alpha=self.momentum)
        # descent is a temporary of this call, so its memory is reused.
        descent.add_(velocity, alpha=self.momentum)
        return torch.sub(theta_start, descent, alpha=self.lr), OuterState(memory=velocity)


@register_outer_rule
@dataclass(frozen=True, kw_only=True, slots=True)
class Local(OuterRule):
    """Step alone with Nesterov momentum on the own pseudo-gradient, then mix.

    v' = gamma v + g; theta' = W [theta + eta (g + gamma v')]. The memory is v, zero at first.
    What is sent depends on nothing received this round. Source: docs/design.md section 2, `local`.
    """

    name: ClassVar[str] = "local"

    def outgoing(self, theta_start: Tensor, theta_h: Tensor, state: OuterState) -> Tensor:
        pseudo_gradient = theta_h - theta_start
        velocity = torch.add(pseudo_gradient, state.memory, alpha=self.momentum)
        pseudo_gradient.add_(velocity, alpha=self.momentum)
        return torch.add(theta_start, pseudo_gradient, alpha=self.lr)

    def step(
        self, theta_start: Tensor, theta_h: Tensor, mixed: Tensor, state: OuterState
    ) -> tuple[Tensor, OuterState]:
        pseudo_gradient = theta_h - theta_start
        return mixed, OuterState(memory=pseudo_gradient.add_(state.memory, alpha=self.momentum))


@register_outer_rule
@dataclass(frozen=True, kw_only=True, slots=True)
class Lookahead(OuterRule):
    """Mix the extrapolated point: theta' = W [y + gamma (y - y_prev)].

    The memory is y_prev, the first parameters at first.
    Source: docs/design.md section 2, `lookahead`.
    """

    name: ClassVar[str] = "lookahead"
    on_nodes: ClassVar[bool] = False

    def initial(self, theta: Tensor) -> OuterState:
        return OuterState(memory=theta.clone())

    def outgoing(self, theta_start: Tensor, theta_h: Tensor, state: OuterState) -> Tensor:
        y = _stepped(theta_start, theta_h, self.lr)
        return torch.add(y, y - state.memory, alpha=self.momentum)

    def step(
        self, theta_start: Tensor, theta_h: Tensor, mixed: Tensor, state: OuterState
    ) -> tuple[Tensor, OuterState]:
        return mixed, OuterState(memory=_stepped(theta_start, theta_h, self.lr))


@register_outer_rule
@dataclass(frozen=True, kw_only=True, slots=True)
class PostMix(OuterRule):
    """Extrapolate what was mixed: z = W y; theta' = z + gamma (z - z_prev).

    The memory is z_prev, the first parameters at first.
    Source: docs/design.md section 2, `post-mix`.
    """

    name: ClassVar[str] = "post-mix"
    on_nodes: ClassVar[bool] = False

    def initial(self, theta: Tensor) -> OuterState:
        return OuterState(memory=theta.clone())

    def outgoing(self, theta_start: Tensor, theta_h: Tensor, state: OuterState) -> Tensor:
        return _stepped(theta_start, theta_h, self.lr)

    def step(
        self, theta_start: Tensor, theta_h: Tensor, mixed: Tensor, state: OuterState
    ) -> tuple[Tensor, OuterState]:
        theta = torch.add(mixed, mixed - state.memory, alpha=self.momentum)
        # A caller may reuse its mixing buffer, so the memory must not share it.
        return theta, OuterState(memory=mixed.clone())


@register_outer_rule
@dataclass(frozen=True, kw_only=True, slots=True)
class Printed(OuterRule):
    """The form one secondary source prints: theta' = W y + gamma (y - y_prev).

    The momentum is not mixed, so peers stay apart even on the complete graph. The memory is
    y_prev, the first parameters at first. Source: docs/design.md section 2, `printed`.
    """

    name: ClassVar[str] = "printed"
    on_nodes: ClassVar[bool] = False

    def initial(self, theta: Tensor) -> OuterState:
        return OuterState(memory=theta.clone())

    def outgoing(self, theta_start: Tensor, theta_h: Tensor, state: OuterState) -> Tensor:
        return _stepped(theta_start, theta_h, self.lr)

    def step(
        self, theta_start: Tensor, theta_h: Tensor, mixed: Tensor, state: OuterState
    ) -> tuple[Tensor, OuterState]:
        y = _stepped(theta_start, theta_h, self.lr)
        return torch.add(mixed, y - state.memory, alpha=self.momentum), OuterState(memory=y)


@register_outer_rule
@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptThenAdd(OuterRule):
    """Mix the start of the round and add the own progress: theta' = W theta + g (DAdam).

    lr and momentum are not used, and the memory stays zero. With one local step this is DAdam,
    with more Local-DAdam: AdamW moves the unmixed parameters, and the moments stay local.
    Source: docs/design.md section 2, baselines.
    """

    name: ClassVar[str] = "dadam"

    def outgoing(self, theta_start: Tensor, theta_h: Tensor, state: OuterState) -> Tensor:
        return theta_start

    def step(
        self, theta_start: Tensor, theta_h: Tensor, mixed: Tensor, state: OuterState
    ) -> tuple[Tensor, OuterState]:
        theta = mixed + (theta_h - theta_start)
        return theta, OuterState(memory=torch.zeros_like(theta_start))


@register_outer_rule
@dataclass(frozen=True, kw_only=True, slots=True)
class NoLoCo(OuterRule):
    """Average pseudo-gradients and parameters over the edge, with momentum that pulls together.

    m' = gamma m + eta W g + eta (W theta - theta); theta' = theta + m'. Both theta and g travel,
    so an exchange carries twice the bytes. The memory is m, zero at first.
    Source: docs/design.md section 2, baselines.
    """

    name: ClassVar[str] = "noloco"
    vectors: ClassVar[int] = 2

    def outgoing(self, theta_start: Tensor, theta_h: Tensor, state: OuterState) -> Tensor:
        return torch.cat((theta_start, theta_h - theta_start), dim=-1)

    def step(
        self, theta_start: Tensor, theta_h: Tensor, mixed: Tensor, state: OuterState
    ) -> tuple[Tensor, OuterState]:
        mean_theta, mean_gradient = mixed.tensor_split(2, dim=-1)
        pull = (mean_theta - theta_start).add_(mean_gradient)
        momentum = torch.add(pull.mul_(self.lr), state.memory, alpha=self.momentum)
        return theta_start + momentum, OuterState(memory=momentum)


def outer_rule(name: str, *, lr: float, momentum: float) -> OuterRule:
    """Return the outer rule `name` with this learning rate (eta) and momentum (gamma).

    Raises:
        ConfigError: no rule has this name.
    """
    return OUTER_RULES.named(name)(lr=lr, momentum=momentum)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MixPart:
    """One edge's share of a mix.

    Attributes:
        weight: W_ij, the same at both ends of the edge.
        received: the partner's outgoing tensor as it arrived; shape and dtype of the own one.
        own_copy: this peer's outgoing tensor as the partner received it.
    """

    weight: float
    received: Tensor
    own_copy: Tensor


def mix(own: Tensor, parts: Sequence[MixPart], alpha: float) -> Tensor:
    """Return this peer's row of the gossip mix, own + alpha sum_j W_ij (received_j - own_copy_j).

    Each term is the exact negative of the partner's, so whatever the wire format loses, the mean
    over the swarm stays. An edge that is left out gives its weight back to the peer itself. Terms
    are added in the order given. The result is a fresh tensor of the shape and dtype of `own`.
    Source: docs/design.md sections 2 and 5.

    Args:
        own: this peer's exact outgoing tensor.
        parts: one per edge that was exchanged.
        alpha: relaxation in (0, 1]; W becomes (1 - alpha) I + alpha W.
    """
    mixed = own.clone()
    for part in parts:
        mixed.add_(part.received - part.own_copy, alpha=alpha * part.weight)
    return mixed


def _stepped(theta_start: Tensor, theta_h: Tensor, lr: float) -> Tensor:
    """Return y = theta + eta g."""
    return torch.add(theta_start, theta_h - theta_start, alpha=lr)
