"""Many peers' models trained as one: their parameters are the rows of one matrix.

Every replica does what `train/learner.py` does, equal within rounding and not bit for bit. On a CPU
a few rows at a time go through `train/llama.py`, so that what they touch stays in the cache; on a
GPU as many as fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from gasloc_p2p.core.errors import ConfigError
from gasloc_p2p.core.substrate import ModelState
from gasloc_p2p.core.types import PeerId
from gasloc_p2p.train.data import Corpus, SampleCursor, count_windows, validation_windows
from gasloc_p2p.train.inner_state import (
    MOMENTS,
    STEP,
    refuse_state_of_another_model,
    warmed_up,
)
from gasloc_p2p.train.llama import StackedLlama
from gasloc_p2p.train.model import PRESETS, Preset, build_model, preset_length, windows_per_step
from gasloc_p2p.train.parameters import ParameterView, Schema
from gasloc_p2p.train.settings import DataConfig, InnerConfig, ModelConfig

T = TypeVar("T")

ADAMW = "adamw"
ADAMW_EPSILON = 1e-8
CLIP_EPSILON = 1e-6
"""What torch's own optimizer and clipping add to their denominators."""

CPU_ACTIVATION_BYTES = 16 << 20
GPU_ACTIVATION_BYTES = 8 << 30
_VALIDATION_BATCH = 32


class Stack:
    """The models, samples and AdamW moments of `peer_ids`, row by row.

    Args:
        model, data, inner: settings of every peer.
        seed: the run's seed.
        peer_ids: one row each.
        corpus: text that all of them train on.
        threads: threads on which groups of rows run on a CPU; the results do not depend on it.

    Attributes:
        replicas: one per row, each usable wherever a `Learner` is.
        schema: what a row holds.

    Raises:
        ConfigError: a setting that only real nodes and the exact engine know.
        DataError: the training or the validation text is shorter than one window.
    """

    def __init__(
        self,
        model: ModelConfig,
        data: DataConfig,
        inner: InnerConfig,
        *,
        seed: int,
        peer_ids: Sequence[PeerId],
        corpus: Corpus,
        threads: int,
    ) -> None:
        _refuse_what_rows_lack(model, inner)
        preset = replace(PRESETS[model.preset], sequence_length=preset_length(model))
        count_windows(corpus.train, preset.sequence_length, part="training")
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        view = ParameterView(
            build_model(model.preset, seed, sequence_length=preset.sequence_length)
        )
        self.schema: Schema = view.schema
        self._inner = inner
        self._sequence_length = preset.sequence_length
        self._train = corpus.train
        self._cursors = [SampleCursor(seed=seed, peer_id=peer) for peer in peer_ids]
        self._llama = StackedLlama.of(preset, self.schema, device=self._device)
        self._theta = view.read().to(self._device).repeat(len(peer_ids), 1)
        self._mean = torch.zeros_like(self._theta)
        self._square = torch.zeros_like(self._theta)
        self._steps = torch.zeros(len(peer_ids), 1, device=self._device)
        self._warmup_steps_left = [0] * len(peer_ids)
        self._decay = _decay(self.schema, inner.weight_decay).to(self._device)
        self._validation = validation_windows(
            corpus.validation,
            tokens=data.validation_tokens,
            sequence_length=preset.sequence_length,
        )
        self._windows = windows_per_step(inner, preset.sequence_length)
        self._rows_at_once = _rows_at_once(preset, self._windows, self._device)
        self._pool = ThreadPoolExecutor(threads) if threads > 1 else None
        self.replicas = tuple(Replica(self, row) for row in range(len(peer_ids)))

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one inner step of one row."""
        return self._windows * self._sequence_length

    def step(self, rows: Sequence[int], lrs: Sequence[float]) -> list[float]:
        """Do one inner step of each row at its own learning rate; return the losses in order.

        Rows whose gradient is not finite stay as they are.
        """
        lr_of = dict(zip(rows, lrs, strict=True))

        def work(part: range) -> dict[int, float]:
            gradients, losses = self._gradients(part)
            self._move(part, gradients, [lr_of[row] for row in part])
            return dict(zip(part, losses, strict=True))

        losses = self._on_parts(rows, work)
        return [losses[row] for row in rows]

    def gradients(self, rows: Sequence[int]) -> list[tuple[Tensor, float]]:
        """Return each row's gradient on its next batch, fp32 [elements] on the CPU, and loss."""

        def work(part: range) -> dict[int, tuple[Tensor, float]]:
            gradients, losses = self._gradients(part)
            return {
                row: (gradient.cpu(), loss)
                for row, gradient, loss in zip(part, gradients, losses, strict=True)
            }

        found = self._on_parts(rows, work)
        return [found[row] for row in rows]

    def apply(self, row: int, gradient: Tensor, lr: float) -> None:
        """Clip `gradient`, fp32 [elements], and take one AdamW step with it."""
        self._move(range(row, row + 1), gradient.to(self._device, copy=True)[None], [lr])

    def read(self, row: int) -> Tensor:
        """Return a copy of a row's parameters, fp32 [elements] on the CPU."""
        return self._theta[row].to("cpu", copy=True)

    def write(self, row: int, flat: Tensor) -> None:
        """Set a row's parameters from `flat`, fp32 [elements]; its moments stay."""
        self._theta[row].copy_(flat)

    def state(self, row: int) -> ModelState:
        """Return a copy of a row's moments, step count and data cursor."""
        return ModelState(
            tensors={
                name: part.to("cpu", copy=True) for name, part in self._inner_tensors(row).items()
            },
            next_sample=self._cursors[row].next_sample,
            warmup_steps_left=self._warmup_steps_left[row],
        )

    def restore(self, row: int, state: ModelState) -> None:
        """Take over a state that `state` returned, of this or another row.

        Raises:
            ValueError: it is that of another model; nothing has changed.
        """
        tensors = self._inner_tensors(row)
        refuse_state_of_another_model(
            state, {name: tuple(part.shape) for name, part in tensors.items()}
        )
        for name, part in tensors.items():
            part.copy_(state.tensors[name])
        self._cursors[row].next_sample = state.next_sample
        self._warmup_steps_left[row] = state.warmup_steps_left

    def restart_optimizer(self, row: int, *, warmup_steps: int) -> None:
        """Forget a row's moments and step count; see `Learner.restart_optimizer`."""
        for part in self._inner_tensors(row).values():
            part.zero_()
        self._warmup_steps_left[row] = warmup_steps

    def _inner_tensors(self, row: int) -> dict[str, Tensor]:
        """A row's moments, [elements] each, and its step count, [1]; views, by name."""
        mean, square = MOMENTS
        return {mean: self._mean[row], square: self._square[row], STEP: self._steps[row]}

    @torch.inference_mode()
    def evaluate(self, flat: Tensor) -> float:
        """Return the mean validation loss of `flat`, fp32 [elements]."""
        weights = self._llama.views(flat.to(self._device)[None])
        total = 0.0
        for tokens in torch.split(self._validation, _VALIDATION_BATCH):
            (loss,) = self._llama.losses(weights, tokens[None].to(self._device)).tolist()
            total += loss * len(tokens)
        return total / len(self._validation)

    def _on_parts(
        self, rows: Sequence[int], work: Callable[[range], Mapping[int, T]]
    ) -> dict[int, T]:
        """Do `work` on parts of neighbouring rows; return all that it found, by row."""
        parts = list(_neighbours(rows, at_most=self._rows_at_once))
        run = map if self._pool is None else self._pool.map
        return {row: value for found in run(work, parts) for row, value in found.items()}

    def _gradients(self, part: range) -> tuple[Tensor, list[float]]:
        """Return the gradients, [rows, elements], and the losses of neighbouring rows."""
        tokens = torch.stack([self._batch(row) for row in part]).to(self._device)
        # Through .data, autograd does not mind that other threads change other rows meanwhile.
        views = self._llama.views(self._theta.data[part.start : part.stop])
        weights = {name: view.detach().requires_grad_() for name, view in views.items()}
        losses = self._llama.losses(weights, tokens)
        found = torch.autograd.grad(losses.sum(), list(weights.values()))
        gradients = torch.empty(len(part), self.schema.elements, device=self._device)
        for place, gradient in zip(self._llama.views(gradients).values(), found, strict=True):
            place.copy_(gradient)
        return gradients, losses.tolist()

    def _batch(self, row: int) -> Tensor:
        return self._cursors[row].batch(
            self._train,
            batch_size=self._windows,
            sequence_length=self._sequence_length,
        )

    def _move(self, part: range, gradients: Tensor, lrs: Sequence[float]) -> None:
        """Clip `gradients`, [rows, elements], in place and take one AdamW step of each row."""
        norms = gradients.norm(dim=1, keepdim=True)
        finite = torch.isfinite(norms).flatten().tolist()
        if not all(finite):
            for offset, row in enumerate(part):
                if finite[offset] and len(part) > 1:
                    one = slice(offset, offset + 1)
                    self._move(range(row, row + 1), gradients[one], lrs[one])
            return
        gradients.mul_((self._inner.clip_norm / (norms + CLIP_EPSILON)).clamp_(max=1.0))
        lrs = [self._warmed_up(row, lr) for row, lr in zip(part, lrs, strict=True)]
        self._adamw(part, gradients, torch.tensor(lrs, device=self._device)[:, None])

    def _warmed_up(self, row: int, lr: float) -> float:
        """Return the learning rate of the step that a row is about to take, and count it."""
        left = self._warmup_steps_left[row]
        if left == 0:
            return lr
        self._warmup_steps_left[row] -= 1
        return warmed_up(lr, steps_taken=int(self._steps[row]), steps_left=left)

    def _adamw(self, part: range, gradients: Tensor, lr: Tensor) -> None:
        """One AdamW step with decoupled decay; `lr` is [rows, 1]."""
        inner, rows = self._inner, slice(part.start, part.stop)
        theta, mean, square, steps = (
            whole[rows] for whole in (self._theta, self._mean, self._square, self._steps)
        )
        steps += 1
        mean.lerp_(gradients, 1 - inner.beta1)
        square.mul_(inner.beta2).addcmul_(gradients, gradients, value=1 - inner.beta2)
        spread = square.sqrt().div_((1 - inner.beta2**steps).sqrt_()).add_(ADAMW_EPSILON)
        theta.addcmul_(theta * self._decay, lr, value=-1)
        theta.addcmul_(mean / spread, lr / (1 - inner.beta1**steps), value=-1)


class Replica:
    """One row of a stack, as a node sees its model."""

    def __init__(self, stack: Stack, row: int) -> None:
        self.stack = stack
        self.row = row

    @property
    def elements(self) -> int:
        """Elements of the flat parameter vector."""
        return self.stack.schema.elements

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each parameter tensor, in the order of the flat vector."""
        return self.stack.schema.sizes

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one inner step."""
        return self.stack.tokens_per_step

    def utilisation(self, tokens_per_s: float) -> float | None:
        """Nobody knows what share of a device this is."""
        return None

    @property
    def schema_digest(self) -> bytes:
        """Digest of what the flat vector holds."""
        return self.stack.schema.digest

    def step(self, lr: float) -> float:
        """Do one inner step at learning rate `lr` and return its loss in nats per byte."""
        (loss,) = self.stack.step([self.row], [lr])
        return loss

    def gradient(self) -> tuple[Tensor, float]:
        """Return the gradient on the next batch, fp32 [elements], unclipped, and the loss."""
        (found,) = self.stack.gradients([self.row])
        return found

    def apply(self, gradient: Tensor, lr: float) -> None:
        """Clip `gradient`, fp32 [elements], and do one optimizer step with it."""
        self.stack.apply(self.row, gradient, lr)

    def theta(self) -> Tensor:
        """Return a copy of the parameters, fp32 [elements] on the CPU."""
        return self.stack.read(self.row)

    def load(self, flat: Tensor) -> None:
        """Set the parameters from `flat`, fp32 [elements]; the moments stay as they are."""
        self.stack.write(self.row, flat)

    def validation_loss(self, flat: Tensor | None = None) -> float:
        """Return the mean loss over the validation windows of `flat`, or of the current values."""
        return self.stack.evaluate(self.theta() if flat is None else flat)

    def state(self) -> ModelState:
        """Return a copy of the moments, the step count and the data cursor."""
        return self.stack.state(self.row)

    def restore(self, state: ModelState) -> None:
        """Take over a state that `state` returned; the parameters stay.

        Raises:
            ValueError: it is that of another model; nothing has changed.
        """
        self.stack.restore(self.row, state)

    def restart_optimizer(self, *, warmup_steps: int) -> None:
        """Forget the moments and the step count; see `Learner.restart_optimizer`."""
        self.stack.restart_optimizer(self.row, warmup_steps=warmup_steps)


def _neighbours(rows: Sequence[int], *, at_most: int) -> Iterator[range]:
    """Yield `rows` in rising order as ranges without gaps of up to `at_most` rows."""
    ordered = sorted(rows)
    start = 0
    for end in range(1, len(ordered) + 1):
        whole = end - start == at_most
        if whole or end == len(ordered) or ordered[end] != ordered[end - 1] + 1:
            yield range(ordered[start], ordered[end - 1] + 1)
            start = end


def _refuse_what_rows_lack(model: ModelConfig, inner: InnerConfig) -> None:
    wrong = {
        "model.name": model.name,
        "inner.optimizer": inner.optimizer if inner.optimizer != ADAMW else "",
    }
    for key, value in wrong.items():
        if value:
            raise ConfigError(
                f"{key} = {value!r} does not work with simulate.engine = 'batched'",
                why="it computes many peers' steps as one, and knows presets with AdamW only",
                fix="set simulate.engine=exact",
            )


def _rows_at_once(preset: Preset, batch_size: int, device: torch.device) -> int:
    """Return how many rows' activations fit what the device works best with."""
    a_token = preset.layers * (10 * preset.width + 6 * preset.feed_forward) * 4
    limit = GPU_ACTIVATION_BYTES if device.type == "cuda" else CPU_ACTIVATION_BYTES
    return max(1, limit // (batch_size * preset.sequence_length * a_token))


def _decay(schema: Schema, weight_decay: float) -> Tensor:
    """Return the decay of every element, fp32 [elements]: matrices decay, vectors do not."""
    return torch.cat(
        [
            torch.full((size,), weight_decay if len(shape) >= 2 else 0.0)
            for size, shape in zip(schema.sizes, schema.shapes, strict=True)
        ]
    )
