"""Several processes that train one peer's model together, each with a device of its own.

The first one, rank 0, is the node: it alone has an identity, samples and a network. It tells the
others what to do next, and all do it alike: a batch is cut into as many parts as there are ranks,
their gradients are added up, and every rank takes the same step. So all hold the same parameters
and moments, and what the node sends to its partners does not depend on how many there are.
Gradients travel once a step, after the last part of it, so that a rank may run out of memory and
take its part again without the others noticing.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from enum import IntEnum
from pathlib import Path
from typing import Any, Final, SupportsFloat

import torch
import torch.distributed as dist
from torch import Tensor

from gasloc_p2p.core.errors import DeviceError
from gasloc_p2p.core.substrate import ModelState
from gasloc_p2p.train.learner import Learner

MEETING_DEADLINE_S: Final = 60.0
COMMAND_DEADLINE_S: Final = 30 * 86_400.0
"""Between two steps may lie an exchange, or a wait for partners, of any length."""
STORE_FILE: Final = "ranks"
LOOPBACK: Final = {"linux": "lo", "darwin": "lo0"}


class Command(IntEnum):
    """What rank 0 has all ranks do."""

    STEP = 0
    LOAD = 1
    RESTORE = 2
    RESTART = 3
    END = 4


class Group:
    """The ranks of one node, connected through loopback.

    Attributes:
        rank: this process's number; 0 is the node.
        size: how many there are.
    """

    def __init__(self, *, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    @classmethod
    def meet(cls, *, rank: int, size: int, folder: Path, interface: str) -> Group:
        """Connect with the other ranks, which do the same at about this time.

        Args:
            rank: of this process.
            size: how many there are.
            folder: private to this node; where they find each other.
            interface: name of the loopback device.

        Raises:
            DeviceError: they did not all come.
        """
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = interface
        try:
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
                init_method=(folder / STORE_FILE).absolute().as_uri(),
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=COMMAND_DEADLINE_S),
            )
        except (RuntimeError, ValueError) as error:
            raise _apart() from error
        return cls(rank=rank, size=size)

    def tell(self, command: Command, value: float = 0.0) -> None:
        """Have all other ranks do something; rank 0 only.

        Raises:
            DeviceError: one of them is gone.
        """
        self.broadcast(torch.tensor([command, value], dtype=torch.float64))

    def listen(self) -> tuple[Command, float]:
        """Wait for what rank 0 tells.

        Raises:
            DeviceError: it is gone.
        """
        told = torch.empty(2, dtype=torch.float64)
        self.broadcast(told)
        command, value = told.tolist()
        return Command(int(command)), value

    def broadcast(self, *tensors: Tensor) -> None:
        """Overwrite tensors on the CPU with those of rank 0.

        Raises:
            DeviceError: a rank is gone.
        """
        try:
            for tensor in tensors:
                dist.broadcast(tensor, src=0)
        except RuntimeError as error:
            raise _apart() from error

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by their sums over all ranks, the same on each, bit for bit.

        Raises:
            DeviceError: a rank is gone.
        """
        try:
            under_way: list[Any] = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
            for one in under_way:
                one.wait()
        except RuntimeError as error:
            raise _apart() from error

    def part(self, windows: Tensor) -> Tensor:
        """Return the windows of a batch that this rank takes."""
        return windows.tensor_split(self.size)[self.rank]

    @staticmethod
    def part_ways() -> None:
        """Close the connections."""
        dist.destroy_process_group()


class RankedLearner(Learner):
    """A learner whose batches are shared with other ranks; see `Learner` for its arguments.

    Attributes:
        group: the ranks, once they have met.
    """

    group: Group

    def _batch(self) -> Tensor:
        """Return the whole batch, int64 [windows, sequence_length + 1], the same on every rank."""
        raise NotImplementedError

    def _backward(self) -> Tensor:
        batch = self._batch()
        own = self.group.part(batch)
        share = len(own) / len(batch)
        loss = self.passes.backward(own) * share
        gradients = [p.grad for p in self._trainable if p.grad is not None]
        for gradient in gradients:
            gradient.mul_(share)
        self.group.add_up([*gradients, loss])
        return loss


class LeadingLearner(RankedLearner):
    """The learner of rank 0, which is the node's."""

    def _batch(self) -> Tensor:
        batch = self.samples.batch(self.windows)
        self.group.broadcast(batch)
        return batch

    def step(self, lr: float) -> SupportsFloat:
        """Do one inner step on all ranks; see `Learner.step`."""
        self.group.tell(Command.STEP, lr)
        return super().step(lr)

    def load(self, flat: Tensor) -> None:
        """Set the parameters on all ranks from `flat`, fp32 [elements]; the moments stay."""
        self.group.tell(Command.LOAD)
        self.group.broadcast(flat)
        super().load(flat)

    def restore(self, state: ModelState) -> None:
        """Have all ranks take over a state; see `Learner.restore`."""
        super().restore(state)
        self.group.tell(Command.RESTORE, state.warmup_steps_left)
        self.group.broadcast(*(state.tensors[name] for name in sorted(state.tensors)))

    def restart_optimizer(self, *, warmup_steps: int) -> None:
        """Have all ranks forget their moments; see `Learner.restart_optimizer`."""
        self.group.tell(Command.RESTART, warmup_steps)
        super().restart_optimizer(warmup_steps=warmup_steps)

    def lead(self, group: Group) -> None:
        """Bring all ranks to this learner's parameters."""
        self.group = group
        self.load(self.theta())

    def end(self) -> None:
        """Let the other ranks end."""
        self.group.tell(Command.END)
        self.group.part_ways()


class FollowingLearner(RankedLearner):
    """The learner of another rank: no samples, no identity, all else as told."""

    def _batch(self) -> Tensor:
        batch = torch.empty(self.windows, self._sequence_length + 1, dtype=torch.int64)
        self.group.broadcast(batch)
        return batch

    def follow(self, group: Group) -> None:
        """Do what rank 0 tells until it ends.

        Raises:
            DeviceError: rank 0 is gone, or memory does not hold one window.
        """
        self.group = group
        while True:
            command, value = group.listen()
            match command:
                case Command.STEP:
                    self.step(value)
                case Command.LOAD:
                    flat = torch.empty(self.elements)
                    group.broadcast(flat)
                    self.load(flat)
                case Command.RESTORE:
                    self._take_over(warmup_steps_left=int(value))
                case Command.RESTART:
                    self.restart_optimizer(warmup_steps=int(value))
                case Command.END:
                    group.part_ways()
                    return

    def _take_over(self, *, warmup_steps_left: int) -> None:
        shapes = self._state_shapes()
        tensors = {name: torch.empty(shapes[name]) for name in sorted(shapes)}
        self.group.broadcast(*tensors.values())
        self.restore(
            ModelState(tensors=tensors, next_sample=0, warmup_steps_left=warmup_steps_left)
        )


def _apart() -> DeviceError:
    return DeviceError(
        "the processes of this node lost each other",
        why="one of them ended, killed or out of memory, and its connection broke with it",
        fix="start the node again with the same settings: it goes on from its last checkpoint; "
        "if it happens again, see what stands above, or set device.processes=1",
    )
