"""Edges that come to nothing, and say so in a few words over a stream of their own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from gasloc_p2p.core.exchange import Cut, Exchange, Finished
from gasloc_p2p.core.substrate import PeerUnreachableError, Stream
from gasloc_p2p.core.types import EdgeOutcome, PeerId
from gasloc_p2p.core.wire import RefuseCode
from gasloc_p2p.node.edge import FLUSH_S, READ_BYTES


async def knock(stream: Stream, exchange: Exchange, *, deadline_s: float) -> Finished | None:
    """Show a partner that is to dial this peer the Hello of their edge, and close the stream.

    Args:
        stream: to the partner, whose inbox takes it for what it is.
        exchange: fresh state machine that speaks first.
        deadline_s: seconds to wait for an answer.

    Returns:
        How the partner refuses the edge; None when it does not.
    """
    try:
        async with asyncio.timeout(deadline_s):
            await stream.write(_small_frames(exchange))
            while answer := await stream.read(READ_BYTES):
                for event in exchange.receive(answer):
                    if isinstance(event, Finished):
                        return event
    except (TimeoutError, ConnectionError):
        return None
    finally:
        await stream.aclose()
    return None


async def decline_edge(
    *,
    partner: PeerId,
    dial: Callable[[], Awaitable[Stream]] | None,
    exchange: Exchange,
    code: RefuseCode,
    reason: str,
) -> EdgeOutcome:
    """Do without an edge, and tell the partner so that it need not wait.

    Args:
        partner: who it is with.
        dial: opens a stream to the partner; None where the partner dials, whose stream the inbox
            refuses.
        exchange: fresh state machine of this edge.
        code, reason: why; the reason in one sentence.
    """
    words = _small_frames(exchange)
    [ended] = exchange.refuse(code, reason)
    assert isinstance(ended, Finished)
    words += _small_frames(exchange)
    if dial is not None:
        # It cannot be helped if this fails: the partner finds out at its own deadline.
        with contextlib.suppress(TimeoutError, PeerUnreachableError, ConnectionError):
            async with asyncio.timeout(FLUSH_S):
                # Both at once, or the partner might find the stream closed while it answers.
                await _say(await dial(), words)
    return EdgeOutcome(
        partner=partner,
        kind=ended.kind,
        reason=ended.reason,
        code=code,
        excluded=code is RefuseCode.EXCLUDED,
    )


def _small_frames(exchange: Exchange) -> bytes:
    """Return all that an exchange has to say that no codec makes."""
    said = bytearray()
    while (item := exchange.next_to_send()) is not None:
        assert not isinstance(item, Cut)
        for part in item:
            said += part
    return bytes(said)


async def _say(stream: Stream, data: bytes) -> None:
    try:
        await stream.write(data)
    finally:
        await stream.aclose()
