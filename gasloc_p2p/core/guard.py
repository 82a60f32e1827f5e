"""How far one partner may pull a peer, and which partners a peer leaves out for a while.

A difference between two peers' parameters is compared with the usual one, the median of those that
were accepted lately. One that is far longer is clipped: its factor goes to the partner in Ready,
both sides use the smaller of the two, and so the mean of the two stays. What no honest peer shows
is an offence, and a peer that repeats offences is left out by whoever saw them; nobody else learns
of it. docs/trust.md says what this protects from and what it does not.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections import deque
from typing import Final

import msgspec

from gasloc_p2p.core.types import PeerId

HISTORY_EDGES: Final = 32
KNOWN_EDGES: Final = 2
"""From so many accepted edges on, their median is the usual length."""

CLIP_RATIO: Final = 5.0
"""Without faults, and after ten rounds alone, differences are at most 4.8 times the usual one."""

OFFENCE_RATIO: Final = 10.0
"""A difference as long as this is clipped to the usual length. Clipped to the limit, one in seven
would still ruin a peer, because outer momentum repeats every pull for many rounds."""

OFFENCES: Final = 3
RECENT_EDGES: Final = 8
EXCLUSION_ROUNDS: Final = 32
MAX_OFFENDERS: Final = 256


class Conduct(msgspec.Struct, frozen=True, kw_only=True):
    """What is remembered of a peer that has offended.

    Attributes:
        recent: of its last edges, oldest first, whether each was an offence.
        excluded_through: last round in which it is left out; -1 when it was never.
    """

    recent: tuple[bool, ...] = ()
    excluded_through: int = -1


class GuardState(msgspec.Struct, frozen=True, kw_only=True):
    """All that a guard remembers from one round to the next; survives a trip through JSON.

    Attributes:
        first_round: the first round that it saw; None before any.
        lengths: of the differences that were accepted last, oldest first.
        far: of the last edges with anybody, oldest first, whether the partner was too far away.
        conduct: of the peers that offended, the latest offender last.
    """

    first_round: int | None = None
    lengths: tuple[float, ...] = ()
    far: tuple[bool, ...] = ()
    conduct: dict[PeerId, Conduct] = {}


class Guard:
    """Judges the differences on one peer's edges, and remembers who offends.

    Deterministic: within a round nothing depends on the order in which its edges are judged.

    Args:
        state: what an earlier guard remembered.
        active: whether it does anything; otherwise nothing is clipped and nobody is left out.
    """

    def __init__(self, state: GuardState | None = None, *, active: bool = True) -> None:
        state = state or GuardState()
        self._active = active
        self._first_round = state.first_round
        self._lengths = deque(state.lengths, maxlen=HISTORY_EDGES)
        self._far = deque(state.far, maxlen=RECENT_EDGES)
        self._conduct = dict(state.conduct)
        self._usual = 0.0

    def state(self) -> GuardState:
        """Return what `Guard` needs to go on as this one would."""
        return GuardState(
            first_round=self._first_round,
            lengths=tuple(self._lengths),
            far=tuple(self._far),
            conduct=dict(self._conduct),
        )

    def open_round(self, round: int, *, motion: float) -> None:
        """Settle how long a difference is usual in `round`.

        Peers that begin with the run share its initial parameters. As long as nothing else is
        known to one of them, what its local steps changed tells how far apart peers can be. One
        that comes later takes its first differences as they are.

        Args:
            round: the round.
            motion: norm of what the local steps changed.
        """
        if self._first_round is None:
            self._first_round = round
        self._usual = 0.0
        if self._active and len(self._lengths) >= KNOWN_EDGES:
            self._usual = statistics.median(self._lengths)
        elif self._active and self._first_round == 0:
            self._usual = motion

    def factor(self, length: float) -> float:
        """Return the factor in (0, 1] by which a difference of this length is clipped.

        It is 1 up to `CLIP_RATIO` times the usual length, and as long as that is not known.
        """
        if length <= self._limit:
            return 1.0
        kept = self._usual if self.is_far(length) else self._limit
        return max(kept / length, sys.float_info.min)

    def ratio(self, length: float) -> float:
        """Return a length as a multiple of the usual one; 0 as long as that is not known."""
        return length / self._usual if self._usual else 0.0

    def is_far(self, length: float) -> bool:
        """Whether a difference is longer than those of honest peers that have kept in touch."""
        return self.ratio(length) > OFFENCE_RATIO

    def accept(self, length: float) -> None:
        """Remember the difference of an edge that was mixed in a training round.

        It counts as it was clipped here: far ones change nothing, and the limit still follows when
        all differences become longer. Those of closing rounds are not remembered: without local
        steps peers come together, and what is usual then is not usual in training.
        """
        if length > 0:
            self._lengths.append(length * self.factor(length))

    def note(self, peer: PeerId, round: int, *, offence: bool, far: bool = False) -> int:
        """Remember what the latest edge with `peer` was like.

        One that is far away offends, unless half of the latest edges with anybody are like that:
        then this peer may as well be the one that went astray, or two halves of the swarm meet
        again after they were cut off from each other.

        Args:
            peer: the partner.
            round: the round.
            offence: whether it did what no honest peer does.
            far: whether its parameters were too far away, by `is_far`.

        Returns:
            How many of its last `RECENT_EDGES` edges were offences. With `OFFENCES` of them it is
            left out for the next `EXCLUSION_ROUNDS` rounds, and begins anew after them.
        """
        if not self._active:
            return 0
        self._far.append(far)
        offence = offence or (far and 2 * sum(self._far) < len(self._far))
        known = self._conduct.get(peer)
        if known is None and not offence:
            return 0
        recent = (*(known.recent if known else ()), offence)[-RECENT_EDGES:]
        offences = sum(recent)
        if offence or not offences:
            self._conduct.pop(peer, None)
        if offences >= OFFENCES:
            self._conduct[peer] = Conduct(excluded_through=round + EXCLUSION_ROUNDS)
        elif offences:
            self._conduct[peer] = Conduct(recent=recent)
        if len(self._conduct) > MAX_OFFENDERS:
            del self._conduct[next(iter(self._conduct))]
        return offences

    def is_excluded(self, peer: PeerId, round: int) -> bool:
        """Whether `peer` is left out in `round`."""
        return round <= self.excluded_through(peer)

    def excluded_through(self, peer: PeerId) -> int:
        """Return the last round in which `peer` is left out; -1 when it never was."""
        conduct = self._conduct.get(peer)
        return -1 if conduct is None else conduct.excluded_through

    @property
    def _limit(self) -> float:
        """The longest difference that is not clipped in this round."""
        return CLIP_RATIO * self._usual if self._usual else math.inf
