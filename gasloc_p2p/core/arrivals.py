"""Which frames of the partner have been dealt with, and which come again on a fresh stream."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from gasloc_p2p.core.wire import FrameType, Head


@dataclass(kw_only=True, slots=True)
class Item:
    """One frame of the partner behind its Hello.

    Attributes:
        head: what the frame is.
        bad: the blocks that a REPAIR holds.
        settled: whether it has been dealt with.
    """

    head: Head
    bad: bytes = b""
    settled: bool = True


class Arrivals:
    """The partner's frames in their order, from the first that may still come again.

    When the stream broke, the partner says again whatever follows those that were settled at the
    beginning, and that must be what it said before. Meanwhile pieces may be settled.
    """

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._first = 0
        self._next = 0
        self._unsettled = 0

    @property
    def all_settled(self) -> bool:
        """Whether every frame that came has been dealt with."""
        return not self._unsettled

    def rewind(self) -> int:
        """Return how many frames at the beginning are settled, and expect the others again."""
        while self._items and self._items[0].settled:
            self._drop_first()
        self._next = self._first
        return self._first

    def known(self) -> Item | None:
        """Return the frame that comes next if it came before; None if it is fresh."""
        place = self._next - self._first
        return self._items[place] if place < len(self._items) else None

    def again(self) -> None:
        """Pass over the frame that is known."""
        self._next += 1
        self._forget()

    def add(self, item: Item) -> None:
        """Take down a fresh frame."""
        self._items.append(item)
        self._next += 1
        self._unsettled += not item.settled
        self._forget()

    def settle(self, kind: FrameType, index: int) -> Item:
        """Deal with the first piece of this kind and index that has not been dealt with.

        Raises:
            RuntimeError: there is none.
        """
        for item in self._items:
            if not item.settled and (item.head.type, item.head.index) == (kind, index):
                item.settled = True
                self._unsettled -= 1
                self._forget()
                return item
        raise RuntimeError(f"{kind.name.lower()} {index} has not arrived, or was dealt with before")

    def _forget(self) -> None:
        while self._items and self._items[0].settled and self._first < self._next:
            self._drop_first()

    def _drop_first(self) -> None:
        self._items.popleft()
        self._first += 1
