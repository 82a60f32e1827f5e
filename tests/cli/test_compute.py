"""The threads of a node, when it leaves in the midst of a long step."""

from __future__ import annotations

import asyncio
import os
import threading

import pytest

from gasloc_p2p.commands.compute import ThreadCompute


async def test_a_process_that_is_left_does_not_wait_for_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    compute, begun, enough = ThreadCompute(), threading.Event(), threading.Event()

    def step() -> None:
        begun.set()
        enough.wait(60)

    async with asyncio.TaskGroup() as tasks:
        stepping = tasks.create_task(compute.run(step))
        await asyncio.to_thread(begun.wait, 60)
        compute.close()
        compute.end_process()
        assert ended == [0]
        enough.set()
        await stepping
    ended.clear()
    compute.end_process()
    assert not ended
