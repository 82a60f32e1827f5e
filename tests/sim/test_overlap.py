"""Exchanges under the inner steps of the next round: the same path, in less time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from gasloc_p2p.core.types import PeerId
from gasloc_p2p.net.identity import Identity
from gasloc_p2p.node.events import RoundFinished, RoundStarted
from gasloc_p2p.node.report import RoundReport
from gasloc_p2p.simulate.links import links_of
from gasloc_p2p.simulate.network import Hub
from gasloc_p2p.testing.peer import SimulatedPeer, verify
from gasloc_p2p.testing.quadratic import NoisyQuadratic
from tests.sim.conftest import in_virtual_time, quick_config

ELEMENTS = 50_000
STEP_S = 0.1
LOCAL_STEPS = 10
"""With `STEP_S` one second of inner steps in a round."""
TRANSFER_60 = "2.7/2.7/0/0"
"""A link on which `ELEMENTS` fp32 take about .6 s."""


def model(index_of: dict[PeerId, int], peer_id: PeerId) -> NoisyQuadratic:
    """A model that starts at a place of its own."""
    made = NoisyQuadratic(seed=0, peer_id=peer_id, elements=ELEMENTS, noise=0.0)
    made.load(torch.full((ELEMENTS,), float(index_of[peer_id])))
    return made


def swarm(
    *assignments: str, peers: int = 4, links: Sequence[str] = (TRANSFER_60,)
) -> list[SimulatedPeer]:
    """Run peers that start apart to the end."""
    config = quick_config(
        f"run.initial_peers={peers}",
        "run.rounds=6",
        "run.closing_rounds=1",
        "gossip.guard=false",
        "pace.adapt_steps=false",
        f"inner.local_steps={LOCAL_STEPS}",
        f"simulate.step_s={STEP_S}",
        "pace.edge_floor_s=60",
        *assignments,
    )
    index_of = {Identity.derived(0, index).peer_id: index for index in range(peers)}

    async def main() -> list[SimulatedPeer]:
        hub = Hub(verify=verify, links=links_of(links, peers))
        async with hub, asyncio.TaskGroup() as tasks:
            started = [
                SimulatedPeer(hub, config, index, models=partial(model, index_of))
                for index in range(peers)
            ]
            for peer in started:
                tasks.create_task(peer.run())
        return started

    return in_virtual_time(main)


def thetas_after_training(peers: Sequence[SimulatedPeer]) -> Tensor:
    last = max(peers[0].life.thetas) - 1
    return torch.stack([peer.life.thetas[last] for peer in peers]).double()


def reports(peer: SimulatedPeer) -> list[RoundReport]:
    return [event.report for event in peer.of(RoundFinished)]


def rounds_s(peer: SimulatedPeer) -> list[float]:
    began_s = [at for at, event in peer.life.log if isinstance(event, RoundStarted)]
    return [after - before for before, after in pairwise(began_s)]


@pytest.mark.parametrize("topology", ["pairs", "ring", "complete"])
@pytest.mark.parametrize("rule", ["nesterov", "local", "noloco"])
def test_without_gradients_the_path_is_that_of_a_swarm_that_waits(topology: str, rule: str) -> None:
    """So whatever is stable without overlap is stable with it."""
    settings = (
        "inner.lr=1e-30",
        "pace.adapt_steps=false",
        "outer.momentum=0.5",
        f"gossip.topology={topology}",
        f"outer.rule={rule}",
    )
    waits = thetas_after_training(swarm(*settings))
    overlaps = thetas_after_training(swarm(*settings, "gossip.overlap=true"))
    assert waits.mean(dim=0) == pytest.approx(1.5, rel=1e-6)
    assert overlaps.mean(dim=0) == pytest.approx(1.5, rel=1e-6)
    assert torch.allclose(overlaps, waits, rtol=0, atol=1e-5)


def test_a_round_takes_the_longer_of_its_steps_and_its_transfer() -> None:
    def median_round_s(*assignments: str, links: Sequence[str] = (TRANSFER_60,)) -> float:
        peers = swarm("gossip.topology=complete", *assignments, peers=2, links=links)
        return sorted(rounds_s(peers[0]))[3]

    steps_s, overlap = LOCAL_STEPS * STEP_S, "gossip.overlap=true"
    transfer_s = median_round_s() - steps_s
    assert 0.5 < transfer_s < 0.7
    assert median_round_s(overlap) == pytest.approx(steps_s, rel=0.01)
    slow = ("1.35/1.35/0/0",)
    slow_transfer_s = median_round_s(links=slow) - steps_s
    assert slow_transfer_s > 1.1
    # A step that has begun is done before what has arrived is taken in.
    over_s = median_round_s(overlap, links=slow) - slow_transfer_s
    assert 0 <= over_s <= 2 * STEP_S


def test_an_edge_is_told_in_the_round_in_which_it_ends() -> None:
    for peer in swarm("gossip.overlap=true", "gossip.topology=complete", peers=2):
        told = reports(peer)
        assert [report.under_way for report in told] == [1, 1, 1, 1, 1, 0, 0]
        assert [len(report.edges) for report in told] == [0, 1, 1, 1, 1, 2, 1]
        assert {edge.late for report in told[:5] for edge in report.edges} == {1}
        assert not any(report.unpaired for report in told)
        assert all(report.wait_s < 0.01 for report in told[1:5])
