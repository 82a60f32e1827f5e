"""Virtual time for tests: nothing takes long, and what hangs is named."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from collections.abc import Callable, Coroutine, Iterator
from contextvars import ContextVar
from typing import Any, Final, SupportsFloat, TypeVar

from gasloc_p2p.core.substrate import LocalModel
from gasloc_p2p.simulate.clock import DeadlockError, InlineCompute, LivelockError, VirtualTimeLoop

T = TypeVar("T")

MOST_TURNS: Final = 1_000_000
"""How often the loop may go round before virtual time has moved at all."""

_ACTING: ContextVar[str] = ContextVar("acting", default="nobody")
"""For whom the running task works; tasks inherit it from the one that starts them."""


def in_virtual_time(
    main: Callable[[], Coroutine[Any, Any, T]], *, horizon_s: float = math.inf
) -> T:
    """Run `main()` to its end on a virtual clock.

    Args:
        main: what to run.
        horizon_s: virtual seconds after which it must be over.

    Raises:
        DeadlockError: every task waits, and no timer is left that could wake one.
        LivelockError: it goes on and on, beyond the horizon or in one and the same moment.

        Both name every task that waits, for whom it works, and where.
    """

    def loop_factory() -> VirtualTimeLoop:
        loop = VirtualTimeLoop(horizon_s=horizon_s, turns=MOST_TURNS)
        loop.set_task_factory(_task_factory())
        return loop

    runner = asyncio.Runner(loop_factory=loop_factory)
    loop = runner.get_loop()
    assert isinstance(loop, VirtualTimeLoop)
    try:
        return runner.run(main())
    except (DeadlockError, LivelockError) as error:
        waiting = "\n".join(_waiting(loop))
        loop.lift_limits()
        raise type(error)(f"{error}\n{waiting}") from None
    finally:
        with contextlib.suppress(DeadlockError):
            runner.close()


def act_as(name: str) -> None:
    """Let the running task, and those that it starts from here on, work for `name`."""
    _ACTING.set(name)
    task = asyncio.current_task()
    if isinstance(task, _Task):
        task.acting = name


def _task_factory() -> Callable[..., asyncio.Task[Any]]:
    numbers = itertools.count()

    def make(
        loop: asyncio.AbstractEventLoop, coro: Coroutine[Any, Any, Any], **options: Any
    ) -> asyncio.Task[Any]:
        task = _Task(coro, loop=loop, **options)
        context = options.get("context")
        task.acting = _ACTING.get() if context is None else context.get(_ACTING, "nobody")
        task.number = next(numbers)
        return task

    return make


class _Task(asyncio.Task[T]):
    """A task that knows for whom it works.

    Its hash is its number, since task groups cancel their tasks in the order of a set.
    """

    acting = "nobody"
    number = -1

    def __hash__(self) -> int:
        return self.number


def _waiting(loop: asyncio.AbstractEventLoop) -> Iterator[str]:
    """Say of every task that works for somebody where it waits, its innermost coroutine last."""
    tasks = [task for task in asyncio.all_tasks(loop) if isinstance(task, _Task)]
    for task in sorted(tasks, key=lambda task: (len(task.acting), task.acting, task.number)):
        if task.acting != "nobody":
            yield f"  {task.acting}: {' > '.join(_awaits(task.get_coro()))}"


def _awaits(coroutine: Any) -> Iterator[str]:
    while (frame := getattr(coroutine, "cr_frame", None)) is not None:
        yield f"{coroutine.__qualname__}:{frame.f_lineno}"
        coroutine = coroutine.cr_await


class ShiftedClock:
    """A clock that is `ahead_s` ahead of the virtual one.

    Args:
        ahead_s: seconds, below zero for a clock that is behind.
    """

    def __init__(self, ahead_s: float = 0.0) -> None:
        self._ahead_s = ahead_s

    def unix_s(self) -> float:
        """Return this clock's idea of the seconds since the simulation began."""
        return asyncio.get_running_loop().time() + self._ahead_s


class StallingCompute(InlineCompute):
    """Computes at once, but can be told to stand still before its next local step.

    Attributes:
        stall_s: virtual seconds for which the next local step stands still.
    """

    stall_s = 0.0

    async def step(self, model: LocalModel, lr: float) -> SupportsFloat:
        """Stand still for `stall_s`, then do one step."""
        stall_s, self.stall_s = self.stall_s, 0.0
        await asyncio.sleep(stall_s)
        return await super().step(model, lr)
