"""What goes wrong in a swarm, to whom and when, written down beforehand so that it can be repeated.

Peers are named by their index. What is planned for a peer's round does not happen when the peer
takes no part in that round.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias, TypeVar

QUIET_START_ROUNDS: Final = 3
QUIET_END_ROUNDS: Final = 14
"""A random plan spares these rounds, so that peers have met, and have time to come together."""

LONGEST_AWAY_ROUNDS: Final = 6
LONGEST_STALL_ROUNDS: Final = 8
LONGEST_PARTITION_ROUNDS: Final = 10
LARGEST_SKEW_S: Final = 2.5
"""The DHT refuses nodes whose clocks are more than 3 s apart."""

SKEWED_SHARE: Final = 0.2
GONE_FOR_GOOD_SHARE: Final = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class Kill:
    """The peer's process is gone from one moment to the next, without a word to anybody.

    Attributes:
        peer: who.
        round: its round.
        after_s: seconds from the start of that round.
        back_after_rounds: how many rounds the swarm goes on before the peer is started again, with
            the same identity and the same folder; None if it stays away.
    """

    peer: int
    round: int
    after_s: float = 0.0
    back_after_rounds: int | None = None

    def __str__(self) -> str:
        away = self.back_after_rounds
        back = "for good" if away is None else f"and started again in round {self.round + away}"
        return f"peer {self.peer} is killed {self.after_s:.1f} s into round {self.round}, {back}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Stall:
    """The first local step of the round takes `seconds` longer; the network goes on answering."""

    peer: int
    round: int
    seconds: float

    def __str__(self) -> str:
        return f"peer {self.peer} stands still for {self.seconds:.1f} s in round {self.round}"


@dataclass(frozen=True, kw_only=True, slots=True)
class CorruptChunk:
    """One bit of the first chunk that the peer sends in this round flips on the way."""

    peer: int
    round: int

    def __str__(self) -> str:
        return f"a chunk that peer {self.peer} sends in round {self.round} is corrupt"


@dataclass(frozen=True, kw_only=True, slots=True)
class DropAck:
    """The stream ends before the partner's last word, Applied, has reached the peer."""

    peer: int
    round: int

    def __str__(self) -> str:
        return f"the Applied that peer {self.peer} waits for in round {self.round} is lost"


@dataclass(frozen=True, kw_only=True, slots=True)
class LieAboutSchema:
    """The peer's first Hello of this round claims parameters of another kind."""

    peer: int
    round: int

    def __str__(self) -> str:
        return f"peer {self.peer} lies about its schema in round {self.round}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """Some peers reach each other but nobody else, and nobody else reaches them.

    Attributes:
        round: it begins when the first peer of the swarm begins this round.
        seconds: how long it lasts.
        peers: indices of the peers on one side.
    """

    round: int
    seconds: float
    peers: frozenset[int]

    def __str__(self) -> str:
        side = ", ".join(map(str, sorted(self.peers)))
        are = "peers are" if len(self.peers) > 1 else "peer is"
        return f"these {are} cut off for {self.seconds:.1f} s from round {self.round} on: {side}"


@dataclass(frozen=True, kw_only=True, slots=True)
class SkewClock:
    """The peer's clock is this much ahead of the others', for the whole run."""

    peer: int
    seconds: float

    def __str__(self) -> str:
        return f"the clock of peer {self.peer} is {self.seconds:+.1f} s off"


WireFault: TypeAlias = CorruptChunk | DropAck | LieAboutSchema
Fault: TypeAlias = Kill | Stall | WireFault | Partition | SkewClock

F = TypeVar("F", Kill, Stall, SkewClock, CorruptChunk, DropAck, LieAboutSchema)


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultPlan:
    """The faults of one run, in no particular order; printing it tells them in words."""

    faults: tuple[Fault, ...] = ()

    def of(self, kind: type[F], peer: int) -> list[F]:
        """Return what of one kind is planned for one peer."""
        return [f for f in self.faults if isinstance(f, kind) and f.peer == peer]

    def on_the_wire(self, peer: int) -> list[WireFault]:
        """Return what is planned for the bytes of one peer."""
        return [f for f in self.faults if isinstance(f, WireFault) and f.peer == peer]

    @property
    def partitions(self) -> list[Partition]:
        """The partitions by the rounds in which they begin."""
        found = [fault for fault in self.faults if isinstance(fault, Partition)]
        return sorted(found, key=_round_of)

    def __str__(self) -> str:
        told = sorted(self.faults, key=lambda fault: (_round_of(fault), str(fault)))
        return "\n".join(map(str, told)) or "nothing goes wrong"

    @classmethod
    def random(cls, seed: int, *, peers: int, rounds: int, round_s: float = 1.0) -> FaultPlan:
        """Return the plan that follows from `seed`, with about as many faults as there are peers.

        The first `QUIET_START_ROUNDS` and the last `QUIET_END_ROUNDS` rounds are spared: stalls and
        partitions are over by then, and whoever comes back has been started again. Three quarters
        of the peers are never killed.

        Args:
            seed: of this plan alone.
            peers: how many there are.
            rounds: training rounds of the run.
            round_s: seconds that a round without faults takes.

        Raises:
            ValueError: there is no other peer, or no round in which something could happen.
        """
        end = rounds - QUIET_END_ROUNDS
        if peers < 2 or end <= QUIET_START_ROUNDS:
            least = QUIET_START_ROUNDS + QUIET_END_ROUNDS + 1
            raise ValueError(f"random faults need at least 2 peers and {least} rounds")
        draw = _Draw(random.Random(f"{seed} {peers} {rounds}"), peers, end, round_s)
        return cls(
            faults=(
                *draw.kills(),
                *draw.stalls(),
                *draw.wire_faults(),
                *draw.partitions(),
                *draw.skews(),
            )
        )


def _round_of(fault: Fault) -> int:
    return -1 if isinstance(fault, SkewClock) else fault.round


class _Draw:
    """Random faults among `peers` peers, all over by round `end`."""

    def __init__(self, draw: random.Random, peers: int, end: int, round_s: float) -> None:
        self._draw = draw
        self._peers = peers
        self._end = end
        self._round_s = round_s

    def _some(self, most: int) -> list[int]:
        """Return at most so many different peers, and at least one."""
        return self._draw.sample(range(self._peers), self._draw.randint(1, max(1, most)))

    def _round(self) -> int:
        return self._draw.randrange(QUIET_START_ROUNDS, self._end)

    def _seconds(self, round: int, most_rounds: int) -> float:
        """Return how long something lasts that begins in `round`."""
        return self._round_s * self._draw.uniform(0.5, min(most_rounds, self._end - round))

    def kills(self) -> Iterator[Kill]:
        for peer in self._some(self._peers // 4):
            round = self._round()
            while True:
                after_s = self._draw.uniform(0.0, 1.5 * self._round_s)
                away = self._draw.randint(0, min(LONGEST_AWAY_ROUNDS, self._end - round))
                if self._draw.random() < GONE_FOR_GOOD_SHARE:
                    yield Kill(peer=peer, round=round, after_s=after_s)
                    break
                yield Kill(peer=peer, round=round, after_s=after_s, back_after_rounds=away)
                # Soon after it has come back, some are killed again.
                round += away + self._draw.randint(3, 8)
                if round >= self._end:
                    break

    def stalls(self) -> Iterator[Stall]:
        for peer in self._some(self._peers // 4):
            round = self._round()
            seconds = self._seconds(round, LONGEST_STALL_ROUNDS)
            yield Stall(peer=peer, round=round, seconds=seconds)

    def wire_faults(self) -> Iterator[WireFault]:
        kinds = (CorruptChunk, CorruptChunk, DropAck, DropAck, LieAboutSchema)
        for _ in range(self._draw.randint(1, self._peers)):
            kind = self._draw.choice(kinds)
            yield kind(peer=self._draw.randrange(self._peers), round=self._round())

    def partitions(self) -> Iterator[Partition]:
        for _ in range(self._draw.randint(0, 2)):
            round = self._round()
            seconds = self._seconds(round, LONGEST_PARTITION_ROUNDS)
            side = frozenset(self._some(self._peers // 2))
            yield Partition(round=round, seconds=seconds, peers=side)

    def skews(self) -> Iterator[SkewClock]:
        for peer in range(self._peers):
            if self._draw.random() < SKEWED_SHARE:
                seconds = self._draw.uniform(-LARGEST_SKEW_S, LARGEST_SKEW_S)
                yield SkewClock(peer=peer, seconds=seconds)
