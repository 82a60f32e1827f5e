"""Keeping a node in one swarm with everybody that it knows of."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

from gasloc_p2p.core.types import PeerId
from gasloc_p2p.net.contacts import Contacts, full_addresses, group_by_peer
from gasloc_p2p.net.neighbours import Neighbours
from gasloc_p2p.net.solitude import Backoff, Solitude, peers_found

CHECK_PERIOD_S: Final = 15.0
LOST_PER_CHECK: Final = 4


class Company:
    """Looks after the peers that a node knows: its bootstrap peers and its contacts.

    Each check pings the bootstrap peers, which may have lost their memory of this node, and dials
    some of the contacts that are out of reach, or all of them when nobody is there. So two parts
    of a swarm that have anybody in common become one again.

    Args:
        own: this node's id; its own address may stand among the others.
        bootstrap: multiaddrs that end in /p2p/ID.
        contacts: peers met, brought up to date in every check.
        warn: told, in one line each, what a person should know.
    """

    def __init__(
        self,
        own: PeerId,
        *,
        bootstrap: Sequence[str],
        contacts: Contacts,
        warn: Callable[[str], None],
    ) -> None:
        self._own = own
        self._bootstrap = self._others(group_by_peer(bootstrap))
        self._contacts = contacts
        self._warn = warn
        self._solitude = Solitude()
        self._backoff = Backoff()
        self._silent: set[PeerId] | None = None
        self._turn = 0
        self.pause_s = 0.0
        """Time to wait until the next check."""

    def _others(self, groups: Mapping[PeerId, tuple[str, ...]]) -> dict[PeerId, tuple[str, ...]]:
        return {peer: addresses for peer, addresses in groups.items() if peer != self._own}

    async def check(self, neighbours: Neighbours) -> int:
        """Meet who can be met, say what has changed, and return how many peers are there.

        Raises:
            control.DAEMON_ERRORS: p2pd does not answer.
        """
        before = await neighbours.present()
        failures = await self._meet(neighbours, self._wanted(before))
        returned = {peer for peer, why in failures.items() if not why and peer not in before}
        if returned:
            await neighbours.explore()
        after = await neighbours.present()
        if before and returned and (found := after - before - self._bootstrap.keys()):
            self._warn(peers_found(len(found)))
        self._tell_of_bootstrap(failures)
        self._tell_of_solitude(len(after))
        await self._contacts.update(after, neighbours.addresses_of)
        return len(after)

    def _wanted(self, present: Collection[PeerId]) -> dict[PeerId, tuple[str, ...]]:
        """Return whom to meet: all bootstrap peers, and some who are not present."""
        known = self._known()
        lost = [peer for peer in known if peer not in present and peer not in self._bootstrap]
        if present and lost:
            turn, self._turn = self._turn % len(lost), self._turn + LOST_PER_CHECK
            lost = (lost[turn:] + lost[:turn])[:LOST_PER_CHECK]
        return {peer: known[peer] for peer in (*self._bootstrap, *lost)}

    def _known(self) -> dict[PeerId, tuple[str, ...]]:
        """Return every address that is known, by peer."""
        known = self._bootstrap | self._others(self._contacts.known)
        for peer, addresses in self._bootstrap.items():
            known[peer] = tuple(dict.fromkeys(addresses + known[peer]))
        return known

    async def _meet(
        self, neighbours: Neighbours, wanted: Mapping[PeerId, tuple[str, ...]]
    ) -> dict[PeerId, str]:
        """Meet all of `wanted` at once; return why each could not be met, "" if it was."""
        async with asyncio.TaskGroup() as tasks:
            meetings = {
                peer: tasks.create_task(neighbours.meet(peer, addresses))
                for peer, addresses in wanted.items()
            }
        return {peer: meeting.result() for peer, meeting in meetings.items()}

    def _tell_of_bootstrap(self, failures: Mapping[PeerId, str]) -> None:
        silent = {peer for peer in self._bootstrap if failures[peer]}
        # Whoever did not answer when the node started has been named by then.
        for peer in silent - (silent if self._silent is None else self._silent):
            self._warn(f"bootstrap peer {peer} does not answer: {failures[peer]}")
        for peer in (self._silent or set()) - silent:
            self._warn(f"bootstrap peer {peer} answers again")
        self._silent = silent

    def _tell_of_solitude(self, peers: int) -> None:
        now_s = asyncio.get_running_loop().time()
        known = full_addresses(self._known())
        if peers or not known:
            self._backoff.reset()
            self.pause_s = CHECK_PERIOD_S
            said = self._solitude.company(now_s, peers=peers)
        else:
            self.pause_s = self._backoff.next_s()
            said = self._solitude.nobody(now_s, addresses=len(known))
        if said:
            self._warn(said)
