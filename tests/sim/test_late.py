"""Edges over a slow link: nobody waits for them, and what they bring is mixed when it is there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

import pytest
import torch
from torch import Tensor

from gasloc_p2p.core.outer import OuterRule
from gasloc_p2p.core.substrate import Network
from gasloc_p2p.core.types import PeerId
from gasloc_p2p.net.identity import Identity
from gasloc_p2p.node.checkpoint import CheckpointStore
from gasloc_p2p.node.events import RoundFinished, RoundStarted
from gasloc_p2p.node.report import EdgeReport, RoundReport
from gasloc_p2p.simulate.links import links_of
from gasloc_p2p.simulate.network import Hub
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

Script: TypeAlias = Callable[
    [Hub, list[SimulatedPeer], list[asyncio.Task[object]]], Awaitable[None]
]
"""What happens while the peers run."""


async def nothing(
    hub: Hub, peers: list[SimulatedPeer], running: list[asyncio.Task[object]]
) -> None:
    return


def model(index_of: Mapping[PeerId, int], peer_id: PeerId) -> NoisyQuadratic:
    """A model that starts at a place of its own."""
    made = NoisyQuadratic(seed=0, peer_id=peer_id, elements=ELEMENTS, noise=0.0)
    made.load(torch.full((ELEMENTS,), float(index_of[peer_id])))
    return made


INDEX_OF = {Identity.derived(0, index).peer_id: index for index in range(PEERS)}


def swarm(
    *assignments: str,
    links: Sequence[str] = UNEVEN,
    script: Script = nothing,
    wrap: Callable[[Network], Network] = lambda network: network,
    rules: Mapping[int, OuterRule] | None = None,
    home: Path | None = None,
) -> list[SimulatedPeer]:
    """Run peers that start apart and never learn; `home` keeps the state of the slow one."""
    config = quick_config(
        f"run.initial_peers={PEERS}",
        f"run.rounds={ROUNDS}",
        f"run.closing_rounds={CLOSING_ROUNDS}",
        "gossip.guard=false",
        "inner.lr=1e-30",
        f"inner.local_steps={LOCAL_STEPS}",
        f"simulate.step_s={STEP_S}",
        "checkpoint.every_rounds=1",
        *assignments,
    )

    async def main() -> list[SimulatedPeer]:
        hub = Hub(verify=Identity.verify, links=links_of(links, PEERS))
        async with hub, asyncio.TaskGroup() as tasks:
            peers = [
                SimulatedPeer(
                    hub,
                    config,
                    index,
                    models=partial(model, INDEX_OF),
                    wrap=wrap,
                    rule=(rules or {}).get(index),
                    checkpoints=CheckpointStore(home, keep=3) if home and index == SLOW else None,
                )
                for index in range(PEERS)
            ]
            running: list[asyncio.Task[object]] = [tasks.create_task(p.run()) for p in peers]
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


@pytest.mark.parametrize("codec", ["none", "bf16", "mod8"])
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
    assert len(applied) >= 4
    assert all(edge.late > 0 for edge in applied)
    slow = [r for r in reports(uneven[SLOW]) if SETTLED <= r.round < ROUNDS]
    trained_s = sum(r.train_s for r in slow)
    assert trained_s > 0.6 * sum(s for t, s in rounds_s(uneven[SLOW]).items() if t >= SETTLED)
    assert all(r.wait_s < 0.1 for r in slow)


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
