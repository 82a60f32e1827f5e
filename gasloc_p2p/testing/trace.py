"""What a simulated swarm did, and what has to hold of it whatever went wrong."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Final

import msgspec
import torch
from blake3 import blake3
from torch import Tensor

from gasloc_p2p.config import Config
from gasloc_p2p.core.types import EdgeKind
from gasloc_p2p.node.events import RoundFinished, RoundStarted
from gasloc_p2p.testing.faults import FaultPlan, Stall
from gasloc_p2p.testing.peer import Life

SLACK_S: Final = 8.0
"""What a round may take beyond its training and its edges: last words and the record store."""

JOINING_ROUNDS: Final = 8
"""A peer that starts takes part before so many rounds could have passed."""


class InvariantError(AssertionError):
    """Something that has to hold of every run does not; the message says what."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """How long things may take, in virtual seconds.

    Attributes:
        round_s: a round.
        joining_s: from the start of a process to its first round, and from a round to the next one
            with which a peer that slept catches up.
        checkpoint_rounds: the most rounds that a crash may lose; None without a limit.
    """

    round_s: float
    joining_s: float
    checkpoint_rounds: int | None

    @classmethod
    def of(cls, config: Config) -> Limits:
        """Return the limits of a run with these settings."""
        pace = config.pace
        if pace.mode == "seconds":
            round_s = pace.period_s + SLACK_S
        else:
            training_s = config.inner.local_steps * config.simulate.step_s
            round_s = training_s + pace.edge_ceiling_s + SLACK_S
        return cls(
            round_s=round_s,
            joining_s=JOINING_ROUNDS * round_s,
            checkpoint_rounds=config.checkpoint.every_rounds or None,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Disturbance:
    """Something that the plan did: when, in which round of the foremost peer, and what."""

    at_s: float
    round: int
    what: str

    def __str__(self) -> str:
        return f"{self.at_s:6.1f} s, round {self.round}: {self.what}"


@dataclass(kw_only=True, slots=True)
class SwarmTrace:
    """Everything that the peers of one run did.

    Attributes:
        peers: how many there were.
        plan: what was to go wrong.
        limits: how long things may take.
        lives: of all peers, in the order in which they began.
        disturbances: what did go wrong, and what was over again.
    """

    peers: int
    plan: FaultPlan
    limits: Limits
    lives: list[Life] = field(default_factory=list)
    disturbances: list[Disturbance] = field(default_factory=list)

    def note(self, at_s: float, round: int, what: str) -> None:
        """Remember a disturbance."""
        self.disturbances.append(Disturbance(at_s=at_s, round=round, what=what))

    def lives_of(self, peer: int) -> list[Life]:
        """Return the lives of one peer, one after the other."""
        return [life for life in self.lives if life.peer == peer]

    @property
    def digest(self) -> str:
        """Hex digest of all that happened and when; equal runs have equal ones."""
        hasher = blake3()
        for life in self.lives:
            hasher.update(repr((life.peer, life.began_s, life.ended_s, life.end)).encode())
            for at_s, event in life.log:
                hasher.update(msgspec.msgpack.encode((at_s, event)))
            for theta in life.thetas.values():
                hasher.update(theta.numpy().tobytes())
        return hasher.hexdigest(length=16)

    @property
    def last_disturbed_round(self) -> int:
        """Round of the foremost peer when the last fault happened or was over; -1 if none did."""
        return max((disturbance.round for disturbance in self.disturbances), default=-1)

    def thetas(self, round: int) -> list[Tensor]:
        """Return the parameters, [P] each, of all peers that took part in `round`, at its end."""
        latest = {life.peer: life.thetas[round] for life in self.lives if round in life.thetas}
        return [latest[peer] for peer in sorted(latest)]

    def disagreement(self, round: int) -> float:
        """Return the root mean square distance of the peers from their mean after `round`.

        Only peers count that took part in the round; nan when there was none.
        """
        thetas = self.thetas(round)
        if not thetas:
            return math.nan
        together = torch.stack(thetas).double()
        return float((together - together.mean(dim=0)).square().sum(dim=1).mean().sqrt())

    def training_rounds(self) -> list[int]:
        """Return the training rounds that any peer has finished."""
        finished = {
            event.report.round
            for life in self.lives
            for event in life.of(RoundFinished)
            if not event.report.closing
        }
        return sorted(finished)

    # What has to hold.

    def assert_all(self, *, fault_free: SwarmTrace) -> None:
        """Check everything that follows.

        Raises:
            InvariantError: something does not hold.
        """
        self.assert_nobody_failed()
        self.assert_no_hang()
        self.assert_finite()
        self.assert_rounds_rise()
        self.assert_no_checkpoint_lost()
        self.assert_absorbed(fault_free)
        self.assert_edges_work()

    def assert_nobody_failed(self) -> None:
        """Whoever was not killed came to the end of the run.

        Raises:
            InvariantError: a peer failed, or left before the end.
        """
        for life in self.lives:
            if life.end not in ("finished", "killed"):
                raise InvariantError(f"peer {life.peer} {life.end}{_told(life.error)}")

    def assert_no_hang(self) -> None:
        """No round took longer than training, its edges' deadline and its stalls allow.

        Nor did the pause before one, or joining.

        Raises:
            InvariantError: something took longer.
        """
        for life in self.lives:
            for what, took_s, allowed_s in self._spans(life):
                if took_s > allowed_s:
                    raise InvariantError(
                        f"{what} of peer {life.peer} took {took_s:.1f} s, at most "
                        f"{allowed_s:.1f} s are allowed"
                    )

    def _spans(self, life: Life) -> Iterator[tuple[str, float, float]]:
        """Yield what a life consists of, how long each part took, and how long it may take."""
        stalled_s: defaultdict[int, float] = defaultdict(float)
        for stall in self.plan.of(Stall, life.peer):
            stalled_s[stall.round] += stall.seconds
        since_s, what, allowed_s = life.began_s, "joining", self.limits.joining_s
        for at_s, event in life.log:
            if isinstance(event, RoundStarted):
                yield what, at_s - since_s, allowed_s
                since_s, what = at_s, f"round {event.round}"
                allowed_s = self.limits.round_s + stalled_s[event.round]
            elif isinstance(event, RoundFinished):
                yield what, at_s - since_s, allowed_s
                since_s, what = at_s, f"the time after round {event.report.round}"
                allowed_s = self.limits.joining_s
        yield what, life.ended_s - since_s, allowed_s

    def assert_finite(self) -> None:
        """All parameters and losses are finite numbers.

        Raises:
            InvariantError: some are not.
        """
        for life in self.lives:
            for round, theta in life.thetas.items():
                if not bool(torch.isfinite(theta).all()):
                    raise InvariantError(f"peer {life.peer} is not finite after round {round}")
            for event in life.of(RoundFinished):
                loss = event.report.train_loss
                if loss is not None and not math.isfinite(loss):
                    raise InvariantError(
                        f"peer {life.peer} has loss {loss} in round {event.report.round}"
                    )

    def assert_rounds_rise(self) -> None:
        """No process applied a round twice or went back.

        Raises:
            InvariantError: one did.
        """
        for life in self.lives:
            rounds = [event.report.round for event in life.of(RoundFinished)]
            for before, after in itertools.pairwise(rounds):
                if after <= before:
                    raise InvariantError(f"peer {life.peer} did round {after} after {before}")

    def assert_no_checkpoint_lost(self) -> None:
        """Whoever keeps checkpoints left a whole one, as recent as the settings promise.

        Raises:
            InvariantError: one is damaged, missing, or too old.
        """
        allowed = self.limits.checkpoint_rounds
        for life in self.lives:
            if life.checkpoints is None:
                continue
            if life.checkpoints.problems:
                raise InvariantError(f"peer {life.peer}: {life.checkpoints.problems[0]}")
            rounds = [event.report.round for event in life.of(RoundFinished)]
            saved = life.checkpoints.newest
            if rounds and saved is None:
                raise InvariantError(f"peer {life.peer} left no checkpoint")
            if rounds and saved is not None and allowed is not None:
                lost = sum(round >= saved for round in rounds)
                if lost >= allowed:
                    raise InvariantError(
                        f"peer {life.peer} had done {lost} rounds since the checkpoint of round "
                        f"{saved} when it ended after round {rounds[-1]}"
                    )

    def assert_absorbed(
        self, fault_free: SwarmTrace, *, within_rounds: int = 10, factor: float = 2.0
    ) -> None:
        """The peers are as close together as if nothing had gone wrong, and stay so.

        Args:
            fault_free: a run without faults of as many peers.
            within_rounds: from so many rounds after the last disturbance on.
            factor: how many times the fault-free disagreement is close enough.

        Raises:
            InvariantError: they are not, or no round is left to tell.
        """
        level = fault_free.usual_disagreement()
        due = self.last_disturbed_round + within_rounds
        later = [round for round in self.training_rounds() if round >= due]
        if not later:
            raise InvariantError(f"the last fault came too late to tell: round {due} is not there")
        for round in later:
            found = self.disagreement(round)
            if not found < factor * level:
                raise InvariantError(
                    f"the disagreement after round {round} is {found:.3g}, {found / level:.1f} "
                    f"times that without faults, {round - self.last_disturbed_round} rounds after "
                    "the last fault"
                )

    def assert_edges_work(self, *, within_rounds: int = 10, least_share: float = 0.9) -> None:
        """Once the last fault is a while ago, nearly all edges are applied.

        Args:
            within_rounds: from so many rounds after the last disturbance on.
            least_share: of the edges of those rounds, training and closing.

        Raises:
            InvariantError: fewer are.
        """
        due = self.last_disturbed_round + within_rounds
        kinds = Counter[EdgeKind]()
        for round, counted in self.edges().items():
            if round >= due:
                kinds += counted
        applied, total = kinds[EdgeKind.APPLIED], kinds.total()
        if applied < least_share * total:
            raise InvariantError(
                f"of the {total} edges from round {due} on, {within_rounds} rounds after the last "
                f"fault, only {applied} are applied"
            )

    def edges(self) -> dict[int, Counter[EdgeKind]]:
        """Return how the edges of each round ended, each counted at both its ends."""
        kinds: defaultdict[int, Counter[EdgeKind]] = defaultdict(Counter)
        for life in self.lives:
            for event in life.of(RoundFinished):
                kinds[event.report.round].update(edge.kind for edge in event.report.edges)
        return dict(sorted(kinds.items()))

    def usual_disagreement(self) -> float:
        """Return the mean disagreement over the second half of the training rounds."""
        rounds = self.training_rounds()
        return fmean(self.disagreement(round) for round in rounds[len(rounds) // 2 :])

    def tell(self) -> str:
        """Say in a few lines what every peer did."""
        return "\n".join(line for peer in range(self.peers) for line in self._tell(peer))

    def _tell(self, peer: int) -> Iterator[str]:
        for life in self.lives_of(peer):
            rounds = [event.report.round for event in life.of(RoundFinished)]
            edges = Counter(
                edge.kind.value for event in life.of(RoundFinished) for edge in event.report.edges
            )
            span = _spans_of(rounds) or "none"
            counted = ", ".join(f"{count} {kind}" for kind, count in sorted(edges.items()))
            until = f" to {life.ended_s:.1f} s" if life.end else " s on"
            yield (
                f"peer {peer}: from {life.began_s:.1f}{until}, rounds {span}; edges "
                f"{counted or 'none'}; {life.end or _last_word(life)}{_told(life.error)}"
            )


def _spans_of(rounds: Sequence[int]) -> str:
    """Return rising numbers as spans: 0-3, 7, 9-12."""
    spans: list[list[int]] = []
    for number in rounds:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(f"{a}-{b}" if a < b else str(a) for a, b in spans)


def _last_word(life: Life) -> str:
    """Say since when nothing was heard of a peer that still runs."""
    if not life.log:
        return "not heard of"
    at_s, event = life.log[-1]
    round = f" of round {event.round}" if isinstance(event, RoundStarted) else ""
    return f"last heard of at {at_s:.1f} s: {type(event).__name__}{round}"


def _told(error: BaseException | None) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return "" if error is None else f": {type(error).__name__}: {error}"
