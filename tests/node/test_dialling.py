"""Who is to be dialled does not wait long for a partner that is gone."""

from __future__ import annotations

import asyncio

import pytest

from gasloc_p2p.core.types import EdgeKind
from gasloc_p2p.core.wire import pack_message
from gasloc_p2p.net.identity import Identity
from gasloc_p2p.node.dialling import (
    EXCHANGE_PROTOCOL,
    KNOCK_PERIOD_S,
    KNOCKS,
    Dialling,
)
from gasloc_p2p.node.edge import DeclinedError
from gasloc_p2p.node.inbox import Inbox
from gasloc_p2p.simulate.network import Hub
from tests.node.test_edge import hello
from tests.sim.conftest import in_virtual_time


def test_a_partner_that_always_dialled_first_is_given_up_at_once_when_it_is_gone() -> None:
    async def main() -> tuple[DeclinedError, float]:
        async with Hub(verify=Identity.verify) as hub:
            a, b = (hub.network(peer, lambda payload: b"") for peer in "ab")
            inbox = Inbox(
                lambda round: hello("b", round), lambda event: None, lambda peer, round: ""
            )
            dialling = Dialling(
                network=b, inbox=inbox, hello=lambda round: hello("b", round), ceiling_s=60.0
            )
            await b.serve(EXCHANGE_PROTOCOL, inbox.accept)
            stream = await a.open_stream("b", EXCHANGE_PROTOCOL, deadline_s=1.0)
            await stream.write(pack_message(hello("a", 5)))
            await asyncio.sleep(1)
            inbox.open_round(5, "a")
            await dialling.contact(5, "a")()
            inbox.release(5, "a")
            await stream.aclose()
            await a.aclose()
            inbox.open_round(6, "a")
            began_s = asyncio.get_running_loop().time()
            with pytest.raises(DeclinedError) as given_up:
                async with asyncio.timeout(60):
                    await dialling.contact(6, "a")()
            return given_up.value, asyncio.get_running_loop().time() - began_s

    given_up, took_s = in_virtual_time(main)
    assert given_up.ended.kind is EdgeKind.LOST
    assert took_s <= KNOCKS * KNOCK_PERIOD_S
