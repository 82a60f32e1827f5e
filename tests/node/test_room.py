"""The memory that rounds hand on to each other."""

from __future__ import annotations

import numpy as np
import torch

from gasloc_p2p.node.room import Room


def place(memory: memoryview) -> int:
    return np.frombuffer(memory, np.uint8).ctypes.data


def test_memory_is_taken_again_but_never_twice_at_a_time() -> None:
    room = Room()
    with room:
        first = {place(room.memory(5000)) for _ in range(3)}
    with room:
        second = {place(room.memory(5000)) for _ in range(3)}
        other = place(room.memory(5000))
    assert len(first) == 3
    assert second == first
    assert other not in first


def test_sizes_that_are_asked_for_no_more_are_given_up() -> None:
    room = Room()
    with room:
        first = room.memory(5000)
    with room:
        room.memory(3000)
    with room:
        assert place(room.memory(5000)) != place(first)


def test_a_copy_is_one() -> None:
    x = torch.linspace(0, 1, 1000)
    with Room() as room:
        copy = room.copy(x)
        assert torch.equal(copy, x)
        copy += 1
    assert x.max() == 1
