"""How much memory a peer needs, and what for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

FP32_BYTES: Final = 4
GIB: Final = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """Bytes that a peer takes beside the program itself.

    Attributes:
        uses: bytes by use; they are not all needed at the same time.
        device: name of the device of the model.
        device_bytes: the most that is needed there at one time; on a CPU, everything.
        host_bytes: the most that is needed in main memory.
        checkpoint_bytes: what comes on top while a checkpoint is still written in the next round.
    """

    uses: Mapping[str, int]
    device: str
    device_bytes: int
    host_bytes: int
    checkpoint_bytes: int

    def sentence(self) -> str:
        """Return the plan in one line."""
        uses = ", ".join(f"{use} {_gib(size)}" for use, size in self.uses.items())
        total = f"at most {_gib(self.host_bytes)} GiB at one time"
        if self.device_bytes != self.host_bytes:
            total = (
                f"at most {_gib(self.device_bytes)} GiB on {self.device} and "
                f"{_gib(self.host_bytes)} GiB of main memory"
            )
        saving = f"{_gib(self.checkpoint_bytes)} more while a slow disk takes a checkpoint"
        return f"memory in GiB: {uses}; {total}; {saving}"


def memory_plan(
    *,
    elements: int,
    kept: int,
    activations: int,
    code_bytes: int,
    vectors: int = 1,
    device: str = "CPU",
) -> MemoryPlan:
    """Return what a peer needs; in main memory is all that peers exchange, whatever the device.

    A round is most hungry in an inner step, or while what came in is mixed. The memory of partners'
    codes and of one mix stays with the process in between.

    Args:
        elements: elements P of the parameters.
        kept: numbers that the inner optimizer remembers.
        activations: bytes of activations of one part of a step.
        code_bytes: of all partners' codes of one round.
        vectors: of P elements that an outer rule sends.
        device: what the model lives on.
    """
    own, moments = FP32_BYTES * elements, FP32_BYTES * kept
    exchange = (2 + vectors) * own + code_bytes
    uses = {
        "parameters": own,
        "gradients": own,
        "optimizer": moments,
        "activations": activations,
        "start of the round": own + moments,
        "outer momentum": own,
        "exchange": exchange,
    }
    start = uses["start of the round"] + uses["outer momentum"]
    if device == "CPU":
        training = own + activations + vectors * own + code_bytes
        most = own + moments + start + max(training, exchange)
        return MemoryPlan(
            uses=uses,
            device=device,
            device_bytes=most,
            host_bytes=most,
            checkpoint_bytes=start,
        )
    return MemoryPlan(
        uses=uses,
        device=device,
        device_bytes=2 * own + moments + activations,
        host_bytes=start + exchange,
        checkpoint_bytes=start,
    )


def beside_activations(*, elements: int, kept: int, on_cpu: bool) -> int:
    """Return the bytes on the device, beside the parameters, that activations must leave free.

    On a CPU with the vectors of the round, as if codes were as long as the parameters.
    """
    plan = memory_plan(
        elements=elements,
        kept=kept,
        activations=0,
        code_bytes=FP32_BYTES * elements if on_cpu else 0,
        device="CPU" if on_cpu else "",
    )
    return plan.device_bytes - plan.uses["parameters"]


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"
