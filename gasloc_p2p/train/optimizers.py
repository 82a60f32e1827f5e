"""Inner optimizers by name, and what each remembers, so that a checkpoint of it is exact."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn

from gasloc_p2p.core.registry import Registry
from gasloc_p2p.train.inner_state import MOMENTS
from gasloc_p2p.train.settings import InnerConfig

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class InnerOptimizer:
    """How one kind of inner optimizer is made and saved.

    What it remembers of a parameter is zero before its first step, and a state of zeros is as good
    as none.

    Attributes:
        make: returns the optimizer; it gets parameter groups, which set `weight_decay`, and the
            settings. The learning rate of a group is set before each step.
        kept: returns name and shape of every fp32 tensor that it keeps for a parameter, as torch
            names them, but for `step`.
        counts: whether it counts the steps of a parameter under `step`.
        skips: whether its step does nothing where its attribute `found_inf` is 1, as torch's fused
            ones do; the host need not wait for the gradient then.
    """

    make: Callable[[Sequence[dict[str, Any]], InnerConfig], torch.optim.Optimizer]
    kept: Callable[[Tensor, InnerConfig], Shapes]
    counts: bool = True
    skips: bool = False


INNER_OPTIMIZERS: Final[Registry[InnerOptimizer]] = Registry("inner optimizer")
"""Every inner optimizer by name, the default first."""


def register_inner_optimizer(name: str, optimizer: InnerOptimizer) -> None:
    """Make an inner optimizer known as `name`.

    Raises:
        ConfigError: the name is malformed or taken.
    """
    INNER_OPTIMIZERS.register(name, optimizer)


def parameter_groups(trainable: Sequence[nn.Parameter], inner: InnerConfig) -> list[dict[str, Any]]:
    """Return the groups of an optimizer: matrices decay, vectors do not."""
    return [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": inner.weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]


def kept_elements(trainable: Sequence[nn.Parameter], inner: InnerConfig) -> int:
    """Return how many numbers the optimizer of `inner` remembers, step counts aside.

    Raises:
        ConfigError: there is no optimizer of this name.
    """
    kept = INNER_OPTIMIZERS.named(inner.optimizer).kept
    return sum(
        torch.Size(shape).numel()
        for parameter in trainable
        for shape in kept(parameter, inner).values()
    )


def _adamw(groups: Sequence[dict[str, Any]], inner: InnerConfig) -> torch.optim.Optimizer:
    # Fused is a third of the time of foreach for many small tensors on a CPU.
    return torch.optim.AdamW(
        list(groups), lr=inner.lr, betas=(inner.beta1, inner.beta2), fused=True
    )


def _sgd(groups: Sequence[dict[str, Any]], inner: InnerConfig) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(groups), lr=inner.lr, momentum=inner.beta1, fused=True)


def _adafactor(groups: Sequence[dict[str, Any]], inner: InnerConfig) -> torch.optim.Optimizer:
    # Gradients are clipped before, by inner.clip_norm; d limits the update itself.
    return torch.optim.Adafactor(list(groups), lr=inner.lr)


def _factors(parameter: Tensor, inner: InnerConfig) -> Shapes:
    shape = tuple(parameter.shape)
    if len(shape) < 2:
        return {"variance": shape}
    return {"row_var": (*shape[:-1], 1), "col_var": (*shape[:-2], 1, shape[-1])}


register_inner_optimizer(
    "adamw",
    InnerOptimizer(
        make=_adamw,
        kept=lambda parameter, inner: dict.fromkeys(MOMENTS, tuple(parameter.shape)),
        skips=True,
    ),
)
register_inner_optimizer(
    "sgd",
    InnerOptimizer(
        make=_sgd,
        kept=lambda parameter, inner: (
            {"momentum_buffer": tuple(parameter.shape)} if inner.beta1 else {}
        ),
        counts=False,
        skips=True,
    ),
)
register_inner_optimizer("adafactor", InnerOptimizer(make=_adafactor, kept=_factors))
