"""Checkpoints are written beside the training; what goes wrong is said, and stops nothing."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import pytest

from gasloc_p2p.commands.compute import ThreadCompute
from gasloc_p2p.core.errors import CheckpointError, DiskError
from gasloc_p2p.node.checkpoint import Checkpoint, CheckpointStore
from gasloc_p2p.node.events import Event, Notice
from gasloc_p2p.node.saver import Saver
from gasloc_p2p.simulate.clock import InlineCompute
from tests.node.crashing import small_checkpoint
from tests.sim.conftest import in_virtual_time

T = TypeVar("T")


class SlowFiles(InlineCompute):
    """Work on files begins when it is asked for and takes `seconds` of virtual time."""

    def __init__(self, seconds: float) -> None:
        super().__init__(step_s=0.0)
        self._seconds = seconds

    async def aside(self, work: Callable[[], T]) -> T:
        await asyncio.sleep(self._seconds)
        return await super().aside(work)


class Bench:
    """A saver with its store, and what it said."""

    def __init__(self, folder: Path, *, seconds: float = 1.0) -> None:
        self.store = CheckpointStore(folder, keep=10)
        self.said: list[str] = []
        self.saver = Saver(self.store, SlowFiles(seconds), self._observe)

    def _observe(self, event: Event) -> None:
        assert isinstance(event, Notice)
        self.said.append(event.text)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Saver]:
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(self.saver.run())
            yield self.saver
            running.cancel()


def test_what_is_offered_is_written_and_of_what_waits_the_newest(tmp_path: Path) -> None:
    bench = Bench(tmp_path)

    async def main() -> None:
        async with bench.running() as saver:
            saver.offer(small_checkpoint(1))
            await asyncio.sleep(1.5)  # its writing has begun
            for round in (2, 3, 4):
                saver.offer(small_checkpoint(round))
            await asyncio.sleep(0.6)
            assert bench.store.rounds() == (1,)
            assert await saver.finish(None, deadline_s=5)

    in_virtual_time(main)
    assert bench.store.rounds() == (4, 1)
    assert bench.said == []


def test_finish_writes_what_it_is_given_in_place_of_what_waits(tmp_path: Path) -> None:
    bench = Bench(tmp_path)

    async def main() -> None:
        async with bench.running() as saver:
            await asyncio.sleep(2)
            for round in (1, 2):
                saver.offer(small_checkpoint(round))
            assert await saver.finish(small_checkpoint(3), deadline_s=1.5)
            assert await saver.finish(None, deadline_s=0), "there is nothing left to do"

    in_virtual_time(main)
    assert bench.store.rounds() == (3,)


@pytest.mark.parametrize(
    ("before", "stays"), [((4, 8), "that of round 8 stays"), ((), "there is no other one")]
)
def test_what_does_not_fit_the_deadline_is_given_up_and_said(
    tmp_path: Path, before: tuple[int, ...], stays: str
) -> None:
    bench = Bench(tmp_path, seconds=6.0)
    for round in before:
        bench.store.write(small_checkpoint(round))

    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with bench.running() as saver:
            await asyncio.sleep(7)
            began_s = loop.time()
            assert not await saver.finish(small_checkpoint(12), deadline_s=5.0)
            assert loop.time() - began_s == pytest.approx(5.0)

    in_virtual_time(main)
    assert bench.store.rounds() == tuple(reversed(before))
    expected = f"the checkpoint of round 12 could not be written within 5 s; {stays}"
    assert bench.said == [expected]


WHEN_DUE = "training goes on, and the next one is tried when it is due"


def test_failures_are_said_ever_more_rarely_and_so_is_their_end(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    bench = Bench(folder)
    bench.store.write(small_checkpoint(8))

    async def main() -> None:
        async with bench.running() as saver:
            await asyncio.sleep(2)
            shutil.move(folder, tmp_path / "away")
            folder.touch()
            await offered(saver, *range(12, 17))
            failure = saver.failure()
            assert isinstance(failure, DiskError)
            assert failure.what == "the state after 16 rounds could not be saved"
            assert failure.why == "File exists; the checkpoint of round 8 stays"
            assert "goes on from the one that stays" in failure.fix
            folder.unlink()
            await offered(saver, 20, 24)
            assert saver.failure() is None
            shutil.move(folder, tmp_path / "away again")
            folder.touch()
            await offered(saver, 28)
            # The last one is told by whoever ends the command.
            assert not await saver.finish(small_checkpoint(32), deadline_s=5)

    async def offered(saver: Saver, *rounds: int) -> None:
        for round in rounds:
            saver.offer(small_checkpoint(round))
            await asyncio.sleep(2)

    in_virtual_time(main)
    exists = f"File exists; that of round 8 stays, {WHEN_DUE}"
    assert bench.said == [
        f"the checkpoint of round 12 could not be written: {exists}",
        f"the checkpoint of round 13 could not be written (2 in a row): {exists}",
        f"the checkpoint of round 15 could not be written (4 in a row): {exists}",
        "checkpoints can be written again; that of round 20 is saved",
        "the checkpoint of round 28 could not be written: " + exists.replace("round 8", "round 24"),
    ]


def test_a_state_that_is_not_fit_to_be_kept_is_no_matter_of_the_disk(tmp_path: Path) -> None:
    bench = Bench(tmp_path)

    async def main() -> None:
        async with bench.running() as saver:
            bad = small_checkpoint(28, value=float("nan"))
            assert not await saver.finish(bad, deadline_s=5)

    in_virtual_time(main)
    failure = bench.saver.failure()
    assert isinstance(failure, CheckpointError)
    assert failure.why == "theta has values that are not finite; there is none before it"
    assert "begins anew" in failure.fix


class HeldStore(CheckpointStore):
    """A store whose writing stands still in the middle until it is let go."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, keep=3)
        self.began = threading.Event()
        self.let_go = threading.Event()
        self.ended = threading.Event()

    def write(
        self, checkpoint: Checkpoint, *, abandoned: Callable[[], bool] = lambda: False
    ) -> None:
        def held() -> bool:
            self.began.set()
            self.let_go.wait()
            return abandoned()

        try:
            super().write(checkpoint, abandoned=held)
        finally:
            self.ended.set()


async def test_a_thread_that_writes_stops_once_the_deadline_has_passed(tmp_path: Path) -> None:
    store, compute = HeldStore(tmp_path), ThreadCompute()
    said: list[Event] = []
    saver = Saver(store, compute, said.append)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(saver.run())
        saver.offer(small_checkpoint(12))
        await asyncio.to_thread(store.began.wait)
        assert not await saver.finish(None, deadline_s=0)
        running.cancel()
    store.let_go.set()
    await asyncio.to_thread(store.ended.wait)
    compute.close()
    assert os.listdir(tmp_path) == []
    assert len(said) == 1
