"""Whole swarms on slow links and through a partition."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from gasloc_p2p.net.identity import Identity
from gasloc_p2p.node.events import Left, RoundStarted
from gasloc_p2p.simulate.links import Link, Partition, links_of, parse_partition
from gasloc_p2p.simulate.network import Hub
from tests.sim.conftest import SimulatedPeer, in_virtual_time, quick_config


def swarm(
    *assignments: str, links: Sequence[Link] = (), partitions: Sequence[Partition] = ()
) -> tuple[list[SimulatedPeer], float]:
    """Run four peers to the end; return them and the virtual seconds that it took."""
    config = quick_config("run.initial_peers=4", "pace.adapt_steps=false", *assignments)

    async def main() -> tuple[list[SimulatedPeer], float]:
        hub = Hub(verify=Identity.verify, links=links, partitions=partitions)
        async with hub, asyncio.TaskGroup() as tasks:
            peers = [SimulatedPeer(hub, config, index) for index in range(4)]
            for peer in peers:
                tasks.create_task(peer.run())
        return peers, asyncio.get_running_loop().time()

    return in_virtual_time(main)


def digests(peers: Sequence[SimulatedPeer]) -> list[str | None]:
    return [peer.of(Left)[0].report.theta_digest for peer in peers]


@pytest.mark.parametrize("topology", ["pairs", "complete"])
def test_a_slow_network_takes_time_and_changes_no_parameter(topology: str) -> None:
    settings = (
        f"gossip.topology={topology}",
        "run.rounds=4",
        "run.closing_rounds=1",
        "pace.edge_floor_s=60",
    )
    ideal, ideal_s = swarm(*settings)
    for conditions in (["dsl"], ["dsl", "mobile", "fibre"]):
        slow, slow_s = swarm(*settings, links=links_of(conditions, 4))
        assert digests(slow) == digests(ideal)
        assert len(set(digests(slow))) == 4
        for peer in (*slow, *ideal):
            edges = peer.edges_by_round()
            assert edges.keys() == set(range(5))
            assert {kind for kinds in edges.values() for kind in kinds} == {"applied"}
        [left] = slow[0].of(Left)
        # Peer 0 is on DSL: at best its uplink of 1.25 MB/s was never idle.
        assert left.report.exchange_s > left.report.bytes_sent / 1.25e6
        assert slow_s > ideal_s + left.report.bytes_sent / 1.25e6


def test_both_sides_of_a_partition_go_on_alone_and_come_together_again() -> None:
    from_s, until_s = 8.0, 40.0
    peers, _ = swarm(
        "run.rounds=24",
        "simulate.step_s=0.5",
        "pace.edge_floor_s=3",
        links=links_of(["lan"], 4),
        partitions=[Partition(from_s=from_s, until_s=until_s, peers=frozenset({0, 1}))],
    )
    sides = [{peers[0].id, peers[1].id}, {peers[2].id, peers[3].id}]
    for index, peer in enumerate(peers):
        [left] = peer.of(Left)
        assert left.finished
        own_side = sides[index // 2]
        partners = {event.round: set(event.partners) for event in peer.of(RoundStarted)}
        across = {t for t, ids in partners.items() if not ids <= own_side}
        view, edges = peer.peers_by_round(), peer.edges_by_round()
        alone = [t for t, count in view.items() if count == 2]
        # Leases of the other side end at most four rounds after the last record that came through,
        # and all that is left of the run is long enough to see it back.
        assert set(view.values()) == {4, 2}
        assert alone == list(range(alone[0], alone[-1] + 1))
        assert len(alone) >= 3
        failed = {t for t, kinds in edges.items() if kinds != ["applied"]}
        assert failed
        assert failed <= across
        assert all(kind != "applied" for t in failed for kind in edges[t])
        assert max(failed) - min(failed) <= 5
        assert max(failed) < alone[0]
        assert all(edges[t] == ["applied"] for t in edges if t >= alone[0])
        assert across & set(range(alone[-1] + 1, max(view) + 1)), "the sides meet again"
    assert len({tuple(peer.peers_by_round().items()) for peer in peers}) == 1


def test_a_partition_that_lasts_no_round_costs_nothing_but_time() -> None:
    settings = ("run.rounds=5", "run.closing_rounds=1", "pace.edge_floor_s=60")
    plain, plain_s = swarm(*settings, links=links_of(["dsl"], 4))
    cut = [parse_partition("2-6:0+1")]
    held_up, held_up_s = swarm(*settings, links=links_of(["dsl"], 4), partitions=cut)
    assert digests(held_up) == digests(plain)
    assert held_up_s > plain_s + 2
