"""Virtual time names what hangs."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from gasloc_p2p.simulate.clock import DeadlockError, LivelockError
from gasloc_p2p.testing import clock
from gasloc_p2p.testing.clock import ShiftedClock, StallingCompute, act_as, in_virtual_time
from gasloc_p2p.testing.quadratic import NoisyQuadratic


async def wait_for_ever() -> None:
    await asyncio.Event().wait()


async def poll_for_ever() -> None:
    for _ in itertools.count():
        await asyncio.sleep(1.0)


async def spin_for_ever() -> None:
    for _ in itertools.count():
        await asyncio.sleep(0)


async def as_peer(name: str) -> None:
    act_as(name)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(wait_for_ever())


def test_a_deadlock_names_who_waits_where() -> None:
    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(as_peer("peer 3"))
            tasks.create_task(as_peer("peer 5"))

    with pytest.raises(DeadlockError) as caught:
        in_virtual_time(main)
    lines = str(caught.value).splitlines()
    waits = [line.strip().partition(": ") for line in lines[1:]]
    assert [who for who, _, _ in waits] == ["peer 3", "peer 3", "peer 5", "peer 5"]
    assert waits[0][2].startswith("as_peer:")
    assert waits[1][2].startswith("wait_for_ever:")
    assert "Event.wait:" in waits[1][2]


def test_polling_past_the_horizon_is_an_error() -> None:
    async def main() -> None:
        act_as("peer 0")
        await poll_for_ever()

    with pytest.raises(LivelockError, match=r"after 100 virtual s\n  peer 0: .*poll_for_ever"):
        in_virtual_time(main, horizon_s=100.0)


def test_going_round_without_time_passing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "MOST_TURNS", 1000)

    async def main() -> None:
        act_as("peer 0")
        await asyncio.sleep(5.0)
        await spin_for_ever()

    with pytest.raises(LivelockError, match=r"stands still at 5.000 s\n  peer 0: .*spin_for_ever"):
        in_virtual_time(main)


def test_what_ends_in_time_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "MOST_TURNS", 100)

    async def main() -> float:
        for _ in range(20):
            await asyncio.sleep(1.0)
            for _ in range(50):
                await asyncio.sleep(0)
        return asyncio.get_running_loop().time()

    assert in_virtual_time(main, horizon_s=21.0) == 20.0


def test_a_task_works_for_whoever_started_it() -> None:
    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(as_peer("peer 1"))
            tasks.create_task(wait_for_ever())

    with pytest.raises(DeadlockError) as caught:
        in_virtual_time(main)
    assert str(caught.value).count("peer 1") == 2
    assert "nobody" not in str(caught.value)


def test_tasks_are_cancelled_in_the_order_in_which_they_were_made() -> None:
    order: list[int] = []

    async def note(number: int) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            order.append(number)

    async def main() -> None:
        group = [asyncio.create_task(note(number)) for number in range(40)]
        await asyncio.sleep(0)
        for task in set(group):
            task.cancel()
        await asyncio.wait(group)

    in_virtual_time(main)
    assert order == sorted(order)


def test_a_stall_takes_its_time_once_and_a_shifted_clock_is_off() -> None:
    async def main() -> list[float]:
        compute = StallingCompute(step_s=1.0)
        model = NoisyQuadratic(seed=0, peer_id="a")
        compute.stall_s = 7.0
        moments = []
        for _ in range(2):
            await compute.step(model, 0.1)
            moments.append(ShiftedClock(-0.5).unix_s())
        return moments

    assert in_virtual_time(main) == [7.5, 8.5]
