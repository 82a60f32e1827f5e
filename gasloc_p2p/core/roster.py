"""Who takes part in which round: the same answer at every peer, without asking anyone."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import msgspec
from blake3 import blake3

from gasloc_p2p.core.records import (
    LEASE_ROUNDS,
    Reachability,
    Record,
    Sign,
    Verdict,
    Work,
    sign_record,
)
from gasloc_p2p.core.stride import NEVER, Stride
from gasloc_p2p.core.types import PeerId

VIEW_LAG_ROUNDS: Final = 2
"""Roster t reads what was known by the end of round t - 2."""

JOIN_ROUNDS: Final = 3
"""A record signed in round s is in every view by the end of s + 1, which roster s + 3 reads."""

GOODBYE_ROUNDS: Final = 2
"""A goodbye signed in round s ends the lease with s + 2, the last roster that may not know it."""

AHEAD_ROUNDS: Final = 4
"""How far ahead of us a record may have been signed and still be used.

Peers that meet each other repeatedly, or are often unpaired, run a few rounds ahead of the rest;
not to use their records would let their leases lapse here. It bounds what a liar gains.
"""

MAX_PEERS: Final = 10_000
DIGEST_BYTES: Final = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Roster:
    """The peers of one round; `peer in roster` says whether a peer, or we, take part.

    Attributes:
        round: the round.
        peers: peer ids in increasing order.
        digest: 16 bytes (blake3) over run id, round and peers; equal rosters have equal digests.
        records: each peer's record, for its reachability and rates.
    """

    round: int
    peers: tuple[PeerId, ...]
    digest: bytes
    records: Mapping[PeerId, Record]

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self.records

    def may_pair(self, a: PeerId, b: PeerId) -> bool:
        """Whether one of two peers of this roster can open a stream to the other."""
        return any(self.records[peer].reachability is not Reachability.PRIVATE for peer in (a, b))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kept:
    record: Record
    signed: bytes


class RosterBook:
    """The newest record of every peer, and the rosters that follow from them.

    Sans-IO. Records come in through `observe`, already verified by `open_record`; `close_round`
    freezes what is known by the end of a round; `at` answers from the frozen views.

    Args:
        run_id: records of other runs are refused.
        own: our peer id.
        rounds: training rounds of the run; nobody skips a closing round after them.
    """

    def __init__(self, run_id: str, own: PeerId, *, rounds: int = NEVER) -> None:
        self._run_id = run_id
        self._own = own
        self._rounds = rounds
        self._own_round = 0
        self._now_s: float | None = None
        self._published: _Kept | None = None
        self._earlier: Record | None = None
        self._known: dict[PeerId, _Kept] = {}
        self._ahead: dict[PeerId, _Kept] = {}
        self._behind: set[PeerId] = set()
        self._snapshots: dict[int, dict[PeerId, Record]] = {}

    @property
    def own_signed(self) -> bytes:
        """The signed bytes of our latest record; empty before the first `renew`."""
        return b"" if self._published is None else self._published.signed

    def observe(self, record: Record, *, signed: bytes, own_round: int) -> Verdict:
        """Take in one verified record.

        Args:
            record: what `open_record(signed)` returned.
            signed: its wire form, kept to be handed to partners.
            own_round: the round that this peer is in.
        """
        self._advance(own_round)
        if record.run_id != self._run_id:
            return Verdict.FOREIGN_RUN
        if record.peer_id == self._own:
            if self._published is None:
                self._earlier = record
            elif record.seq <= self._published.record.seq:
                return Verdict.STALE
            return Verdict.OWN_IDENTITY_ELSEWHERE
        return self._keep(_Kept(record=record, signed=signed))

    def renew(
        self,
        *,
        round: int,
        first_round: int | None = None,
        lease_until: int | None = None,
        seq: int,
        work: Work,
        every: int | None = None,
        reachability: Reachability,
        expires_at: float,
        sign: Sign,
    ) -> Record:
        """Build, sign and take in our next record; its wire form is then `own_signed`.

        Args:
            round: the round that this peer is in.
            first_round: first round in which it takes part; by default that of the last record
                while its lease lasts, otherwise `round + JOIN_ROUNDS`.
            lease_until: last round in which it takes part; by default the longest lease, for a
                goodbye `round + GOODBYE_ROUNDS`.
            seq: above that of every record of this identity, from earlier processes too.
            work: this peer's speed, and what it has done so far.
            every: the stride to change to once everybody can know of it, if no other change is
                under way; None for the one that there is.
            reachability: who can open a stream to this peer.
            expires_at: unix seconds after which the record is void.
            sign: signs with this node's identity.

        Raises:
            RecordError: other peers would refuse the record.
            ValueError: `seq` does not rise.
        """
        last = None if self._published is None else self._published.record
        if last is not None and seq <= last.seq:
            raise ValueError(f"seq {seq} is not above {last.seq}, which is published")
        begins = _first_round(round, last) if first_round is None else first_round
        record = Record(
            run_id=self._run_id,
            peer_id=self._own,
            seq=seq,
            signed_round=round,
            first_round=begins,
            lease_until=round + LEASE_ROUNDS if lease_until is None else lease_until,
            reachability=reachability,
            expires_at=expires_at,
            **msgspec.structs.asdict(work),
            **self._next_stride(begins, round, every).told(),
        )
        self._published = _Kept(record=record, signed=sign_record(record, sign))
        self._advance(round)
        self._known[self._own] = self._published
        return record

    def _next_stride(self, first_round: int, round: int, every: int | None) -> Stride:
        """Return the stride to announce in `round`, which the next two rosters must not notice.

        A peer that joins anew is in none of those, and takes part in all rounds at first.
        """
        last = self._earlier if self._published is None else self._published.record
        if last is None or last.first_round != first_round:
            return Stride()
        stride = last.stride
        if every in (None, stride.every) or not stride.has_begun(round - AHEAD_ROUNDS):
            return stride
        # Those ahead of us have closed views that can no longer learn of it.
        furthest = max([round, *(kept.record.signed_round for kept in self._known.values())])
        return stride.changed(every, at_least=furthest + JOIN_ROUNDS)

    def stride(self) -> Stride:
        """Return our own stride, as announced last."""
        return Stride() if self._published is None else self._stride_of(self._published.record)

    def _stride_of(self, record: Record) -> Stride:
        return record.stride._replace(until=self._rounds)

    def close_round(self, t: int) -> None:
        """Freeze the view that is known by the end of round `t`."""
        self._advance(t)
        self._snapshots[t] = self._view()
        # Late hand-shakes of round t still need the view of t - 2; nothing needs an older one.
        for closed in [s for s in self._snapshots if s < t - VIEW_LAG_ROUNDS]:
            del self._snapshots[closed]

    def at(self, t: int) -> Roster:
        """Return the roster of round `t` (docs/design.md, section 3)."""
        self._advance(t)
        live = self.live(t)
        records = {p: live[p] for p in live if self._stride_of(live[p]).takes_part(t)}
        return Roster(
            round=t,
            peers=tuple(records),
            digest=_digest(self._run_id, t, records),
            records=MappingProxyType(records),
        )

    def live(self, t: int) -> dict[PeerId, Record]:
        """Return the records of the peers of round `t` and of those that skip it, sorted."""
        return {
            peer: record
            for peer, record in sorted(self._view_for(t).items())
            if record.first_round <= t <= self._lease_of(record)
        }

    def _lease_of(self, record: Record) -> int:
        """Return how long the peer of a frozen record is known to take part.

        A lease renewed since then counts as well, for a peer that is a few rounds behind us had
        renewed little when the view was frozen; only who joins is read from the frozen view.
        """
        newest = self._known.get(record.peer_id)
        if newest is None or newest.record.first_round > record.first_round:
            return record.lease_until
        return max(record.lease_until, newest.record.lease_until)

    def swarm_round(self) -> int | None:
        """Estimate the round that the others are in; None when no other live peer is known.

        The lower median of `signed_round` over the newest record of every other peer: any minority
        of liars leaves it between two values told by honest peers. Ours does not count, or of two
        peers the one that fell behind would never see that it did. Peers that said goodbye, that
        are silent, or whose lease ended before our own round do not count, or those who left would
        hold back the few who stay; but who renews after that is alive, and merely behind us. Those
        who skip rounds follow the others, not each other: they count if there is nobody else.
        """
        others = self.others()
        steady = [r for r in others if self._stride_of(r).every_at(r.signed_round) == 1]
        rounds = [record.signed_round for record in steady or others]
        return statistics.median_low(rounds) if rounds else None

    def lapsing(self, t: int) -> tuple[PeerId, ...]:
        """Return the others of round `t - 1` that round `t` would be without, though all is well.

        They seem to be alive and have not said goodbye; we merely ran ahead of what their leases
        cover, which is in rounds. They would still count on us. Those that skip the two rounds are
        among them, or they would be missing from a later one.
        """
        self._advance(t - 1)
        before, newest = self.live(t - 1), self.newest()
        return tuple(
            peer
            for peer, record in before.items()
            if peer in newest
            and newest[peer].lease_until < t
            and self._lease_of(record) < t
            and self._is_alive(newest[peer])
        )

    def newest(self) -> dict[PeerId, Record]:
        """Return the newest record of every other peer, however old or far ahead it is."""
        kept = {**self._known, **self._ahead}
        return {peer: kept[peer].record for peer in kept if peer != self._own}

    def others(self) -> list[Record]:
        """Return the newest record of every other peer that is taken to be alive."""
        return [
            record
            for record in self.newest().values()
            if (record.lease_until >= self._own_round or record.peer_id in self._behind)
            and self._is_alive(record)
        ]

    def rates(self) -> list[Record]:
        """Return the newest record of every other peer that is in the swarm, for its speed.

        Without those that skip rounds the others would seem faster, and more would skip. Silent
        ones count as well: who waits for a slow peer does not renew meanwhile.
        """
        records = self.newest().values()
        return [r for r in records if r.lease_until >= self._own_round and not r.is_goodbye]

    def _is_alive(self, record: Record) -> bool:
        silent = self._now_s is not None and record.is_silent(self._now_s)
        return not (record.is_goodbye or silent)

    def founders(self) -> int:
        """Return how many peers have announced themselves for round 0, ours and ahead included."""
        newest = {**self._known, **self._ahead}.values()
        return sum(kept.record.first_round == 0 for kept in newest)

    def records_for_partner(self) -> list[bytes]:
        """Return the signed records to swap at a hand-shake: ours, then the latest signed first.

        Records whose lease is over, and those from too far ahead to be used, are left out.
        """
        live = [k for k in self._known.values() if k.record.lease_until >= self._own_round]
        live.sort(
            key=lambda k: (k.record.peer_id != self._own, -k.record.signed_round, k.record.peer_id)
        )
        return [kept.signed for kept in live]

    def median_cycle_s(self, peers: Iterable[PeerId]) -> float:
        """Return the lower median of the seconds per round that `peers` tell; 0 when none does."""
        told = [self._known[p].record.cycle_s for p in peers if p in self._known]
        return statistics.median_low([s for s in told if s > 0] or [0.0])

    def expire(self, now_s: float) -> None:
        """Note the time (unix seconds) and forget the records that are void; frozen views stay."""
        self._now_s = now_s
        for records in (self._known, self._ahead):
            for peer in [p for p, k in records.items() if k.record.expires_at < now_s]:
                del records[peer]

    def _advance(self, own_round: int) -> None:
        """Note our round, and let the records be used that are no longer ahead of it."""
        if own_round <= self._own_round:
            return
        self._own_round = own_round
        waiting, self._ahead = self._ahead, {}
        for kept in waiting.values():
            self._keep(kept)

    def _keep(self, kept: _Kept) -> Verdict:
        # Usable and ahead are kept side by side, each the highest seq of its kind: which ones
        # remain depends on the set of records alone, not on the order in which they came.
        record = kept.record
        peer = record.peer_id
        usable = self._known.get(peer)
        if usable is not None and record.seq <= usable.record.seq:
            return Verdict.STALE
        is_ahead = record.signed_round > self._own_round + AHEAD_ROUNDS
        ahead = self._ahead.get(peer)
        if is_ahead and ahead is not None and record.seq <= ahead.record.seq:
            return Verdict.STALE
        records = self._ahead if is_ahead else self._known
        if peer not in records and len(records) >= MAX_PEERS:
            # Peers already known are never pushed out by a flood of other ids.
            return Verdict.FULL
        self._note_behind(record)
        records[peer] = kept
        if is_ahead:
            return Verdict.AHEAD
        if ahead is not None and ahead.record.seq <= record.seq:
            del self._ahead[peer]
        return Verdict.ACCEPTED

    def _note_behind(self, record: Record) -> None:
        """Note who is alive in rounds that are long over here, as after the network was split.

        That takes a record beside one that an earlier round knew, for the store keeps the last
        ones of peers that have left.
        """
        known_before = any(record.peer_id in view for view in self._snapshots.values())
        if known_before and record.lease_until < self._own_round:
            self._behind.add(record.peer_id)
        else:
            self._behind.discard(record.peer_id)

    def _view(self) -> dict[PeerId, Record]:
        return {peer: kept.record for peer, kept in self._known.items()}

    def _view_for(self, t: int) -> dict[PeerId, Record]:
        # At the start of a run and after a jump the view of t - 2 was never frozen. A later one
        # gives nearly the same roster: a peer that stays has a lease that covers t in both, one
        # that joins is kept out by its first_round and one that leaves is kept in by its lease
        # until all views agree. The oldest later view is nearest to what the others read.
        later = [closed for closed in self._snapshots if closed >= t - VIEW_LAG_ROUNDS]
        return self._snapshots[min(later)] if later else self._view()


def _first_round(t: int, last: Record | None) -> int:
    # Roster t + 2 is the first that may read a record signed in t, and some peers read the last
    # one instead. They agree if that one's lease covers t + 2, or if both records keep us out.
    if last is not None and t + VIEW_LAG_ROUNDS <= last.lease_until:
        return last.first_round
    return t + JOIN_ROUNDS


def _digest(run_id: str, t: int, peers: Iterable[PeerId]) -> bytes:
    hasher = blake3()
    for part in (run_id, str(t), *peers):
        data = part.encode()
        hasher.update(len(data).to_bytes(4, "big"))
        hasher.update(data)
    return hasher.digest(length=DIGEST_BYTES)
