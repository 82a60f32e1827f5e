"""How a peer comes to a stream with its partner: one of the two dials, the other one waits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from gasloc_p2p.core.exchange import Exchange, Finished
from gasloc_p2p.core.substrate import Network, PeerUnreachableError, Stream
from gasloc_p2p.core.types import EdgeKind, PeerId
from gasloc_p2p.core.wire import Hello
from gasloc_p2p.node.edge import FLUSH_S, Contact, DeclinedError, unreachable
from gasloc_p2p.node.few_words import knock
from gasloc_p2p.node.inbox import Inbox

EXCHANGE_PROTOCOL = "gasloc/exchange/2"
KNOCK_PERIOD_S = 0.75
KNOCK_DEADLINE_S = 5.0
KNOCK_ANSWER_S = 2.0
KNOCKS = 2
"""A dead partner is given up after this many failed knocks, less than 2 s after it is gone."""

REDIAL_S = (0.25, 0.5, 1.0)
FIRST_REDIAL_S = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Pauses between dials; a partner never met before may still be spreading its address."""


class Dialling:
    """Reaches partners, and remembers which ones it could reach.

    Args:
        network: opens streams.
        inbox: where streams of partners with smaller ids arrive.
        hello: what this peer shows when it knocks in a round.
        ceiling_s: the longest that opening a stream may take.
    """

    def __init__(
        self, *, network: Network, inbox: Inbox, hello: Callable[[int], Hello], ceiling_s: float
    ) -> None:
        self._network = network
        self._inbox = inbox
        self._hello = hello
        self._ceiling_s = ceiling_s
        self._own = network.peer_id
        self._reached: set[PeerId] = set()

    def contact(self, t: int, partner: PeerId) -> Callable[[], Awaitable[Contact]]:
        """Return how to reach `partner` in round t: the smaller id dials."""
        if self._own < partner:
            return lambda: self._dial(partner)
        return lambda: self._await_dial(t, partner)

    def brief_dial(self, partner: PeerId) -> Callable[[], Awaitable[Stream]] | None:
        """Return how to dial `partner` once, for a few words; None where the partner dials."""
        if self._own > partner:
            return None
        return lambda: self._network.open_stream(partner, EXCHANGE_PROTOCOL, deadline_s=FLUSH_S)

    async def _dial(self, partner: PeerId) -> Contact:
        """Dial until it works; the patience is short for a partner that was reached before."""
        pauses_s = REDIAL_S if partner in self._reached else FIRST_REDIAL_S
        for pause_s in (*pauses_s, None):
            try:
                stream = await self._network.open_stream(
                    partner, EXCHANGE_PROTOCOL, deadline_s=self._ceiling_s
                )
            except PeerUnreachableError:
                if pause_s is None:
                    raise
                await asyncio.sleep(pause_s)
            else:
                self._reached.add(partner)
                return Contact(stream=stream)
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _await_dial(self, t: int, partner: PeerId) -> Contact:
        """Wait for the partner's stream, or until it is known that none will come.

        Raises:
            DeclinedError: the partner could be reached earlier and cannot be any more, or it has
                no such edge, or is in a later round.
        """
        async with asyncio.TaskGroup() as tasks:
            dialled = tasks.create_task(self._inbox.claim(t, partner))
            gone = tasks.create_task(self._until_hopeless(t, partner))
            await asyncio.wait({dialled, gone}, return_when=asyncio.FIRST_COMPLETED)
            dialled.cancel()
            gone.cancel()
        if dialled.cancelled():
            raise DeclinedError(gone.result())
        # Its connection works both ways, so a knock that fails later on says that it is gone.
        self._reached.add(partner)
        return dialled.result()

    async def _until_hopeless(self, t: int, partner: PeerId) -> Finished:
        """Knock now and then; return how the edge of round t ends when no stream will come.

        A partner that never could be dialled may still dial, so its silence says nothing; hence
        the knock at a stranger's door at once, while it is likely to be there.
        """
        missed = 0
        while True:
            if partner in self._reached:
                await asyncio.sleep(KNOCK_PERIOD_S)
            try:
                stream = await self._network.open_stream(
                    partner, EXCHANGE_PROTOCOL, deadline_s=KNOCK_DEADLINE_S
                )
            except PeerUnreachableError as error:
                if partner not in self._reached:
                    await asyncio.Event().wait()
                missed += 1
                if missed == KNOCKS:
                    return unreachable(error)
            except TimeoutError:
                continue
            else:
                self._reached.add(partner)
                missed = 0
                asked = Exchange(hello=self._hello(t), partner=partner, dialer=True)
                refused = await knock(stream, asked, deadline_s=KNOCK_ANSWER_S)
                if refused is not None and refused.kind is not EdgeKind.LOST:
                    return refused

    async def can_dial(self, partner: PeerId) -> bool:
        """Whether `partner` takes a stream, as it does however busy it is."""
        try:
            stream = await self._network.open_stream(
                partner, EXCHANGE_PROTOCOL, deadline_s=KNOCK_DEADLINE_S
            )
        except (PeerUnreachableError, TimeoutError):
            return False
        await stream.aclose()
        return True
