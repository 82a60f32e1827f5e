"""The libp2p daemon (p2pd): one child process, started, watched and ended by its node."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import os
import shutil
import signal
import tempfile
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from gasloc_p2p.core.errors import DaemonError
from gasloc_p2p.net.identity import Identity
from gasloc_p2p.net.settings import NetConfig

STARTUP_DEADLINE_S: Final = 20.0
STOP_GRACE_S: Final = 2.0
ATTACH_DEADLINE_S: Final = 10
"""p2pd ends itself when nobody has attached to it for this long."""
TAIL_BYTES: Final = 4096
_READY: Final = b"Peer ID:"
_NO_BOOTSTRAP: Final = "bootstrap peers"

_log = logging.getLogger(__name__)


class BootstrapRefusedError(DaemonError):
    """p2pd could connect to none of its bootstrap peers."""


class Daemon:
    """A running p2pd, in a session of its own, so that Ctrl-C in a terminal does not reach it.

    It also ends by itself shortly after this process is gone, however that ends.

    Attributes:
        directory: private folder (mode 0700) for the sockets between p2pd and this process.
    """

    def __init__(self, process: Process, output: asyncio.StreamReader, directory: Path) -> None:
        self.directory: Final = directory
        self._process = process
        self._tail = b""
        self._ready: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._draining = asyncio.create_task(self._drain(output), name="p2pd output")

    @classmethod
    async def start(
        cls, identity: Identity, config: NetConfig, *, bootstrap: Sequence[str]
    ) -> Daemon:
        """Start p2pd and return once it listens and is connected to a bootstrap peer, if any.

        Args:
            identity: its key reaches p2pd through a pipe, never through a second file.
            config: listen and announce addresses.
            bootstrap: peers to connect to; at least one must answer unless there are none.

        Raises:
            BootstrapRefusedError: none of `bootstrap` could be connected to.
            DaemonError: p2pd is missing, ended, or was not up within `STARTUP_DEADLINE_S`.
        """
        async with contextlib.AsyncExitStack() as undo:
            directory = _private_directory()
            undo.callback(shutil.rmtree, directory, ignore_errors=True)
            process = await _spawn(identity, config, bootstrap=bootstrap, directory=directory)
            assert process.stdout is not None
            daemon = cls(process, process.stdout, directory)
            undo.push_async_callback(daemon.stop)
            await daemon._until_ready()
            undo.pop_all()
        return daemon

    @property
    def control_path(self) -> Path:
        """The unix socket on which p2pd takes requests."""
        return self.directory / "p2pd.sock"

    @property
    def pid(self) -> int:
        """Process id of p2pd."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit status, None while p2pd runs."""
        return self._process.returncode

    @property
    def last_line(self) -> str:
        """The last line that p2pd printed."""
        lines = self._tail.decode(errors="replace").split("\n")
        return next(
            (line.strip() for line in reversed(lines) if line.strip()), "it printed nothing"
        )

    async def exited(self) -> int:
        """Wait until p2pd has ended, for whatever reason, and return its exit status."""
        return await self._process.wait()

    def kill(self) -> None:
        """End p2pd by force, without waiting until it has ended."""
        self._signal(force=True)

    async def stop(self) -> None:
        """End p2pd, by force after `STOP_GRACE_S`; safe to call twice, and when it has ended."""
        self._signal(force=False)
        try:
            async with asyncio.timeout(STOP_GRACE_S):
                await self._process.wait()
        except TimeoutError:
            _log.warning("p2pd %d did not end when asked and is killed", self.pid)
        finally:
            self._signal(force=True)
            shutil.rmtree(self.directory, ignore_errors=True)
        await self._process.wait()
        await asyncio.wait({self._draining})

    def _signal(self, *, force: bool) -> None:
        if self._process.returncode is None:
            # Not by the process object, which may reap a child that has just ended by itself, and
            # asyncio then complains that it has missed the exit status.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL if force else signal.SIGTERM)

    async def _drain(self, output: asyncio.StreamReader) -> None:
        """Read what p2pd prints, so that it never blocks, and keep the end of it."""
        while piece := await output.read(TAIL_BYTES // 4):
            self._tail = (self._tail + piece)[-TAIL_BYTES:]
            if _READY in self._tail and not self._ready.done():
                self._ready.set_result(True)
        if not self._ready.done():
            self._ready.set_result(False)

    async def _until_ready(self) -> None:
        try:
            async with asyncio.timeout(STARTUP_DEADLINE_S):
                up = await asyncio.shield(self._ready)
        except TimeoutError:
            raise DaemonError(
                f"the libp2p daemon was not up within {STARTUP_DEADLINE_S:.0f} s",
                why=f"the last it said: {self.last_line}",
                fix="if this machine is very busy, try again; otherwise see the line above",
            ) from None
        if up:
            return
        kind = BootstrapRefusedError if _NO_BOOTSTRAP in self.last_line else DaemonError
        raise kind(
            "the libp2p daemon did not start",
            why=self.last_line,
            fix="check net.listen and net.announce; the line above is the daemon's own",
        )


def _private_directory() -> Path:
    # Not the platform's own temporary folder: a unix socket's path must stay below 104 bytes,
    # which the one of macOS leaves no room for.
    base = "/tmp" if os.access("/tmp", os.W_OK) else None
    return Path(tempfile.mkdtemp(prefix="gasloc-p2pd-", dir=base))


def _key_pipe(identity: Identity) -> int:
    """Return the reading end of a pipe that holds the secret key."""
    reading, writing = os.pipe()
    os.write(writing, identity.key_file())
    os.close(writing)
    return reading


async def _spawn(
    identity: Identity, config: NetConfig, *, bootstrap: Sequence[str], directory: Path
) -> Process:
    binary = _binary()
    key_end = _key_pipe(identity)
    spawning = asyncio.ensure_future(
        asyncio.create_subprocess_exec(
            str(binary),
            f"-listen=/unix{directory}/p2pd.sock",
            f"-id=/dev/fd/{key_end}",
            *_arguments(config, bootstrap),
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=STDOUT,
            start_new_session=True,
            pass_fds=(key_end,),
        )
    )
    try:
        return await asyncio.shield(spawning)
    except asyncio.CancelledError:
        # Cancelled half-way, event loops leave the child running or unreaped.
        await asyncio.wait({spawning})
        if spawning.exception() is None:
            spawning.result().kill()
            await spawning.result().communicate()
        raise
    except OSError as error:
        raise DaemonError(
            "the libp2p daemon cannot be run",
            why=f"{binary}: {error.strerror or error}",
            fix="pip install --force-reinstall hivemind, from a wheel for this platform",
        ) from None
    finally:
        os.close(key_end)


def _arguments(config: NetConfig, bootstrap: Sequence[str]) -> list[str]:
    arguments = [
        f"-hostAddrs={','.join(config.listen)}",
        f"-idleTimeout={ATTACH_DEADLINE_S}s",
        "-dhtServer=1",
        "-tls=1",
        "-relay=1",
        "-autoRelay=0",
        "-autonat=1",
        "-natPortMap=0",
        "-connManager=1",
    ]
    if config.announce:
        arguments.append(f"-announceAddrs={','.join(config.announce)}")
    if bootstrap:
        arguments += ["-b=1", f"-bootstrapPeers={','.join(bootstrap)}"]
    return arguments


def _binary() -> Path:
    """Find p2pd without importing hivemind, which would load torch."""
    package = importlib.util.find_spec("hivemind")
    folders = (package.submodule_search_locations if package is not None else None) or []
    for folder in folders:
        return Path(folder) / "hivemind_cli" / "p2pd"
    raise DaemonError(
        "hivemind is not installed",
        why="the libp2p daemon is part of it",
        fix="pip install 'hivemind>=1.1.12'",
    )
