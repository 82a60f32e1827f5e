"""The device that a peer trains on."""

from __future__ import annotations

import ctypes
import resource
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil
import torch

from gasloc_p2p.core.errors import DeviceError
from gasloc_p2p.train.settings import DeviceConfig

_CGROUPS: Final = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)
"""Limit and use of a container's memory, in the second and the first version."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """A device and how it calculates.

    Attributes:
        place: where tensors live.
        autocast: type of matrix products; None for that of the parameters.
    """

    place: torch.device
    autocast: torch.dtype | None

    @property
    def name(self) -> str:
        """The device in words."""
        if self.place.type == "cuda":
            return torch.cuda.get_device_name(self.place)
        return self.place.type.upper()

    @property
    def precision(self) -> str:
        """The type of matrix products in words."""
        return "fp32" if self.autocast is None else "bf16"


def require_device(config: DeviceConfig, *, processes: int = 1) -> str:
    """Return the kind of device that the settings name: "cpu", "cuda" or "mps".

    Args:
        config: the settings.
        processes: how many processes want one each, where they are GPUs.

    Raises:
        DeviceError: it is not there, or not often enough.
    """
    kind = config.kind
    there = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    if kind == "auto":
        kind = "cuda" if there["cuda"] else "mps" if there["mps"] else "cpu"
    if not there[kind]:
        raise DeviceError(
            f"device.kind = {kind!r}, but torch finds no such device",
            why="there is none, its driver does not work, or this torch was built without it",
            fix="set device.kind=cpu, or install the torch that pytorch.org names for this machine",
        )
    if kind == "cuda" and processes > torch.cuda.device_count():
        raise DeviceError(
            f"device.processes asks for {processes} GPUs, and there are "
            f"{torch.cuda.device_count()}",
            why="every process of a node trains on a GPU of its own",
            fix="set device.processes to the number of GPUs",
        )
    return kind


def device_of(config: DeviceConfig, *, rank: int = 0) -> Device:
    """Return the device that the settings name, and of several GPUs the one of this rank.

    Raises:
        DeviceError: it is not there.
    """
    kind = require_device(config, processes=rank + 1)
    lowered = config.precision == "bf16" or (config.precision == "auto" and kind == "cuda")
    if kind == "cuda":
        torch.cuda.set_device(rank)
    place = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    return Device(place=place, autocast=torch.bfloat16 if lowered else None)


def available_bytes() -> int:
    """Return the main memory that this process may still take, its container's limit included."""
    limits = [int(psutil.virtual_memory().available)]
    for limit, use in _CGROUPS:
        try:
            limits.append(int(limit.read_text()) - int(use.read_text()))
        except (OSError, ValueError):  # no such file, or the word "max"
            continue
    address_space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if address_space != resource.RLIM_INFINITY:
        limits.append(address_space - int(psutil.Process().memory_info().vms))
    return max(0, min(limits))


def give_back_memory() -> None:
    """Give the system the memory that freed tensors left in the heap, where the C library can.

    What training leaves, gradients and activations, would stay with the process otherwise.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on whatever device."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(
        words in str(error)
        for words in ("can't allocate memory", "not enough memory", "out of memory")
    )
