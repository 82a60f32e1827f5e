"""Real nodes that are killed, asked to leave, and started again from what they had saved."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from gasloc_p2p.commands.lifetime import INTERRUPTED_EXIT_CODE
from gasloc_p2p.node.checkpoint import CheckpointStore
from gasloc_p2p.node.events import Left, Notice, RoundFinished, RoundStarted
from gasloc_p2p.report import SwarmReport
from tests.p2p.real import real_swarm
from tests.p2p.test_testnet import assert_gone, environment, run_and_report, run_report

pytestmark = [pytest.mark.p2p, pytest.mark.timeout(240)]

LEAVE_S = 10.0


def digests(report: SwarmReport) -> list[str | None]:
    return [peer.theta_digest for peer in report.peers]


@pytest.mark.parametrize("peers", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_swarm_killed_as_a_whole_ends_as_if_it_had_not_been(peers: int, tmp_path: Path) -> None:
    arguments = ("--peers", str(peers), "--rounds", "6", "--local-steps", "5", "--seed", "3")
    values = ("data.validation_tokens=1024", "checkpoint.every_rounds=1", "pace.adapt_steps=false")
    settings = [part for value in values for part in ("--set", value)]
    kept = ("--keep", str(tmp_path / "kept"))
    parent = subprocess.Popen(
        [sys.executable, "-m", "gasloc_p2p", "testnet", *arguments, *settings, *kept],
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    assert parent.stdout is not None
    family = [psutil.Process(parent.pid)]
    for line in parent.stdout:
        if line.startswith("round 3/"):
            family += family[0].children(recursive=True)
            for process in reversed(family):
                process.kill()
    parent.wait()
    assert len(family) > peers
    assert_gone(family)
    assert not (tmp_path / "kept" / "peer-0" / "report.json").exists()

    resumed, said = run_and_report(tmp_path, "testnet", *arguments, *settings, *kept)
    whole = run_report(tmp_path, "simulate", *arguments, *settings)
    assert digests(resumed) == digests(whole)
    assert [peer.train_loss for peer in resumed.peers] == [peer.train_loss for peer in whole.peers]
    assert said.count("resumed from the checkpoint") == peers


async def test_a_node_that_is_asked_to_leave_saves_its_round_and_goes_on_from_it(
    tmp_path: Path,
) -> None:
    async with real_swarm(tmp_path) as swarm:
        entry = await swarm.bootstrap()
        settings = ("run.rounds=100000", "checkpoint.every_rounds=0")
        [node] = await swarm.nodes_of_run("leave", entry, 1, *settings)
        await node.reached(3)
        began_s = time.monotonic()
        node.signal(signal.SIGTERM)
        assert await node.ended() == 0
        assert time.monotonic() - began_s < LEAVE_S
        at = node.of(RoundStarted)[-1].round
        saved = CheckpointStore(tmp_path / "leave" / "checkpoints", keep=3).rounds()[0]
        # It may have been asked between two rounds.
        assert saved in (at, at + 1)

        again = await swarm.launch("leave", "resume")
        await again.reached(saved + 1)
        assert again.of(RoundStarted)[0].round == saved
        assert any("resumed from the checkpoint" in notice.text for notice in again.of(Notice))
        again.signal(signal.SIGINT)
        assert await again.ended() == 0
        assert again.of(Left)[0].report.rounds == len(again.of(RoundFinished)) + saved


async def test_the_second_request_to_leave_ends_a_node_at_once(tmp_path: Path) -> None:
    async with real_swarm(tmp_path) as swarm:
        [node] = await swarm.nodes_of_run("twice", await swarm.bootstrap(), 1, "run.rounds=100000")
        await node.reached(2)
        family = psutil.Process(node.child.pid).children()
        assert family
        node.signal(signal.SIGSTOP)
        # Both are waiting when it goes on, so that the first one has no time to be carried out.
        node.signal(signal.SIGINT)
        node.signal(signal.SIGTERM)
        node.signal(signal.SIGCONT)
        assert await node.ended() == INTERRUPTED_EXIT_CODE
        assert_gone(family)


async def test_a_joiner_is_soon_as_good_as_those_that_it_joined(tmp_path: Path) -> None:
    tried = ("data.validation_tokens=4096", "node.validate_every_rounds=1")
    async with real_swarm(tmp_path) as swarm:
        entry = await swarm.bootstrap()
        founders = await swarm.nodes_of_run(
            "late", entry, 3, "run.rounds=100", "inner.local_steps=15", *tried
        )
        await founders[0].reached(14)
        joiner = await swarm.join("late-3", founders[0], *tried)
        first = (await joiner.first(RoundStarted)).round
        nodes = (*founders, joiner)
        for node in nodes:
            await node.reached(first + 6)
        for node in nodes:
            node.signal(signal.SIGINT)
        assert [await node.ended() for node in nodes] == [0] * 4
    assert any("took over the parameters" in notice.text for notice in joiner.of(Notice))
    assert first >= 17
    others = [node.val_loss_of(first + 5) for node in founders]
    assert joiner.val_loss_of(first + 5) <= 1.02 * sum(others) / len(others)
