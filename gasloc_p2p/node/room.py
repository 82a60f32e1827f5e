"""The memory of a round: the partners' codes and the mix."""

from __future__ import annotations

import mmap
from collections import defaultdict
from types import TracebackType

import torch
from torch import Tensor


class Room:
    """Lends memory for as long as it is entered, and keeps it for the next time.

    Pages that come fresh from the system cost more than all that is written to them and read again.
    In the meantime the system may take these away where it is short of memory.
    """

    def __init__(self) -> None:
        self._lent: list[mmap.mmap] = []
        self._kept: defaultdict[int, list[mmap.mmap]] = defaultdict(list)

    def memory(self, size_bytes: int) -> memoryview:
        """Return so many bytes, at least one, with anything in them."""
        kept = self._kept[size_bytes]
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        block = kept.pop() if kept else mmap.mmap(-1, size_bytes, flags=flags)
        self._lent.append(block)
        return memoryview(block)

    def copy(self, x: Tensor) -> Tensor:
        """Return a copy of a flat vector."""
        memory = self.memory(x.numel() * x.itemsize)
        return torch.frombuffer(memory, dtype=x.dtype).copy_(x)

    def __enter__(self) -> Room:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Sizes that were not asked for this time are given up.
        self._kept.clear()
        for block in self._lent:
            # Only Linux and the BSDs can wait until they need the pages.
            if hasattr(mmap, "MADV_FREE"):
                block.madvise(mmap.MADV_FREE)
            self._kept[len(block)].append(block)
        self._lent.clear()
