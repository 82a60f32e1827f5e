"""Two vectors that lie to each other as the parameters of partners do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from gasloc_p2p.core.codecs import block_max_difference

SCALE: Final = 0.02
"""Standard deviation of a parameter."""

DISTANCE: Final = 0.02
"""Typical distance of partners by the norm of either."""

REGION: Final = 4096
"""Neighbouring elements that move alike, as those of one tensor do."""

SPREAD: Final = 1.0
"""Standard deviation of the logarithm of how far regions move."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Side:
    """One partner, with what it knows by itself; fp32 [elements] each.

    Attributes:
        x: its parameters after the local steps.
        before: the same before them.
        stepped: its last outer step.
    """

    x: Tensor
    before: Tensor
    stepped: Tensor

    def motion(self, block_elements: int) -> Tensor:
        """Return how far it knows to have moved, fp32 [blocks], as `node/drift.py` does."""
        moved = block_max_difference(self.before, self.x, block_elements)
        return moved + self._maxima(self.stepped, block_elements) / 2

    def _maxima(self, values: Tensor, block_elements: int) -> Tensor:
        return block_max_difference(torch.zeros_like(values), values, block_elements)


def draw_partners(elements: int, *, seed: int = 0) -> tuple[Side, Side]:
    """Return two partners, the same for the same seed.

    Parameters are normal with standard deviation `SCALE`. Each region of `REGION` elements has a
    scale s of its own, log-normal, such that partners are apart by about `DISTANCE` of their norm.
    In every region a partner is off the swarm's mean by s / 2 before its local steps, which move it
    by s / 2, as did its last outer step; all of it normal and independent. So partners differ by s.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(count: int) -> Tensor:
        return torch.randn(count, generator=generator)

    regions = torch.exp(SPREAD * normal(-(-elements // REGION)))
    scales = regions.repeat_interleave(REGION)[:elements]
    scales *= DISTANCE * SCALE / scales.square().mean().sqrt()
    mean = SCALE * normal(elements)

    def side() -> Side:
        before = mean + scales / 2 * normal(elements)
        return Side(
            x=before + scales / 2 * normal(elements),
            before=before,
            stepped=scales / 2 * normal(elements),
        )

    return side(), side()
