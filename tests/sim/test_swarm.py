"""Whole simulated swarms: every size and topology, deterministic, and better together."""

from __future__ import annotations

import math

import msgspec
import pytest

from gasloc_p2p.core.types import EdgeKind
from gasloc_p2p.node.room import Room
from gasloc_p2p.report import SwarmReport
from gasloc_p2p.simulate.swarm import simulate
from tests.sim.conftest import quick_config


def run(peers: int, *assignments: str) -> SwarmReport:
    config = quick_config(f"run.initial_peers={peers}", *assignments)
    return simulate(config, peers=peers, observe=lambda index, event: None).report


def edges_per_peer(topology: str, peers: int, round_count: int) -> int:
    per_round = {"pairs": 1, "ring": min(2, peers - 1), "cycle": min(2, peers - 1)}
    return round_count * per_round.get(topology, peers - 1)


@pytest.mark.parametrize("topology", ["pairs", "ring", "complete", "cycle"])
@pytest.mark.parametrize("peers", [1, 2, 3, 5])
def test_every_edge_of_every_size_and_topology_is_applied(topology: str, peers: int) -> None:
    report = run(peers, f"gossip.topology={topology}", "run.rounds=3")
    rounds = 3 + 5
    assert [peer.exit_code for peer in report.peers] == [0] * peers
    assert {peer.rounds for peer in report.peers} == {3}
    for peer in report.peers:
        counts = msgspec.to_builtins(peer.edges)
        assert all(counts[kind] == 0 for kind in EdgeKind if kind != "applied"), counts
    applied = sum(peer.edges.applied for peer in report.peers)
    unpaired = sum(peer.edges.unpaired for peer in report.peers)
    if topology == "pairs":
        assert applied == rounds * (peers - peers % 2)
        assert unpaired == rounds * (peers % 2)
    else:
        assert applied == peers * edges_per_peer(topology, peers, rounds)
    if topology == "complete" and peers > 1:
        assert report.closing_consensus_distance is not None
        assert report.closing_consensus_distance < 1e-6


def test_the_same_seed_gives_the_same_parameters_and_another_one_does_not() -> None:
    first, again = run(3), run(3)
    assert msgspec.structs.replace(first, wall_s=0.0) == msgspec.structs.replace(again, wall_s=0.0)
    other = run(3, "run.seed=1")
    digests = {peer.theta_digest for report in (first, other) for peer in report.peers}
    assert len(digests) == 6


@pytest.mark.parametrize(
    ("codec", "rule"),
    [
        ("none", "nesterov"),
        ("bf16", "local"),
        pytest.param("none", "local", marks=pytest.mark.slow),
        pytest.param("bf16", "nesterov", marks=pytest.mark.slow),
    ],
)
def test_peers_learn_and_come_together(codec: str, rule: str) -> None:
    report = run(
        4,
        f"gossip.codec={codec}",
        f"outer.rule={rule}",
        "inner.local_steps=10",
        "inner.batch_size=8",
        "data.validation_tokens=4096",
    )
    assert report.averaged_val_loss is not None
    assert report.averaged_val_loss < 0.6 * report.initial_val_loss
    assert report.consensus_distance is not None
    assert report.closing_consensus_distance is not None
    assert report.closing_consensus_distance < 0.2 * report.consensus_distance


def test_a_round_writes_over_nothing_that_is_still_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    # With this rule the parameters of the next round are the mix itself.
    settings = ("outer.rule=local", "run.rounds=3")
    reused = run(2, *settings)
    monkeypatch.setattr(Room, "memory", lambda room, size_bytes: memoryview(bytearray(size_bytes)))
    fresh = run(2, *settings)
    digests = [[peer.theta_digest for peer in report.peers] for report in (reused, fresh)]
    assert digests[0] == digests[1]


def test_without_gossip_peers_stay_apart() -> None:
    apart, together = run(4, "gossip.topology=none"), run(4)
    assert sum(peer.edges.unpaired for peer in apart.peers) == 4 * 13
    assert apart.consensus_distance is not None
    assert together.consensus_distance is not None
    assert apart.consensus_distance > 2 * together.consensus_distance


def test_bf16_sends_half_the_bytes() -> None:
    sent = [run(2, f"gossip.codec={codec}").peers[0].bytes_sent for codec in ("none", "bf16")]
    assert math.isclose(sent[0] / sent[1], 2.0, rel_tol=0.01)


def test_both_paces_finish() -> None:
    report = run(
        3, "pace.mode=seconds", "pace.period_s=6", "pace.start_delay_s=2", "simulate.step_s=0.25"
    )
    steps = {count for peer in report.peers for count in peer.local_steps}
    assert steps == {4}, "6 s less the 5 s kept for the exchange hold four steps of .25 s"
    assert all(peer.rounds == 8 for peer in report.peers)
