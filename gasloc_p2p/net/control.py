"""Requests to p2pd over its control socket, one socket each."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Final

from hivemind.p2p.p2p_daemon_bindings.utils import (
    P2PDaemonError,
    raise_if_failed,
    read_pbmsg_safe,
    write_pbmsg,
)
from hivemind.proto import p2pd_pb2

DAEMON_ERRORS: Final = (P2PDaemonError, OSError, EOFError)
"""What a request raises when p2pd refuses it, is gone, or does not answer in time."""


async def ask(control_path: Path, request: Any, *, deadline_s: float) -> Any:
    """Return p2pd's answer (`p2pd_pb2.Response`) to a `p2pd_pb2.Request`.

    hivemind's own calls have no deadline and leak their socket when they are cancelled.

    Raises:
        P2PDaemonError: p2pd refuses; the message says why.
        OSError, EOFError: p2pd is gone, or did not answer within `deadline_s` (`TimeoutError`).
    """
    async with asyncio.timeout(deadline_s):
        reader, writer = await asyncio.open_unix_connection(str(control_path))
        try:
            await write_pbmsg(writer, request)
            response = p2pd_pb2.Response()
            await read_pbmsg_safe(reader, response)
        finally:
            writer.transport.abort()
    raise_if_failed(response)
    return response
