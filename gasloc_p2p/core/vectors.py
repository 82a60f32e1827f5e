"""Passes over vectors as long as the parameters, a part at a time.

What they need for themselves is as small as a part, however long the vectors are.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from gasloc_p2p.core.outer import OuterRule, OuterState

PART_ELEMENTS: Final = 1 << 20


def is_finite(*tensors: Tensor) -> bool:
    """Whether all elements are finite numbers."""
    return all(
        bool(torch.isfinite(part).all())
        for tensor in tensors
        for part in torch.split(tensor.reshape(-1), PART_ELEMENTS)
    )


def distance(a: Tensor, b: Tensor) -> float:
    """Return ||a - b|| of two flat fp32 vectors, summed in fp64.

    It is infinite or NaN exactly when an element of a - b, in fp32, is.
    """
    squares = 0.0
    for mine, theirs in zip(*(torch.split(x, PART_ELEMENTS) for x in (a, b)), strict=True):
        squares += float((mine - theirs).to(torch.float64).square_().sum())
    return math.sqrt(squares)


def outer_step(
    rule: OuterRule, theta_start: Tensor, theta_h: Tensor, mixed: Tensor, state: OuterState
) -> tuple[Tensor, OuterState]:
    """Take the outer step of `rule`; see `OuterRule.step`, except for what becomes of `mixed`.

    Args:
        rule: which.
        theta_start, theta_h, state: flat tensors of P elements, left alone.
        mixed: flat, `rule.vectors` times as long; the parameters that are returned take its place.
    """
    vectors = mixed.view(rule.vectors, -1)
    theta, memory = vectors[0], torch.empty_like(state.memory)
    for first in range(0, len(theta), PART_ELEMENTS):
        part = slice(first, first + PART_ELEMENTS)
        theta[part], kept = rule.step(
            theta_start[part],
            theta_h[part],
            vectors[:, part].flatten(),
            OuterState(memory=state.memory[part]),
        )
        memory[part] = kept.memory
    return theta, OuterState(memory=memory)
