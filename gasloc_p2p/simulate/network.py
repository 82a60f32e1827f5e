"""An in-memory network: streams between peers of one process, and the store they meet in."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType

from blake3 import blake3

from gasloc_p2p.core.records import Verify, open_record
from gasloc_p2p.core.substrate import PeerUnreachableError, StreamHandler
from gasloc_p2p.core.types import BytesLike, PeerId

PIPE_BYTES = 1 << 20


class _Pipe:
    """One direction of a stream, with a byte limit."""

    def __init__(self) -> None:
        self._pieces: deque[bytes] = deque()
        self._buffered_bytes = 0
        self._closed = False
        self._changed = asyncio.Event()

    async def put(self, data: BytesLike) -> None:
        while self._buffered_bytes >= PIPE_BYTES and not self._closed:
            self._changed.clear()
            await self._changed.wait()
        if self._closed:
            raise ConnectionResetError("the other end closed the stream")
        self._pieces.append(bytes(data))
        self._buffered_bytes += len(data)
        self._changed.set()

    async def get(self, max_bytes: int) -> bytes:
        while not self._pieces and not self._closed:
            self._changed.clear()
            await self._changed.wait()
        if not self._pieces:
            return b""
        piece = self._pieces.popleft()
        if len(piece) > max_bytes:
            self._pieces.appendleft(piece[max_bytes:])
            piece = piece[:max_bytes]
        self._buffered_bytes -= len(piece)
        self._changed.set()
        return piece

    def close(self) -> None:
        self._closed = True
        self._changed.set()


class MemoryStream:
    """One end of an in-memory stream."""

    def __init__(self, peer_id: PeerId, incoming: _Pipe, outgoing: _Pipe) -> None:
        self._peer_id = peer_id
        self._incoming = incoming
        self._outgoing = outgoing

    @property
    def peer_id(self) -> PeerId:
        """Identity of the other end."""
        return self._peer_id

    async def read(self, max_bytes: int) -> bytes:
        """Return up to `max_bytes` bytes, or b"" once the other end has closed."""
        return await self._incoming.get(max_bytes)

    async def write(self, data: BytesLike) -> None:
        """Send `data` once the other end has read enough of what came before."""
        await self._outgoing.put(data)

    async def aclose(self) -> None:
        """Close both directions; bytes already written can still be read."""
        self._incoming.close()
        self._outgoing.close()


class Hub:
    """Connects the networks of all simulated peers; use as an async context manager."""

    def __init__(self, *, verify: Verify) -> None:
        self._verify = verify
        self._peers: dict[PeerId, MemoryNetwork] = {}
        self._records: dict[tuple[str, PeerId], tuple[float, bytes]] = {}
        self._manifests: dict[tuple[str, bytes], bytes] = {}
        self._handlers = asyncio.TaskGroup()

    async def __aenter__(self) -> Hub:
        await self._handlers.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for network in list(self._peers.values()):
            await network.aclose()
        await self._handlers.__aexit__(kind, error, trace)

    def network(self, peer_id: PeerId, sign: Callable[[bytes], bytes]) -> MemoryNetwork:
        """Plug a peer in."""
        network = MemoryNetwork(self, peer_id, sign)
        self._peers[peer_id] = network
        return network

    def connect(self, dialer: PeerId, peer: PeerId, protocol: str) -> MemoryStream:
        """Open a stream and start the peer's handler for it."""
        target = self._peers.get(peer)
        handler = target.handlers.get(protocol) if target is not None else None
        if target is None or handler is None:
            raise PeerUnreachableError(f"{peer} does not answer to {protocol}")
        there, back = _Pipe(), _Pipe()
        target.running.add(
            self._handlers.create_task(_serve(handler, MemoryStream(dialer, there, back)))
        )
        return MemoryStream(peer, back, there)

    def store_record(self, signed: bytes) -> bool:
        """Replace a peer's record unless the old one expires as late, as the real store does.

        Returns:
            Whether the record was taken.

        Raises:
            RecordError: the record is malformed or its signature is not its peer's.
        """
        record = open_record(signed, verify=self._verify)
        key = (record.run_id, record.peer_id)
        known = self._records.get(key)
        if known is not None and record.expires_at <= known[0]:
            return False
        self._records[key] = (record.expires_at, signed)
        return True

    def records(self, run_id: str) -> list[bytes]:
        """Return all records of a run."""
        return [signed for (run, _), (_, signed) in self._records.items() if run == run_id]

    def store_manifest(self, run_id: str, manifest: bytes) -> None:
        """Store a manifest under its digest."""
        self._manifests[run_id, blake3(manifest).digest()] = manifest

    def manifest(self, run_id: str, digest: bytes) -> bytes | None:
        """Return the manifest with this digest."""
        return self._manifests.get((run_id, digest))

    def unplug(self, peer_id: PeerId) -> None:
        """Remove a peer; its records stay."""
        self._peers.pop(peer_id, None)


async def _serve(handler: StreamHandler, stream: MemoryStream) -> None:
    await handler(stream)


class MemoryNetwork:
    """One simulated peer's `Network`; deadlines hold trivially, as nothing is ever slow."""

    def __init__(self, hub: Hub, peer_id: PeerId, sign: Callable[[bytes], bytes]) -> None:
        self._hub = hub
        self._peer_id = peer_id
        self._sign = sign
        self.handlers: dict[str, StreamHandler] = {}
        self.running: set[asyncio.Task[None]] = set()

    @property
    def peer_id(self) -> PeerId:
        """This peer's identity."""
        return self._peer_id

    def sign(self, payload: bytes) -> bytes:
        """Sign with this peer's identity."""
        return self._sign(payload)

    async def open_stream(self, peer: PeerId, protocol: str, *, deadline_s: float) -> MemoryStream:
        """Open a stream; see `Network.open_stream`."""
        return self._hub.connect(self._peer_id, peer, protocol)

    async def serve(self, protocol: str, handler: StreamHandler) -> None:
        """Register a handler; see `Network.serve`."""
        self.handlers[protocol] = handler

    async def publish_record(self, signed: bytes, *, deadline_s: float) -> bool:
        """Store this peer's record; see `Network.publish_record`."""
        return self._hub.store_record(signed)

    async def fetch_records(self, run_id: str, *, deadline_s: float) -> Sequence[bytes]:
        """Return the records of a run; see `Network.fetch_records`."""
        return self._hub.records(run_id)

    async def publish_manifest(self, run_id: str, manifest: bytes, *, deadline_s: float) -> bool:
        """Store a manifest; see `Network.publish_manifest`."""
        self._hub.store_manifest(run_id, manifest)
        return True

    async def fetch_manifest(
        self, run_id: str, digest: bytes, *, deadline_s: float
    ) -> bytes | None:
        """Return a manifest; see `Network.fetch_manifest`."""
        return self._hub.manifest(run_id, digest)

    async def aclose(self) -> None:
        """Unplug this peer and end its handlers."""
        self._hub.unplug(self._peer_id)
        for task in self.running:
            task.cancel()
