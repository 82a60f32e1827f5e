"""How far a peer has moved lately, block by block."""

from __future__ import annotations

import torch
from torch import Tensor

from gasloc_p2p.core.codecs import Codec, block_max_difference


class Drift:
    """What the modular codecs tell partners of a peer's motion (docs/design.md section 5).

    Unchecked codecs ask for nothing and cost nothing.

    Attributes:
        stepped: how far the last outer step went, fp32 [blocks of P]; replaced and never changed.
    """

    def __init__(self, codec: Codec, *, elements: int) -> None:
        self._block = codec.block_elements
        self._asked = codec.checked
        self.stepped = torch.zeros(-(-elements // self._block) if codec.checked else 0)

    def motion(self, theta: Tensor, theta_h: Tensor, *, vectors: int) -> Tensor | None:
        """Return the motion of the local steps and half of the last outer step, fp32 [blocks].

        None where nobody asks.

        Args:
            theta, theta_h: parameters before and after the local steps, fp32 [P].
            vectors: how many vectors of P elements the blocks run over.
        """
        if not self._asked:
            return None
        moved = block_max_difference(theta, theta_h, self._block) + self.stepped / 2
        if vectors == 1:
            return moved
        # Where one vector ends within a block, the next one begins there.
        every = moved.repeat_interleave(self._block)[: theta.numel()].repeat(vectors)
        return block_max_difference(every, None, self._block)

    def note_step(self, theta: Tensor, stepped: Tensor) -> None:
        """Learn from an outer step from `theta` to `stepped`, fp32 [P] each."""
        if self._asked:
            self.stepped = block_max_difference(theta, stepped, self._block)

    def note_correction(self, theta: Tensor, corrected: Tensor) -> None:
        """Learn that late edges moved `theta` to `corrected`, fp32 [P] each."""
        if self._asked:
            moved = block_max_difference(theta, corrected, self._block)
            self.stepped = torch.maximum(self.stepped, moved)

    def restore(self, stepped: Tensor | None) -> None:
        """Take over an earlier `stepped`; one of another codec tells nothing."""
        if stepped is not None and stepped.shape == self.stepped.shape:
            self.stepped = stepped
