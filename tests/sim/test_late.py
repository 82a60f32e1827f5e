"""Edges over a slow link: nobody waits for them, and what they bring is mixed when it is there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import pairwise
from statistics import median
from typing import Any, TypeAlias, cast

import msgspec
import pytest
import torch
from torch import Tensor

from gasloc_p2p.config import Config
from gasloc_p2p.core.outer import Local, OuterRule
from gasloc_p2p.core.substrate import LocalModel, Network, Stream, StreamHandler
from gasloc_p2p.core.types import BytesLike, EdgeKind, PeerId
from gasloc_p2p.net.identity import Identity
from gasloc_p2p.node.dialling import EXCHANGE_PROTOCOL
from gasloc_p2p.node.events import Left, RoundFinished, RoundStarted
from gasloc_p2p.node.report import EdgeReport, RoundReport
from gasloc_p2p.simulate.links import links_of
from gasloc_p2p.simulate.network import Hub
from gasloc_p2p.simulate.poison import Poison
from gasloc_p2p.testing.peer import SimulatedPeer
from gasloc_p2p.testing.quadratic import NoisyQuadratic
from tests.sim.conftest import in_virtual_time, quick_config

ELEMENTS = 10_000
STEP_S = 0.1
LOCAL_STEPS = 10
PEERS = 6
SLOW = PEERS - 1
ROUNDS = 24
SETTLED = 9
"""From this round on everybody knows who is slow, and the slow one has its stride."""
CLOSING_ROUNDS = 2
LINK = "1.6/1.6/0.01/0"
"""A link on which `ELEMENTS` fp32 take .2 s, a fifth of the inner steps of a round."""
UNEVEN = (LINK,) * SLOW + ("0.16/0.16/0.01/0",)
EVEN = (LINK,) * PEERS

INDEX_OF = {Identity.derived(0, index).peer_id: index for index in range(PEERS)}

Running: TypeAlias = list[asyncio.Task[Any]]
Script: TypeAlias = Callable[[Hub, list[SimulatedPeer], Running], Awaitable[None]]
"""What happens while the peers run."""


async def nothing(hub: Hub, peers: list[SimulatedPeer], running: Running) -> None:
    return


def apart(peer_id: PeerId) -> NoisyQuadratic:
    """A model that starts at a place of its own."""
    made = NoisyQuadratic(seed=0, peer_id=peer_id, elements=ELEMENTS, noise=0.0)
    made.load(torch.full((ELEMENTS,), float(INDEX_OF[peer_id])))
    return made


def swarm_config(*assignments: str) -> Config:
    return quick_config(
        f"run.initial_peers={PEERS}",
        f"run.rounds={ROUNDS}",
        f"run.closing_rounds={CLOSING_ROUNDS}",
        "gossip.guard=false",
        "inner.lr=1e-30",
        "gossip.chunk_bytes=4096",
        f"inner.local_steps={LOCAL_STEPS}",
        f"simulate.step_s={STEP_S}",
        *assignments,
    )


def swarm(
    *assignments: str,
    links: Sequence[str] = UNEVEN,
    script: Script = nothing,
    wrap: Callable[[Network], Network] = lambda network: network,
    rule: OuterRule | None = None,
    models: Callable[[PeerId], LocalModel] = apart,
) -> list[SimulatedPeer]:
    """Run peers that start apart and never learn; `wrap` and `rule` are the slow one's."""
    config = swarm_config(*assignments)
    of_slow: dict[str, Any] = {"wrap": wrap, "rule": rule}

    async def main() -> list[SimulatedPeer]:
        hub = Hub(verify=Identity.verify, links=links_of(links, PEERS))
        async with hub, asyncio.TaskGroup() as tasks:
            peers = [
                SimulatedPeer(
                    hub,
                    config,
                    index,
                    models=models,
                    **(of_slow if index == SLOW else {}),
                )
                for index in range(PEERS)
            ]
            running: Running = [tasks.create_task(p.run()) for p in peers]
            await script(hub, peers, running)
        return peers

    return in_virtual_time(main, horizon_s=5000)


def reports(peer: SimulatedPeer) -> list[RoundReport]:
    return [event.report for event in peer.of(RoundFinished)]


def slow_edges(peer: SimulatedPeer) -> list[EdgeReport]:
    """Return edges of the training rounds from `SETTLED` on, those with the slow peer only."""
    slow = Identity.derived(0, SLOW).peer_id
    edges = [e for r in reports(peer) if SETTLED <= r.round < ROUNDS for e in r.edges]
    return [edge for edge in edges if slow in (edge.partner, peer.id)]


def rounds_s(peer: SimulatedPeer) -> dict[int, float]:
    """Return the seconds from the beginning of each round to that of the next one."""
    begun = [(e.round, at) for at, e in peer.life.log if isinstance(e, RoundStarted)]
    return {t: after - before for (t, before), (_, after) in pairwise(begun)}


def last_thetas(peers: Iterable[SimulatedPeer]) -> Tensor:
    return torch.stack([peer.life.thetas[max(peer.life.thetas)] for peer in peers]).double()


@pytest.mark.parametrize("codec", ["none", pytest.param("bf16", marks=pytest.mark.slow), "mod8"])
@pytest.mark.parametrize(
    ("topology", "settings"),
    [
        ("pairs", ("pace.stride=false",)),
        ("ring", ("pace.stride=false",)),
        ("pairs", ("outer.rule=local",)),
        ("ring", ("outer.momentum=0", "gossip.overlap=true")),
    ],
)
def test_late_edges_keep_the_mean_of_the_swarm(
    topology: str, settings: tuple[str, ...], codec: str
) -> None:
    peers = swarm(f"gossip.topology={topology}", f"gossip.codec={codec}", *settings)
    late = [e for p in peers for r in reports(p) for e in r.edges if e.kind == "applied" and e.late]
    assert len(late) > 8
    assert last_thetas(peers).mean() == pytest.approx((PEERS - 1) / 2, rel=1e-6)
    assert not [e for p in peers for r in reports(p) for e in r.edges if e.kind == "asymmetric"]


@pytest.mark.parametrize("overlap", ["false", "true"])
def test_nobody_waits_for_a_slow_link(overlap: str) -> None:
    settings = "outer.rule=local", f"gossip.overlap={overlap}"
    uneven, even = swarm(*settings), swarm(*settings, links=EVEN)

    def seconds(peers: Sequence[SimulatedPeer]) -> float:
        took = [rounds_s(peer) for peer in peers[:SLOW]]
        return sum(s for of in took for t, s in of.items() if SETTLED <= t < ROUNDS - 1)

    assert seconds(uneven) < 1.15 * seconds(even)
    ends = [edge for peer in uneven for edge in slow_edges(peer)]
    assert len(ends) > 8
    assert {edge.kind for edge in ends} <= {"applied", "not_partner"}
    applied = [edge for edge in slow_edges(uneven[SLOW]) if edge.kind == "applied"]
    assert len(applied) >= 3
    assert all(edge.late > 0 for edge in applied)
    slow = [r for r in reports(uneven[SLOW]) if SETTLED <= r.round < ROUNDS]
    trained_s = sum(r.train_s for r in slow)
    assert trained_s > 0.5 * sum(s for t, s in rounds_s(uneven[SLOW]).items() if t >= SETTLED)
    assert all(r.wait_s < 0.1 for r in slow)
    at_once = 0
    for report in reports(uneven[SLOW]):
        at_once += report.under_way - sum(edge.late > 0 for edge in report.edges)
        assert at_once <= 1 or report.round < 5, "they would share its link"


@pytest.mark.parametrize("overlap", ["false", "true"])
def test_after_the_closing_rounds_all_are_the_same(overlap: str) -> None:
    closing = 10
    peers = swarm(
        f"run.closing_rounds={closing}",
        f"gossip.overlap={overlap}",
        "gossip.topology=ring",
        "outer.momentum=0.5",
        "run.rounds=16",
    )
    slow = reports(peers[SLOW])
    assert max(report.every for report in slow) > 1
    assert [r.round for r in slow if r.closing] == list(range(16, 16 + closing))
    for peer in peers:
        for report in reports(peer):
            assert not report.closing or {e.kind for e in report.edges} == {"applied"}
            assert not report.closing or len([e for e in report.edges if e.late == 0]) == 2
            assert not (report.closing and report.under_way)
    before = torch.stack([p.life.thetas[max(t for t in p.life.thetas if t < 16)] for p in peers])
    spread = float((before.max(dim=0).values - before.min(dim=0).values).max())
    assert spread > 1e-3
    after = last_thetas(peers)
    assert float((after - after.mean(dim=0)).abs().max()) < 1e-3 * spread


class BreakingNetwork:
    """Cuts streams of exchanges in the middle of what they carry; see `breaks`.

    Attributes:
        breaks: how many streams it is still to cut.
    """

    breaks = 0

    def __init__(self, network: Network) -> None:
        self._network = network

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)

    async def open_stream(self, peer: PeerId, protocol: str, *, deadline_s: float) -> Stream:
        stream = await self._network.open_stream(peer, protocol, deadline_s=deadline_s)
        return BreakingStream(stream, self) if protocol == EXCHANGE_PROTOCOL else stream

    async def serve(self, protocol: str, handler: StreamHandler) -> None:
        async def serve(stream: Stream) -> None:
            await handler(BreakingStream(stream, self))

        await self._network.serve(protocol, serve if protocol == EXCHANGE_PROTOCOL else handler)


class BreakingStream:
    def __init__(self, stream: Stream, network: BreakingNetwork) -> None:
        self._stream = stream
        self._network = network
        self._sent_bytes = 0

    @property
    def peer_id(self) -> PeerId:
        return self._stream.peer_id

    async def read(self, max_bytes: int) -> bytes:
        return await self._stream.read(max_bytes)

    async def write(self, data: BytesLike) -> None:
        self._sent_bytes += len(data)
        if self._network.breaks and self._sent_bytes > 10_000:
            self._network.breaks -= 1
            await self._stream.aclose()
            raise ConnectionError("cut")
        await self._stream.write(data)

    async def aclose(self) -> None:
        await self._stream.aclose()


async def is_transferring(peer: SimulatedPeer) -> None:
    """Wait until the slow peer has gone on from a settled round whose edge is under way."""
    t = SETTLED
    while not any(r.round >= SETTLED and r.under_way for r in reports(peer)):
        t += 1
        await peer.reached(t)


def test_a_late_edge_whose_stream_breaks_is_resumed() -> None:
    networks: list[BreakingNetwork] = []

    def wrap(network: Network) -> Network:
        networks.append(BreakingNetwork(network))
        return cast("Network", networks[0])

    async def script(hub: Hub, peers: list[SimulatedPeer], running: Running) -> None:
        await is_transferring(peers[SLOW])
        networks[0].breaks = 3

    peers = swarm("outer.rule=local", script=script, wrap=wrap)
    assert networks[0].breaks == 0
    ends = slow_edges(peers[SLOW])
    assert sum(edge.resumed for edge in ends) == 3
    assert {edge.kind for edge in ends} == {"applied"}
    assert all(edge.late > 0 for edge in ends)
    assert last_thetas(peers).mean() == pytest.approx((PEERS - 1) / 2, rel=1e-6)


def test_a_late_edge_whose_partner_dies_is_lost_and_nobody_waits() -> None:
    async def script(hub: Hub, peers: list[SimulatedPeer], running: Running) -> None:
        await is_transferring(peers[SLOW])
        running[SLOW].cancel()
        await peers[SLOW].network.aclose()

    peers = swarm("outer.rule=local", script=script)
    lost = [edge for peer in peers[:SLOW] for edge in slow_edges(peer) if edge.kind == "lost"]
    assert any(0 < edge.late <= 4 for edge in lost), "seconds, where its deadline is 16 s"
    for peer in peers[:SLOW]:
        took_s = [s for t, s in rounds_s(peer).items() if SETTLED <= t < ROUNDS - 1]
        # Until its lease is over it may still be drawn, and is found to be gone.
        assert max(took_s) < 3 * median(took_s)
        assert peer.of(Left)[0].finished


@pytest.mark.parametrize("leaver", [0, SLOW])
@pytest.mark.parametrize("overlap", ["false", "true"])
def test_who_leaves_while_late_edges_are_under_way_leaves_at_once(
    leaver: int, overlap: str
) -> None:
    took_s: list[float] = []

    async def script(hub: Hub, peers: list[SimulatedPeer], running: Running) -> None:
        await is_transferring(peers[SLOW])
        began_s = asyncio.get_running_loop().time()
        peers[leaver].leave.set()
        await asyncio.wait({running[leaver]})
        took_s.append(asyncio.get_running_loop().time() - began_s)

    peers = swarm("outer.rule=local", f"gossip.overlap={overlap}", script=script)
    assert took_s[0] < 1
    for index, peer in enumerate(peers):
        assert peer.of(Left)[0].finished is (index != leaver)
        edges = peer.of(Left)[0].report.edges
        begun = sum(r.under_way + sum(e.late == 0 for e in r.edges) for r in reports(peer))
        assert sum(msgspec.to_builtins(edges)[kind] for kind in (*EdgeKind, "cut")) == begun
        assert edges.cut == 0 or index == leaver
    assert leaver != SLOW or peers[leaver].of(Left)[0].report.edges.cut


def test_what_a_late_edge_brings_is_clipped_and_who_sends_harm_is_left_out() -> None:
    def start(peer_id: PeerId) -> NoisyQuadratic:
        return NoisyQuadratic(seed=0, peer_id=peer_id, elements=ELEMENTS)

    def farthest(guard: str) -> tuple[float, list[EdgeReport]]:
        harm = Poison(
            lr=0.7, momentum=0.9, honest=Local(lr=0.7, momentum=0.9), attack=lambda x: 30 * x + 3
        )
        honest = f"gossip.guard={guard}", "outer.rule=local", "inner.lr=0.05"
        peers = swarm(*honest, rule=harm, models=start)
        edges = [edge for peer in peers[:SLOW] for edge in slow_edges(peer)]
        return float(last_thetas(peers[:SLOW]).abs().max()), edges

    unguarded, edges = farthest("false")
    assert any(edge.late and edge.kind == "applied" for edge in edges)
    guarded, edges = farthest("true")
    assert any(edge.clip < 1 or edge.excluded or edge.code == "excluded" for edge in edges)
    assert guarded < 0.2 * unguarded
