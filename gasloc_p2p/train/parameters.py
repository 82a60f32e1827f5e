"""A model's trainable parameters as one flat vector: what peers mix and send."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from blake3 import blake3
from torch import Tensor, nn

from gasloc_p2p.core.errors import ConfigError

# fp32 holds every value of these exactly, so reading and writing back changes nothing.
_EXACT_IN_FP32 = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class Schema:
    """What the flat vector holds, in order; peers exchange only when their schemas agree.

    Attributes:
        names: parameter names in `named_parameters` order, tied ones once.
        shapes: one shape per name.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each parameter."""
        return tuple(math.prod(shape) for shape in self.shapes)

    @cached_property
    def elements(self) -> int:
        """Elements of the flat vector."""
        return sum(self.sizes)

    @cached_property
    def digest(self) -> bytes:
        """32-byte blake3 over every name and shape, length-prefixed, in order."""
        hasher = blake3(_u64(len(self.names)))
        for name, shape in zip(self.names, self.shapes, strict=True):
            encoded = name.encode()
            hasher.update(_u64(len(encoded), len(shape), *shape))
            hasher.update(encoded)
        return hasher.digest()


class ParameterView:
    """Reads and writes a model's trainable parameters as one flat fp32 vector on the CPU.

    The order is that of `named_parameters`, each parameter row-major whatever its strides. Frozen
    parameters are left out; parameters that share memory are listed once, under their first name.

    Raises:
        ConfigError: the model has persistent buffers, nothing to train, or a trainable parameter
            of another dtype than fp32, bf16 and fp16.
    """

    def __init__(self, model: nn.Module) -> None:
        _refuse_persistent_buffers(model)
        named = dict(_trainable(model))
        if not named:
            raise ConfigError(
                "The model has no trainable parameters.",
                why="Every parameter is frozen, so peers would have nothing to mix.",
                fix="Leave requires_grad on for the parameters that peers train together.",
            )
        self._parameters = tuple(named.values())
        self._staging: Tensor | None = None
        if self._parameters[0].device.type == "cuda":
            # A GPU copies to and from pinned memory only at the full speed of its bus.
            largest = max(parameter.numel() for parameter in self._parameters)
            self._staging = torch.empty(largest, dtype=torch.float32, pin_memory=True)
        self.schema = Schema(
            names=tuple(named), shapes=tuple(tuple(value.shape) for value in named.values())
        )

    @torch.no_grad()
    def read(self) -> Tensor:
        """Return a copy of the parameters, fp32 [elements] on the CPU."""
        flat = torch.empty(self.schema.elements, dtype=torch.float32)
        for part, parameter in zip(self._split(flat), self._parameters, strict=True):
            part.copy_(self._staged(parameter, parameter))
        return flat

    @torch.no_grad()
    def write(self, flat: Tensor) -> None:
        """Set the parameters from `flat`, fp32 [elements], rounded to each parameter's dtype.

        Raises:
            ValueError: `flat` has another shape or dtype.
        """
        for part, parameter in zip(self._split(flat), self._parameters, strict=True):
            parameter.copy_(self._staged(parameter, part))

    def read_gradient(self) -> Tensor:
        """Return a copy of the gradient, fp32 [elements] on the CPU; 0 where there is none."""
        flat = torch.zeros(self.schema.elements, dtype=torch.float32)
        for part, parameter in zip(self._split(flat), self._parameters, strict=True):
            if parameter.grad is not None:
                part.copy_(parameter.grad)
        return flat

    def write_gradient(self, flat: Tensor) -> None:
        """Set the gradient from `flat`, fp32 [elements], rounded to each parameter's dtype.

        Raises:
            ValueError: `flat` has another shape or dtype.
        """
        for part, parameter in zip(self._split(flat), self._parameters, strict=True):
            parameter.grad = part.to(parameter, copy=True)

    def _staged(self, parameter: Tensor, values: Tensor) -> Tensor:
        """Return what to copy `values` of a parameter from: pinned memory, where there is some."""
        if self._staging is None:
            return values
        return self._staging[: parameter.numel()].view(parameter.shape).copy_(values)

    def _split(self, flat: Tensor) -> Iterator[Tensor]:
        """Yield the part of `flat` that each parameter has, as a view of its shape.

        Raises:
            ValueError: `flat` has another shape or dtype.
        """
        elements = self.schema.elements
        if flat.shape != (elements,) or flat.dtype != torch.float32:
            raise ValueError(
                f"expected torch.float32 [{elements}], not {flat.dtype} {list(flat.shape)}"
            )
        for part, shape in zip(
            flat.split_with_sizes(self.schema.sizes), self.schema.shapes, strict=True
        ):
            yield part.view(shape)


def theta_digest(flat: Tensor) -> str:
    """Return blake3, in hex, over the little-endian bytes of `flat`, fp32 on the CPU.

    Raises:
        ValueError: `flat` is not fp32.
    """
    if flat.dtype != torch.float32:
        raise ValueError(f"expected torch.float32, not {flat.dtype}")
    values = flat.detach().contiguous().numpy().astype("<f4", copy=False)
    return blake3(values.data.cast("B")).hexdigest()


def _trainable(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield named trainable parameters, those that share memory once."""
    seen = set[tuple[int, int]]()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter.dtype not in _EXACT_IN_FP32:
            raise ConfigError(
                f"Parameter {name} has dtype {parameter.dtype}.",
                why="Peers mix fp32 values, which cannot hold every value of that dtype.",
                fix="Use float32, bfloat16 or float16, or freeze the parameter.",
            )
        # Empty tensors all report address 0 without sharing anything.
        memory = (parameter.data_ptr(), parameter.numel())
        if parameter.numel() and memory in seen:
            continue
        seen.add(memory)
        yield name, parameter


def _refuse_persistent_buffers(model: nn.Module) -> None:
    buffers = [name for name, _ in model.named_buffers(remove_duplicate=False)]
    persistent = sorted(set(buffers) & model.state_dict().keys())
    if persistent:
        raise ConfigError(
            f"The model has persistent buffers: {', '.join(persistent)}.",
            why="Peers mix parameters only, so these would silently drift apart.",
            fix="Use layers without running statistics, or register them with persistent=False.",
        )


def _u64(*values: int) -> bytes:
    return b"".join(value.to_bytes(8, "little") for value in values)
