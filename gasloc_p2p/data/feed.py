"""Samples from a stream that is read ahead, by a thread of its own, into a buffer on the disk.

Sample k is tokens k T to k T + T of the peer's stream, so that the number of the next sample is all
that a checkpoint has to keep; see docs/design.md section 6.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from gasloc_p2p.core.errors import DataError
from gasloc_p2p.data.patience import ClosedError
from gasloc_p2p.data.shelf import Entry, Shelf
from gasloc_p2p.data.stream import Stream
from gasloc_p2p.data.tokens import Tokens

BEHIND = 4
"""One part in so many of the buffer is for units that have been trained on: a node that crashed
goes on from its last checkpoint, which is behind."""
UNSAID_S = 3.0
MEMORY_BYTES = 32 << 20
"""Most that is held in memory where the disk takes no more."""


class Closing:
    """Starts threads, and tells them that nobody waits for what they do any more."""

    def __init__(self) -> None:
        self._closed = threading.Event()
        self._wakers: list[Callable[[], None]] = []
        self._threads: list[threading.Thread] = []

    def start(self, work: Callable[[], None], *, name: str) -> None:
        """Let a thread do `work`; it does not hold up the end of the process."""
        thread = threading.Thread(target=work, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def wakes(self, wake: Callable[[], None]) -> None:
        """Have `close` call `wake`."""
        self._wakers.append(wake)

    def close(self) -> None:
        """End all pauses."""
        self._closed.set()
        for wake in self._wakers:
            wake()

    def join(self, *, deadline_s: float = math.inf) -> None:
        """Wait for the end of the threads.

        One that C++ called back from would end the whole process with SIGABRT if it went on after
        the interpreter has been taken down.

        Args:
            deadline_s: seconds after which those that still wait for a hub are left to themselves.
        """
        until_s = time.monotonic() + deadline_s
        for thread in self._threads:
            thread.join(min(threading.TIMEOUT_MAX, max(0.0, until_s - time.monotonic())))

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed.is_set()

    def pause(self, seconds: float) -> None:
        """Wait.

        Raises:
            ClosedError: `close` was called.
        """
        if self._closed.wait(seconds):
            raise ClosedError


class Feed:
    """A peer's samples, read ahead; its thread begins with the first one that is asked for.

    Args:
        stream: where they come from.
        shelf: where they wait.
        sequence_length: tokens that a window predicts.
        limit_bytes: most that the shelf may hold, unless a single step needs more.
        say: told when training has to wait; called from any thread.
        closing: ends the thread.
        unsaid_s: training waits for so long before it says that it does.
    """

    def __init__(
        self,
        *,
        stream: Stream,
        shelf: Shelf,
        sequence_length: int,
        limit_bytes: int,
        say: Callable[[str], None],
        closing: Closing,
        unsaid_s: float = UNSAID_S,
    ) -> None:
        self.next_sample = 0
        self._stream = stream
        self._shelf = shelf
        self._length = sequence_length
        self._limit_bytes = limit_bytes
        self._say = say
        self._closing = closing
        self._unsaid_s = unsaid_s
        self._ends = list(accumulate(entry.tokens for entry in shelf.entries))
        self._in_memory: dict[int, Tokens] = {}
        self._open: tuple[int, Tokens] = (-1, np.empty(0, dtype=np.uint8))
        self._windows = 1
        self._dropped_before = 0
        self._disk_is_full = False
        self._largest_bytes = 0
        self._failure: BaseException | None = None
        self._changed = threading.Condition()
        self._wakers: list[Callable[[], None]] = []
        self._begun = False
        closing.wakes(self._tell)

    def batch(self, windows: int) -> Tensor:
        """Return the next windows, int64 [windows, sequence_length + 1], and move past them.

        Waits for them if need be.

        Raises:
            DataError: they cannot be had.
            ClosedError: the feed was closed.
        """
        self._begin(windows)
        # One file at each step, for small data may wait in the buffer for long before it is read.
        shards = self._stream.shards
        shards.check(shards.names[self.next_sample // windows % len(shards.names)])
        count = windows * self._length + 1
        while True:
            with self._changed:
                while not (self._is_there(windows) or self._failure or self._closing.closed):
                    self._changed.wait()
                if self._failure and self._stream.shards.local:
                    # Unlike a hub, a person at this machine can mend it at once.
                    raise self._failure
                if not self._is_there(windows):
                    raise self._failure or ClosedError
                tokens = self._take(self.next_sample * self._length, count)
                if tokens is not None:
                    self.next_sample += windows
                    self._drop_behind()
                self._changed.notify_all()
            if tokens is not None:
                return torch.from_numpy(tokens).unfold(0, self._length + 1, self._length)
            self._say("a part of the text buffer was damaged on the disk; it is read again")

    async def ready(self, windows: int) -> None:
        """Wait until `batch` has so many windows at once, or fails; the event loop stays free."""
        self._begin(windows)
        if self._can_answer(windows):
            return
        loop, arrived = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            loop.call_soon_threadsafe(arrived.set)

        self._wakers.append(wake)
        try:
            if not self._can_answer(windows):
                await self._wait(windows, arrived)
        finally:
            self._wakers.remove(wake)

    async def _wait(self, windows: int, arrived: asyncio.Event) -> None:
        """Wait for text, and say so if it takes longer than a moment."""

        async def until_there() -> None:
            while not self._can_answer(windows):
                await arrived.wait()
                arrived.clear()

        began_s = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(self._unsaid_s):
                await until_there()
        except TimeoutError:
            self._say("training waits: the text buffer is empty")
            await until_there()
            waited_s = asyncio.get_running_loop().time() - began_s
            self._say(f"training goes on after {waited_s:.0f} s without text")

    def close(self) -> None:
        """End the thread and wait for it; it may still wait for a hub."""
        self._closing.close()
        self._closing.join()

    def trained_on(self) -> Sequence[Entry]:
        """Return the units of which samples were drawn, in order."""
        return self._shelf.entries[: bisect_right(self._ends, self.next_sample * self._length)]

    def _begin(self, windows: int) -> None:
        self._windows = windows
        if not self._begun:
            self._begun = True
            self._closing.start(self._run, name="text")

    def _can_answer(self, windows: int) -> bool:
        return self._is_there(windows) or self._failure is not None

    def _is_there(self, windows: int) -> bool:
        """Whether all units of the next windows are there; needs no lock."""
        last = self._last_needed(windows)
        return last < len(self._ends) and all(map(self._holds, range(self._first(), last + 1)))

    def _first(self) -> int:
        """The unit in which the next sample begins."""
        return bisect_right(self._ends, self.next_sample * self._length)

    def _last_needed(self, windows: int) -> int:
        return bisect_right(self._ends, (self.next_sample + windows) * self._length)

    def _holds(self, unit: int) -> bool:
        empty = self._shelf.entries[unit].tokens == 0
        return empty or unit in self._in_memory or self._shelf.holds(unit)

    def _take(self, start: int, count: int) -> Tokens | None:
        """Return tokens of the stream, int64 [count]; None when a unit turns out to be damaged."""
        unit = bisect_right(self._ends, start)
        parts: list[Tokens] = []
        while count:
            if self._shelf.entries[unit].tokens:
                tokens = self._load(unit)
                if tokens is None:
                    return None
                first = start - (self._ends[unit] - len(tokens))
                part = tokens[first : first + count]
                parts.append(part)
                start, count = start + len(part), count - len(part)
            unit += 1
        return np.concatenate(parts).astype(np.int64)

    def _load(self, unit: int) -> Tokens | None:
        if self._open[0] != unit:
            tokens = self._in_memory.get(unit)
            if tokens is None:
                tokens = self._shelf.load(unit)
            if tokens is None or len(tokens) != self._shelf.entries[unit].tokens:
                self._shelf.drop(unit)
                return None
            self._open = (unit, tokens)
        return self._open[1]

    def _drop_behind(self) -> None:
        """Throw away what was trained on, beyond the share that is kept for a restart."""
        first = self._first()
        if first == self._dropped_before:
            return
        self._dropped_before = first
        for unit in [unit for unit in self._in_memory if unit < first]:
            del self._in_memory[unit]
        behind = [(unit, size) for unit, size in self._shelf.units() if unit < first]
        spare = sum(size for _, size in behind) - self._limit_bytes // BEHIND
        for unit, size in behind:
            if spare <= 0:
                break
            self._shelf.drop(unit)
            spare -= size

    def _run(self) -> None:
        try:
            while not self._closing.closed:
                with self._changed:
                    while (unit := self._wanted()) is None and not self._closing.closed:
                        self._changed.wait()
                if unit is not None:
                    self._fetch(unit)
        except ClosedError:
            return
        except BaseException as error:  # it ends the training, not only this thread
            self._failure = error
        finally:
            self._stream.units.close()
            self._tell()

    def _wanted(self) -> int | None:
        """Return the unit to read next; None while there is no room for more."""
        last = self._last_needed(self._windows)
        for unit in range(self._first(), len(self._ends)):
            if not self._holds(unit):
                return unit if unit <= last or self._has_room() else None
        unit = len(self._ends)
        return unit if unit <= last or self._has_room() else None

    def _has_room(self) -> bool:
        in_memory = sum(tokens.nbytes for tokens in self._in_memory.values())
        if self._disk_is_full and in_memory + self._largest_bytes > MEMORY_BYTES:
            return False
        return self._shelf.held_bytes + in_memory + self._largest_bytes <= self._limit_bytes

    def _fetch(self, unit: int) -> None:
        """Read a unit and keep it, unless training is past it."""
        if unit < len(self._ends):
            entry = self._shelf.entries[unit]
            tokens = self._stream.read(entry.place)
            if tokens is None or len(tokens) != entry.tokens:
                raise DataError(
                    "The text is not what it was when this run began.",
                    why=f"Unit {unit} of it had {entry.tokens} tokens.",
                    fix="Put the files back, or remove the folder `data` in the node's home to "
                    "begin with the text as it is.",
                )
        else:
            entry, tokens = self._stream.read_next(self._shelf.entries)
        self._largest_bytes = max(self._largest_bytes, tokens.nbytes)
        end = self._ends[unit] if unit < len(self._ends) else sum(self._ends[-1:]) + len(tokens)
        # Outside the lock, for a disk may be slow, and only this thread writes.
        if len(tokens) and end > self.next_sample * self._length:
            self._keep(unit, tokens)
        with self._changed:
            if unit == len(self._ends):
                self._shelf.note(entry)
                self._ends.append(end)
        self._tell()

    def _keep(self, unit: int, tokens: Tokens) -> None:
        try:
            self._shelf.put(unit, tokens)
        except OSError as error:
            self._in_memory[unit] = tokens
            if not self._disk_is_full:
                self._say(
                    f"the text buffer cannot be written ({error.strerror or error}); training goes "
                    "on with what fits into memory"
                )
            self._disk_is_full = True
        else:
            self._disk_is_full = False

    def _tell(self) -> None:
        with self._changed:
            self._changed.notify_all()
        for wake in tuple(self._wakers):
            wake()
