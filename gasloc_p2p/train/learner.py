"""The inner loop of one peer: its model, its data, its optimizer."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, SupportsFloat

import torch
from torch import Tensor, nn

from gasloc_p2p.core.substrate import ModelState
from gasloc_p2p.core.types import PeerId
from gasloc_p2p.train.data import Corpus, load_corpus
from gasloc_p2p.train.device import device_of, give_back_memory
from gasloc_p2p.train.inner_state import (
    STEP,
    refuse_state_of_another_model,
    warmed_up,
)
from gasloc_p2p.train.memory import MemoryPlan, beside_activations, memory_plan
from gasloc_p2p.train.model import model_of, windows_per_step
from gasloc_p2p.train.optimizers import INNER_OPTIMIZERS, kept_elements, parameter_groups
from gasloc_p2p.train.parameters import ParameterView
from gasloc_p2p.train.passes import Passes
from gasloc_p2p.train.samples import Samples, Text, TextInMemory
from gasloc_p2p.train.settings import DataConfig, DeviceConfig, InnerConfig, ModelConfig
from gasloc_p2p.train.speed import flops_per_token, measured_peak

RUN_AHEAD: Final = 2
"""Steps that a GPU may have before it; with more, rounds by the clock would end too late."""
_LARGE: Final = 4 << 20
"""Elements of a model for which it pays to give memory back at the end of a round."""
_HEADS: Final = re.compile("(ForCausalLM|LMHeadModel)$")
ON_THE_CPU: Final = DeviceConfig(kind="cpu")


def _say_nothing(text: str) -> None:
    pass


class Learner:
    """Trains a model on a peer's own samples.

    The optimizer's moments never leave the peer and survive `load`, as in docs/design.md section 2.
    Nothing here draws random numbers: on a CPU the same arguments give the same parameters, bit for
    bit on one thread. Not safe for calls from two threads at once.

    Attributes:
        parameters_view: the model's parameters as a flat vector.
        samples: the peer's own.
        device: what it trains on.
        passes: how batches go through the model.
        windows: how many one inner step takes.
        kept_elements: numbers that the optimizer remembers.
        architecture: name of the model's class, without what all of them are.

    Args:
        model: fp32 on the CPU; it is moved to the device.
        samples: what it trains on.
        validation: the held-out windows, int64 [windows, sequence_length + 1].
        inner: settings of the inner optimizer.
        device: settings of the device.
        rank, ranks: which of how many processes of a node this is; see `train/ranks.py`.
        notice: told, in one sentence, what a person should know of the device's memory.

    Raises:
        ConfigError: the model cannot be mixed, see `ParameterView`, or a setting does not fit.
        DeviceError: the device is missing or has too little memory.
    """

    def __init__(
        self,
        model: nn.Module,
        samples: Samples,
        validation: Tensor,
        inner: InnerConfig,
        *,
        device: DeviceConfig = ON_THE_CPU,
        rank: int = 0,
        ranks: int = 1,
        notice: Callable[[str], None] = _say_nothing,
    ) -> None:
        self._kind = INNER_OPTIMIZERS.named(inner.optimizer)
        self.architecture = _HEADS.sub("", type(model).__name__)
        self.device = device_of(device, rank=rank)
        model = model.to(self.device.place).train()
        self.parameters_view = ParameterView(model)
        self.samples = samples
        self._inner = inner
        self._validation = validation
        self._sequence_length = validation.shape[1] - 1
        self._trainable = [value for value in model.parameters() if value.requires_grad]
        self._optimizer: Any = self._kind.make(parameter_groups(self._trainable, inner), inner)
        self._warmup_steps_left = 0
        self._foreach = self.device.place.type != "mps"
        self._under_way: deque[torch.cuda.Event] = deque()
        self.windows = windows_per_step(inner, self._sequence_length)
        self._flops_per_token = flops_per_token(model, sequence_length=self._sequence_length)
        self._peak_flops = 0.0
        self.kept_elements = kept_elements(self._trainable, inner)
        self.passes = Passes(
            model,
            self.device,
            device,
            windows=-(-self.windows // ranks),
            sequence_length=self._sequence_length,
            vectors_bytes=beside_activations(
                elements=self.elements,
                kept=self.kept_elements,
                on_cpu=self.device.place.type == "cpu",
            ),
            notice=notice,
        )

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one inner step."""
        return self.windows * self._sequence_length

    def measure_peak(self) -> str:
        """Measure what the device can do, so that `utilisation` is known; return that in words."""
        self._peak_flops = measured_peak(self.device)
        return (
            f"the {self.device.name} does {self._peak_flops / 1e12:.3g} TFLOP/s in "
            f"{self.device.precision} (measured); MFU is the part of it that training uses"
        )

    def utilisation(self, tokens_per_s: float) -> float | None:
        """Return the model FLOP utilisation at so many tokens a second; None: peak not measured."""
        if not self._peak_flops:
            return None
        reached = self._flops_per_token * tokens_per_s
        # A machine that was busy when the peak was measured can do more than that.
        self._peak_flops = max(self._peak_flops, reached)
        return reached / self._peak_flops

    def memory_plan(self, *, code_bytes: int, vectors: int = 1) -> MemoryPlan:
        """Return what a node with this learner needs; see `train.memory.memory_plan`."""
        return memory_plan(
            elements=self.elements,
            kept=self.kept_elements,
            activations=round(self.passes.a_window_bytes * self.passes.micro_batch),
            code_bytes=code_bytes,
            vectors=vectors,
            device=self.device.name,
        )

    def step(self, lr: float) -> SupportsFloat:
        """Do one inner step at learning rate `lr` and return its loss in nats per token.

        With a gradient that is not finite neither parameters nor moments change, so that this peer
        can go on from good parameters; such a loss is usually not finite either. On a GPU the step
        may still be under way when this returns, and the loss is there once it is asked for.

        Raises:
            DeviceError: memory does not hold one window.
        """
        loss = self._backward()
        self._move(lr)
        if self.device.place.type != "cuda":
            return loss.item()
        self._note_step()
        return loss

    def _note_step(self) -> None:
        """Mark the end of a step on the GPU, and wait for an earlier one's."""
        end = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        end.record()
        self._under_way.append(end)
        if len(self._under_way) > RUN_AHEAD:
            self._under_way.popleft().synchronize()

    def gradient(self) -> tuple[Tensor, float]:
        """Return the gradient on the next batch, fp32 [elements], unclipped, and the loss."""
        loss = self._backward().item()
        gradient = self.parameters_view.read_gradient()
        self._optimizer.zero_grad()
        return gradient, loss

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
            return self.passes.evaluate(self._validation)
        current = self.theta()
        self.parameters_view.write(flat)
        try:
            return self.passes.evaluate(self._validation)
        finally:
            self.parameters_view.write(current)

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
        if self.elements >= _LARGE:
            give_back_memory()
        return self.parameters_view.read()

    def load(self, flat: Tensor) -> None:
        """Set the parameters from `flat`, fp32 [elements]; the moments stay as they are."""
        self.parameters_view.write(flat)

    @torch.no_grad()
    def state(self) -> ModelState:
        """Return a copy of the optimizer's moments and step counts, and the data cursor.

        A tensor without a step yet has zeros, which is what optimizers start with.
        """
        tensors = {
            name: torch.zeros(shape, dtype=torch.float32)
            for name, shape in self._state_shapes().items()
        }
        for index, (parameter, parts) in enumerate(self._moments(tensors)):
            found = self._optimizer.state.get(parameter)
            if found:
                if self._kind.counts:
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
            found = {name: part.to(parameter.device, copy=True) for name, part in parts.items()}
            if self._kind.counts:
                # Only fused optimizers count on the device.
                place = parameter.device if self._kind.skips else torch.device("cpu")
                found[STEP] = state.tensors[STEP][index].to(place, copy=True)
            self._optimizer.state[parameter] = found
        self.samples.next_sample = state.next_sample
        self._warmup_steps_left = state.warmup_steps_left

    def restart_optimizer(self, *, warmup_steps: int) -> None:
        """Forget the optimizer's moments and step counts; the data cursor stays.

        Of the `warmup_steps` steps that follow, step k is done at (k + 1) / (warmup_steps + 1) of
        its learning rate; one whose gradient is not finite does not count. An optimizer that counts
        no steps comes to the full rate more slowly at first.
        """
        self._optimizer.state.clear()
        self._warmup_steps_left = warmup_steps

    def _kept(self, parameter: Tensor) -> Mapping[str, tuple[int, ...]]:
        return self._kind.kept(parameter, self._inner)

    def _state_shapes(self) -> dict[str, tuple[int, ...]]:
        elements: dict[str, int] = {}
        for parameter in self._trainable:
            for name, shape in self._kept(parameter).items():
                elements[name] = elements.get(name, 0) + torch.Size(shape).numel()
        counts = {STEP: (len(self._trainable),)} if self._kind.counts else {}
        return {**{name: (size,) for name, size in elements.items()}, **counts}

    def _moments(
        self, tensors: Mapping[str, Tensor]
    ) -> Iterator[tuple[nn.Parameter, dict[str, Tensor]]]:
        """Yield each parameter with its parts of the flat moments, as views of their shapes."""
        begins = dict.fromkeys(tensors, 0)
        for parameter in self._trainable:
            parts = {}
            for name, shape in self._kept(parameter).items():
                size = torch.Size(shape).numel()
                parts[name] = tensors[name].narrow(0, begins[name], size).view(shape)
                begins[name] += size
            yield parameter, parts

    def _backward(self) -> Tensor:
        """Leave the gradient on the next batch in the parameters and return the loss."""
        return self.passes.backward(self.samples.batch(self.windows))

    def _move(self, lr: float) -> None:
        """Take the optimizer's step, unless the gradient is not finite, and drop the gradient."""
        norm = nn.utils.clip_grad_norm_(
            self._trainable, self._inner.clip_norm, foreach=self._foreach
        )
        finite = torch.isfinite(norm)
        # Who counts steps of a warm-up has to know at once; so does an optimizer that cannot skip.
        if self._kind.skips and not self._warmup_steps_left:
            self._optimizer.found_inf = (~finite).to(torch.float32)
            self._take_step(lr)
        elif finite:
            self._optimizer.found_inf = None
            self._take_step(self._warmed_up(lr))
        # Nobody needs it during the exchange that may follow.
        self._optimizer.zero_grad()

    def _take_step(self, lr: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()

    def _warmed_up(self, lr: float) -> float:
        """Return the learning rate of the step that is about to be taken, and count it."""
        left = self._warmup_steps_left
        if left == 0:
            return lr
        self._warmup_steps_left -= 1
        counts = (int(found[STEP]) for found in self._optimizer.state.values() if STEP in found)
        return warmed_up(lr, steps_taken=max(counts, default=0), steps_left=left)


def build_learner(
    model: ModelConfig,
    data: DataConfig,
    inner: InnerConfig,
    *,
    seed: int,
    peer_id: PeerId,
    corpus: Corpus | None = None,
    text: Text | None = None,
    device: DeviceConfig = ON_THE_CPU,
    notice: Callable[[str], None] = _say_nothing,
    kind: type[Learner] = Learner,
    ranks: int = 1,
) -> Learner:
    """Return the learner of one peer, with the initial parameters of the run.

    Args:
        seed: the run's seed.
        corpus: text already read, shared by the peers of one process; read from `data` when None.
        text: takes the place of `corpus`.
        device: settings of the device.
        notice: told, in one sentence, what a person should know of the device's memory.
        kind: its class.
        ranks: processes that train with it.

    Raises:
        ConfigError: the model cannot be had or mixed, or a setting does not fit.
        DataError: the text is missing, unreadable or too small.
        DeviceError: the device is missing or has too little memory.
    """
    if text is None:
        text = TextInMemory(
            corpus=load_corpus(data) if corpus is None else corpus,
            seed=seed,
            peer_id=peer_id,
            validation_tokens=data.validation_tokens,
        )
    built = model_of(model, seed=seed, vocabulary=text.vocabulary, folder=device.model_folder)
    supply = text.supply(built.sequence_length)
    return kind(
        built.module,
        supply.samples,
        supply.validation,
        inner,
        device=device,
        ranks=ranks,
        notice=notice,
    )
