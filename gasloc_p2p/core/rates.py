"""How fast this peer computes and exchanges, and how that compares with the swarm."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import Final, Protocol

from gasloc_p2p.core.types import PeerId

REMEMBERED_ROUNDS: Final = 3
ENOUGH: Final = 2
"""With a single round or edge, who happens to meet a slow peer first would take itself for slow."""
REMEMBERED_EDGES: Final = 8
REMEMBERED_PARTNERS: Final = 1024
OBSERVATIONS: Final = 2
"""Exchanges with the same partner whose mean predicts the next one."""
SLOW_SHARE: Final = 0.25
SLOW_FACTOR: Final = 2
"""An edge is slow if it takes this part of a round longer than others do, and so many times as
long; edges that share a link with others of the same round are not."""
TIMED_OUT_FACTOR: Final = 2
"""An edge that ran out of time counts as so many times as long, and as no quicker than its partner
was before. Nobody knows what it needed, but were it not taken for slow in the end, it would run out
of time in every round."""


class Rates(Protocol):
    """What a peer tells about its speed; its record is one."""

    @property
    def step_s(self) -> float:
        """Seconds of one inner step; 0 when unknown."""
        ...

    @property
    def transfer_s(self) -> float:
        """Seconds of one exchange, waiting excluded; 0 when unknown."""
        ...


class RateWatch:
    """Remembers this peer's own rounds and edges, and says what to expect of the next ones.

    Medians, so that one round during which the machine did something else changes nothing.
    """

    def __init__(self) -> None:
        self._steps_s: deque[float] = deque(maxlen=REMEMBERED_ROUNDS)
        self._exchanges_s: deque[float | None] = deque(maxlen=REMEMBERED_ROUNDS)
        self._edges = 0
        self._by_partner: dict[PeerId, deque[float]] = {}
        self._exchange_s: float | None = None
        self._had_edges = False

    @property
    def step_s(self) -> float:
        """Median seconds of one inner step over the last rounds; 0 before the first."""
        return statistics.median(self._steps_s) if self._steps_s else 0.0

    @property
    def transfer_s(self) -> float:
        """Seconds of the quickest of the last exchanges, two with each partner; 0 when unknown.

        What a slow partner adds says nothing of one's own link.
        """
        if not self.knows_transfers:
            return 0.0
        recent = islice(reversed(self._by_partner.values()), REMEMBERED_EDGES)
        return min(map(min, recent))

    @property
    def knows_transfers(self) -> bool:
        """Whether enough edges have ended to tell how long they take."""
        return self._edges >= ENOUGH

    @property
    def exchange_s(self) -> float | None:
        """Lower median of the seconds for which edges held up the last rounds that had any.

        Rounds that waited for none of their edges do not count unless all are like that: 0 then.
        None before there are enough rounds to tell.
        """
        if len(self._exchanges_s) < ENOUGH:
            return None
        return statistics.median_low([s for s in self._exchanges_s if s is not None] or [0.0])

    def note_edge(
        self,
        partner: PeerId,
        transfer_s: float,
        *,
        awaited: bool = True,
        timed_out: bool = False,
    ) -> None:
        """Take in how long an exchange took.

        Args:
            partner: who it was with.
            transfer_s: seconds, waiting excluded.
            awaited: whether the round went on only after it.
            timed_out: whether it ran out of time.
        """
        if timed_out:
            known_s = self.expected_edge_s(partner, 0.0)
            transfer_s = max(TIMED_OUT_FACTOR * transfer_s, known_s)
        self._edges += 1
        seen = self._by_partner.pop(partner, None) or deque[float](maxlen=OBSERVATIONS)
        seen.append(transfer_s)
        # Whoever was met last is forgotten last.
        self._by_partner[partner] = seen
        if len(self._by_partner) > REMEMBERED_PARTNERS:
            del self._by_partner[next(iter(self._by_partner))]
        self._had_edges = True
        if awaited:
            self._exchange_s = max(self._exchange_s or 0.0, transfer_s)

    def note_round(self, *, steps: int, train_s: float) -> None:
        """Take in a round that is over, after its edges.

        Args:
            steps: inner steps that it held.
            train_s: seconds that they took together.
        """
        if steps > 0:
            self._steps_s.append(train_s / steps)
        if self._had_edges:
            self._exchanges_s.append(self._exchange_s)
        self._exchange_s, self._had_edges = None, False

    def expected_edge_s(self, partner: PeerId, told_s: float) -> float:
        """Return the seconds that an exchange with `partner` should take; 0 when unknown.

        Args:
            partner: who it is with.
            told_s: what the partner tells of its own exchanges, 0 when it does not.
        """
        seen = self._by_partner.get(partner)
        if seen:
            return statistics.fmean(seen)
        return max(self.transfer_s, told_s) if self.knows_transfers else told_s


def target_cycle_s(local_steps: int, rates: Iterable[Rates], *, overlap: bool = False) -> float:
    """Return the seconds of a round that half of the peers need at most; 0 when nobody tells.

    The lower median of `local_steps` steps and one exchange after them, or under them where rounds
    overlap. It follows from how fast peers are and not from how many steps they do, so it does not
    drift as they adapt to it, and a minority of liars leaves it between two values that honest
    peers tell. Who does not tell how long exchanges take yet counts as usual.
    """
    told = [peer for peer in rates if peer.step_s > 0]
    usual_s = typical_transfer_s(told)
    both = [(local_steps * peer.step_s, peer.transfer_s or usual_s) for peer in told]
    cycles_s = [max(parts_s) if overlap else sum(parts_s) for parts_s in both]
    return statistics.median_low(cycles_s) if cycles_s else 0.0


def typical_transfer_s(rates: Iterable[Rates]) -> float:
    """Return the lower median of the seconds per exchange that peers tell; 0 when nobody does."""
    transfers_s = [peer.transfer_s for peer in rates if peer.step_s > 0 and peer.transfer_s > 0]
    return statistics.median_low(transfers_s) if transfers_s else 0.0


def is_slow_edge(
    expected_s: float, typical_s: float, cycle_s: float, *, hidden_s: float | None = None
) -> bool:
    """Whether an edge is not worth waiting for.

    Args:
        expected_s: seconds that it should take.
        typical_s: seconds that edges usually take.
        cycle_s: seconds of a round of the swarm; 0 when unknown, and no edge is slow then.
        hidden_s: seconds of an edge that hold nobody up; `typical_s` by default.
    """
    held_up_s = expected_s - (typical_s if hidden_s is None else hidden_s)
    much_slower = expected_s > SLOW_FACTOR * typical_s
    return cycle_s > 0 and much_slower and held_up_s > SLOW_SHARE * cycle_s
