"""How often a peer takes part: in all rounds, or in one of a few when its exchanges take long."""

from __future__ import annotations

import math
from collections import deque
from typing import Final, NamedTuple

MAX_STRIDE: Final = 16
NEVER: Final = 2**53
"""A round that no run has."""
CONSIDERED_ROUNDS: Final = 3
"""A stride changes after so many rounds in a row that ask for it."""
TOLERANCE: Final = 1.2
"""A stride is kept until rounds take this much longer than it allows, and is lowered only to one in
which they fit, so that it does not swing, and machines that are nearly equal do not skip rounds."""


class Stride(NamedTuple):
    """Which rounds a peer takes part in, and which ones before it changed that.

    Attributes:
        every: from round `since` on, it takes part in one of `every` rounds.
        phase: those rounds t with (t - phase) % every == 0.
        since: first round of which that holds.
        every_before, phase_before: what holds in the rounds before `since`.
        until: first of the rounds in which all peers take part, whatever their strides; no peer
            tells it, for the run says it.
    """

    every: int = 1
    phase: int = 0
    since: int = 0
    every_before: int = 1
    phase_before: int = 0
    until: int = NEVER

    def told(self) -> dict[str, int]:
        """Return what a record holds of it, by field."""
        told = self._asdict()
        del told["until"]
        return told

    def every_at(self, t: int) -> int:
        """Return how many rounds apart the peer takes part, as of round `t`."""
        if t >= self.until:
            return 1
        return self.every if t >= self.since else self.every_before

    def takes_part(self, t: int) -> bool:
        """Whether the peer takes part in round `t`, as far as its stride is concerned."""
        phase = self.phase if t >= self.since else self.phase_before
        return (t - phase) % self.every_at(t) == 0

    def next_turn(self, t: int) -> int:
        """Return the first round from `t` on in which the peer takes part."""
        while not self.takes_part(t):
            t += 1
        return t

    def has_begun(self, t: int) -> bool:
        """Whether `every` and `phase` alone say all about the rounds from `t` on."""
        return t >= self.since or (self.every, self.phase) == (self.every_before, self.phase_before)

    def changed(self, every: int, *, at_least: int) -> Stride:
        """Return this stride with another `every` from its own first turn on.

        Args:
            every: at least 1.
            at_least: the first round in which the turn may be; this stride has begun by then.
        """
        since = self.next_turn(at_least)
        return Stride(
            every=every,
            phase=since % every,
            since=since,
            every_before=self.every,
            phase_before=self.phase,
        )


class StrideChooser:
    """Chooses the stride with which a peer's rounds fit in the swarm's.

    Args:
        most: the highest stride to choose, up to `MAX_STRIDE`.
    """

    def __init__(self, *, most: int = MAX_STRIDE) -> None:
        self._most = most
        self._every = 1
        self._asked: deque[int] = deque(maxlen=CONSIDERED_ROUNDS)

    def consider(self, *, least_s: float, cycle_s: float) -> int | None:
        """Take in one of this peer's own rounds and return the stride to have; None at first.

        Args:
            least_s: the shortest that one of its rounds can be: an exchange and one inner step.
            cycle_s: seconds of a round of the swarm, above 0.
        """
        self._asked.append(self._asked_for(least_s / cycle_s))
        if len(self._asked) < CONSIDERED_ROUNDS:
            return None
        # Estimates that all point the same way but never agree must not put it off for ever.
        if min(self._asked) > self._every:
            self._every = min(self._asked)
        elif max(self._asked) < self._every:
            self._every = max(self._asked)
        return self._every

    def _asked_for(self, cycles: float) -> int:
        needed = self._fitting(cycles / TOLERANCE)
        return needed if needed > self._every else min(self._every, self._fitting(cycles))

    def _fitting(self, cycles: float) -> int:
        return max(1, math.ceil(min(cycles, self._most)))
