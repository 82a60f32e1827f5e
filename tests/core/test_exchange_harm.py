"""What an exchange does about partners that go too far: clip factors, offences, exclusion."""

from __future__ import annotations

import math

import pytest

from gasloc_p2p.core.exchange import Agreed, Exchange, Finished
from gasloc_p2p.core.types import EdgeKind
from gasloc_p2p.core.wire import Ready, RefuseCode, pack_message, unpack_message
from tests.core.exchange_stages import greeted, received
from tests.core.two_sides import PLAIN, A, B, end, frames, hello, refusal, sent


@pytest.mark.parametrize(("ours", "theirs"), [(1.0, 0.25), (0.25, 1.0), (0.5, 0.25), (0.1, 0.1)])
@pytest.mark.parametrize("we_are_first", [True, False])
def test_both_sides_use_the_smaller_clip_factor(
    ours: float, theirs: float, we_are_first: bool
) -> None:
    exchange = received()
    ready = pack_message(Ready(clip=theirs))
    if we_are_first:
        events = [*exchange.accept(clip=ours), *exchange.receive(ready)]
    else:
        events = [*exchange.receive(ready), *exchange.accept(clip=ours)]
    assert events == [Agreed(clip=min(ours, theirs))]
    (frame, _) = frames(sent(exchange))
    assert unpack_message(frame.data, Ready).clip == ours


@pytest.mark.parametrize("clip", [0.0, -1.0, 1.5, math.nan, math.inf])
def test_a_clip_factor_that_no_partner_would_read_is_an_error(clip: float) -> None:
    with pytest.raises(ValueError, match="clip factor"):
        received().accept(clip=clip)


@pytest.mark.parametrize(
    ("code", "kind", "offence"),
    [
        (RefuseCode.NON_FINITE, EdgeKind.CORRUPT, True),
        (RefuseCode.LEAVING, EdgeKind.REFUSED, False),
        (RefuseCode.EXCLUDED, EdgeKind.REFUSED, False),
    ],
)
def test_only_what_the_partner_did_is_an_offence(
    code: RefuseCode, kind: EdgeKind, offence: bool
) -> None:
    exchange = received()
    reason = "refused by this peer: x"
    ended = Finished(kind=kind, reason=reason, offence=offence, code=code)
    assert exchange.refuse(code, "x") == [ended]
    told = Finished(kind=kind, reason="refused by partner: x", code=code)
    assert received().receive(sent(exchange)) == [told]


def test_damage_found_while_the_stream_is_broken_is_an_offence_too() -> None:
    exchange = greeted()
    exchange.reconnect()
    assert end(exchange.refuse(RefuseCode.CORRUPT, "x")).offence


@pytest.mark.parametrize("said", [True, False])
def test_a_dialer_may_refuse_at_once_behind_its_hello(said: bool) -> None:
    exchange = Exchange(hello=hello(A), layout=PLAIN, partner=B, dialer=True)
    first = exchange.next_to_send() if said else ()
    assert isinstance(first, tuple)
    exchange.refuse(RefuseCode.EXCLUDED, "left out")
    words = b"".join(first) + sent(exchange)
    events = Exchange(hello=hello(B), partner=A, dialer=False).receive(words)
    reason = "refused by partner: left out"
    code = RefuseCode.EXCLUDED
    assert end(events) == Finished(kind=EdgeKind.REFUSED, reason=reason, code=code)


def test_whoever_was_dialled_refuses_in_place_of_its_hello() -> None:
    exchange = Exchange(hello=hello(A), layout=PLAIN, partner=B, dialer=False)
    exchange.receive(pack_message(hello(B)))
    exchange.refuse(RefuseCode.EXCLUDED, "left out")
    assert refusal(sent(exchange)).code is RefuseCode.EXCLUDED
