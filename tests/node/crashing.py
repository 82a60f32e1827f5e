"""What the children of `test_checkpoint.py` do before they are killed, and how they are started."""

from __future__ import annotations

import multiprocessing
import os
import resource
import sys
from collections.abc import Iterable
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from gasloc_p2p.core.errors import CheckpointError
from gasloc_p2p.core.substrate import ModelState
from gasloc_p2p.node.checkpoint import Checkpoint, CheckpointStore, Progress

ELEMENTS = 300
TRACED = ("checkpoint.py", "sealed.py", "tempfile.py", "shutil.py")

# Children start from a process that has torch already, so that dozens of them take no time.
CHILDREN = multiprocessing.get_context("forkserver")
CHILDREN.set_forkserver_preload([__name__])


def small_checkpoint(round: int, *, value: float = 0.0, elements: int = ELEMENTS) -> Checkpoint:
    """A checkpoint whose theta is `value` everywhere."""
    return Checkpoint(
        progress=Progress(
            run_id="run",
            run_digest=b"\x00digest\xff",
            schema_digest=b"schema",
            peer_id="peer",
            round=round,
            next_sample=8 * round,
            warmup_steps_left=0,
            written_unix_s=1.5e9,
        ),
        theta=torch.full((elements,), value),
        memory=torch.arange(elements, dtype=torch.float32),
        model=ModelState(
            tensors={"exp_avg": torch.linspace(-1, 1, elements), "step": torch.tensor([3.0])},
            next_sample=8 * round,
            warmup_steps_left=0,
        ),
    )


def write_line_by_line(
    parent: Connection, folder: Path, rounds: Iterable[int], *, keep: int
) -> None:
    """Write one checkpoint after the other, and wait for leave before every line of code.

    Sends None before each line and waits for an answer; sends the number of checkpoints that are
    written after each of them, the first of which has theta 1.
    """
    store = CheckpointStore(folder, keep=keep)

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        if Path(frame.f_code.co_filename).name not in TRACED:
            return None
        if event == "line":
            parent.send(None)
            parent.recv()
        return trace

    for number, round in enumerate(rounds, start=1):
        checkpoint = small_checkpoint(round, value=float(number))
        sys.settrace(trace)
        store.write(checkpoint)
        sys.settrace(None)
        parent.send(number)
    parent.close()


def write_with_a_file_size_limit(parent: Connection, folder: Path, limit_bytes: int) -> None:
    """Send how writing the checkpoint of round 2 ends where files may only have so many bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
    try:
        CheckpointStore(folder, keep=2).write(small_checkpoint(2))
    except OSError as error:
        parent.send(error.errno)
    else:
        parent.send(0)


def read_as_nobody_special(parent: Connection, folder: Path) -> None:
    """Send how reading ends for a user to whom permissions apply."""
    if os.geteuid() == 0:
        os.seteuid(65534)
    try:
        CheckpointStore(folder, keep=2).read_newest()
    except CheckpointError as error:
        parent.send(str(error))
    else:
        parent.send("")
