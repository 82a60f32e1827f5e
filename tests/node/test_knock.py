"""Who waits to be dialled knocks, and learns at once that nobody will come."""

from __future__ import annotations

import asyncio

from gasloc_p2p.core.exchange import Exchange, Finished
from gasloc_p2p.core.types import EdgeKind
from gasloc_p2p.net.identity import Identity
from gasloc_p2p.node.few_words import knock
from gasloc_p2p.node.inbox import Inbox
from gasloc_p2p.simulate.network import Hub
from tests.node.test_edge import PROTOCOL, hello
from tests.sim.conftest import in_virtual_time

OWN_ROUND = 5


def answer_to_a_knock(*, round: int, partners: tuple[str, ...]) -> tuple[Finished | None, float]:
    """Let b knock at the door of a, which is in round 5 with these partners."""

    async def main() -> tuple[Finished | None, float]:
        async with Hub(verify=Identity.verify) as hub:
            a, b = (hub.network(peer, lambda payload: b"") for peer in "ab")
            inbox = Inbox(
                lambda round: hello("a", round), lambda event: None, lambda peer, round: ""
            )
            await a.serve(PROTOCOL, inbox.accept)
            inbox.open_round(OWN_ROUND, partners)
            stream = await b.open_stream("a", PROTOCOL, deadline_s=1.0)
            exchange = Exchange(hello=hello("b", round), partner="a", dialer=True)
            answer = await knock(stream, exchange, deadline_s=1.0)
            claimed = asyncio.ensure_future(inbox.claim(round, "b"))
            await asyncio.wait({claimed}, timeout=1.0)
            assert not claimed.done(), "a knock is not the stream of an edge"
            claimed.cancel()
            return answer, asyncio.get_running_loop().time()

    return in_virtual_time(main)


def test_a_partner_that_has_the_edge_says_nothing_against_it() -> None:
    assert answer_to_a_knock(round=OWN_ROUND, partners=("b",))[0] is None
    assert answer_to_a_knock(round=OWN_ROUND + 1, partners=())[0] is None


def test_a_partner_without_the_edge_says_so_at_once() -> None:
    answer, took_s = answer_to_a_knock(round=OWN_ROUND, partners=("c",))
    assert answer is not None
    assert answer.kind is EdgeKind.NOT_PARTNER
    assert "no edge with b in round 5" in answer.reason
    assert took_s <= 1.0


def test_a_partner_that_is_past_the_round_says_so() -> None:
    answer, _ = answer_to_a_knock(round=OWN_ROUND - 1, partners=("b",))
    assert answer is not None
    assert answer.kind is EdgeKind.NOT_PARTNER
    assert "round 4 is over here" in answer.reason
