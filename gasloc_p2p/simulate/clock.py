"""Virtual time: an event loop whose clock jumps to the next timer whenever nothing is ready."""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Callable, Mapping
from typing import Any, SupportsFloat, TypeVar

from gasloc_p2p.core.substrate import LocalModel
from gasloc_p2p.simulate.speeds import STEADY, Machine

T = TypeVar("T")
RESOLUTION_S = 1e-6


class DeadlockError(RuntimeError):
    """Every task waits and no timer is left that could wake one."""


class LivelockError(RuntimeError):
    """Things go on happening for longer than they may."""


class _JumpingSelector(selectors.BaseSelector):
    """Polls without waiting and advances virtual time by the wait that was asked for."""

    def __init__(self, horizon_s: float, turns: float) -> None:
        self.now_s = 0.0
        self.horizon_s = horizon_s
        self.turns = turns
        self._turns_done = 0
        self._polled = selectors.DefaultSelector()

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._polled.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._polled.unregister(fileobj)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._polled.get_map()

    def close(self) -> None:
        self._polled.close()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = self._polled.select(0)
        if ready or timeout == 0:
            self._turns_done += 1
            if self._turns_done > self.turns:
                raise LivelockError(f"virtual time stands still at {self.now_s:.3f} s")
            return ready
        if timeout is None:
            raise DeadlockError("every peer waits for another one, and no deadline is running")
        self._turns_done = 0
        self.now_s += timeout
        if self.now_s > self.horizon_s:
            raise LivelockError(f"not over after {self.horizon_s:g} virtual s")
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time; sleeping an hour takes no time at all.

    Blocking work must run inline on the loop: a thread would not hold time back.

    Args:
        horizon_s: virtual seconds after which all must be over.
        turns: how often the loop may go round in one and the same moment.

    Raises:
        DeadlockError: from whatever runs the loop, if nothing can ever happen again.
        LivelockError: likewise, if one of the two limits is passed.
    """

    def __init__(self, *, horizon_s: float = math.inf, turns: float = math.inf) -> None:
        self._virtual = _JumpingSelector(horizon_s, turns)
        super().__init__(self._virtual)
        # asyncio runs a timer once the clock is less than this short of it; below the spacing of
        # floats at large times that would never be.
        self._clock_resolution = RESOLUTION_S

    def time(self) -> float:
        """Return virtual seconds since the loop was made."""
        return self._virtual.now_s

    def lift_limits(self) -> None:
        """Let everything come to its end, for instance after one of the limits was passed."""
        self._virtual.horizon_s = self._virtual.turns = math.inf


class VirtualClock:
    """Wall time of a simulated swarm: the running loop's own virtual time."""

    def unix_s(self) -> float:
        """Return virtual seconds since the simulation began."""
        return asyncio.get_running_loop().time()


class InlineCompute:
    """Runs tensor work on the loop and charges virtual time for inner steps.

    Args:
        step_s: virtual seconds of one inner step at the common speed.
        machine: how fast it is.
    """

    def __init__(self, *, step_s: float, machine: Machine = STEADY) -> None:
        self._step_s = step_s
        self._machine = machine

    @property
    def step_s(self) -> float:
        """Virtual seconds of an inner step that begins at this moment."""
        return self._step_s / self._machine.factor(asyncio.get_running_loop().time())

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work` at once; it takes no virtual time."""
        result = work()
        await asyncio.sleep(0)
        return result

    async def aside(self, work: Callable[[], T]) -> T:
        """Run `work` at once; it takes no virtual time."""
        return await self.run(work)

    async def step(self, model: LocalModel, lr: float) -> SupportsFloat:
        """Do one inner step at once, then let its virtual duration pass."""
        loss = model.step(lr)
        await asyncio.sleep(self.step_s)
        return loss
