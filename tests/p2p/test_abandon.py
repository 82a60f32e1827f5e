"""Partners that are gone or fail: what they cost a peer in time and memory."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeAlias

import psutil
import pytest
import torch

from gasloc_p2p.core.codecs import Keys, codec_named
from gasloc_p2p.core.exchange import Cut, Exchange
from gasloc_p2p.core.substrate import Stream
from gasloc_p2p.core.types import EdgeKind, EdgeOutcome
from gasloc_p2p.core.wire import PROTOCOL_VERSION, Hello
from gasloc_p2p.net.network import Libp2pNetwork
from gasloc_p2p.node.edge import Contact, EdgeWork, run_edge
from gasloc_p2p.node.events import RoundFinished
from gasloc_p2p.node.report import RoundReport
from gasloc_p2p.simulate.clock import InlineCompute
from tests.p2p.real import RealNode, real_swarm

pytestmark = [pytest.mark.p2p, pytest.mark.timeout(240)]

StartNode: TypeAlias = Callable[..., Awaitable[Libp2pNetwork]]
PATIENCE_S = 60.0
SOON_S = 15.0
"""Far from the deadline, and far beyond the 2 s that abandoning takes on a quiet machine."""
CODE_BYTES = 4 << 20
CHUNK_BYTES = 1 << 18


async def first_lost_edge(node: RealNode) -> RoundReport:
    def lost() -> RoundReport | None:
        reports = [event.report for event in node.of(RoundFinished)]
        return next((r for r in reports if any(e.kind is EdgeKind.LOST for e in r.edges)), None)

    return await node.until(lost)


@pytest.mark.parametrize("dialer_dies", [True, False], ids=["dialer", "acceptor"])
async def test_a_dead_partner_is_abandoned_within_two_seconds(
    dialer_dies: bool, tmp_path: Path
) -> None:
    patient = (f"pace.edge_floor_s={PATIENCE_S}", f"pace.edge_ceiling_s={PATIENCE_S}")
    async with real_swarm(tmp_path) as swarm:
        entry = await swarm.bootstrap()
        nodes = await swarm.nodes_of_run("abandon", entry, 2, "run.rounds=100000", *patient)
        for node in nodes:
            await node.reached(3)
        nodes.sort(key=lambda node: node.peer_id, reverse=not dialer_dies)
        victim, survivor = nodes
        victim.signal(signal.SIGKILL)
        report = await first_lost_edge(survivor)
        survivor.signal(signal.SIGINT)
        assert await survivor.ended() == 0
    assert report.exchange_s < SOON_S


def hello(peer: str) -> Hello:
    return Hello(
        protocol_min=PROTOCOL_VERSION,
        protocol_max=PROTOCOL_VERSION,
        peer_id=peer,
        run_digest=b"run",
        schema_digest=b"schema",
        round=5,
        roster_digest=b"roster",
        codec="none",
        code_bytes=CODE_BYTES,
        chunk_bytes=CHUNK_BYTES,
        scale_bytes=0,
    )


async def test_memory_is_flat_over_a_hundred_failed_exchanges(start_node: StartNode) -> None:
    first = await start_node(0)
    second = await start_node(1, await first.addresses())
    offer = codec_named("none").offer(
        torch.zeros(CODE_BYTES // 4),
        motion=None,
        keys=Keys(round=5, own=0),
        chunk_bytes=CHUNK_BYTES,
    )
    endings = itertools.cycle(["half", "mute", "garbage", "at once"])

    def exchange_with(partner: str, own: str, *, dialer: bool) -> Exchange:
        return Exchange(hello=hello(own), layout=offer.layout, partner=partner, dialer=dialer)

    async def fail(stream: Stream) -> None:
        """Answer as far as the ending goes, then leave."""
        ending = next(endings)
        try:
            if ending == "half":
                partner = exchange_with(stream.peer_id, first.peer_id, dialer=False)
                partner.receive(await stream.read(1 << 16))
                coder = offer.coder(b"")
                for _ in range(CODE_BYTES // CHUNK_BYTES // 2):
                    item = partner.next_to_send()
                    assert item is not None
                    parts = item.frame(coder.encode(item.index)) if isinstance(item, Cut) else item
                    for part in parts:
                        await stream.write(part)
            elif ending == "garbage":
                await stream.write(b"\xff" * CHUNK_BYTES)
            elif ending == "mute":
                while await stream.read(1 << 20):
                    pass
        except ConnectionError:
            pass
        finally:
            await stream.aclose()

    async def failed_exchange() -> EdgeOutcome:
        async def contact() -> Contact:
            stream = await second.open_stream(first.peer_id, "gasloc/test/1", deadline_s=10.0)
            return Contact(stream=stream)

        return await run_edge(
            partner=first.peer_id,
            contact=contact,
            exchange=exchange_with(first.peer_id, second.peer_id, dialer=True),
            work=EdgeWork(
                offer=offer,
                compute=InlineCompute(step_s=0.0),
                clip=lambda length: 1.0,
                records=lambda records: None,
            ),
            deadline_s=0.3,
        )

    await first.serve("gasloc/test/1", fail)
    memory = psutil.Process().memory_info
    kinds = {(await failed_exchange()).kind for _ in range(20)}
    assert len(kinds) >= 2
    assert not kinds & {EdgeKind.APPLIED, EdgeKind.ASYMMETRIC}
    before_bytes = memory().rss
    for _ in range(100):
        assert not (await failed_exchange()).mixes
    assert memory().rss - before_bytes < 6 * CODE_BYTES, "a leak would be a hundred times as much"
