"""What to do when a hub does not answer as it should: say so, wait, try again."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
LONGEST_ASKED_PAUSE_S = 3600.0
AGAIN_S = 60.0
"""A trouble that lasts is told so often."""


class ClosedError(Exception):
    """Whoever wanted the text has gone, so nothing more is read."""


Pause = Callable[[float], None]
"""Waits for so many seconds; raises ClosedError as soon as nobody wants the text any more."""


class Patience:
    """Doubles its pauses from 1 s to 60 s while one trouble follows another.

    A trouble is told when it comes for the first time, the second, the fourth, and so on, so that a
    bad line cannot flood the terminal, and every minute while it lasts.

    Args:
        say: told of troubles, a sentence each.
        pause: how to wait.
        clock: seconds from somewhere.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        pause: Pause,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.say = say
        self._pause = pause
        self._clock = clock
        self._attempts = 0
        self._began_s = self._told_s = 0.0
        self._last = ""
        self._times: Counter[str] = Counter()

    def check(self) -> None:
        """Raise ClosedError if nobody wants the text any more."""
        self._pause(0.0)

    def endure(self, trouble: str, *, asked_s: float | None = None) -> None:
        """Tell of a trouble and wait.

        Args:
            trouble: what happened, as the beginning of a sentence.
            asked_s: how long the other side asked to be left alone.

        Raises:
            ClosedError: nobody wants the text any more.
        """
        if not self._attempts:
            self._began_s = self._told_s = self._clock()
        pause_s = min(FIRST_PAUSE_S * 2**self._attempts, LONGEST_PAUSE_S)
        if asked_s is not None:
            pause_s = max(pause_s, min(asked_s, LONGEST_ASKED_PAUSE_S))
        if trouble != self._last:
            self._last = trouble
            self._times[trouble] += 1
            times = self._times[trouble]
            if times & (times - 1) == 0:
                often = f" ({times} times so far)" if times > 1 else ""
                self.say(f"{trouble}{often}; next try in {pause_s:.0f} s")
                self._told_s = self._clock()
        self._attempts += 1
        self._tell_again(trouble, pause_s)
        while pause_s > AGAIN_S:
            self._pause(AGAIN_S)
            pause_s -= AGAIN_S
            self._tell_again(trouble, pause_s)
        self._pause(pause_s)

    def _tell_again(self, trouble: str, pause_s: float) -> None:
        now_s = self._clock()
        if now_s - self._told_s >= AGAIN_S:
            self._told_s = now_s
            tried = f"{now_s - self._began_s:.0f} s without success"
            self.say(f"{trouble}; {tried} so far, next try in {pause_s:.0f} s")

    def relax(self) -> None:
        """Begin with the shortest pause again: something has arrived."""
        self._attempts = 0
        self._last = ""
