"""Who watches a simulated swarm, and when in virtual time things happened."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from statistics import fmean
from typing import TypeAlias

from gasloc_p2p.node.events import Event, RoundFinished, Validated
from gasloc_p2p.report import CurvePoint

SwarmObserver: TypeAlias = Callable[[int, Event], None]
"""Told the index of a peer and what happened to it."""


class Timeline:
    """Passes events on and remembers at which virtual second the swarm had learned what.

    Args:
        observe: who is told next.
        attacker: index of the peer whose losses do not count; None for nobody.

    Attributes:
        trained_s: virtual second at which the last peer ended its last training round.
    """

    def __init__(self, observe: SwarmObserver, *, attacker: int | None = None) -> None:
        self._observe = observe
        self._attacker = attacker
        self._tried: dict[int, list[tuple[float, float]]] = {}
        self.trained_s = 0.0

    def observe(self, index: int, event: Event) -> None:
        """Note the event's time if it says something about learning, and pass it on."""
        match event:
            case Validated(round=round, val_loss=val_loss) if index != self._attacker:
                self._tried.setdefault(round, []).append((_now_s(), val_loss))
            case RoundFinished(report=report) if not report.closing:
                self.trained_s = max(self.trained_s, _now_s())
        self._observe(index, event)

    def curve(self) -> tuple[CurvePoint, ...]:
        """Return the mean validation loss of the peers' own models, round by round."""
        return tuple(
            CurvePoint(
                round=round,
                time_s=max(time_s for time_s, _ in tried),
                val_loss=fmean(val_loss for _, val_loss in tried),
            )
            for round, tried in sorted(self._tried.items())
        )


def _now_s() -> float:
    return asyncio.get_running_loop().time()
