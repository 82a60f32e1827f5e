"""Starts the further processes of a node that trains with several (docs/models.md)."""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from gasloc_p2p.commands.follow import READY, RankSpec
from gasloc_p2p.config import Config
from gasloc_p2p.core.errors import ConfigError, DeviceError
from gasloc_p2p.train.ranks import LOOPBACK, Group

READY_DEADLINE_S: Final = 300.0
"""For reading a model from the disk; one that is not there yet is downloaded by the node first."""
END_DEADLINE_S: Final = 5.0


class Ranks:
    """The further processes of a node; none of them outlives it.

    Attributes:
        size: ranks of the node, itself included.
    """

    def __init__(self, config: Config, folder: Path, *, vocabulary: int) -> None:
        self.size = config.device.processes
        self._vocabulary = vocabulary
        self._config = config
        self._folder = folder
        self._processes: list[asyncio.subprocess.Process] = []

    async def start(self) -> None:
        """Start the processes and wait until each has its model.

        Raises:
            DeviceError: one of them does not come up; it has said why on standard error.
        """
        for rank in range(1, self.size):
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "gasloc_p2p.commands.follow"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                # A Ctrl-C in the terminal is for the node, which then lets them end.
                start_new_session=True,
            )
            self._processes.append(process)
            assert process.stdin is not None
            process.stdin.write(self._spec(rank).model_dump_json().encode() + b"\n")
            await process.stdin.drain()
        try:
            async with asyncio.timeout(READY_DEADLINE_S):
                for rank, process in enumerate(self._processes, start=1):
                    assert process.stdout is not None
                    if await process.stdout.readline() != READY:
                        raise _failed(rank, "it ended before its model was there")
        except TimeoutError:
            raise _failed(rank, f"its model was not there after {READY_DEADLINE_S:g} s") from None

    def meet(self) -> Group:
        """Connect with all of them; blocks until each has come.

        Raises:
            DeviceError: they did not all come.
        """
        return Group.meet(rank=0, size=self.size, folder=self._folder, interface=loopback())

    async def end(self) -> None:
        """Wait until all have ended; whoever does not in time is killed."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        try:
            async with asyncio.timeout(END_DEADLINE_S):
                for process in self._processes:
                    await process.wait()
        except TimeoutError:
            for process in self._processes:
                if process.returncode is None:
                    process.kill()
                    await process.wait()

    def _spec(self, rank: int) -> RankSpec:
        config = self._config
        return RankSpec(
            rank=rank,
            ranks=self.size,
            folder=self._folder,
            interface=loopback(),
            model=config.model,
            vocabulary=self._vocabulary,
            inner=config.inner,
            device=config.device,
            seed=config.run.seed,
            threads=config.node.threads,
            extensions=config.node.extensions,
        )


@asynccontextmanager
async def ranks_of(config: Config, *, vocabulary: int) -> AsyncIterator[Ranks]:
    """Provide the further processes of a node, and end them with it.

    Raises:
        ConfigError: this system has no loopback device that is known.
    """
    folder = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="gasloc-ranks-"))
    ranks = Ranks(config, folder, vocabulary=vocabulary)
    try:
        yield ranks
    finally:
        await ranks.end()
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


def loopback() -> str:
    """Return the name of this machine's loopback device.

    Raises:
        ConfigError: this system has none that is known.
    """
    if sys.platform not in LOOPBACK:
        raise ConfigError(
            "device.processes works on Linux and macOS only",
            why=f"the loopback device of {sys.platform} has no known name",
            fix="set device.processes=1",
        )
    return LOOPBACK[sys.platform]


def _failed(rank: int, why: str) -> DeviceError:
    return DeviceError(
        f"process {rank} of this node does not come up",
        why=f"{why}; what it says stands above",
        fix="mend that, or set device.processes=1",
    )
