"""The inner loop of one peer: its model, its data, its optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gasloc_p2p.core.substrate import ModelState
from gasloc_p2p.core.types import PeerId
from gasloc_p2p.train.data import Corpus, load_corpus
from gasloc_p2p.train.inner_state import (
    MOMENTS,
    STEP,
    refuse_state_of_another_model,
    warmed_up,
)
from gasloc_p2p.train.model import PRESETS, build_model
from gasloc_p2p.train.parameters import ParameterView
from gasloc_p2p.train.samples import Samples, Text, TextInMemory
from gasloc_p2p.train.settings import DataConfig, InnerConfig, ModelConfig

_VALIDATION_BATCH = 32


class Learner:
    """Trains a model on a peer's own samples with AdamW.

    The moments never leave the peer and survive `load`, as in docs/design.md section 2. Nothing
    here draws random numbers: the same arguments give the same parameters, bit for bit on one
    thread. Not safe for calls from two threads at once.

    Attributes:
        parameters_view: the model's parameters as a flat vector.
        samples: the peer's own.

    Args:
        model: fp32 on the CPU.
        samples: what it trains on.
        validation: the held-out windows, int64 [windows, sequence_length + 1].
        inner: settings of the inner optimizer.

    Raises:
        ConfigError: the model cannot be mixed, see `ParameterView`.
    """

    def __init__(
        self, model: nn.Module, samples: Samples, validation: Tensor, inner: InnerConfig
    ) -> None:
        self.parameters_view = ParameterView(model)
        self.samples = samples
        self._model = model.train()
        self._inner = inner
        self._validation = validation
        self._trainable = [value for value in model.parameters() if value.requires_grad]
        self._optimizer = _adamw(self._trainable, inner)
        self._warmup_steps_left = 0

    def step(self, lr: float) -> float:
        """Do one inner step at learning rate `lr` and return its loss in nats per token.

        With a gradient that is not finite neither parameters nor moments change, so that this peer
        can go on from good parameters; such a loss is usually not finite either.
        """
        loss = self._backward()
        self._move(lr)
        return loss

    def gradient(self) -> tuple[Tensor, float]:
        """Return the gradient on the next batch, fp32 [elements], unclipped, and the loss."""
        loss = self._backward()
        return self.parameters_view.read_gradient(), loss

    def apply(self, gradient: Tensor, lr: float) -> None:
        """Do one optimizer step at learning rate `lr` with `gradient`, fp32 [elements]; clips it.

        With a gradient that is not finite nothing changes.
        """
        self.parameters_view.write_gradient(gradient)
        self._move(lr)

    def validation_loss(self, flat: Tensor | None = None) -> float:
        """Return the mean loss in nats per token over the fixed validation windows.

        Args:
            flat: parameters to measure, fp32 [elements]; the current ones when None. The current
                ones stay in place either way.
        """
        if flat is None:
            return self._evaluate()
        current = self.theta()
        self.load(flat)
        try:
            return self._evaluate()
        finally:
            self.load(current)

    @property
    def elements(self) -> int:
        """Elements of the flat parameter vector."""
        return self.parameters_view.schema.elements

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each parameter tensor, in the order of the flat vector."""
        return self.parameters_view.schema.sizes

    @property
    def schema_digest(self) -> bytes:
        """Digest of what the flat vector holds."""
        return self.parameters_view.schema.digest

    def theta(self) -> Tensor:
        """Return a copy of the parameters, fp32 [elements] on the CPU."""
        return self.parameters_view.read()

    def load(self, flat: Tensor) -> None:
        """Set the parameters from `flat`, fp32 [elements]; the moments stay as they are."""
        self.parameters_view.write(flat)

    @torch.no_grad()
    def state(self) -> ModelState:
        """Return a copy of AdamW's moments and step counts, and the data cursor.

        A tensor without a step yet has zeros, which is what AdamW starts with.
        """
        tensors = {
            name: torch.zeros(shape, dtype=torch.float32)
            for name, shape in self._state_shapes().items()
        }
        for index, (parameter, parts) in enumerate(self._moments(tensors)):
            found = self._optimizer.state.get(parameter)
            if found:
                tensors[STEP][index] = found[STEP]
                for name, part in parts.items():
                    part.copy_(found[name])
        return ModelState(
            tensors=tensors,
            next_sample=self.samples.next_sample,
            warmup_steps_left=self._warmup_steps_left,
        )

    @torch.no_grad()
    def restore(self, state: ModelState) -> None:
        """Take over a state that `state` returned; the parameters stay.

        Raises:
            ValueError: it is that of another model; nothing has changed.
        """
        refuse_state_of_another_model(state, self._state_shapes())
        for index, (parameter, parts) in enumerate(self._moments(state.tensors)):
            self._optimizer.state[parameter] = {
                STEP: state.tensors[STEP][index].to(parameter.device, copy=True),
                **{name: torch.empty_like(parameter).copy_(part) for name, part in parts.items()},
            }
        self.samples.next_sample = state.next_sample
        self._warmup_steps_left = state.warmup_steps_left

    def restart_optimizer(self, *, warmup_steps: int) -> None:
        """Forget AdamW's moments and step counts; the data cursor stays.

        Of the `warmup_steps` steps that follow, step k is done at (k + 1) / (warmup_steps + 1) of
        its learning rate; one whose gradient is not finite does not count.
        """
        self._optimizer.state.clear()
        self._warmup_steps_left = warmup_steps

    def _state_shapes(self) -> dict[str, tuple[int, ...]]:
        elements = sum(parameter.numel() for parameter in self._trainable)
        return {**dict.fromkeys(MOMENTS, (elements,)), STEP: (len(self._trainable),)}

    def _moments(
        self, tensors: Mapping[str, Tensor]
    ) -> Iterator[tuple[nn.Parameter, dict[str, Tensor]]]:
        """Yield each parameter with its parts of the flat moments, as views of its shape."""
        sizes = [parameter.numel() for parameter in self._trainable]
        split = (tensors[name].split_with_sizes(sizes) for name in MOMENTS)
        for parameter, *parts in zip(self._trainable, *split, strict=True):
            views = (part.view(parameter.shape) for part in parts)
            yield parameter, dict(zip(MOMENTS, views, strict=True))

    def _backward(self) -> float:
        """Leave the gradient on the next batch in the parameters and return the loss."""
        tokens = self.samples.batch(self._inner.batch_size)
        self._optimizer.zero_grad()
        loss = self._loss(tokens)
        torch.autograd.backward(loss)
        return loss.item()

    def _move(self, lr: float) -> None:
        norm = nn.utils.clip_grad_norm_(self._trainable, self._inner.clip_norm, foreach=True)
        if torch.isfinite(norm):
            lr = self._warmed_up(lr)
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()

    def _warmed_up(self, lr: float) -> float:
        """Return the learning rate of the step that is about to be taken, and count it."""
        left = self._warmup_steps_left
        if left == 0:
            return lr
        self._warmup_steps_left -= 1
        taken = max((int(found[STEP]) for found in self._optimizer.state.values()), default=0)
        return warmed_up(lr, steps_taken=taken, steps_left=left)

    def _evaluate(self) -> float:
        self._model.eval()
        total = 0.0
        with torch.inference_mode():
            for tokens in torch.split(self._validation, _VALIDATION_BATCH):
                total += self._loss(tokens).item() * len(tokens)
        self._model.train()
        return total / len(self._validation)

    def _loss(self, tokens: Tensor) -> Tensor:
        """Mean cross-entropy of predicting tokens[:, 1:] from tokens[:, :-1]."""
        logits: Tensor = self._model(input_ids=tokens[:, :-1]).logits
        return cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def build_learner(
    model: ModelConfig,
    data: DataConfig,
    inner: InnerConfig,
    *,
    seed: int,
    peer_id: PeerId,
    corpus: Corpus | None = None,
    text: Text | None = None,
) -> Learner:
    """Return the learner of one peer, with the initial parameters of the run.

    Args:
        seed: the run's seed.
        corpus: text already read, shared by the peers of one process; read from `data` when None.
        text: takes the place of `corpus`.

    Raises:
        DataError: the text is missing, unreadable or too small.
    """
    if text is None:
        text = TextInMemory(
            corpus=load_corpus(data) if corpus is None else corpus,
            seed=seed,
            peer_id=peer_id,
            validation_tokens=data.validation_tokens,
        )
    supply = text.supply(PRESETS[model.preset].sequence_length)
    return Learner(
        build_model(model.preset, seed, vocabulary=text.vocabulary),
        supply.samples,
        supply.validation,
        inner,
    )


def _adamw(trainable: list[nn.Parameter], inner: InnerConfig) -> torch.optim.AdamW:
    groups = [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": inner.weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]
    # Fused is a third of the time of foreach for many small tensors on a CPU.
    return torch.optim.AdamW(groups, lr=inner.lr, betas=(inner.beta1, inner.beta2), fused=True)
