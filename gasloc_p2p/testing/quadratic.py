"""A model that costs nothing: a quadratic whose gradients carry each peer's own noise."""

from __future__ import annotations

import math
from typing import Final

import torch
from blake3 import blake3
from torch import Tensor

from gasloc_p2p.core.substrate import ModelState
from gasloc_p2p.core.types import PeerId

ELEMENTS: Final = 32
NOISE: Final = 1.0
_STEEPEST, _FLATTEST = 1.0, 0.3
_UNIT_UNIFORM = math.sqrt(3.0)
"""Half the width of a uniform distribution of variance 1."""


class NoisyQuadratic:
    """The loss 1/2 sum_k a_k (theta_k - target_k)^2, trained by SGD; a `LocalModel`.

    All peers share the curvatures a in [0.3, 1], the target and the start at 0. A step's gradient
    has noise of standard deviation `noise` in every element, which depends on nothing but the run's
    seed, the peer and the number of the step, so a restored model goes on bit for bit.

    Attributes:
        restarts: how often `restart_optimizer` was called; SGD has no moments to forget.

    Args:
        seed: the run's seed.
        peer_id: whose noise it is.
        elements: elements P of theta.
        noise: standard deviation of the gradient's noise.
    """

    def __init__(
        self, *, seed: int, peer_id: PeerId, elements: int = ELEMENTS, noise: float = NOISE
    ) -> None:
        self.restarts = 0
        self._noise = noise
        self._key = blake3(f"noisy quadratic, seed {seed}, peer {peer_id}".encode()).digest()
        self._schema = blake3(f"noisy quadratic of {elements}".encode()).digest()
        self._curvature = torch.logspace(
            math.log10(_FLATTEST), math.log10(_STEEPEST), elements, dtype=torch.float32
        )
        target_key = blake3(f"noisy quadratic, seed {seed}".encode()).digest()
        self._target = _uniform(target_key, 0, elements)
        self._theta = torch.zeros(elements)
        self._steps = 0

    @property
    def elements(self) -> int:
        """Elements P of the flat parameter vector."""
        return self._theta.numel()

    @property
    def tokens_per_step(self) -> int:
        """One token, for want of any."""
        return 1

    def utilisation(self, tokens_per_s: float) -> float | None:
        """Nobody knows what share of a device this is."""
        return None

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements of its one parameter tensor."""
        return (self.elements,)

    @property
    def schema_digest(self) -> bytes:
        """Digest of the kind of model and its size."""
        return self._schema

    def step(self, lr: float) -> float:
        """Do one step of SGD at learning rate `lr`; return the loss before it, without noise."""
        loss = self.validation_loss()
        gradient = self._curvature * (self._theta - self._target)
        gradient += self._noise * _uniform(self._key, self._steps, self.elements)
        self._theta = self._theta - lr * gradient
        self._steps += 1
        return loss

    def theta(self) -> Tensor:
        """Return a copy of the parameters, fp32 [P]."""
        return self._theta.clone()

    def load(self, flat: Tensor) -> None:
        """Set the parameters from `flat`, fp32 [P]."""
        self._theta = flat.clone()

    def validation_loss(self, flat: Tensor | None = None) -> float:
        """Return the loss of `flat`, fp32 [P], or of the current parameters."""
        away = (self._theta if flat is None else flat) - self._target
        return 0.5 * float((self._curvature * away * away).sum())

    def state(self) -> ModelState:
        """Return the number of steps done; SGD remembers nothing else."""
        return ModelState(tensors={}, next_sample=self._steps, warmup_steps_left=0)

    def restore(self, state: ModelState) -> None:
        """Go on from a state that `state` returned.

        Raises:
            ValueError: it holds the moments of another optimizer.
        """
        if state.tensors:
            raise ValueError(f"SGD has no moments, but there are {sorted(state.tensors)}")
        self._steps = state.next_sample

    def restart_optimizer(self, *, warmup_steps: int) -> None:
        """Count the call."""
        self.restarts += 1


def _uniform(key: bytes, counter: int, elements: int) -> Tensor:
    """Return numbers of mean 0 and variance 1, fp32 [elements], for this key and counter."""
    raw = blake3(counter.to_bytes(8, "little"), key=key).digest(length=4 * elements)
    words = torch.frombuffer(bytearray(raw), dtype=torch.int32)
    return words.to(torch.float32) * (_UNIT_UNIFORM / 2**31)
