"""Steps that are computed together, of peers that leave in the middle of one."""

from __future__ import annotations

import asyncio

import torch

from gasloc_p2p.simulate.engine import StackedCompute, StackedSteps
from gasloc_p2p.train.settings import DataConfig, InnerConfig, ModelConfig
from gasloc_p2p.train.stack import Stack
from tests.sim.conftest import corpus, in_virtual_time

LR = 1e-3


def test_a_step_that_was_cancelled_does_not_move_the_row_later() -> None:
    stack = Stack(
        ModelConfig(),
        DataConfig(validation_tokens=512),
        InnerConfig(batch_size=2),
        seed=0,
        peer_ids=("a", "b"),
        corpus=corpus(),
        threads=1,
    )
    leaver, stayer = stack.replicas
    before = leaver.theta()

    async def main() -> None:
        compute = StackedCompute(StackedSteps(stack), step_s=1.0)
        async with asyncio.TaskGroup() as tasks:
            left = tasks.create_task(compute.step(leaver, LR))
            tasks.create_task(compute.step(stayer, LR))
            await asyncio.sleep(0.5)
            left.cancel()
        assert torch.equal(leaver.theta(), before)
        assert leaver.state().next_sample == 0
        await compute.step(leaver, LR)

    in_virtual_time(main)
    assert not torch.equal(leaver.theta(), before)
    assert leaver.state().next_sample == stayer.state().next_sample == 2
