"""Codecs in whole swarms: the mean stays, peers come together, and a run can be repeated."""

from __future__ import annotations

import asyncio
import itertools
from functools import cache

import pytest
import torch

from gasloc_p2p.config import Config
from gasloc_p2p.core.codecs import CODECS
from gasloc_p2p.core.types import PeerId
from gasloc_p2p.net.identity import Identity
from gasloc_p2p.node.events import RoundFinished
from gasloc_p2p.simulate.network import Hub
from gasloc_p2p.testing.chaos import Case
from gasloc_p2p.testing.quadratic import NoisyQuadratic
from gasloc_p2p.testing.swarm import VirtualSwarm
from gasloc_p2p.testing.trace import SwarmTrace
from tests.sim.conftest import SimulatedPeer, in_virtual_time, quick_config

PEERS = 6
ROUNDS = 8
CLOSING_ROUNDS = 8
ELEMENTS = 1500
BUILT_IN = ("none", "bf16", "fp16", "int8", "int4", "mod8", "mod4")


def model(peer: PeerId) -> NoisyQuadratic:
    return NoisyQuadratic(seed=0, peer_id=peer, elements=ELEMENTS)


@cache
def swarm(codec: str, topology: str) -> SwarmTrace:
    config: Config = Case(
        seed=0,
        peers=PEERS,
        rounds=ROUNDS,
        settings=(
            f"gossip.codec={codec}",
            f"gossip.topology={topology}",
            "gossip.chunk_bytes=1024",
            f"run.closing_rounds={CLOSING_ROUNDS}",
        ),
    ).config()
    return VirtualSwarm(config, peers=PEERS, models=model).run()


def repaired(trace: SwarmTrace) -> int:
    return sum(
        edge.repaired_blocks
        for life in trace.lives
        for event in life.of(RoundFinished)
        for edge in event.report.edges
    )


def test_the_built_in_codecs_are_these() -> None:
    assert set(BUILT_IN) <= set(CODECS.names)


@pytest.mark.parametrize(
    ("codec", "topology"),
    [
        # The other topologies bring nothing that a codec could notice.
        pytest.param(codec, topology, marks=pytest.mark.slow if other and codec != "mod4" else ())
        for codec in BUILT_IN
        for topology, other in (
            ("pairs", False),
            ("ring", True),
            ("complete", False),
            ("exponential", True),
        )
    ],
)
def test_closing_rounds_leave_the_mean_of_the_swarm_alone(codec: str, topology: str) -> None:
    trace = swarm(codec, topology)
    means = [
        torch.stack(trace.thetas(round)).double().mean(dim=0)
        for round in range(ROUNDS - 1, ROUNDS + CLOSING_ROUNDS)
    ]
    assert len(means) == CLOSING_ROUNDS + 1
    for before, after in itertools.pairwise(means):
        assert (after - before).norm() <= 1e-6 * before.norm()
    apart = [trace.disagreement(round) for round in (ROUNDS - 1, ROUNDS + CLOSING_ROUNDS - 1)]
    factor = 1.0 if codec == "int4" else 0.5
    # On the complete graph one round brings them as close as the codec allows.
    assert apart[1] < factor * apart[0] or topology == "complete", "and peers come together"
    if codec == "mod4" and topology == "pairs":
        assert repaired(trace) > 0, "repairs are part of it"
    elif not codec.startswith("mod"):
        assert repaired(trace) == 0


@pytest.mark.parametrize("codec", ["int4", "mod4"])
def test_a_run_can_be_repeated_bit_for_bit(codec: str) -> None:
    first = swarm(codec, "pairs")
    swarm.cache_clear()
    assert swarm(codec, "pairs").digest == first.digest


@pytest.mark.parametrize("codec", ["mod8", "mod4"])
def test_rules_that_send_two_vectors_close_with_one(codec: str) -> None:
    config = quick_config(
        *("run.initial_peers=2", "run.rounds=2", "run.closing_rounds=2", "outer.rule=noloco"),
        *("outer.force=true", f"gossip.codec={codec}"),
    )

    async def main() -> list[SimulatedPeer]:
        async with Hub(verify=Identity.verify) as hub, asyncio.TaskGroup() as tasks:
            peers = [SimulatedPeer(hub, config, index) for index in range(2)]
            for peer in peers:
                tasks.create_task(peer.run())
        return peers

    for peer in in_virtual_time(main):
        assert peer.edges_by_round() == {t: ["applied"] for t in range(4)}
