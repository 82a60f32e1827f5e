"""Streams that partners open: held until their round begins here, or refused with a reason."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import msgspec

from gasloc_p2p.core.exchange import Cut, Exchange, Finished
from gasloc_p2p.core.substrate import Stream
from gasloc_p2p.core.types import PeerId
from gasloc_p2p.core.wire import Hello, ProtocolError, RefuseCode, pack_message, read_hello
from gasloc_p2p.node.edge import Contact
from gasloc_p2p.node.events import Notice, Observer

HELLO_DEADLINE_S = 10.0
REFUSAL_DEADLINE_S = 2.0
READ_BYTES = 65_536
HELD_STREAMS = 64
STRANGERS_TOLD = 256
ROUNDS_AHEAD = 8
"""A partner may be this many rounds ahead and still be kept waiting."""


class Inbox:
    """Matches incoming streams with the edges of this peer's rounds.

    Args:
        own_hello: builds this peer's Hello for a round, to check a stranger's against it.
        observe: told once of each stranger that is refused for what it is.
        left_out: says why a peer is left out in a round; empty when it is not.
    """

    def __init__(
        self,
        own_hello: Callable[[int], Hello],
        observe: Observer,
        left_out: Callable[[PeerId, int], str] = lambda peer, round: "",
    ) -> None:
        self._own_hello = own_hello
        self._observe = observe
        self._left_out = left_out
        self._told: set[PeerId] = set()
        self._round = 0
        self._partners: frozenset[PeerId] | None = None
        self._under_way: set[tuple[int, PeerId]] = set()
        self._held: dict[tuple[int, PeerId], asyncio.Future[_Held]] = {}
        self._holding = 0

    async def accept(self, stream: Stream) -> None:
        """Serve one incoming stream to its end; the transport calls this."""
        try:
            early, hello = await self._first_frame(stream)
            if hello is None:
                return
            refusal = self._refusal(stream.peer_id, hello)
            if refusal is not None:
                await _say(stream, refusal)
                return
            if stream.peer_id > self._own_hello(hello.round).peer_id:
                # The smaller id dials: this is a knock, and it is not refused.
                return
            held = _Held(stream, early, hello)
            self._free_place(hello.round, stream.peer_id).set_result(held)
            self._holding += 1
            try:
                await held.done.wait()
            finally:
                self._holding -= 1
            if held.refusal is not None:
                await _say(stream, held.refusal)
        finally:
            await stream.aclose()

    async def _first_frame(self, stream: Stream) -> tuple[bytes, Hello | None]:
        early = bytearray()
        try:
            async with asyncio.timeout(HELLO_DEADLINE_S):
                while data := await stream.read(READ_BYTES):
                    early += data
                    hello = read_hello(early)
                    if hello is not None:
                        return bytes(early), hello
        except (TimeoutError, ProtocolError):
            pass
        return bytes(early), None

    def _refusal(self, peer: PeerId, hello: Hello) -> Exchange | None:
        """Return the exchange that carries a refusal, or None when the stream may wait."""
        answer, disagreement = self._answer(peer, hello)
        if disagreement:
            self._tell(peer, disagreement)
            return answer
        no_edge = self._no_edge(peer, hello.round)
        if no_edge is None:
            return None
        answer.refuse(*no_edge)
        return answer

    def _answer(self, peer: PeerId, hello: Hello) -> tuple[Exchange, str]:
        """Return this side of an exchange, and what the two sides disagree about.

        What came after the Hello is for the edge, even if it is a refusal.
        """
        answer = Exchange(hello=self._own_hello(hello.round), partner=peer, dialer=False)
        # Nothing has been sent here that a resumed exchange could have taken.
        events = answer.receive(pack_message(msgspec.structs.replace(hello, received=0)))
        ended = [event for event in events if isinstance(event, Finished)]
        return answer, ended[0].reason if ended else ""

    def _tell(self, peer: PeerId, disagreement: str) -> None:
        if peer not in self._told and len(self._told) < STRANGERS_TOLD:
            self._told.add(peer)
            self._observe(Notice(text=f"a stream from {peer} was {disagreement}"))

    def _no_edge(self, peer: PeerId, round: int) -> tuple[RefuseCode, str] | None:
        """Say why a stream for `round` cannot wait here; None when it can."""
        if (round, peer) in self._under_way:
            return None
        reason = ""
        if round < self._round:
            reason = f"round {round} is over here, this peer is in round {self._round}"
        elif left_out := self._left_out(peer, round):
            return RefuseCode.EXCLUDED, left_out
        elif round == self._round and self._partners is not None:
            if peer in self._partners:
                reason = f"the edge of round {round} with {peer} is over here"
            else:
                reason = f"this peer has no edge with {peer} in round {round}"
        elif round > self._round + ROUNDS_AHEAD or self._holding >= HELD_STREAMS:
            reason = f"too early for round {round}, this peer is in round {self._round}"
        return (RefuseCode.NOT_PARTNER, reason) if reason else None

    def _place(self, round: int, peer: PeerId) -> asyncio.Future[_Held]:
        key = (round, peer)
        if key not in self._held:
            self._held[key] = asyncio.get_running_loop().create_future()
        return self._held[key]

    def _free_place(self, round: int, peer: PeerId) -> asyncio.Future[_Held]:
        """Return the place of a stream; the one that it takes the place of has broken."""
        place = self._place(round, peer)
        if not place.done():
            return place
        place.result().done.set()
        del self._held[round, peer]
        return self._place(round, peer)

    def start_at(self, round: int) -> None:
        """Keep streams for `round`, the first that this peer takes part in, instead of round 0."""
        self._round = round

    def open_round(self, round: int, partners: Iterable[PeerId]) -> None:
        """Begin `round`: streams of its partners may be claimed, all others are refused.

        Those of earlier rounds whose edges were not released may still be claimed.

        Args:
            round: the round.
            partners: those that are not left out.
        """
        self._round = round
        self._partners = frozenset(partners)
        self._under_way |= {(round, peer) for peer in self._partners}
        for (held_round, peer), place in list(self._held.items()):
            if held_round <= round and (held_round, peer) not in self._under_way:
                self._drop(held_round, peer, place)

    def _drop(self, round: int, peer: PeerId, place: asyncio.Future[_Held]) -> None:
        del self._held[round, peer]
        if place.done() and not place.cancelled():
            held = place.result()
            held.refusal, _ = self._answer(peer, held.hello)
            over = RefuseCode.NOT_PARTNER, "the edge is over here"
            held.refusal.refuse(*(self._no_edge(peer, round) or over))
            held.done.set()
        else:
            place.cancel()

    def decline(self, round: int, partner: PeerId) -> None:
        """Refuse the stream of a partner, here or still to come, with which there is no edge."""
        self._under_way.discard((round, partner))
        place = self._held.get((round, partner))
        if place is not None:
            self._drop(round, partner, place)

    async def claim(self, round: int, partner: PeerId) -> Contact:
        """Wait until `partner` has opened its stream for `round`.

        The claimer owns the stream from here on and calls `release` when it is through.
        """
        held = await asyncio.shield(self._place(round, partner))
        while held.claimed:
            # It broke, and the partner has yet to dial again.
            held.done.set()
            del self._held[round, partner]
            held = await asyncio.shield(self._place(round, partner))
        held.claimed = True
        return Contact(stream=held.stream, early=held.early)

    def release(self, round: int, partner: PeerId) -> None:
        """End the handler of a claimed stream, if there is one, and take no other one."""
        self._under_way.discard((round, partner))
        place = self._held.pop((round, partner), None)
        if place is None:
            return
        if place.done() and not place.cancelled():
            place.result().done.set()
        else:
            place.cancel()

    def close(self) -> None:
        """Let go of every stream that is still held."""
        for round, peer in list(self._held):
            self.release(round, peer)


class _Held:
    """A stream whose Hello has been read and whose round is still to come."""

    def __init__(self, stream: Stream, early: bytes, hello: Hello) -> None:
        self.stream = stream
        self.early = early
        self.hello = hello
        self.done = asyncio.Event()
        self.claimed = False
        self.refusal: Exchange | None = None


async def _say(stream: Stream, refusal: Exchange) -> None:
    try:
        async with asyncio.timeout(REFUSAL_DEADLINE_S):
            while (frame := refusal.next_to_send()) is not None:
                assert not isinstance(frame, Cut)
                for part in frame:
                    await stream.write(part)
    except (TimeoutError, ConnectionError):
        return
