"""Which blocks both sides of an exchange repair, and which Check or Repair each still owes.

Both sides find the bad blocks of what they received, tell each other in a Check, and repair the
union of both, so that both mix the same numbers (docs/design.md section 5). Where the rest of a
chunk then still differs, the side that sees it asks for the whole chunk, and both repair that.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from gasloc_p2p.core.codecs.layout import Layout
from gasloc_p2p.core.wire import ProtocolError


@dataclass(slots=True)
class _Damage:
    """One chunk that needs a repair.

    Attributes:
        first: union of both sides' first Checks.
        whole: whether all of the chunk is repaired.
        first_sent, whole_sent: whether our repair of these blocks was given out.
        first_arrived, whole_arrived: whether the partner's is here.
        asked_by_us, asked_by_partner: who asked for the whole chunk after a first repair.
    """

    first: bytes
    whole: bool
    first_sent: bool = False
    whole_sent: bool = False
    first_arrived: bool = False
    whole_arrived: bool = False
    asked_by_us: bool = False
    asked_by_partner: bool = False

    @property
    def only_we_asked(self) -> bool:
        return self.asked_by_us and not self.asked_by_partner


class Repairs:
    """The Checks and Repairs of one exchange, seen from one side.

    Bitmaps are as `Layout.everything` describes; b"" is one without bad blocks.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._ours: dict[int, bytes] = {}
        self._theirs: dict[int, bytes] = {}
        self._told: set[int] = set()
        self._checks: deque[tuple[int, bytes]] = deque()
        self._damaged: dict[int, _Damage] = {}
        self._owed_by_us: dict[int, _Damage] = {}
        self._owed_by_partner: dict[int, _Damage] = {}

    @property
    def partner_checked_all(self) -> bool:
        """Whether the partner's Check of every chunk is here, if there are Checks at all."""
        return not self._layout.checked or len(self._theirs) == self._layout.chunks

    @property
    def partner_owes(self) -> bool:
        """Whether a repair from the partner is still to come."""
        return bool(self._owed_by_partner)

    @property
    def partner_owes_before_ready(self) -> bool:
        """Whether such a repair must come before its Ready.

        When only this side asked for a whole chunk, the partner may have been ready before it knew.
        """
        return any(not damage.only_we_asked for damage in self._owed_by_partner.values())

    @property
    def partner_has_all(self) -> bool:
        """Whether this side has given out every Check and Repair that lets the partner be ready."""
        told = not self._layout.checked or len(self._told) == self._layout.chunks
        return told and all(
            damage.only_we_asked and damage.first_sent for damage in self._owed_by_us.values()
        )

    def found(self, index: int, bad: bytes) -> None:
        """Take this side's first Check of a chunk.

        Raises:
            ValueError: `bad` is no bitmap of the chunk, or chunks are not checked.
        """
        if bad and not (self._layout.checked and self._layout.is_bitmap(index, bad)):
            raise ValueError(f"not a bitmap of the blocks of chunk {index}")
        if not self._layout.checked:
            return
        self._ours[index] = _without_zeros(bad)
        self._checks.append((index, self._ours[index]))
        self._unite(index)

    def mismatched(self, index: int) -> None:
        """Ask for a whole chunk, unless that is under way, because its first repair failed."""
        damage = self._damaged[index]
        if not damage.whole:
            damage.whole = damage.asked_by_us = True
            self._checks.append((index, self._layout.everything(index)))
            self._owe(index, damage)

    def admit_check(self, index: int, size: int, *, sent: int) -> None:
        """Let a Check come.

        Args:
            index: its chunk.
            size: bytes of its bitmap.
            sent: number of chunks that this side has sent.

        Raises:
            ProtocolError: it is out of place, or has another size than a bitmap.
        """
        if index >= sent:
            raise ProtocolError(f"a check of chunk {index}, which it cannot have")
        expected = self._layout.bitmap_bytes(index)
        if size not in (0, expected):
            raise ProtocolError(f"a check of chunk {index} of {size} bytes, expected {expected}")
        if index not in self._theirs:
            return
        damage = self._damaged.get(index)
        if (
            damage is None
            or not damage.first_sent
            or damage.asked_by_partner
            or damage.whole_arrived
        ):
            raise ProtocolError(f"another check of chunk {index}")

    def heard(self, index: int, bad: bytes) -> None:
        """Take a Check that was admitted.

        Raises:
            ProtocolError: `bad` is no bitmap of the chunk, or the second one does not ask for all.
        """
        if bad and not self._layout.is_bitmap(index, bad):
            raise ProtocolError(f"a check of chunk {index} names blocks that it does not have")
        if index not in self._theirs:
            self._theirs[index] = _without_zeros(bad)
            self._unite(index)
            return
        if bad != self._layout.everything(index):
            raise ProtocolError(f"a second check of chunk {index} that does not ask for all of it")
        damage = self._damaged[index]
        damage.whole = damage.asked_by_partner = True
        self._owe(index, damage)

    def next_check(self) -> tuple[int, bytes] | None:
        """Return the next Check to send, a chunk and its bad blocks; it counts as sent."""
        if not self._checks:
            return None
        index, bad = self._checks.popleft()
        self._told.add(index)
        return index, bad

    def next_repair(self) -> tuple[int, bytes] | None:
        """Return the next Repair to send, a chunk and the blocks; it counts as sent."""
        if not self._owed_by_us:
            return None
        index, damage = next(iter(self._owed_by_us.items()))
        del self._owed_by_us[index]
        if damage.whole:
            damage.whole_sent = True
        else:
            damage.first_sent = True
        return index, self._due(index, damage)

    def admit_repair(self, index: int, size: int) -> None:
        """Let a Repair of a chunk with `size` bytes come.

        Raises:
            ProtocolError: none is due, or it has another size than the due one.
        """
        damage = self._owed_by_partner.get(index)
        if damage is None:
            raise ProtocolError(f"a repair of chunk {index}, which was not due")
        expected = self._layout.repair_bytes(index, self._due(index, damage))
        if size != expected:
            raise ProtocolError(f"a repair of chunk {index} of {size} bytes, expected {expected}")

    def arrived(self, index: int) -> bytes:
        """Take a Repair that was admitted, and return the blocks that it holds."""
        damage = self._owed_by_partner.pop(index)
        if damage.whole:
            damage.whole_arrived = True
        else:
            damage.first_arrived = True
        return self._due(index, damage)

    def is_everything(self, index: int, bad: bytes) -> bool:
        """Whether these are all blocks of a chunk."""
        return bad == self._layout.everything(index)

    def _unite(self, index: int) -> None:
        """Once both sides' first Checks of a chunk are known, owe what they name together."""
        if index not in self._ours or index not in self._theirs:
            return
        union = _union(self._ours[index], self._theirs[index])
        if union:
            whole = self.is_everything(index, union)
            damage = self._damaged[index] = _Damage(first=union, whole=whole)
            self._owe(index, damage)

    def _owe(self, index: int, damage: _Damage) -> None:
        if not damage.whole_sent:
            self._owed_by_us[index] = damage
        self._owed_by_partner[index] = damage

    def _due(self, index: int, damage: _Damage) -> bytes:
        return self._layout.everything(index) if damage.whole else damage.first


def _union(a: bytes, b: bytes) -> bytes:
    if not a or not b:
        return a or b
    return (int.from_bytes(a, "little") | int.from_bytes(b, "little")).to_bytes(len(a), "little")


def _without_zeros(bad: bytes) -> bytes:
    return bad if any(bad) else b""
