"""How much memory a model's activations take, found with a pass over a few tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn

from gasloc_p2p.core.errors import ConfigError

_TOKENS: Final = 64
_LOGIT_VECTORS: Final = 2
"""Gradients of the logits and of their softmax, which come on top of what is kept."""


def activation_bytes(
    module: nn.Module,
    loss_of: Callable[[Tensor], Tensor],
    *,
    tokens: int,
    checkpointing: bool,
) -> float:
    """Return the bytes per token that a training pass takes beside vectors like the parameters.

    What autograd keeps grows with the tokens, for attention keeps no square matrices. So a short
    window tells for all. With activation checkpointing, one block's activations come on top of
    the blocks' inputs.

    Args:
        module: in training mode.
        loss_of: the loss of int64 [windows, tokens + 1].
        tokens: of a whole window.
        checkpointing: whether the module drops activations and computes them again.
    """
    few = min(tokens, _TOKENS)
    batch = torch.zeros(1, few + 1, dtype=torch.int64, device=next(module.parameters()).device)
    kept = _kept_bytes(module, loss_of, batch)
    if checkpointing:
        checkpoint_activations(module, on=False)
        blocks = max(1, int(_config_of(module).num_hidden_layers))
        kept += _kept_bytes(module, loss_of, batch) // blocks
        checkpoint_activations(module, on=True)
    return kept / few


def _kept_bytes(module: nn.Module, loss_of: Callable[[Tensor], Tensor], batch: Tensor) -> int:
    """Return what autograd keeps for the backward pass, and the gradients of the logits."""
    own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    found: dict[int, int] = {}
    largest = 0

    def keep(tensor: Tensor) -> Tensor:
        nonlocal largest
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
            largest = max(largest, storage.nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss_of(batch)
    return sum(found.values()) + _LOGIT_VECTORS * largest


def checkpoint_activations(module: nn.Module, *, on: bool) -> None:
    """Have a model of transformers drop its activations and compute them again, or not.

    Raises:
        ConfigError: it cannot.
    """
    # Since its version 5 the library calls them by another name.
    kind = "activation" if hasattr(module, "activation_checkpointing_enable") else "gradient"
    switch: Any = getattr(module, f"{kind}_checkpointing_{'enable' if on else 'disable'}", None)
    try:
        if switch is None:
            raise ValueError("it is no model of transformers")
        switch(**({f"{kind}_checkpointing_kwargs": {"use_reentrant": False}} if on else {}))
    except ValueError as error:
        raise ConfigError(
            "device.activation_checkpointing does not work with this model",
            why=str(error),
            fix="leave it false; device.micro_batch=1 needs the least memory then",
        ) from error


def _config_of(module: nn.Module) -> Any:
    config: Any = module.config
    return config.get_text_config()
