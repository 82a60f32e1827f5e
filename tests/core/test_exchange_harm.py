"""What an exchange does about partners that go too far: clip factors, offences, exclusion."""

from __future__ import annotations

import math

import pytest

from gasloc_p2p.core.exchange import Agreed, Exchange, Finished
from gasloc_p2p.core.types import EdgeKind
from gasloc_p2p.core.wire import Ready, RefuseCode, pack_message, unpack_message
from tests.core.test_exchange import A, B, end, frames, hello, received, sent


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
    assert unpack_message(frame.payload, Ready).clip == ours


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
    assert exchange.refuse(code, "x") == [Finished(kind=kind, reason=reason, offence=offence)]
    told = Finished(kind=kind, reason="refused by partner: x")
    assert received().receive(sent(exchange)) == [told]


def test_a_dialer_may_refuse_at_once_behind_its_hello() -> None:
    exchange = Exchange(hello=hello(A), partner=B, dialer=True)
    first = exchange.data_to_send()
    exchange.refuse(RefuseCode.EXCLUDED, "left out")
    last = exchange.data_to_send()
    assert first is not None
    assert last is not None
    events = Exchange(hello=hello(B), partner=A, dialer=False).receive(bytes(first) + bytes(last))
    reason = "refused by partner: left out"
    assert end(events) == Finished(kind=EdgeKind.REFUSED, reason=reason)
