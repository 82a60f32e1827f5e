"""The faults that happen to bytes happen to libp2p's as well."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack

import pytest

from gasloc_p2p.commands.compute import ThreadCompute, WallClock
from gasloc_p2p.config import Config, assignment_layer, load
from gasloc_p2p.core.substrate import Network
from gasloc_p2p.founding import found, pace_of
from gasloc_p2p.net.identity import Identity
from gasloc_p2p.net.network import Libp2pNetwork
from gasloc_p2p.net.settings import NetConfig
from gasloc_p2p.node.node import Node
from gasloc_p2p.node.report import PeerReport
from gasloc_p2p.testing.faults import CorruptChunk, DropAck, LieAboutSchema, WireFault
from gasloc_p2p.testing.network import FaultyNetwork
from gasloc_p2p.testing.quadratic import NoisyQuadratic

pytestmark = pytest.mark.p2p

SETTINGS = (
    "run.id=faulty",
    "run.rounds=8",
    "run.closing_rounds=0",
    "run.initial_peers=2",
    "inner.local_steps=1",
    "node.validate_every_rounds=0",
    "pace.edge_floor_s=3",
)


@pytest.fixture
async def networks() -> AsyncIterator[Sequence[Libp2pNetwork]]:
    async with AsyncExitStack() as undo:
        started: list[Libp2pNetwork] = []
        for index in range(2):
            bootstrap = await started[0].addresses() if started else ()
            started.append(
                await Libp2pNetwork.create(
                    Identity.derived(seed=0, index=index),
                    NetConfig(listen=("/ip4/127.0.0.1/tcp/0",), bootstrap=bootstrap),
                )
            )
            undo.push_async_callback(started[-1].aclose)
        yield started


async def run_node(config: Config, network: Network, compute: ThreadCompute) -> PeerReport:
    manifest = found(config, now_s=0.0)
    node = Node(
        config=config,
        manifest=manifest,
        network=network,
        clock=WallClock(),
        compute=compute,
        learner=NoisyQuadratic(seed=0, peer_id=network.peer_id),
        pace=pace_of(config, manifest),
        verify=Identity.verify,
        observe=lambda event: None,
    )
    return (await node.run(asyncio.Event())).report


async def test_each_fault_ends_its_edge_and_no_other(networks: Sequence[Libp2pNetwork]) -> None:
    config = load([assignment_layer(SETTINGS)]).config
    planned: list[WireFault] = [
        CorruptChunk(peer=0, round=2),
        DropAck(peer=0, round=4),
        LieAboutSchema(peer=0, round=7),
    ]
    struck: list[WireFault] = []
    faulty = FaultyNetwork(networks[0], planned, told=struck.append)
    compute = ThreadCompute()
    try:
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(run_node(config, network, compute))
                for network in (faulty, networks[1])
            ]
    finally:
        compute.close()
    own, other = [task.result().edges for task in running]
    assert struck == planned
    assert (own.applied, own.corrupt, own.asymmetric, own.refused) == (5, 1, 1, 1)
    # Whoever is dialled by a liar refuses the stream and goes on waiting for the partner, until it
    # knocks and hears that the edge is over there, or finds that nobody is there any more.
    ended = other.refused + other.timed_out + other.not_partner + other.lost
    assert (other.applied, other.corrupt, ended) == (6, 1, 1)
