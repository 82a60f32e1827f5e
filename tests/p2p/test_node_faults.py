"""Real nodes that are stopped, killed, late or strangers to each other."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Literal

import psutil
import pytest

from gasloc_p2p.core.errors import IdentityError
from gasloc_p2p.core.records import LEASE_ROUNDS
from gasloc_p2p.node.events import Jumped, Notice, Online, RoundFinished, RoundStarted
from tests.p2p.real import RealNode, real_swarm

pytestmark = [pytest.mark.p2p, pytest.mark.timeout(240)]

PACES = {
    "steps": (),
    "seconds": (
        "pace.mode=seconds",
        "pace.period_s=2.5",
        "pace.exchange_budget_s=1",
        "pace.start_delay_s=30",
    ),
}


def last_begun(node: RealNode) -> int:
    return max((event.round for event in node.of(RoundStarted)), default=-1)


@pytest.mark.parametrize("pace", ["steps", pytest.param("seconds", marks=pytest.mark.slow)])
async def test_a_stopped_peer_jumps_to_the_swarms_round_and_is_paired_again(
    pace: str, tmp_path: Path
) -> None:
    async with real_swarm(tmp_path) as swarm:
        entry = await swarm.bootstrap()
        stopped, *others = await swarm.nodes_of_run(
            "stopped",
            entry,
            3,
            "run.rounds=100000",
            "gossip.topology=ring",
            "pace.adapt_steps=true",
            *PACES[pace],
        )
        await stopped.reached(2)
        stopped.signal(signal.SIGSTOP)
        # Without it the others are so quick that it cannot catch up round by round.
        gone = last_begun(stopped) + LEASE_ROUNDS + 2
        await others[0].until(lambda: True if last_begun(others[0]) >= gone else None)
        stopped.signal(signal.SIGCONT)
        landed = await stopped.until(lambda: landing(stopped))
        await stopped.until(lambda: True if with_everybody(stopped, since=landed) else None)
        for node in (stopped, *others):
            node.signal(signal.SIGINT)
        assert [await node.ended() for node in (stopped, *others)] == [0, 0, 0]


def landing(node: RealNode) -> int | None:
    """Return the round to which it jumped over another one."""
    jumps = [j.to_round for j in node.of(Jumped) if j.to_round >= j.from_round + 2]
    return jumps[-1] if jumps else None


def with_everybody(node: RealNode, *, since: int) -> bool:
    """Whether both its edges of a later round were applied."""
    return any(
        edges == [("applied", "")] * 2 for round, edges in node.edges().items() if round > since
    )


async def test_a_killed_peer_leaves_every_roster_at_the_same_round(tmp_path: Path) -> None:
    async with real_swarm(tmp_path) as swarm:
        entry = await swarm.bootstrap()
        killed, *others = await swarm.nodes_of_run(
            "killed", entry, 4, "run.rounds=14", "gossip.topology=ring"
        )
        await killed.reached(3)
        killed.signal(signal.SIGKILL)
        assert [await node.ended() for node in others] == [0, 0, 0]
    views = [node.peers_by_round() for node in others]
    assert all(view == views[0] for view in views)
    assert views[0][3] == 4
    assert views[0][10] == 3
    for node in others:
        assert {kind for kind, _ in node.edges()[15]} == {"applied"}
    # A ring is drawn anew in each round, and one of the three may never have been next to it.
    lost = [
        node
        for node in others
        if any(kind != "applied" for edges in node.edges().values() for kind, _ in edges)
    ]
    assert len(lost) >= 2, "its neighbours have lost edges to it"


async def test_two_runs_on_one_bootstrap_do_not_disturb_each_other(tmp_path: Path) -> None:
    async with real_swarm(tmp_path) as swarm:
        entry = await swarm.bootstrap()
        runs = [
            await swarm.nodes_of_run(name, entry, 2, "pace.edge_floor_s=20")
            for name in ("blue", "green")
        ]
        for run in runs:
            assert [await node.ended() for node in run] == [0, 0]
    for run in runs:
        ids = {node.peer_id for node in run}
        for node in run:
            assert node.partners() == ids - {node.peer_id}
            assert all(edges == [("applied", "")] for edges in node.edges().values())


async def test_leaving_says_goodbye_and_ends_quickly(tmp_path: Path) -> None:
    async with real_swarm(tmp_path) as swarm:
        entry = await swarm.bootstrap()
        leaver, stayer = await swarm.nodes_of_run("leave", entry, 2, "run.rounds=100000")
        await leaver.reached(2)
        leaver.signal(signal.SIGTERM)
        async with asyncio.timeout(10):
            assert await leaver.child.wait() == 0
        at = leaver.of(RoundStarted)[-1].round
        await stayer.reached(at + 4)
        assert stayer.peers_by_round()[at + 3] == 1
        stayer.signal(signal.SIGINT)
        assert await stayer.ended() == 0
    assert (tmp_path / "leave" / "report.json").is_file()


def exchanged_after(node: RealNode, round: int) -> Literal[True] | None:
    """Whether an edge of the node has worked since `round`."""
    reports = [event.report for event in node.of(RoundFinished) if event.report.round > round]
    return True if any(e.kind.value == "applied" for r in reports for e in r.edges) else None


async def test_a_node_whose_p2pd_dies_is_rebuilt_and_trains_on(tmp_path: Path) -> None:
    async with real_swarm(tmp_path) as swarm:
        entry = await swarm.bootstrap()
        struck, other = await swarm.nodes_of_run("orphan", entry, 2, "run.rounds=100000")
        await struck.reached(2)
        [daemon] = [
            child for child in psutil.Process(struck.child.pid).children() if child.name() == "p2pd"
        ]
        daemon.kill()
        await struck.until(
            lambda: next((e for e in struck.of(Notice) if "back on the network" in e.text), None)
        )
        at = struck.of(RoundStarted)[-1].round
        await struck.until(lambda: exchanged_after(struck, at))
        await other.until(lambda: exchanged_after(other, at))
        for node in (struck, other):
            node.signal(signal.SIGINT)
        assert [await node.ended() for node in (struck, other)] == [0, 0]
    assert any("the libp2p daemon ended" in event.text for event in struck.of(Notice))
    assert [event.peer_id for event in struck.of(Online)] == [struck.peer_id]


async def test_a_copy_of_an_identity_is_refused_and_the_original_trains_on(tmp_path: Path) -> None:
    async with real_swarm(tmp_path) as swarm:
        entry = await swarm.bootstrap()
        [node] = await swarm.nodes_of_run("twin", entry, 1, "run.rounds=100000")
        await node.reached(2)
        home = tmp_path / "twin-copy"
        home.mkdir()
        copy = home / "identity"
        copy.touch(mode=0o600)
        copy.write_bytes((tmp_path / "twin" / "identity").read_bytes())
        twin = await swarm.join("twin-copy", node)
        assert await twin.ended() == IdentityError.exit_code
        at = node.of(RoundStarted)[-1].round
        await node.reached(at + 3)
        node.signal(signal.SIGINT)
        assert await node.ended() == 0
