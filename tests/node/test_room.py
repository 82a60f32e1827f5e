"""The memory that rounds hand on to each other."""

from __future__ import annotations

import numpy as np
import torch

from gasloc_p2p.node.room import Room


def place(memory: memoryview) -> int:
    return np.frombuffer(memory, np.uint8).ctypes.data


def test_memory_is_handed_out_again_once_nobody_refers_to_it() -> None:
    room = Room()
    kept, left = room.memory(5000), room.memory(5000)
    places = place(kept), place(left)
    part = torch.frombuffer(left[1000:], dtype=torch.uint8)[1:]
    del left
    assert place(room.memory(5000)) not in places, "a tensor still refers to a part of it"
    del part
    again = {place(memory) for memory in (room.memory(5000), room.memory(5000))}
    assert places[1] in again
    assert places[0] not in again
    assert len(kept) == 5000


def test_a_copy_is_one() -> None:
    x = torch.linspace(0, 1, 1000)
    copy = Room().copy(x)
    assert torch.equal(copy, x)
    copy += 1
    assert x.max() == 1
