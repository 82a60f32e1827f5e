"""How a peer comes to a round together with the others, whether they are ahead or behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from functools import partial

from gasloc_p2p.core.roster import AHEAD_ROUNDS
from gasloc_p2p.core.types import PeerId
from gasloc_p2p.node.events import Notice, PeersChanged, Waiting
from gasloc_p2p.node.membership import Profile
from gasloc_p2p.node.mixing import Course
from gasloc_p2p.node.peer import Peer
from gasloc_p2p.node.round import train_ahead

STAND_BY_ROUNDS = 2 * AHEAD_ROUNDS
"""A peer so far ahead of most others waits for them, or they would never meet again."""
STAND_BY_RENEWAL_S = 5.0
SLOWER_POLL_S = 0.25


class Company:
    """Keeps one peer together with the others between its rounds.

    Args:
        peer: whose.
        profile: what the others are told of it.
    """

    def __init__(self, *, peer: Peer, profile: Callable[[], Profile]) -> None:
        self._peer = peer
        self._profile = profile
        self._others: frozenset[PeerId] | None = None

    def tell_changes(self, t: int) -> None:
        """Say who came and went since the round before, and once that nobody is left.

        This peer trains on all the same.

        Args:
            t: the round to come.
        """
        others = frozenset(self._peer.membership.companions(t)) - {self._peer.id}
        before, self._others = self._others, others
        if before is None or before == others:
            return
        self._peer.observe(self._changes(t, others - before, before - others))
        if not others:
            self._peer.observe(
                Notice(
                    text="no other peer is left in the run; this one trains on alone, and who "
                    "comes back before its last round joins it"
                )
            )

    def _changes(
        self, t: int, joined: Collection[PeerId], missing: Collection[PeerId]
    ) -> PeersChanged:
        newest = self._peer.membership.book.newest() if missing else {}
        left = [peer for peer in missing if peer in newest and newest[peer].is_goodbye]
        gone = [peer for peer in missing if peer not in newest or not newest[peer].is_goodbye]
        kinds = {"joined": list(joined), "left": left, "gone": gone}
        return PeersChanged(
            round=t,
            peers=len(self._others or ()) + 1,
            names={kind: peers[0] for kind, peers in kinds.items() if len(peers) == 1},
            **{kind: len(peers) for kind, peers in kinds.items()},
        )

    async def come_to_turn(self, t: int) -> Course:
        """Train until the others come to this peer's turn, if it skips rounds.

        Sooner, nobody would be there, and it would not know who takes part.
        """
        peer, membership, course = self._peer, self._peer.membership, Course()
        if membership.stride().takes_part(t - 1):
            return course

        def have_come(to: int) -> bool:
            swarm_round = membership.swarm_round()
            return swarm_round is None or swarm_round >= to

        plan = peer.plan(t, (), membership.roster(t))
        # Those who wait for its edges get them a round's steps after they have come to round t - 1.
        begins = t if plan.has_slow_link and peer.may_be_late(t) else t - 1
        async with asyncio.TaskGroup() as tasks:
            following = tasks.create_task(membership.follow(t))
            if not peer.is_closing(t):
                await train_ahead(peer, t, plan, course, partial(have_come, t))
            await membership.wait_until(partial(have_come, begins))
            following.cancel()
        return course

    async def stand_by(self, t: int) -> None:
        """Wait for the others when they are so far behind that they could not be met."""
        membership = self._peer.membership
        swarm_round = membership.swarm_round()
        if swarm_round is None or t <= swarm_round + STAND_BY_ROUNDS:
            return
        self._peer.observe(
            Waiting(
                reason=f"most others are in round {swarm_round}, this peer is in {t} "
                "and lets them catch up"
            )
        )

        def met() -> bool:
            swarm_round = membership.swarm_round()
            return swarm_round is None or t <= swarm_round + AHEAD_ROUNDS

        while not met():
            await membership.renew(t, self._profile())
            try:
                async with asyncio.timeout(STAND_BY_RENEWAL_S):
                    await membership.wait_until(met)
            except TimeoutError:
                continue

    async def wait_for_slower(self, t: int) -> None:
        """Give peers whose leases this one has outrun the time that an edge with them would get.

        Peers that meet each other repeatedly run ahead of the others. Without those they would
        draw another graph than the others do with them, and edges on both sides would fail.
        """
        peer, membership = self._peer, self._peer.membership
        slower = membership.lapsing(t)
        if not slower or peer.config.pace.mode != "steps":
            return
        roster = membership.roster(t - 1)
        patience_s = max(peer.edge_deadline_s(t, p, roster) for p in slower)
        try:
            async with asyncio.timeout(patience_s):
                await membership.refresh()
                while slower := membership.lapsing(t):
                    if not any([await peer.dialling.can_dial(partner) for partner in slower]):
                        return
                    # As of the round before, or they would take themselves for left behind.
                    await membership.renew(t - 1, self._profile())
                    await asyncio.sleep(SLOWER_POLL_S)
                    await membership.refresh()
        except TimeoutError:
            return
