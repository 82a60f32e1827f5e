"""The far end of `gasloc bench stream`: a process that answers over TCP and over libp2p.

`python -m gasloc_p2p.bench.far_end` says in one line of JSON where it is, and leaves when its
standard input closes, so that it never outlives its parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from typing import Final

import msgspec
import uvloop

from gasloc_p2p.bench.transfer import PIECE_BYTES, TcpStream, serve_transfers
from gasloc_p2p.core.substrate import Stream
from gasloc_p2p.core.types import PeerId
from gasloc_p2p.net.identity import Identity
from gasloc_p2p.net.network import Libp2pNetwork
from gasloc_p2p.net.settings import NetConfig

PROTOCOL: Final = "gasloc/bench/1"
HOST: Final = "127.0.0.1"
LISTEN: Final = (f"/ip4/{HOST}/tcp/0",)
SEED: Final = 0
NEAR, FAR = 0, 1
"""Indices of the two derived identities."""


class Greeting(msgspec.Struct, frozen=True, kw_only=True):
    """Where the far end is.

    Attributes:
        tcp_port: on loopback.
        peer_id: its libp2p identity.
        addresses: its multiaddrs.
    """

    tcp_port: int
    peer_id: PeerId
    addresses: tuple[str, ...]


async def serve(greet_fd: int) -> None:
    """Answer on a TCP port and on libp2p until cancelled; say where once both are open."""
    identity = Identity.derived(SEED, FAR)
    network = await Libp2pNetwork.create(identity, NetConfig(listen=LISTEN))
    try:
        await network.serve(PROTOCOL, _answer_p2p)
        server = await asyncio.start_server(_answer_tcp, HOST, 0, limit=PIECE_BYTES)
        greeting = Greeting(
            tcp_port=server.sockets[0].getsockname()[1],
            peer_id=network.peer_id,
            addresses=await network.addresses(),
        )
        os.write(greet_fd, msgspec.json.encode(greeting) + b"\n")
        await asyncio.Event().wait()
    finally:
        await network.aclose()


async def _answer_p2p(stream: Stream) -> None:
    with contextlib.suppress(ConnectionError):
        await serve_transfers(stream)
    await stream.aclose()


async def _answer_tcp(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        await serve_transfers(TcpStream(reader=reader, writer=writer))
    writer.close()


async def _until_orphaned(greet_fd: int) -> None:
    """Serve until standard input closes, also in the middle of a start."""
    loop, parent = asyncio.get_running_loop(), asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(parent), sys.stdin)
    async with asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(serve(greet_fd))
        while await parent.read(1024):
            pass
        serving.cancel()


def main() -> None:
    """Serve the parent."""
    # Whatever a library prints must not come before the greeting.
    greet_fd = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    uvloop.run(_until_orphaned(greet_fd))


if __name__ == "__main__":
    main()
