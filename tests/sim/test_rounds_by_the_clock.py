"""With pace `seconds` the clock alone keeps the swarm together, even where clocks are off."""

from __future__ import annotations

import asyncio
import random
from functools import partial

import pytest

from gasloc_p2p.core.types import EdgeKind, PeerId
from gasloc_p2p.net.identity import Identity
from gasloc_p2p.node.events import Event, RoundFinished, RoundStarted
from gasloc_p2p.node.report import EdgeReport
from gasloc_p2p.simulate.clock import InlineCompute
from gasloc_p2p.simulate.links import links_of
from gasloc_p2p.simulate.network import Hub
from gasloc_p2p.simulate.speeds import machines_of
from gasloc_p2p.testing.clock import ShiftedClock
from gasloc_p2p.testing.peer import SimulatedPeer
from gasloc_p2p.testing.quadratic import NoisyQuadratic
from tests.sim.conftest import in_virtual_time, quick_config

PEERS = 8
ROUNDS = 20
MOST_OFF_S = 1.0
PARAMETERS = 50_000
LINKS = ("datacenter", "dsl", "mobile", "1/1/0.1/0")
"""The parameters take .2 MB: at once on the first, 1.6 s on the last."""
SLOW_LINK = "0.12/0.12/0.1/0"
"""13 s, longer than a round."""


def _edges(peer: SimulatedPeer) -> list[EdgeReport]:
    return [edge for event in peer.of(RoundFinished) for edge in event.report.edges]


SPEEDS = ("0:0.2:6", "40:5:2", "40:0.2:3+7")
"""A step takes .5 s, and 2.5 s where it begins when its round is nearly over."""


@pytest.mark.parametrize(
    ("seed", "topology", "slow", "overlap"),
    [
        (0, "pairs", False, "false"),
        (1, "pairs", False, "true"),
        (2, "ring", False, "false"),
        (3, "pairs", True, "false"),
        (4, "ring", True, "true"),
    ],
)
def test_peers_are_never_more_than_one_round_apart(
    seed: int, topology: str, slow: bool, overlap: str
) -> None:
    config = quick_config(
        f"run.seed={seed}",
        f"run.rounds={ROUNDS}",
        "run.closing_rounds=2",
        f"gossip.topology={topology}",
        f"gossip.overlap={overlap}",
        "pace.mode=seconds",
        "pace.period_s=8",
        "pace.start_delay_s=3",
        "pace.exchange_budget_s=5",
    )
    draw = random.Random(seed)
    ahead_s = [draw.uniform(-MOST_OFF_S, MOST_OFF_S) for _ in range(PEERS - 2)]
    ahead_s += [-MOST_OFF_S, MOST_OFF_S]
    draw.shuffle(ahead_s)
    rounds: dict[int, int] = {}
    apart: list[int] = []

    def sample(index: int, event: Event) -> None:
        if isinstance(event, RoundStarted):
            rounds[index] = event.round
            apart.append(max(rounds.values()) - min(rounds.values()))

    def model(peer_id: PeerId) -> NoisyQuadratic:
        return NoisyQuadratic(seed=seed, peer_id=peer_id, elements=PARAMETERS)

    async def main() -> list[SimulatedPeer]:
        machines = machines_of(SPEEDS, PEERS)
        links = links_of(LINKS, PEERS)
        if slow:
            links = (*links[:-1], *links_of((SLOW_LINK,), 1))
        hub = Hub(verify=Identity.verify, links=links, partitions=())
        async with hub, asyncio.TaskGroup() as tasks:
            peers = [
                SimulatedPeer(
                    hub,
                    config,
                    index,
                    models=model,
                    compute=InlineCompute(step_s=0.5, machine=machines[index]),
                    clock=ShiftedClock(ahead_s[index]),
                    observe=partial(sample, index),
                )
                for index in range(PEERS)
            ]
            for peer in peers:
                tasks.create_task(peer.run())
        return peers

    peers = in_virtual_time(main)
    assert max(apart) == 1
    assert set(rounds) == set(range(PEERS))
    kinds = []
    for peer in peers:
        trained = [e.report for e in peer.of(RoundFinished) if not e.report.closing]
        assert len(trained) >= ROUNDS - 1
        kinds += [edge.kind for report in trained for edge in report.edges]
    # Some are too late for the round, which makes rounds no longer and nobody late for the next.
    assert kinds.count(EdgeKind.APPLIED) > len(kinds) / 2
    if slow:
        late = [e for e in _edges(peers[-1]) if e.kind is EdgeKind.APPLIED and e.late > 1]
        assert len(late) >= 3, "they last longer than a round"
