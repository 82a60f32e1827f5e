"""When a round begins, how many inner steps it holds, how long an edge may take, and its LR.

Times are unix seconds, durations are seconds; no clock is read here.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Final, Literal, Protocol, TypeAlias

from gasloc_p2p.core.tempo import StepPlan

Schedule: TypeAlias = Literal["cosine", "constant", "wsd"]

DECAY_SHARE: Final = 0.2
"""Part of a run in which the learning rate of `wsd` falls where nothing else is said."""

CYCLES_PER_EDGE: Final = 4
TRANSFERS_PER_EDGE: Final = 4
TRANSFERS_RESERVED: Final = 2
"""Estimated transfers for which a round of fixed length stops training before its end."""

MIN_DEADLINE_S: Final = 0.1


class RoundPhase(enum.StrEnum):
    """What a round is for."""

    TRAINING = "training"
    CLOSING = "closing"
    """No inner steps, outer learning rate 1, momentum 0: the peers come to one model."""
    FINISHED = "finished"
    """The run is over; no such round takes place."""


def round_phase(round: int, *, rounds: int, closing_rounds: int) -> RoundPhase:
    """Return the phase of `round` in a run of `rounds` training and `closing_rounds` more."""
    if round < rounds:
        return RoundPhase.TRAINING
    return RoundPhase.CLOSING if round < rounds + closing_rounds else RoundPhase.FINISHED


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBudget:
    """How many inner steps a round holds; at least one limit is set.

    Attributes:
        max_steps: the most inner steps, 0 for a round without training; None for no such limit.
        until_s: unix seconds at which no further step begins; None for no such limit.
    """

    max_steps: int | None
    until_s: float | None

    def __post_init__(self) -> None:
        if self.max_steps is None and self.until_s is None:
            raise ValueError("a step budget needs max_steps or until_s")

    def allows(self, done: int, now_s: float) -> bool:
        """Whether a step may follow the `done` ones at `now_s`; time never forbids the first."""
        if self.max_steps is not None and done >= self.max_steps:
            return False
        return done == 0 or self.until_s is None or now_s < self.until_s

    def fraction_done(self, done: int, now_s: float, *, started_s: float) -> float:
        """Return the part of the budget that is spent, in [0, 1].

        Elapsed over available time where time is the limit, else `done` over `max_steps`
        (docs/design.md, section 6: the learning rate follows the round and this fraction).
        """
        if self.until_s is not None:
            available_s = self.until_s - started_s
            fraction = (now_s - started_s) / available_s if available_s > 0 else 1.0
        else:
            fraction = done / self.max_steps if self.max_steps else 1.0
        return min(1.0, max(0.0, fraction))


_NO_STEPS: Final = StepBudget(max_steps=0, until_s=None)


class Pace(Protocol):
    """How the rounds of a run follow each other."""

    @property
    def rounds(self) -> int:
        """Training rounds of the run."""
        ...

    @property
    def closing_rounds(self) -> int:
        """Rounds of pure mixing after them."""
        ...

    def phase(self, round: int) -> RoundPhase:
        """Return what `round` is for."""
        ...

    def budget(self, round: int, now_s: float, plan: StepPlan) -> StepBudget:
        """Return the inner steps of `round`, which begins at `now_s`.

        Args:
            round: the round.
            now_s: unix seconds.
            plan: what this peer intends for the round.
        """
        ...

    def next_round(self, own_round: int, swarm_round: int | None, now_s: float) -> int:
        """Return the round to enter after `own_round` (-1: none yet); always a later one.

        Args:
            own_round: the last round that this peer entered.
            swarm_round: the estimated round of the swarm; None if unknown.
            now_s: unix seconds.
        """
        ...

    def starts_in_s(self, round: int, now_s: float) -> float:
        """Return the seconds until `round` begins; 0 when it may begin at once."""
        ...

    def edge_deadline_s(
        self,
        round: int,
        now_s: float,
        *,
        own_cycle_s: float,
        partner_cycle_s: float,
        transfer_s: float,
        awaited: bool = True,
        floor_s: float,
        ceiling_s: float,
    ) -> float:
        """Return the seconds from `now_s` after which an edge of `round` is given up.

        Args:
            round: the round.
            now_s: unix seconds.
            own_cycle_s: this peer's median seconds per round; 0 if unknown.
            partner_cycle_s: what the partner's record says; 0 if unknown.
            transfer_s: seconds that the exchange itself is expected to take; 0 if unknown.
            awaited: whether the outer step waits for it.
            floor_s: least deadline where the pace does not set it.
            ceiling_s: greatest deadline where the pace does not set it.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class StepsPace:
    """Every round holds as many inner steps as planned; partners wait for each other.

    Attributes:
        rounds: training rounds.
        closing_rounds: rounds of pure mixing after them.
    """

    rounds: int
    closing_rounds: int

    def phase(self, round: int) -> RoundPhase:
        """Return what `round` is for."""
        return round_phase(round, rounds=self.rounds, closing_rounds=self.closing_rounds)

    def budget(self, round: int, now_s: float, plan: StepPlan) -> StepBudget:
        """Return the planned steps for a training round, none for a later one."""
        if self.phase(round) is not RoundPhase.TRAINING:
            return _NO_STEPS
        return StepBudget(max_steps=plan.steps, until_s=None)

    def next_round(self, own_round: int, swarm_round: int | None, now_s: float) -> int:
        """Return the next round; a peer more than one behind skips to the swarm's round."""
        return own_round + 1 if swarm_round is None else max(own_round + 1, swarm_round)

    def starts_in_s(self, round: int, now_s: float) -> float:
        """Return 0: a round begins as soon as this peer comes to it."""
        return 0.0

    def edge_deadline_s(
        self,
        round: int,
        now_s: float,
        *,
        own_cycle_s: float,
        partner_cycle_s: float,
        transfer_s: float,
        awaited: bool = True,
        floor_s: float,
        ceiling_s: float,
    ) -> float:
        """Return four of the slower peer's cycles and four transfers, in [floor_s, ceiling_s]."""
        cycle_s = max(own_cycle_s, partner_cycle_s)
        if cycle_s <= 0:
            # While no cycle is known, a slow partner must not be taken for a dead one.
            return ceiling_s
        deadline_s = CYCLES_PER_EDGE * cycle_s + TRANSFERS_PER_EDGE * transfer_s
        return min(ceiling_s, max(floor_s, deadline_s))


@dataclass(frozen=True, kw_only=True, slots=True)
class SecondsPace:
    """Round t begins at t0 + t x period for everybody and holds as many steps as fit.

    Attributes:
        t0_s: unix seconds at which round 0 begins.
        period_s: length of a round.
        rounds: training rounds.
        closing_rounds: rounds of pure mixing after them.
        exchange_budget_s: least time before the end of a round in which no step begins.
        overlap: whether a round exchanges under the inner steps of the next one, so that the last
            round alone needs such a time.
    """

    t0_s: float
    period_s: float
    rounds: int
    closing_rounds: int
    exchange_budget_s: float
    overlap: bool = False

    def phase(self, round: int) -> RoundPhase:
        """Return what `round` is for."""
        return round_phase(round, rounds=self.rounds, closing_rounds=self.closing_rounds)

    def budget(self, round: int, now_s: float, plan: StepPlan) -> StepBudget:
        """Return the time until sending must start, for a training round; no steps later on."""
        if self.phase(round) is not RoundPhase.TRAINING:
            return _NO_STEPS
        reserved_s = max(self.exchange_budget_s, TRANSFERS_RESERVED * plan.exchange_s)
        if self.overlap and self.phase(round + 1) is RoundPhase.TRAINING:
            reserved_s = 0.0
        return StepBudget(max_steps=None, until_s=self._ends_s(round) - reserved_s)

    def next_round(self, own_round: int, swarm_round: int | None, now_s: float) -> int:
        """Return the round that the clock shows, or the one after `own_round` if that is later."""
        return max(own_round + 1, math.floor((now_s - self.t0_s) / self.period_s))

    def starts_in_s(self, round: int, now_s: float) -> float:
        """Return the seconds until the clock shows `round`."""
        return max(0.0, self.t0_s + round * self.period_s - now_s)

    def edge_deadline_s(
        self,
        round: int,
        now_s: float,
        *,
        own_cycle_s: float,
        partner_cycle_s: float,
        transfer_s: float,
        awaited: bool = True,
        floor_s: float,
        ceiling_s: float,
    ) -> float:
        """Return the seconds until the end of `round`, and at least `MIN_DEADLINE_S`.

        An edge that nobody awaits has four transfers, up to `ceiling_s`, if that is longer.
        """
        least_s = MIN_DEADLINE_S if awaited else min(ceiling_s, TRANSFERS_PER_EDGE * transfer_s)
        return max(MIN_DEADLINE_S, least_s, self._ends_s(round) - now_s)

    def _ends_s(self, round: int) -> float:
        return self.t0_s + (round + 1) * self.period_s


def lr_at(
    position: float,
    *,
    rounds: int,
    peak: float,
    warmup_rounds: float,
    min_ratio: float,
    schedule: Schedule,
    decay_rounds: float = 0.0,
) -> float:
    """Return the inner learning rate at `position` (docs/design.md, section 6).

    Args:
        position: the round plus the fraction of it that is done, >= 0.
        rounds: training rounds, at whose end a cosine or a decay reaches its minimum.
        peak: learning rate after the linear warm-up from 0.
        warmup_rounds: length of the warm-up.
        min_ratio: that minimum as a part of `peak`.
        schedule: after the warm-up "cosine", "constant", or "wsd" (warm-up, stable, decay), which
            is constant and falls in a straight line at the end. Source: Hu et al., "MiniCPM".
        decay_rounds: rounds of that decay, after the warm-up at the earliest; 0: a fifth of all.
    """
    if position < warmup_rounds:
        return peak * position / warmup_rounds
    if schedule == "constant":
        return peak
    if position >= rounds:
        return peak * min_ratio
    if schedule == "wsd":
        begins = max(warmup_rounds, rounds - (decay_rounds or DECAY_SHARE * rounds))
        fallen = max(0.0, (position - begins) / (rounds - begins))
        return peak * (1 - (1 - min_ratio) * fallen)
    progress = (position - warmup_rounds) / (rounds - warmup_rounds)
    return peak * (min_ratio + (1 - min_ratio) * (1 + math.cos(math.pi * progress)) / 2)
