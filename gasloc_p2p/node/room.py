"""The memory of partners' codes and of mixes, which rounds hand on to each other."""

from __future__ import annotations

import mmap
import weakref
from collections import defaultdict
from typing import Final

import numpy as np
import torch
from torch import Tensor

_FLAGS: Final = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


class Room:
    """Hands out memory, and again what nobody refers to any more.

    Pages that come fresh from the system cost more than all that is written to them and read again.
    While nobody needs these, the system may take them away where it is short of memory.
    """

    def __init__(self) -> None:
        self._free: defaultdict[int, list[mmap.mmap]] = defaultdict(list)

    def memory(self, size_bytes: int) -> memoryview:
        """Return so many bytes, at least one, with anything in them."""
        free = self._free[size_bytes]
        block = free.pop() if free else mmap.mmap(-1, size_bytes, flags=_FLAGS)
        whole = np.frombuffer(block, dtype=np.uint8)
        weakref.finalize(whole, self._take_back, block).atexit = False
        return whole.data

    def copy(self, x: Tensor) -> Tensor:
        """Return a copy of a flat vector, which is not empty."""
        memory = self.memory(x.numel() * x.itemsize)
        return torch.frombuffer(memory, dtype=x.dtype).copy_(x)

    def _take_back(self, block: mmap.mmap) -> None:
        # Only Linux and the BSDs can wait until they need the pages.
        if hasattr(mmap, "MADV_FREE"):
            block.madvise(mmap.MADV_FREE)
        self._free[len(block)].append(block)
