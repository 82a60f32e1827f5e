"""The machine that this runs on, without anything that names it or its owner."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import msgspec


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """What bears on how long things take.

    Attributes:
        cpu: model.
        cores: how many CPUs this process may use.
        memory_gib: main memory.
        accelerators: model of every GPU.
        system: operating system and architecture.
        python: version.
        torch: version.
    """

    cpu: str
    cores: int
    memory_gib: float
    accelerators: tuple[str, ...]
    system: str
    python: str
    torch: str

    def sentence(self) -> str:
        """Return the machine in words."""
        parts = [f"{self.cpu}, {self.cores} cores", f"{self.memory_gib:.0f} GiB memory"]
        parts += self.accelerators
        return f"{', '.join(parts)}; {self.system}, Python {self.python}, torch {self.torch}"


def this_machine() -> Machine:
    """Describe the machine that this process runs on."""
    import torch

    return Machine(
        cpu=_cpu(),
        cores=usable_cores(),
        memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        accelerators=tuple(
            torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())
        ),
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        torch=str(torch.__version__),
    )


def usable_cores() -> int:
    """Return how many CPUs this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def visible_gpus() -> list[str]:
    """Return the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    import torch

    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return named.split(",")[:count] if named else [str(index) for index in range(count)]


def _cpu() -> str:
    """Return the CPU's model as the system names it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
