"""When a node that lost its company tries again, and what it says about it."""

from __future__ import annotations

from typing import Final

FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 30.0
REMIND_PERIOD_S: Final = 300.0


class Backoff:
    """Pauses between attempts: 1, 2, 4 ... 30 s."""

    def __init__(self) -> None:
        self._next_s = FIRST_PAUSE_S

    def next_s(self) -> float:
        """Return how long to wait before the next attempt."""
        pause_s, self._next_s = self._next_s, min(2 * self._next_s, LONGEST_PAUSE_S)
        return pause_s

    def reset(self) -> None:
        """Begin with short pauses again."""
        self._next_s = FIRST_PAUSE_S


class Solitude:
    """Whether anybody of those that this node knows is there; told of every look around.

    The two methods return one line for a person, or "" when there is nothing to say: it is said
    at once that nobody is there, every few minutes while that lasts, and when it is over.
    """

    def __init__(self) -> None:
        self._since_s: float | None = None
        self._said_s = 0.0

    def nobody(self, now_s: float, *, addresses: int) -> str:
        """Note at `now_s` that none of so many known addresses answers."""
        none = f"none of {_count(addresses, 'known address', 'known addresses')} answers"
        if self._since_s is None:
            self._since_s = self._said_s = now_s
            return f"alone: {none}; going on, and trying again until somebody does"
        if now_s - self._said_s < REMIND_PERIOD_S:
            return ""
        self._said_s = now_s
        return f"alone since {_minutes(now_s - self._since_s)}: {none}"

    def company(self, now_s: float, *, peers: int) -> str:
        """Note at `now_s` that so many peers are there."""
        if self._since_s is None:
            return ""
        alone_s, self._since_s = now_s - self._since_s, None
        return f"no longer alone, after {_minutes(alone_s)}: {_count(peers, 'peer')} there"


def peers_found(count: int) -> str:
    """Say that a part of the swarm was found that this node had no connection to."""
    return f"{_count(count, 'peer')} of another part of the swarm found: joined"


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def _minutes(duration_s: float) -> str:
    return f"{duration_s:.0f} s" if duration_s < 120 else f"{duration_s / 60:.0f} min"
