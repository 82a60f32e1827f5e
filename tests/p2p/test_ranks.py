"""Nodes of several processes: one peer as others see it, and the same steps as with one."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
import torch

from gasloc_p2p.commands.compute import ThreadCompute
from gasloc_p2p.commands.learner import learner_of
from gasloc_p2p.config import Config, assignment_layer, load
from gasloc_p2p.core.errors import ConfigError, DeviceError
from gasloc_p2p.core.types import EdgeKind
from gasloc_p2p.node.events import RoundFinished
from gasloc_p2p.train.data import load_corpus
from gasloc_p2p.train.learner import Learner
from gasloc_p2p.train.samples import TextInMemory
from tests.p2p.real import real_swarm

pytestmark = pytest.mark.timeout(180)

LR = 1e-2
STEPS = 3


def config_of(folder: Path, *assignments: str) -> Config:
    text = folder / "text"
    text.write_text("".join(f"line {number} of a text\n" for number in range(400)))
    given = (f"data.path={text}", "inner.batch_size=5", "data.validation_tokens=256")
    return load([assignment_layer([*given, *assignments])]).config


@asynccontextmanager
async def learner(config: Config, processes: int) -> AsyncIterator[tuple[Learner, ThreadCompute]]:
    device = config.device.model_copy(update={"processes": processes})
    compute = ThreadCompute()
    try:
        several = config.model_copy(update={"device": device})
        text = TextInMemory(
            corpus=load_corpus(config.data), seed=0, peer_id="a", validation_tokens=256
        )
        async with learner_of(several, text, "a", compute, lambda text: None) as built:
            yield built, compute
    finally:
        compute.close()


def course(learner: Learner) -> tuple[torch.Tensor, list[float], float]:
    """Train, go back to the middle with other parameters, and go on after a fresh start."""
    losses = [float(learner.step(LR)) for _ in range(STEPS)]
    state, theta = learner.state(), learner.theta()
    losses += [float(learner.step(LR)) for _ in range(STEPS)]
    learner.load(theta.mul(0.9))
    learner.restore(state)
    losses += [float(learner.step(LR)) for _ in range(STEPS)]
    learner.restart_optimizer(warmup_steps=2)
    losses += [float(learner.step(LR)) for _ in range(STEPS)]
    return learner.theta(), losses, learner.validation_loss(theta)


async def test_two_processes_take_the_steps_of_one(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    async with learner(config, 1) as (alone, compute):
        theta, losses, val_loss = await compute.run(lambda: course(alone))
    async with learner(config, 2) as (both, compute):
        found, found_losses, found_val_loss = await compute.run(lambda: course(both))
    assert found_losses == pytest.approx(losses, rel=1e-4)
    assert found_val_loss == pytest.approx(val_loss, rel=1e-4)
    torch.testing.assert_close(found, theta, rtol=0, atol=3e-4)


@pytest.mark.slow
async def test_a_process_that_dies_ends_the_step_with_a_reason(tmp_path: Path) -> None:
    async def lose_one() -> None:
        async with learner(config_of(tmp_path), 2) as (both, compute):
            await compute.run(lambda: both.step(LR))
            [follower] = followers()
            follower.send_signal(signal.SIGKILL)
            await compute.run(lambda: [both.step(LR) for _ in range(STEPS)])

    with pytest.raises(DeviceError, match="lost each other"):
        await lose_one()
    assert followers() == []


@pytest.mark.slow
async def test_more_processes_than_windows_are_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path, "inner.batch_size=1")
    with pytest.raises(ConfigError, match=r"device\.processes = 2, but a step has 1 windows"):
        async with learner(config, 2):
            pass
    assert followers() == []


@pytest.mark.p2p
async def test_nodes_of_one_and_of_two_processes_meet_in_a_swarm(tmp_path: Path) -> None:
    async with real_swarm(tmp_path) as swarm:
        entry = await swarm.bootstrap()
        settings = ("run.initial_peers=2", "run.rounds=3", "run.closing_rounds=1")
        shared = (*settings, "inner.local_steps=5", "inner.batch_size=4", "pace.adapt_steps=false")
        one = await swarm.found("run", entry, *shared)
        two = await swarm.join("two", one, "device.processes=2")
        assert [await node.ended() for node in (one, two)] == [0, 0]
    for node in (one, two):
        kinds = [edge.kind for e in node.of(RoundFinished) for edge in e.report.edges]
        assert kinds == [EdgeKind.APPLIED] * 4
    assert one.left().report.val_loss == pytest.approx(two.left().report.val_loss, rel=0.1)


def followers() -> list[psutil.Process]:
    """Processes of further ranks that this one has started."""
    children = psutil.Process(os.getpid()).children(recursive=True)
    return [child for child in children if "gasloc_p2p.commands.follow" in child.cmdline()]
