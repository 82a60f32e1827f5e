"""The process of a further rank: `python -m gasloc_p2p.commands.follow`, which its node starts."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Final

import torch
from pydantic import BaseModel, ConfigDict

from gasloc_p2p.core.errors import GaslocError
from gasloc_p2p.extensions import load_extensions
from gasloc_p2p.train.model import model_of
from gasloc_p2p.train.ranks import FollowingLearner, Group
from gasloc_p2p.train.settings import DeviceConfig, InnerConfig, ModelConfig

READY: Final = b"ready\n"
"""Written to standard output once the model is there."""


class RankSpec(BaseModel):
    """What a further rank is told; the node writes it to its standard input, as one line of JSON.

    Attributes:
        rank, ranks: which one it is of how many.
        folder: private to the node; where the ranks find each other.
        interface: name of the loopback device.
        model, inner, device: settings of the run and of this machine.
        vocabulary: tokens of the run's tokenizer.
        seed: the run's.
        threads: threads of torch in this process.
        extensions: files or modules that register inner optimizers.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    rank: int
    ranks: int
    folder: Path
    interface: str
    model: ModelConfig
    inner: InnerConfig
    device: DeviceConfig
    vocabulary: int
    seed: int
    threads: int
    extensions: tuple[str, ...] = ()


def main() -> int:
    """Follow the node's rank 0 until it ends; return the exit code."""
    spec = RankSpec.model_validate_json(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_node, daemon=True).start()
    torch.set_num_threads(spec.threads)
    try:
        load_extensions(spec.extensions)
        learner = _learner(spec)
        sys.stdout.buffer.write(READY)
        sys.stdout.buffer.flush()
        learner.follow(
            Group.meet(
                rank=spec.rank, size=spec.ranks, folder=spec.folder, interface=spec.interface
            )
        )
    except GaslocError as error:
        print(f"gasloc: rank {spec.rank} of this node: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _learner(spec: RankSpec) -> FollowingLearner:
    """Return a learner without samples; parameters come from rank 0."""
    built = model_of(
        spec.model, seed=spec.seed, vocabulary=spec.vocabulary, folder=spec.device.model_folder
    )
    nothing = torch.empty(0, built.sequence_length + 1, dtype=torch.int64)
    return FollowingLearner(
        built.module,
        NoSamples(),
        nothing,
        spec.inner,
        device=spec.device,
        rank=spec.rank,
        ranks=spec.ranks,
        notice=lambda text: print(f"rank {spec.rank} of this node: {text}", file=sys.stderr),
    )


class NoSamples:
    """Stands in for samples where rank 0 has them."""

    next_sample = 0

    def batch(self, windows: int) -> torch.Tensor:
        """Refuse.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("only rank 0 has samples")


def _end_with_node() -> None:
    """End once standard input closes, however the node went away."""
    sys.stdin.buffer.read()
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
