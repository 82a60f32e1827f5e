"""Who is in the swarm: this peer's signed record goes out, everybody else's come in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from gasloc_p2p.core.errors import IdentityError
from gasloc_p2p.core.records import (
    RECORD_TTL_S,
    Reachability,
    Record,
    RecordError,
    Verdict,
    Verify,
    Work,
    open_record,
)
from gasloc_p2p.core.roster import (
    GOODBYE_ROUNDS,
    VIEW_LAG_ROUNDS,
    Roster,
    RosterBook,
)
from gasloc_p2p.core.skew import SkewWatch
from gasloc_p2p.core.stride import Stride
from gasloc_p2p.core.substrate import Clock, Network
from gasloc_p2p.core.types import PeerId
from gasloc_p2p.node.events import Notice, Observer

STORE_DEADLINE_S = 5.0
REFRESH_PERIOD_S = 1.0
FOLLOW_PER_CYCLE = 0.5
"""A peer that skips rounds looks so often where the others are, in their cycles: its lease lapses
if it misses two of their rounds."""
FIRST_POLL_S = 0.05
LAST_POLL_S = 1.0
POLL_GROWTH = 1.1
"""Polls come quickly at first, so that peers which wait for each other begin together, and less
often once it takes long."""

TWIN_WATCH_S = 2.0
TWIN_POLL_S = 0.25
TWIN_WATCH_LIMIT_S = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """What this peer tells of itself whenever it renews its record.

    Attributes:
        work: its speed, and what it has done.
        every: the stride that it wants; None for the one that it has.
    """

    work: Work = field(default_factory=Work)
    every: int | None = None


class Membership:
    """This peer's view of the swarm, kept current through the network's record store.

    Args:
        network: where records are published and found.
        clock: wall time, for expirations.
        run_id: records of other runs are ignored.
        rounds: training rounds of the run.
        verify: checks a signature against the peer id that made it.
        observe: told of clocks that disagree.
    """

    def __init__(
        self,
        *,
        network: Network,
        clock: Clock,
        run_id: str,
        rounds: int,
        verify: Verify,
        observe: Observer,
    ) -> None:
        self._network = network
        self._clock = clock
        self._run_id = run_id
        self._verify = verify
        self._observe = observe
        self._skew = SkewWatch()
        self._profile = Profile()
        self._seq = 0
        self._expires_at = 0.0
        self._round = 0
        self._announced = False
        self._left_behind: Record | None = None
        self.book = RosterBook(run_id, network.peer_id, rounds=rounds)

    async def announce(self, round: int, *, first_round: int) -> None:
        """Declare that this peer takes part from `first_round` on."""
        await self._publish(round, first_round=first_round)

    async def renew(self, round: int, profile: Profile) -> None:
        """Extend this peer's lease from `round`; one that has lapsed starts afresh a bit later."""
        self._profile = profile
        await self._publish(self._signed_round(round))

    async def stay_stored(self, round: int, profile: Profile) -> None:
        """Renew again before the record expires, in rounds that last so long; never returns."""
        while True:
            await asyncio.sleep(RECORD_TTL_S / 3)
            await self.renew(round, profile)

    async def follow(self, turn: int) -> None:
        """Renew in each round that the others come to before `turn`, our next; never returns."""
        while True:
            pause_s = FOLLOW_PER_CYCLE * self.cycle_s()
            await asyncio.sleep(min(REFRESH_PERIOD_S, max(FIRST_POLL_S, pause_s)))
            await self.refresh()
            if self._seen_round(turn) > self._round:
                await self._publish(self._seen_round(turn))

    async def say_goodbye(self, round: int) -> None:
        """Shorten the lease so that every roster drops this peer at the same round."""
        if self._announced:
            signed_round = self._signed_round(round)
            await self._publish(signed_round, lease_until=signed_round + GOODBYE_ROUNDS)

    def _signed_round(self, round: int) -> int:
        """Return the round that a record of this peer's `round` is signed in.

        One that skips rounds is in all of them until its next turn: its lease is in the rounds of
        the others, from the one that they have come to.
        """
        turn = self.stride().next_turn(round + 1)
        if turn == round + 1 or self.swarm_round() is None:
            return round
        return self._seen_round(turn)

    def _seen_round(self, turn: int) -> int:
        """Return the round that the others have come to, at most our next turn."""
        return max(self._round, min(turn, self.swarm_round() or 0))

    async def _publish(
        self,
        round: int,
        *,
        first_round: int | None = None,
        lease_until: int | None = None,
    ) -> None:
        now_s = self._clock.unix_s()
        self._round = round
        self._announced = True
        # Both rise even if the clock does not: the store refuses what expires no later.
        self._seq = max(self._seq + 1, int(now_s * 1000))
        self._expires_at = max(self._expires_at + 1e-3, now_s + RECORD_TTL_S)
        self.book.renew(
            round=round,
            first_round=first_round,
            lease_until=lease_until,
            seq=self._seq,
            work=self._profile.work,
            every=self._profile.every,
            reachability=Reachability.PUBLIC,
            expires_at=self._expires_at,
            sign=self._network.sign,
        )
        await self._network.publish_record(self.book.own_signed, deadline_s=STORE_DEADLINE_S)

    async def refresh(self) -> None:
        """Fetch the records that the store holds now.

        Raises:
            IdentityError: another process publishes records with this peer's identity.
        """
        self.take_records(
            await self._network.fetch_records(self._run_id, deadline_s=STORE_DEADLINE_S)
        )
        self.book.expire(self._clock.unix_s())

    async def keep_current(self) -> None:
        """Fetch again and again while a partner lets us wait, for its lease goes on; never returns.

        Raises:
            IdentityError: another process publishes records with this peer's identity.
        """
        while True:
            await asyncio.sleep(REFRESH_PERIOD_S)
            await self.refresh()

    def take_records(self, signed_records: Iterable[bytes]) -> None:
        """Consider signed records from the store or from a partner; bad ones are skipped."""
        for signed in signed_records:
            try:
                record = open_record(signed, verify=self._verify)
            except RecordError:
                continue
            verdict = self.book.observe(record, signed=signed, own_round=self._round)
            if verdict is Verdict.OWN_IDENTITY_ELSEWHERE:
                self._meet_own_record(record)
            elif verdict in (Verdict.ACCEPTED, Verdict.AHEAD):
                self._compare_clocks(record)

    def _compare_clocks(self, record: Record) -> None:
        signed_s = record.expires_at - RECORD_TTL_S
        text = self._skew.observe(record.peer_id, signed_s=signed_s, now_s=self._clock.unix_s())
        if text is not None:
            self._observe(Notice(text=text))

    async def refuse_twin(self) -> None:
        """Make sure that nobody else is in the swarm with this identity, before announcing it.

        A live record of our own may be what an earlier process left; it is another process if it
        is renewed while we watch.

        Raises:
            IdentityError: another process publishes records with this peer's identity.
        """
        left = self._left_behind
        if left is None or left.is_goodbye or left.is_silent(self._clock.unix_s()):
            return
        until_s = self._clock.unix_s() + min(TWIN_WATCH_S + 2 * left.cycle_s, TWIN_WATCH_LIMIT_S)
        while self._clock.unix_s() < until_s:
            await asyncio.sleep(TWIN_POLL_S)
            await self.refresh()
            if self._left_behind is not None and self._left_behind.seq > left.seq:
                raise _identity_in_use(left)

    def unbroken_since(self, round: int) -> int | None:
        """Return the first round of what an earlier process of this peer announced.

        None when the others no longer count on it by `round`, so that it has to join anew.
        """
        left = self._left_behind
        if left is None or left.is_goodbye or left.lease_until < round + VIEW_LAG_ROUNDS:
            return None
        return left.first_round

    def _meet_own_record(self, record: Record) -> None:
        """Take a record of our own that this process did not publish for what it is.

        Before the first announcement it is what an earlier process left; its seq is surpassed.
        """
        if self._announced:
            raise _identity_in_use(record)
        self._left_behind = record
        self._seq = max(self._seq, record.seq)
        self._expires_at = max(self._expires_at, record.expires_at)

    def roster(self, round: int) -> Roster:
        """Return who takes part in `round`."""
        return self.book.at(round)

    def companions(self, round: int) -> tuple[PeerId, ...]:
        """Return the peers of the run at the start of `round`, those that skip it included."""
        # A peer that skips rounds may come to its next turn long before the others.
        ahead = self.stride().every_at(round) > 1
        return tuple(self.book.live(min(round, self._round + 1) if ahead else round))

    def stride(self) -> Stride:
        """Return the rounds in which this peer takes part."""
        return self.book.stride()

    def lapsing(self, round: int) -> tuple[PeerId, ...]:
        """Return the peers that `round` would be without only because this one ran ahead."""
        return self.book.lapsing(round)

    def close_round(self, round: int) -> None:
        """Freeze the view at the end of `round`; rosters two rounds later are drawn from it."""
        self.book.close_round(round)

    def swarm_round(self) -> int | None:
        """Return the round in which most other peers are; None when none is known."""
        return self.book.swarm_round()

    def cycle_s(self) -> float:
        """Return the median seconds per round that the other peers tell; 0 when none does."""
        round = self.swarm_round()
        return 0.0 if round is None else self.book.median_cycle_s(self.book.at(round).peers)

    async def wait_until(self, ready: Callable[[], bool]) -> None:
        """Poll the store until `ready()`; the caller sets the deadline."""
        await self.refresh()
        pause_s, known = FIRST_POLL_S, len(self.book.records_for_partner())
        while not ready():
            await asyncio.sleep(pause_s)
            await self.refresh()
            found = len(self.book.records_for_partner())
            pause_s = min(POLL_GROWTH * pause_s, LAST_POLL_S) if found == known else FIRST_POLL_S
            known = found


def _identity_in_use(record: Record) -> IdentityError:
    return IdentityError(
        f"identity {record.peer_id} is in use by another process",
        why="newer records in the swarm carry this peer's own signature",
        fix="stop the other process, or give this node an identity of its own with "
        "--set net.identity=FILE",
    )
