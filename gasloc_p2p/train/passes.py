"""Forward and backward passes that fit the device's memory, however large a step is."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gasloc_p2p.core.errors import DeviceError
from gasloc_p2p.train.activations import activation_bytes, checkpoint_activations
from gasloc_p2p.train.device import Device, available_bytes, is_out_of_memory
from gasloc_p2p.train.settings import DeviceConfig

_VALIDATION_WINDOWS: Final = 32
_VALIDATION_TOKENS: Final = 8192
"""Most windows and, but for a single window, most tokens that are validated at once."""
USED_SHARE: Final = 0.8
"""Part of the memory that is free beside all vectors, which activations may take."""


class Passes:
    """The passes of one model over batches of windows.

    A batch goes through in parts of `micro_batch` windows whose gradients add up to that of the
    mean over all its tokens, equal to a single pass within rounding. When memory runs out, the
    gradients of the batch are dropped, parts are halved, and the same batch goes through again.

    Attributes:
        micro_batch: windows in one part.
        a_window_bytes: memory that the activations of one window take.

    Args:
        module: on its device already, in training mode.
        device: the same device.
        config: its settings.
        windows: how many a batch has.
        sequence_length: tokens that a window predicts.
        vectors_bytes: what will be allocated on the device beside activations.
        notice: told, in one sentence, when parts become smaller.

    Raises:
        ConfigError: the model cannot do without its activations.
        DeviceError: memory does not hold one window.
    """

    def __init__(
        self,
        module: nn.Module,
        device: Device,
        config: DeviceConfig,
        *,
        windows: int,
        sequence_length: int,
        vectors_bytes: int,
        notice: Callable[[str], None],
    ) -> None:
        self._module = module
        self._device = device
        self._notice = notice
        self._sequence_length = sequence_length
        self._checkpointing = config.activation_checkpointing
        if self._checkpointing:
            checkpoint_activations(module, on=True)
        self._forward: Callable[..., Tensor] = self._logits
        if config.compile:
            compiled = torch.compile(module, dynamic=False)
            self._forward = lambda tokens: compiled(input_ids=tokens).logits
        with torch.enable_grad():
            a_token = activation_bytes(
                module,
                lambda tokens: self._loss(self._logits, tokens),
                tokens=sequence_length,
                checkpointing=self._checkpointing,
            )
        self.a_window_bytes = a_token * sequence_length
        self.micro_batch = min(windows, config.micro_batch or windows)
        if not config.micro_batch:
            self._fit(windows, vectors_bytes)

    def backward(self, tokens: Tensor) -> Tensor:
        """Leave the gradient on a batch in the parameters, and return its loss.

        Args:
            tokens: int64 [windows, sequence_length + 1] on the CPU.

        Returns:
            The mean cross-entropy in nats per token, on the device.

        Raises:
            DeviceError: memory does not hold one window.
        """
        if self._device.place.type == "cuda":
            tokens = tokens.pin_memory().to(self._device.place, non_blocking=True)
        else:
            tokens = tokens.to(self._device.place)
        while (loss := self._attempt(tokens)) is None:
            self._halve(len(tokens))
        return loss

    def evaluate(self, windows: Tensor) -> float:
        """Return the mean loss over windows, int64 [windows, sequence_length + 1]."""
        at_once = max(1, min(_VALIDATION_WINDOWS, _VALIDATION_TOKENS // self._sequence_length))
        self._module.eval()
        total = 0.0
        with torch.inference_mode():
            for tokens in torch.split(windows, at_once):
                here = tokens.to(self._device.place)
                total += self._loss(self._logits, here).item() * len(tokens)
        self._module.train()
        return total / len(windows)

    def _attempt(self, tokens: Tensor) -> Tensor | None:
        """Do what `backward` does; None, and no gradient, when memory runs out."""
        try:
            return self._accumulate(tokens)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
        # Here, with the error gone, nothing refers to its activations any more.
        self._module.zero_grad(set_to_none=True)
        if self._device.place.type == "cuda":
            torch.cuda.empty_cache()
        return None

    def _accumulate(self, tokens: Tensor) -> Tensor:
        if len(tokens) <= self.micro_batch:
            return self._one_pass(tokens, share=1.0)
        parts = torch.split(tokens, self.micro_batch)
        losses = [self._one_pass(part, share=len(part) / len(tokens)) for part in parts]
        return torch.stack(losses).sum()

    def _one_pass(self, tokens: Tensor, *, share: float) -> Tensor:
        loss = self._loss(self._forward, tokens)
        if share < 1:
            loss = loss * share
        torch.autograd.backward(loss)
        return loss.detach()

    def _loss(self, forward: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
        """Mean cross-entropy of predicting tokens[:, 1:] from tokens[:, :-1]."""
        with self._autocast():
            logits = forward(tokens[:, :-1])
        return cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    def _logits(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self._module(input_ids=tokens).logits
        return logits

    def _autocast(self) -> AbstractContextManager[object]:
        dtype = self._device.autocast
        return nullcontext() if dtype is None else torch.autocast(self._device.place.type, dtype)

    def _halve(self, windows: int) -> None:
        before = min(self.micro_batch, windows)
        if before == 1:
            raise DeviceError(
                f"memory does not hold one window of {self._sequence_length} tokens",
                why=f"activations of a single one are more than the {self._device.name} has left",
                fix="set device.activation_checkpointing=true, use a device with more memory, or "
                "found a run with a smaller model or model.sequence_length",
            )
        self.micro_batch = (before + 1) // 2
        self._notice(
            f"memory ran out with {before} windows at once; steps go on in parts of "
            f"{self.micro_batch}"
        )

    def _fit(self, windows: int, vectors_bytes: int) -> None:
        """Make parts as large as memory allows, on a GPU by trying."""
        if self._device.place.type == "cpu":
            free = USED_SHARE * (available_bytes() - vectors_bytes)
            self.micro_batch = max(1, min(windows, int(free // self.a_window_bytes)))
        else:
            self._try_out(windows, vectors_bytes)
        if self.micro_batch < windows:
            self._notice(
                f"memory holds {self.micro_batch} of a step's {windows} windows at once; it goes "
                f"through in {-(-windows // self.micro_batch)} parts"
            )

    def _try_out(self, windows: int, vectors_bytes: int) -> None:
        """Halve parts until a step with all else in memory fits; changes no parameter."""
        notice, self._notice = self._notice, lambda text: None
        tokens = torch.zeros(windows, self._sequence_length + 1, dtype=torch.int64)
        beside = torch.empty(vectors_bytes, dtype=torch.uint8, device=self._device.place)
        self.backward(tokens)
        self._module.zero_grad(set_to_none=True)
        del beside
        self._notice = notice
