"""One edge over a stream that breaks, stalls or lies: always an outcome, never an exception."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from gasloc_p2p.core.exchange import Exchange
from gasloc_p2p.core.substrate import PeerUnreachableError, Stream
from gasloc_p2p.core.types import BytesLike, EdgeKind, EdgeOutcome
from gasloc_p2p.core.wire import Hello
from gasloc_p2p.net.identity import Identity
from gasloc_p2p.node.edge import (
    FLUSH_S,
    Contact,
    EdgeCallbacks,
    Judgement,
    decline_edge,
    run_edge,
)
from gasloc_p2p.node.events import Event, Notice
from gasloc_p2p.node.inbox import Inbox
from gasloc_p2p.simulate.network import Hub
from tests.sim.conftest import in_virtual_time

CODES = {"a": bytes(range(256)) * 4000, "b": bytes(reversed(range(256))) * 4000}
PROTOCOL = "test"
DEADLINE_S = 30.0


def hello(peer: str, round: int = 5) -> Hello:
    return Hello(
        protocol_min=1,
        protocol_max=1,
        peer_id=peer,
        run_digest=b"run",
        schema_digest=b"schema",
        round=round,
        roster_digest=b"roster",
        codec="none",
        code_bytes=len(CODES["a"]),
        chunk_bytes=65_536,
        scales=b"",
    )


def decoded(codes: BytesLike) -> Tensor:
    return torch.frombuffer(bytearray(codes), dtype=torch.uint8)


def callbacks(peer: str, *, finite: bool = True, clip: float = 1.0) -> EdgeCallbacks:
    async def encode(scales: bytes) -> BytesLike:
        return CODES[peer]

    async def judge(codes: BytesLike, scales: bytes) -> Judgement | None:
        return Judgement(received=decoded(codes), length=7.0, clip=clip) if finite else None

    return EdgeCallbacks(encode=encode, judge=judge, records=lambda records: None)


async def edge_of(
    peer: str,
    partner: str,
    contact: Callable[[], Awaitable[Contact]],
    *,
    finite: bool = True,
    clip: float = 1.0,
    own: Hello | None = None,
) -> EdgeOutcome:
    return await run_edge(
        partner=partner,
        contact=contact,
        exchange=Exchange(hello=own or hello(peer), partner=partner, dialer=peer == "a"),
        callbacks=callbacks(peer, finite=finite, clip=clip),
        deadline_s=DEADLINE_S,
    )


class Pair:
    """Peer a dials peer b, whose inbox is at round 5."""

    def __init__(self, hub: Hub) -> None:
        self.events: list[Event] = []
        self.left_out_at_b = ""
        self.a = hub.network("a", lambda payload: b"")
        self.b = hub.network("b", lambda payload: b"")
        self.inbox = Inbox(
            lambda round: hello("b", round),
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
    pair: Pair, *, finite_at_b: bool = True, clips: tuple[float, float] = (1.0, 1.0)
) -> tuple[EdgeOutcome, ...]:
    async with asyncio.TaskGroup() as tasks:
        a = tasks.create_task(edge_of("a", "b", pair.dial, clip=clips[0]))
        b = tasks.create_task(edge_of("b", "a", pair.claim, finite=finite_at_b, clip=clips[1]))
    return a.result(), b.result()


def test_both_sides_apply_and_count_the_same_bytes() -> None:
    async def scene(pair: Pair) -> tuple[EdgeOutcome, ...]:
        await pair.serve()
        return await both(pair)

    a, b = play(scene)
    assert (a.kind, b.kind) == (EdgeKind.APPLIED, EdgeKind.APPLIED)
    assert a.received is not None
    assert b.received is not None
    assert torch.equal(a.received, decoded(CODES["b"]))
    assert torch.equal(b.received, decoded(CODES["a"]))
    assert (a.clip, a.length, a.offence, a.excluded) == (1.0, 7.0, "", False)
    assert (a.bytes_sent, a.bytes_received) == (b.bytes_received, b.bytes_sent)


def test_numbers_that_are_not_finite_are_refused_and_named_on_both_sides() -> None:
    async def scene(pair: Pair) -> tuple[EdgeOutcome, ...]:
        await pair.serve()
        return await both(pair, finite_at_b=False)

    a, b = play(scene)
    assert (a.kind, b.kind) == (EdgeKind.CORRUPT, EdgeKind.CORRUPT)
    assert "not finite" in a.reason
    assert "refused by partner" in a.reason
    assert "refused by this peer" in b.reason
    assert a.received is None
    assert (a.offence, b.offence) == ("", b.reason)


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
        async def die(stream: Stream) -> None:
            exchange = Exchange(hello=hello("b"), partner="a", dialer=False)
            sent = 0
            while sent <= after_bytes:
                for event in exchange.receive(await stream.read(65_536)):
                    if type(event).__name__ == "PartnerHello":
                        exchange.send_codes(CODES["b"])
                while sent <= after_bytes and (data := exchange.data_to_send()) is not None:
                    await stream.write(data)
                    sent += len(data)
            await stream.aclose()

        await pair.b.serve(PROTOCOL, die)
        return (await edge_of("a", "b", pair.dial),)

    [outcome] = play(scene)
    assert outcome.kind is EdgeKind.LOST
    assert outcome.received is None


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
    exchange = Exchange(hello=hello(peer), partner=partner, dialer=peer == "a")
    return decline_edge(partner=partner, dial=dial, exchange=exchange, reason="left out")


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
