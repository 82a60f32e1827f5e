"""The unix socket on which p2pd hands over the streams that peers open."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Final

import base58
from hivemind.proto import p2pd_pb2
from hivemind.utils.multiaddr import Multiaddr

from gasloc_p2p.core.types import PeerId
from gasloc_p2p.net.control import ask
from gasloc_p2p.net.daemon import Daemon
from gasloc_p2p.net.messages import receive_message
from gasloc_p2p.net.sockets import LocalSocket

BACKLOG: Final = 128
OUT_OF_FILES_PAUSE_S: Final = 0.5

_log = logging.getLogger(__name__)


class Doorway:
    """Takes the streams that peers open; hivemind's own reads ahead into a buffer.

    The socket lies beside p2pd's own, where no other user of the machine can connect and claim to
    be any peer.

    Args:
        daemon: the p2pd process.
        arrived: called with each connection; `name_of` then says whose it is.
    """

    def __init__(self, daemon: Daemon, arrived: Callable[[LocalSocket], None]) -> None:
        self._daemon = daemon
        self._arrived = arrived
        self._raw: socket.socket | None = None

    async def serve(self, protocol: str, *, deadline_s: float) -> None:
        """Have p2pd hand over the streams of `protocol`, from here on.

        Raises:
            P2PDaemonError, OSError, EOFError: p2pd refuses, is gone, or is silent.
        """
        if self._raw is None:
            self._raw = self._open()
        request = p2pd_pb2.StreamHandlerRequest(
            addr=Multiaddr(f"/unix{self._path}").to_bytes(), proto=[protocol], balanced=False
        )
        await ask(
            self._daemon.control_path,
            p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_HANDLER, streamHandler=request),
            deadline_s=deadline_s,
        )

    def close(self) -> None:
        """Take no more streams; safe to call twice."""
        if self._raw is not None:
            asyncio.get_running_loop().remove_reader(self._raw)
            self._raw.close()
            self._raw = None

    @property
    def _path(self) -> Path:
        return self._daemon.directory / "streams.sock"

    def _open(self) -> socket.socket:
        raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            raw.setblocking(False)
            raw.bind(str(self._path))
            raw.listen(BACKLOG)
        except OSError:
            raw.close()
            raise
        asyncio.get_running_loop().add_reader(raw, self._accept, raw)
        return raw

    def _accept(self, listening: socket.socket) -> None:
        try:
            raw, _ = listening.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            # It stays readable, and would keep the event loop busy until a file is closed.
            _log.error("a stream was not taken: %s", error)
            loop = asyncio.get_running_loop()
            loop.remove_reader(listening)
            loop.call_later(OUT_OF_FILES_PAUSE_S, self._go_on, listening)
            return
        self._arrived(LocalSocket(raw))

    def _go_on(self, listening: socket.socket) -> None:
        if self._raw is listening:
            asyncio.get_running_loop().add_reader(listening, self._accept, listening)


async def name_of(connection: LocalSocket) -> tuple[PeerId, str]:
    """Return which peer opened the stream of a connection that has just arrived, and its protocol.

    Raises:
        EOFError, ValueError: p2pd does not say.
    """
    info = p2pd_pb2.StreamInfo()
    await receive_message(connection, info)
    return base58.b58encode(info.peer).decode(), info.proto
