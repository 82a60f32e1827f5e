"""How far a peer has moved lately, block by block."""

from __future__ import annotations

import torch
from torch import Tensor

from gasloc_p2p.core.codecs import Codec, block_max_difference


class Drift:
    """What the modular codecs tell partners of a peer's motion (docs/design.md section 5).

    Unchecked codecs ask for nothing and cost nothing.

    Attributes:
        stepped: how far the last outer step went, fp32 [blocks]; replaced and never changed.
    """

    def __init__(self, codec: Codec, *, elements: int, vectors: int) -> None:
        self._block = codec.block_elements
        self._vectors = vectors
        self._asked = codec.checked
        self.stepped = torch.zeros(-(-elements * vectors // self._block) if codec.checked else 0)

    def motion(self, theta: Tensor, theta_h: Tensor) -> Tensor | None:
        """Return the motion of the local steps and half of the last outer step, fp32 [blocks].

        None where nobody asks.

        Args:
            theta, theta_h: parameters before and after the local steps, fp32 [P].
        """
        return self._maxima(theta, theta_h) + self.stepped / 2 if self._asked else None

    def note_step(self, theta: Tensor, stepped: Tensor) -> None:
        """Learn from an outer step from `theta` to `stepped`, fp32 [P] each."""
        if self._asked:
            self.stepped = self._maxima(theta, stepped)

    def restore(self, stepped: Tensor | None) -> None:
        """Take over an earlier `stepped`; one of another codec tells nothing."""
        if stepped is not None and stepped.shape == self.stepped.shape:
            self.stepped = stepped

    def _maxima(self, before: Tensor, after: Tensor) -> Tensor:
        if self._vectors > 1:
            before, after = before.repeat(self._vectors), after.repeat(self._vectors)
        return block_max_difference(before, after, self._block)
