"""Virtual time passes at once, in order, and says when nothing can happen any more."""

from __future__ import annotations

import asyncio

import pytest

from gasloc_p2p.simulate.clock import DeadlockError, InlineCompute, VirtualClock
from gasloc_p2p.simulate.swarm import learner_of
from tests.sim.conftest import corpus, in_virtual_time, quick_config


def test_sleeping_takes_virtual_time_only() -> None:
    async def main() -> list[tuple[float, str]]:
        log: list[tuple[float, str]] = []

        async def sleeper(name: str, seconds: float) -> None:
            await asyncio.sleep(seconds)
            log.append((VirtualClock().unix_s(), name))

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(sleeper("year", 365 * 86_400.0))
            tasks.create_task(sleeper("hour", 3600.0))
        return log

    assert in_virtual_time(main) == [(3600.0, "hour"), (365 * 86_400.0, "year")]


def test_deadlines_follow_the_virtual_clock() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1000.0):
                await asyncio.Event().wait()
        return VirtualClock().unix_s()

    assert in_virtual_time(main) == 1000.0


def test_a_deadlock_is_an_error_and_not_a_hang() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(DeadlockError):
        in_virtual_time(main)


def test_inner_steps_are_charged_and_other_work_is_free() -> None:
    config = quick_config()

    async def main() -> tuple[int, list[float]]:
        compute = InlineCompute(step_s=0.5)
        model = learner_of(config, peer_id="a", corpus=corpus())
        times_s = []
        for _ in range(2):
            await compute.step(model, 1e-3)
            times_s.append(VirtualClock().unix_s())
        return await compute.run(lambda: 7), [*times_s, VirtualClock().unix_s()]

    assert in_virtual_time(main) == (7, [0.5, 1.0, 1.0])
