"""How many inner steps a peer does in a round, so that neither it nor the others wait.

Source: docs/design.md, section 3.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Final

from gasloc_p2p.core.rates import (
    SLOW_FACTOR,
    SLOW_SHARE,
    Rates,
    RateWatch,
    is_slow_edge,
    target_cycle_s,
    typical_transfer_s,
)
from gasloc_p2p.core.stride import TOLERANCE, StrideChooser
from gasloc_p2p.core.types import PeerId

MOST_STEPS_FACTOR: Final = 8
"""A fast peer does at most so many times the usual steps."""
MOST_CHANGE: Final = 3.0
"""Steps rise or fall at most by this factor from one round to the next.

With it, and with rates that are medians of three rounds, a peer that becomes five times as fast or
as slow has the right number of steps three rounds later, and one bad round changes nothing.
"""
SAME_SHARE: Final = 0.1
"""What makes so small a part of a round changes no steps, so that equal machines stay equal."""
HIDDEN_SHARE: Final = 0.5
"""With overlap, an edge that lasts this part of a round holds nobody up. One that lasts a whole one
does: its ends come to it at different times, and if either is a bit late, the other one waits."""
PATIENCE: Final = 1.5
"""An edge may take so many times what would have counted as slow beforehand."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """What a peer intends for one round.

    Attributes:
        steps: inner steps, where steps make a round.
        full_steps: the usual inner steps, those of a peer that is as fast as the swarm.
        every: rounds of the swarm that this one of the peer takes.
        reason: why `steps` is not `full_steps`, for a person; empty when it is.
        exchange_s: seconds that the awaited edges should take; 0 when unknown.
        expected_s: the same for each edge, by partner.
        slow: partners whose edges are not worth waiting for.
        has_slow_link: whether this peer's own link is why its edges are not.
        patience_s: seconds after which the others are not either; 0 when unknown.
    """

    steps: int
    full_steps: int
    every: int = 1
    reason: str = ""
    exchange_s: float = 0.0
    expected_s: Mapping[PeerId, float] = field(default_factory=lambda: MappingProxyType({}))
    slow: frozenset[PeerId] = frozenset()
    has_slow_link: bool = False
    patience_s: float = math.inf

    @property
    def share(self) -> int:
        """The steps that one round of the swarm takes, at least one."""
        return max(1, round(self.steps / self.every))

    def from_here(self, done: int) -> StepPlan:
        """Return the plan once the others have come to the round and `done` steps are done."""
        return replace(self, steps=min(self.steps, done + self.share))


class Tempo:
    """Decides what a peer does to keep in step with a swarm that is faster or slower.

    Args:
        local_steps: usual inner steps of a round, H.
        period_s: length of a round by the clock; 0 where steps make a round.
        adapt: whether steps, and what is waited for, follow from rates.
        stride: whether a peer that cannot keep up at all may skip rounds.
        late: whether rounds go on without slow edges.
        overlap: whether a round exchanges under the inner steps of the next one.

    Attributes:
        rates: what this peer has learned of its own speed.
    """

    def __init__(
        self,
        *,
        local_steps: int,
        period_s: float = 0.0,
        adapt: bool = True,
        stride: bool = True,
        late: bool = False,
        overlap: bool = False,
    ) -> None:
        self.rates = RateWatch()
        self._local_steps = local_steps
        self._period_s = period_s
        self._adapt = adapt
        self._late = late
        self._overlap = overlap
        self._chooser = StrideChooser() if adapt and stride and not period_s else None
        self._cycle_s = 0.0
        self._has_slow_link = False
        self._before = local_steps, 1
        """Steps planned last, before those that the round's own edges cost, and the stride."""

    def plan(
        self, *, others: Iterable[Rates], partners: Mapping[PeerId, float], every: int = 1
    ) -> StepPlan:
        """Return what to do in the next round.

        Args:
            others: what the other peers of the swarm tell, those that skip rounds included.
            partners: those of the round, and the seconds per exchange that each tells.
            every: this peer's stride.
        """
        told = [self.rates, *others]
        self._cycle_s = cycle_s = self._period_s or target_cycle_s(
            self._local_steps, told, overlap=self._overlap
        )
        typical_s = typical_transfer_s(told)
        # Under the inner steps there is room for longer ones than usual.
        hidden_s = HIDDEN_SHARE * cycle_s if self._overlap else typical_s
        is_slow = partial(is_slow_edge, typical_s=typical_s, cycle_s=cycle_s, hidden_s=hidden_s)
        self._has_slow_link = is_slow(self.rates.transfer_s)
        expected_s = {p: self.rates.expected_edge_s(p, s) for p, s in partners.items()}
        slow = frozenset(
            partner for partner, edge_s in expected_s.items() if self._adapt and is_slow(edge_s)
        )
        unawaited = slow if self._late else ()
        awaited_s = [s for p, s in expected_s.items() if p not in unawaited]
        exchange_s = max(awaited_s, default=0.0)
        # One whose own link is slow, or may be, is like that in all rounds.
        is_usual = self.rates.knows_transfers and not self._has_slow_link
        unheld = is_usual and bool(unawaited) and not awaited_s
        steps = self._steps(every, exchange_s, typical_s, unheld=unheld)
        return StepPlan(
            steps=steps,
            full_steps=self._local_steps * every,
            every=every,
            reason=self._reason(steps, every, unheld=unheld),
            exchange_s=exchange_s,
            expected_s=MappingProxyType(expected_s),
            slow=slow,
            has_slow_link=self._has_slow_link,
            patience_s=self._patience_s(typical_s, hidden_s),
        )

    def _patience_s(self, typical_s: float, hidden_s: float) -> float:
        """Return when an edge counts as slow though it was not expected to be; see `StepPlan`."""
        if not (self._adapt and self._late):
            return math.inf
        slow_s = max(SLOW_FACTOR * typical_s, hidden_s + SLOW_SHARE * self._cycle_s)
        return PATIENCE * slow_s if self._cycle_s else 0.0

    def note_round(self, *, steps: int, train_s: float) -> int | None:
        """Take in a round that is over, and return the stride to have; None to keep it.

        Args:
            steps: inner steps that it held.
            train_s: seconds that they took together.
        """
        rates = self.rates
        rates.note_round(steps=steps, train_s=train_s)
        if self._chooser is None or not (steps and self._cycle_s):
            return None
        parts_s = rates.transfer_s, rates.step_s
        least_s = max(parts_s) if self._overlap else sum(parts_s)
        if self._late and self._has_slow_link:
            # Its exchanges last into its next rounds, and one must be over before another begins.
            least_s *= TOLERANCE
        return self._chooser.consider(least_s=least_s, cycle_s=self._cycle_s)

    def _steps(self, every: int, exchange_s: float, typical_s: float, *, unheld: bool) -> int:
        full = self._local_steps * every
        step_s, cycle_s = self.rates.step_s, every * self._cycle_s
        if not self._adapt or self._period_s or not (step_s and cycle_s):
            return full
        # An exchange costs this peer at least what it counts for in the swarm's round. Else peers
        # that are all alike, and wait for none of their edges, would all be faster than the rest.
        transfer_s = self.rates.transfer_s or typical_s
        usual_s = min(typical_s, transfer_s)
        if self._overlap:
            free_s = cycle_s - full * step_s
            usual_s = max(0.0, min(free_s, transfer_s - full * step_s))
        elif not (self._late and is_slow_edge(transfer_s, typical_s, self._cycle_s)):
            # Otherwise nobody waits for its edges, nor does it: its link costs it no steps.
            usual_s = max(usual_s, self.rates.exchange_s or 0.0)
        same_s = SAME_SHARE * cycle_s
        left_s = cycle_s - usual_s - full * step_s
        fitting = full if abs(left_s) <= same_s else full + left_s / step_s
        base = self._bounded(fitting, every)
        self._before = base, every
        if unheld and not self._overlap:
            # The others are exchanging meanwhile; in the next round it would wait for them.
            return _whole(base + usual_s / step_s)
        extra_s = exchange_s - usual_s if typical_s and not self._overlap else 0.0
        return max(1, _whole(base - extra_s / step_s)) if extra_s > same_s else base

    def _bounded(self, fitting: float, every: int) -> int:
        """Return the steps that fit, near enough to those of the round before."""
        full = self._local_steps * every
        steps, stride = self._before
        least = math.ceil(steps * every / stride / MOST_CHANGE)
        most = math.floor(steps * every / stride * MOST_CHANGE)
        most = min(max(1, most), MOST_STEPS_FACTOR * full)
        return max(1, _whole(min(most, max(least, fitting))))

    def _reason(self, steps: int, every: int, *, unheld: bool) -> str:
        full = self._local_steps * every
        if steps == full:
            return ""
        if steps > full:
            why = "nobody to wait for" if unheld and self._before[0] <= full else "faster than most"
        # Whose steps would fit if there were no exchange is held up by the exchange.
        elif full * self.rates.step_s <= (1 + SAME_SHARE) * every * self._cycle_s:
            why = "link-bound"
        else:
            why = "compute-bound"
        return f"{why}: {steps} of {full} steps"


def _whole(steps: float) -> int:
    """Return the steps that fit, one that lacks a tenth of itself included."""
    return math.floor(steps + SAME_SHARE)
