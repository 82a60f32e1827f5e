"""One edge over a stream that breaks, stalls or lies: always an outcome, never an exception."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from gasloc_p2p.core.codecs import Codec, Coder, Keys, Offer, block_max_difference, codec_named
from gasloc_p2p.core.exchange import Cut, Exchange
from gasloc_p2p.core.substrate import PeerUnreachableError, Stream
from gasloc_p2p.core.types import BytesLike, EdgeKind, EdgeOutcome
from gasloc_p2p.core.wire import Hello, RefuseCode
from gasloc_p2p.net.identity import Identity
from gasloc_p2p.node.edge import FLUSH_S, MAX_RESUMPTIONS, Contact, EdgeWork, run_edge
from gasloc_p2p.node.events import Event, Notice
from gasloc_p2p.node.few_words import decline_edge
from gasloc_p2p.node.inbox import Inbox
from gasloc_p2p.simulate.clock import InlineCompute
from gasloc_p2p.simulate.network import Hub
from tests.sim.conftest import in_virtual_time

ELEMENTS = 250_000
CHUNK_BYTES = 65_536
PROTOCOL = "test"
DEADLINE_S = 30.0
KEYS = Keys(round=1, own=2)
VECTORS = {
    "a": torch.linspace(0, 1, ELEMENTS),
    "b": torch.linspace(0, 1, ELEMENTS) + 1e-3 * torch.arange(ELEMENTS).sin(),
}
NONE = codec_named("none")


def hello(peer: str, round: int = 5, codec: Codec = NONE) -> Hello:
    layout = codec.layout(ELEMENTS, CHUNK_BYTES)
    return Hello(
        protocol_min=1,
        protocol_max=1,
        peer_id=peer,
        run_digest=b"run",
        schema_digest=b"schema",
        round=round,
        roster_digest=b"roster",
        codec=codec.name,
        code_bytes=layout.code_bytes,
        chunk_bytes=CHUNK_BYTES,
        scale_bytes=layout.scale_bytes,
    )


def offer(peer: str, codec: Codec = NONE) -> Offer:
    motion = block_max_difference(VECTORS["a"], VECTORS["b"], codec.block_elements)
    return codec.offer(
        VECTORS[peer],
        motion=motion if codec.checked else None,
        keys=KEYS,
        chunk_bytes=CHUNK_BYTES,
    )


def exchange_of(own: Hello, partner: str, offered: Offer, *, dialer: bool) -> Exchange:
    return Exchange(
        hello=own, layout=offered.layout, scales=offered.scales, partner=partner, dialer=dialer
    )


def difference(outcome: EdgeOutcome) -> Tensor:
    """What the edge adds to the mix at full weight."""
    assert outcome.coder is not None
    mixed = torch.zeros(ELEMENTS)
    outcome.coder.add_difference(mixed, 1.0)
    return mixed


async def edge_of(
    peer: str,
    partner: str,
    contact: Callable[[], Awaitable[Contact]],
    *,
    offered: Offer | None = None,
    clip: float = 1.0,
    own: Hello | None = None,
    codec: Codec = NONE,
) -> EdgeOutcome:
    offered = offered or offer(peer, codec)
    return await run_edge(
        partner=partner,
        contact=contact,
        exchange=exchange_of(own or hello(peer, codec=codec), partner, offered, dialer=peer == "a"),
        work=EdgeWork(
            offer=offered,
            compute=InlineCompute(step_s=0.0),
            clip=lambda length: clip,
            records=lambda records: None,
        ),
        deadline_s=DEADLINE_S,
    )


class Pair:
    """Peer a dials peer b, whose inbox is at round 5."""

    def __init__(self, hub: Hub) -> None:
        self.events: list[Event] = []
        self.left_out_at_b = ""
        self.codec = NONE
        self.a = hub.network("a", lambda payload: b"")
        self.b = hub.network("b", lambda payload: b"")
        self.inbox = Inbox(
            lambda round: hello("b", round, self.codec),
            self.events.append,
            lambda peer, round: self.left_out_at_b,
        )

    async def dial(self) -> Contact:
        return Contact(stream=await self.a.open_stream("b", PROTOCOL, deadline_s=1.0))

    async def claim(self) -> Contact:
        return await self.inbox.claim(5, "a")

    async def serve(self, partners: tuple[str, ...] = ("a",), round: int = 5) -> None:
        await self.b.serve(PROTOCOL, self.inbox.accept)
        self.inbox.open_round(round, partners)


def play(
    scene: Callable[[Pair], Awaitable[tuple[EdgeOutcome, ...]]],
) -> tuple[EdgeOutcome, ...]:
    async def main() -> tuple[EdgeOutcome, ...]:
        async with Hub(verify=Identity.verify) as hub:
            return await scene(Pair(hub))

    return in_virtual_time(main)


async def both(
    pair: Pair,
    *,
    codec: Codec = NONE,
    offer_of_a: Offer | None = None,
    clips: tuple[float, float] = (1.0, 1.0),
    dial: Callable[[], Awaitable[Contact]] | None = None,
) -> tuple[EdgeOutcome, ...]:
    pair.codec = codec
    async with asyncio.TaskGroup() as tasks:
        a = tasks.create_task(
            edge_of("a", "b", dial or pair.dial, offered=offer_of_a, clip=clips[0], codec=codec)
        )
        b = tasks.create_task(edge_of("b", "a", pair.claim, clip=clips[1], codec=codec))
    return a.result(), b.result()


@pytest.mark.parametrize("name", ["none", "bf16", "int8", "mod4"])
def test_both_sides_apply_and_count_the_same_bytes(name: str) -> None:
    async def scene(pair: Pair) -> tuple[EdgeOutcome, ...]:
        await pair.serve()
        return await both(pair, codec=codec_named(name))

    a, b = play(scene)
    assert (a.kind, b.kind) == (EdgeKind.APPLIED, EdgeKind.APPLIED)
    assert torch.equal(difference(a), -difference(b))
    assert (a.clip, a.offence, a.excluded, a.resumed) == (1.0, "", False, 0)
    assert (a.bytes_sent, a.bytes_received) == (b.bytes_received, b.bytes_sent)
    assert a.length == b.length == pytest.approx(float(difference(a).double().norm()), rel=1e-6)
    assert a.repaired_blocks == b.repaired_blocks
    if name == "none":
        assert torch.equal(difference(a), VECTORS["b"] - VECTORS["a"])


class Poisoned:
    """An offer whose codes are not numbers."""

    def __init__(self, honest: Offer) -> None:
        self.scales, self.layout = honest.scales, honest.layout
        self._honest = honest

    def coder(self, partner_scales: BytesLike) -> Coder:
        coder = self._honest.coder(partner_scales)
        sizes = self.layout.code_sizes
        setattr(coder, "encode", lambda index: b"\xff" * sizes[index])  # noqa: B010  # mypy allows no other way
        return coder


def test_numbers_that_are_not_finite_are_refused_and_named_on_both_sides() -> None:
    async def scene(pair: Pair) -> tuple[EdgeOutcome, ...]:
        await pair.serve()
        return await both(pair, offer_of_a=Poisoned(offer("a")))

    a, b = play(scene)
    assert (a.kind, b.kind) == (EdgeKind.CORRUPT, EdgeKind.CORRUPT)
    assert "not finite" in a.reason
    assert "refused by partner" in a.reason
    assert "refused by this peer" in b.reason
    assert a.coder is None
    assert (a.offence, b.offence) == ("", b.reason)


class Breaking:
    """A stream that breaks after so many bytes have been read."""

    def __init__(self, stream: Stream, *, after_bytes: int) -> None:
        self.peer_id = stream.peer_id
        self._stream = stream
        self._left = after_bytes

    async def read(self, max_bytes: int) -> bytes:
        if self._left <= 0:
            await self._stream.aclose()
            return b""
        data = await self._stream.read(min(max_bytes, self._left))
        self._left -= len(data)
        return data

    async def write(self, data: BytesLike) -> None:
        await self._stream.write(data)

    async def aclose(self) -> None:
        await self._stream.aclose()


@pytest.mark.parametrize("name", ["none", "mod4"])
@pytest.mark.parametrize("breaks", [1, MAX_RESUMPTIONS, MAX_RESUMPTIONS + 1])
def test_a_broken_stream_is_taken_up_where_it_broke(breaks: int, name: str) -> None:
    codec = codec_named(name)
    code_bytes = codec.layout(ELEMENTS, CHUNK_BYTES).code_bytes

    async def scene(pair: Pair) -> tuple[EdgeOutcome, ...]:
        await pair.serve()
        left = breaks

        async def dial() -> Contact:
            nonlocal left
            reached = await pair.dial()
            if not left:
                return reached
            left -= 1
            return Contact(stream=Breaking(reached.stream, after_bytes=code_bytes // 8))

        return await both(pair, codec=codec, dial=dial)

    a, b = play(scene)
    if breaks > MAX_RESUMPTIONS:
        assert (a.kind, a.coder, b.coder) == (EdgeKind.LOST, None, None)
        return
    assert (a.kind, b.kind) == (EdgeKind.APPLIED, EdgeKind.APPLIED)
    assert (a.resumed, b.resumed) == (breaks, breaks)
    assert torch.equal(difference(a), -difference(b))
    assert a.bytes_received < 1.7 * code_bytes, "what had arrived was not sent again"


@pytest.mark.parametrize("clips", [(0.5, 1.0), (1.0, 0.5), (0.75, 0.5)])
def test_both_sides_mix_with_the_smaller_clip_factor(clips: tuple[float, float]) -> None:
    async def scene(pair: Pair) -> tuple[EdgeOutcome, ...]:
        await pair.serve()
        return await both(pair, clips=clips)

    assert [outcome.clip for outcome in play(scene)] == [0.5, 0.5]


def test_a_partner_that_never_comes_times_out() -> None:
    async def scene(pair: Pair) -> tuple[EdgeOutcome, ...]:
        await pair.serve()
        return (await edge_of("b", "a", pair.claim),)

    [outcome] = play(scene)
    assert outcome.kind is EdgeKind.TIMED_OUT
    assert outcome.elapsed_s == pytest.approx(DEADLINE_S, abs=0.1)
    assert outcome.wait_s == pytest.approx(DEADLINE_S, abs=0.1)


def test_a_partner_that_cannot_be_reached_is_lost() -> None:
    async def scene(pair: Pair) -> tuple[EdgeOutcome, ...]:
        async def dial() -> Contact:
            raise PeerUnreachableError("nobody there")

        return (await edge_of("a", "b", dial),)

    [outcome] = play(scene)
    assert (outcome.kind, outcome.reason) == (
        EdgeKind.LOST,
        "cannot be reached: nobody there",
    )


@pytest.mark.parametrize("after_bytes", [0, 10, 200, 100_000, 700_000])
def test_a_partner_that_dies_in_mid_transfer_is_lost(after_bytes: int) -> None:
    async def scene(pair: Pair) -> tuple[EdgeOutcome, ...]:
        offered = offer("b")

        async def die(stream: Stream) -> None:
            exchange = exchange_of(hello("b"), "a", offered, dialer=False)
            coder = offered.coder(b"")
            sent = 0
            while sent <= after_bytes:
                exchange.receive(await stream.read(65_536))
                while sent <= after_bytes and (item := exchange.next_to_send()) is not None:
                    parts = item.frame(coder.encode(item.index)) if isinstance(item, Cut) else item
                    for part in parts:
                        await stream.write(part)
                        sent += len(part)
            await stream.aclose()
            await pair.b.aclose()

        await pair.b.serve(PROTOCOL, die)
        return (await edge_of("a", "b", pair.dial),)

    [outcome] = play(scene)
    assert outcome.kind is EdgeKind.LOST
    assert outcome.coder is None


def test_a_silent_partner_is_given_up_at_the_deadline() -> None:
    async def scene(pair: Pair) -> tuple[EdgeOutcome, ...]:
        async def silent(stream: Stream) -> None:
            await asyncio.Event().wait()

        await pair.b.serve(PROTOCOL, silent)
        return (await edge_of("a", "b", pair.dial),)

    [outcome] = play(scene)
    assert outcome.kind is EdgeKind.TIMED_OUT


def test_an_early_stream_waits_for_its_round() -> None:
    async def scene(pair: Pair) -> tuple[EdgeOutcome, ...]:
        await pair.serve(partners=(), round=3)
        async with asyncio.TaskGroup() as tasks:
            a = tasks.create_task(edge_of("a", "b", pair.dial))
            await asyncio.sleep(10.0)
            pair.inbox.open_round(5, ["a"])
            b = tasks.create_task(edge_of("b", "a", pair.claim))
        return a.result(), b.result()

    a, b = play(scene)
    assert (a.kind, b.kind) == (EdgeKind.APPLIED, EdgeKind.APPLIED)
    assert a.wait_s == pytest.approx(10.0, abs=0.1)


@pytest.mark.parametrize(
    ("round", "partners", "reason"),
    [
        (6, ("a",), "round 5 is over here, this peer is in round 6"),
        (5, (), "this peer has no edge with a in round 5"),
        (5 - 9, (), "too early for round 5, this peer is in round -4"),
    ],
)
def test_a_stream_without_an_edge_is_refused_at_once(
    round: int, partners: tuple[str, ...], reason: str
) -> None:
    async def scene(pair: Pair) -> tuple[EdgeOutcome, ...]:
        await pair.serve(partners=partners, round=round)
        return (await edge_of("a", "b", pair.dial),)

    [outcome] = play(scene)
    assert outcome.kind is EdgeKind.NOT_PARTNER
    assert reason in outcome.reason
    assert outcome.elapsed_s == 0.0


def test_a_stream_that_waits_for_a_round_without_its_edge_is_refused() -> None:
    async def scene(pair: Pair) -> tuple[EdgeOutcome, ...]:
        await pair.serve(partners=(), round=4)
        async with asyncio.TaskGroup() as tasks:
            a = tasks.create_task(edge_of("a", "b", pair.dial))
            await asyncio.sleep(1.0)
            pair.inbox.open_round(5, ())
        return (a.result(),)

    [outcome] = play(scene)
    assert outcome.kind is EdgeKind.NOT_PARTNER
    assert "no edge with a in round 5" in outcome.reason


@pytest.mark.parametrize(
    ("own", "words"),
    [
        (msgspec.structs.replace(hello("a"), run_digest=b"other"), "run digest"),
        (msgspec.structs.replace(hello("a"), schema_digest=b"other"), "schema digest"),
        (msgspec.structs.replace(hello("a"), peer_id="c"), "peer id"),
        (msgspec.structs.replace(hello("a"), codec="bf16"), "codec"),
    ],
)
def test_strangers_are_refused_and_told_of_once(own: Hello, words: str) -> None:
    notices: list[str] = []

    async def scene(pair: Pair) -> tuple[EdgeOutcome, ...]:
        await pair.serve()
        outcomes = [await edge_of("a", "b", pair.dial, own=own) for _ in range(2)]
        notices.extend(event.text for event in pair.events if isinstance(event, Notice))
        return tuple(outcomes)

    for outcome in play(scene):
        assert outcome.kind is EdgeKind.REFUSED
        assert f"refused by partner: expected {words}" in outcome.reason
    [notice] = notices
    assert f"a stream from a was refused by this peer: expected {words}" in notice


# Partners that are left out


def declined(peer: str, partner: str, dial: Callable[[], Awaitable[Stream]] | None) -> Any:
    exchange = exchange_of(hello(peer), partner, offer(peer), dialer=peer == "a")
    return decline_edge(
        partner=partner, dial=dial, exchange=exchange, code=RefuseCode.EXCLUDED, reason="left out"
    )


def check_declined(here: EdgeOutcome, there: EdgeOutcome) -> None:
    assert (here.kind, here.excluded) == (EdgeKind.REFUSED, True)
    assert here.reason == "refused by this peer: left out"
    assert (there.kind, there.excluded) == (EdgeKind.REFUSED, False)
    assert there.reason == "refused by partner: left out"
    assert there.offence == ""
    assert there.elapsed_s < 1.0


@pytest.mark.parametrize("early", [True, False])
def test_one_that_waits_for_a_dialer_that_leaves_it_out_is_told(early: bool) -> None:
    async def scene(pair: Pair) -> tuple[EdgeOutcome, ...]:
        await pair.serve(partners=(), round=4)
        a = await declined("a", "b", lambda: pair.a.open_stream("b", PROTOCOL, deadline_s=1.0))
        await asyncio.sleep(5.0 if early else 0.0)
        pair.inbox.open_round(5, ["a"])
        return a, await edge_of("b", "a", pair.claim)

    check_declined(*play(scene))


@pytest.mark.parametrize("early", [True, False])
def test_a_dialer_that_is_left_out_is_refused(early: bool) -> None:
    async def scene(pair: Pair) -> tuple[EdgeOutcome, ...]:
        pair.left_out_at_b = "left out"
        await pair.serve(partners=(), round=3 if early else 5)
        return await declined("b", "a", None), await edge_of("a", "b", pair.dial)

    check_declined(*play(scene))


def test_a_stream_that_waits_when_its_peer_is_left_out_is_refused() -> None:
    async def scene(pair: Pair) -> tuple[EdgeOutcome, ...]:
        await pair.serve(partners=(), round=4)
        async with asyncio.TaskGroup() as tasks:
            a = tasks.create_task(edge_of("a", "b", pair.dial))
            await asyncio.sleep(0.5)
            pair.left_out_at_b = "left out"
            pair.inbox.open_round(5, ())
        return await declined("b", "a", None), a.result()

    check_declined(*play(scene))


@pytest.mark.parametrize("how", ["unreachable", "silent", "gone"])
def test_telling_a_partner_that_cannot_hear_takes_two_seconds_at_most(how: str) -> None:
    async def scene(pair: Pair) -> tuple[EdgeOutcome, ...]:
        class Gone:
            peer_id = "b"

            async def write(self, data: BytesLike) -> None:
                raise ConnectionError

            async def aclose(self) -> None:
                return

        async def dial() -> Any:
            if how == "unreachable":
                raise PeerUnreachableError("nobody there")
            if how == "silent":
                await asyncio.Event().wait()
            return Gone()

        began_s = asyncio.get_running_loop().time()
        outcome = await declined("a", "b", dial)
        assert asyncio.get_running_loop().time() - began_s <= FLUSH_S
        return (outcome,)

    [outcome] = play(scene)
    assert (outcome.kind, outcome.excluded) == (EdgeKind.REFUSED, True)


def test_noise_instead_of_a_hello_is_dropped() -> None:
    async def scene(pair: Pair) -> tuple[EdgeOutcome, ...]:
        await pair.serve()
        stream = await pair.a.open_stream("b", PROTOCOL, deadline_s=1.0)
        await stream.write(b"GET / HTTP/1.1\r\n\r\n" * 10)
        while await stream.read(100):
            pass
        return ()

    assert play(scene) == ()
