"""What learners and replicas have in common when their inner optimizer is saved or restarted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

from gasloc_p2p.core.substrate import ModelState

MOMENTS: Final = ("exp_avg", "exp_avg_sq")
"""AdamW's moments, fp32 [P] each, under the names that torch gives them."""
STEP: Final = "step"
"""AdamW's step counts, fp32; one for each tensor that has moments of its own."""


def refuse_state_of_another_model(state: ModelState, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Check that `state` has the tensors that `shapes` names, all fp32.

    Raises:
        ValueError: a name, shape or dtype differs, or a count is negative.
    """
    if set(state.tensors) != set(shapes):
        raise ValueError(f"expected {sorted(shapes)}, not {sorted(state.tensors)}")
    for name, shape in shapes.items():
        tensor = state.tensors[name]
        if tuple(tensor.shape) != shape or tensor.dtype != torch.float32:
            raise ValueError(
                f"{name}: expected torch.float32 {list(shape)}, "
                f"not {tensor.dtype} {list(tensor.shape)}"
            )
    if state.next_sample < 0 or state.warmup_steps_left < 0:
        raise ValueError("a count of samples or steps is negative")


def warmed_up(lr: float, *, steps_taken: int, steps_left: int) -> float:
    """Return the learning rate of a step after the optimizer was started afresh.

    It rises in a straight line and reaches `lr` once the warm-up is over, so that first moments
    made of few gradients move the parameters little.

    Args:
        lr: what the schedule says.
        steps_taken: steps since the optimizer was started afresh; AdamW's own count.
        steps_left: steps of the warm-up that are still to come, this one included; at least 1.
    """
    return lr * (steps_taken + 1) / (steps_taken + steps_left + 1)
