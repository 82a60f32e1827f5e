"""The real network: libp2p streams and a Kademlia DHT, through hivemind."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Final

from blake3 import blake3
from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError
from hivemind.proto import dht_pb2

from gasloc_p2p.core.errors import DaemonError
from gasloc_p2p.core.manifest import MAX_MANIFEST_BYTES
from gasloc_p2p.core.records import MAX_RECORD_BYTES, open_record
from gasloc_p2p.core.substrate import PeerUnreachableError, Stream, StreamHandler
from gasloc_p2p.core.types import PeerId
from gasloc_p2p.net.capped import Caps
from gasloc_p2p.net.control import DAEMON_ERRORS
from gasloc_p2p.net.daemon import Daemon
from gasloc_p2p.net.identity import Identity
from gasloc_p2p.net.inbound import Doorway, name_of
from gasloc_p2p.net.join import Attachment, join
from gasloc_p2p.net.lanes import Lanes
from gasloc_p2p.net.neighbours import Neighbours
from gasloc_p2p.net.settings import NetConfig
from gasloc_p2p.net.sockets import LocalSocket
from gasloc_p2p.net.streams import P2PStream, request_stream
from gasloc_p2p.net.validator import MANIFEST_TTL_S, manifest_key, record_key

MAX_INBOUND_STREAMS: Final = 64
MAX_RECORDS: Final = 10_000
SERVE_DEADLINE_S: Final = 5.0
NAME_DEADLINE_S: Final = 5.0
ADDRESSES_DEADLINE_S: Final = 5.0
HANDLER_GRACE_S: Final = 2.0
_EVERY_REPLICA: Final = float("nan")
"""Expiration with which a search would be content: none. Without it a search ends at the first
node that claims its answer never expires, and a single node could hide the rest of the swarm."""

_log = logging.getLogger(__name__)


class Libp2pNetwork:
    """One node's place on the network; implements `gasloc_p2p.core.substrate.Network`.

    Made by `create`. While p2pd or the DHT is unwell, records and manifests are simply not stored
    and not found.
    """

    def __init__(self, identity: Identity, attachment: Attachment, *, caps: Caps) -> None:
        self._identity = identity
        self._parts = attachment
        self._caps = caps
        self._doorway = Doorway(attachment.daemon, self._accept)
        self._served: dict[str, StreamHandler] = {}
        self._streams: set[P2PStream] = set()
        self._lanes = Lanes()
        self._handlers: set[asyncio.Task[None]] = set()
        self._requests: set[asyncio.Timeout] = set()
        self._closing = False
        self._quiet = asyncio.Event()
        self.neighbours: Final = Neighbours(attachment)
        self._end = asyncio.Lock()
        attachment.undo.push_async_callback(self._end_streams)

    @classmethod
    async def create(
        cls,
        identity: Identity,
        config: NetConfig,
        *,
        warn: Callable[[str], None] = _log.warning,
    ) -> Libp2pNetwork:
        """Start p2pd and join the DHT; see `gasloc_p2p.net.join.join` for what can go wrong."""
        return cls(identity, await join(identity, config, warn=warn), caps=Caps(config))

    @property
    def peer_id(self) -> PeerId:
        """This node's own identity."""
        return self._identity.peer_id

    @property
    def daemon(self) -> Daemon:
        """The p2pd process, for whoever watches over it."""
        return self._parts.daemon

    def inherit(self, earlier: Libp2pNetwork) -> None:
        """Hold the DHT entries that `earlier` held for the swarm."""
        self._parts.dht.protocol.storage = earlier._parts.dht.protocol.storage

    async def is_well(self, *, deadline_s: float) -> bool:
        """Whether p2pd, and the connection over which the DHT uses it, answer in time."""
        p2p = self._parts.p2p
        try:
            async with asyncio.timeout(deadline_s):
                await p2p.call_protobuf_handler(
                    PeerID(b""), "gasloc/nobody", dht_pb2.PingRequest(), dht_pb2.PingResponse
                )
        except P2PDaemonError:
            # It refuses an id that is none, which is an answer.
            return True
        except OSError:
            return False
        return True

    def sign(self, payload: bytes) -> bytes:
        """Sign `payload` with this node's identity; 64 bytes (Ed25519)."""
        return self._identity.sign(payload)

    async def addresses(self) -> tuple[str, ...]:
        """Return the multiaddrs by which others may reach this node, each ending in /p2p/ID.

        Raises:
            DaemonError: p2pd does not answer, or listens nowhere.
        """
        try:
            async with asyncio.timeout(ADDRESSES_DEADLINE_S):
                visible = await self._parts.p2p.get_visible_maddrs(latest=True)
        except (P2PDaemonError, OSError, EOFError, ValueError) as error:
            raise DaemonError(
                "this node's addresses are not known",
                why=f"p2pd: {error or type(error).__name__}; it last said: {self.daemon.last_line}",
                fix="check net.listen and net.announce, then start again",
            ) from None
        return tuple(str(address) for address in visible)

    async def open_stream(self, peer: PeerId, protocol: str, *, deadline_s: float) -> Stream:
        """Open a stream to `peer`.

        Raises:
            PeerUnreachableError: the peer cannot be reached or does not speak `protocol`.
            TimeoutError: nothing happened within `deadline_s`.
        """
        async with asyncio.timeout(deadline_s):
            return await self._lanes.dial(peer, partial(self._open_lane, peer, protocol))

    async def _open_lane(self, peer: PeerId, protocol: str) -> P2PStream:
        """Have p2pd open a stream.

        Raises:
            PeerUnreachableError: see `open_stream`.
        """
        if self._closing:
            raise PeerUnreachableError(f"{peer}: this node has left the network")
        try:
            connection = await LocalSocket.connect(self.daemon.control_path)
        except OSError as error:
            raise PeerUnreachableError(f"{peer}: own p2pd is gone ({error})") from error
        lane = self._adopt(peer, connection)
        connected = False
        try:
            await request_stream(peer, protocol, connection)
            connected = True
        finally:
            if not connected:
                lane.abort()
        return lane

    async def serve(self, protocol: str, handler: StreamHandler) -> None:
        """Run `handler` for every stream that a peer opens with `protocol`.

        The handler owns its stream and closes it. Beyond `MAX_INBOUND_STREAMS` at a time, each lane
        counted, further ones are closed at once.

        Raises:
            DaemonError: p2pd does not take the registration.
        """
        self._served[protocol] = handler
        try:
            await self._doorway.serve(protocol, deadline_s=SERVE_DEADLINE_S)
        except DAEMON_ERRORS as error:
            raise DaemonError(
                f"p2pd does not accept streams for {protocol}",
                why=f"{error or type(error).__name__}; it last said: {self.daemon.last_line}",
                fix="start again",
            ) from None

    def _adopt(self, peer: PeerId, connection: LocalSocket) -> P2PStream:
        stream = P2PStream(peer, connection, caps=self._caps, released=self._release)
        self._streams.add(stream)
        return stream

    def _release(self, stream: P2PStream) -> None:
        self._streams.discard(stream)
        if not self._streams:
            self._quiet.set()

    def _accept(self, connection: LocalSocket) -> None:
        stream = self._adopt("", connection)
        if self._closing or len(self._handlers) >= MAX_INBOUND_STREAMS:
            _log.debug("a stream is refused: %d are open", len(self._handlers))
            stream.close()
            return

        def ended(running: asyncio.Task[None]) -> None:
            self._handlers.discard(running)
            stream.close()
            error = None if running.cancelled() else running.exception()
            if error is not None:
                _log.error("%s failed", running.get_name(), exc_info=error)

        running = asyncio.ensure_future(self._handle(stream, connection))
        self._handlers.add(running)
        running.add_done_callback(ended)

    async def _handle(self, stream: P2PStream, connection: LocalSocket) -> None:
        try:
            async with asyncio.timeout(NAME_DEADLINE_S):
                peer, protocol = await name_of(connection)
        except (TimeoutError, EOFError, ValueError) as error:
            _log.debug("p2pd did not say whose stream it was: %r", error)
            return
        stream.comes_from(peer)
        running = asyncio.current_task()
        assert running is not None
        running.set_name(f"{protocol} handler on a stream from {peer}")
        handler = self._served.get(protocol)
        if handler is not None:
            await self._lanes.serve(stream, handler)

    async def publish_record(self, signed: bytes, *, deadline_s: float) -> bool:
        """Store this peer's signed record for its run; False when nobody accepted it.

        Raises:
            RecordError: other peers would refuse the record.
        """
        record = open_record(signed, verify=Identity.verify)
        return await self._store(
            record_key(record.run_id),
            record.peer_id,
            signed,
            expires_at_s=record.expires_at,
            deadline_s=deadline_s,
        )

    async def fetch_records(self, run_id: str, *, deadline_s: float) -> Sequence[bytes]:
        """Return the signed records of `run_id` that the store holds, at most `MAX_RECORDS`."""
        values = await self._fetch(record_key(run_id), deadline_s=deadline_s)
        records = [v for v in values.values() if len(v) <= MAX_RECORD_BYTES]
        if len(records) > MAX_RECORDS:
            _log.warning("run %s has %d records; %d are read", run_id, len(records), MAX_RECORDS)
        return records[:MAX_RECORDS]

    async def publish_manifest(self, run_id: str, manifest: bytes, *, deadline_s: float) -> bool:
        """Store a run's manifest under its own digest; False when nobody accepted it."""
        digest = blake3(manifest).digest()
        return await self._store(
            manifest_key(run_id, digest),
            digest.hex(),
            manifest,
            expires_at_s=time.time() + MANIFEST_TTL_S,
            deadline_s=deadline_s,
        )

    async def fetch_manifest(
        self, run_id: str, digest: bytes, *, deadline_s: float
    ) -> bytes | None:
        """Return the manifest with this blake3 digest, or None when nobody has it."""
        values = await self._fetch(manifest_key(run_id, digest), deadline_s=deadline_s)
        manifest = values.get(digest.hex())
        if manifest is None or len(manifest) > MAX_MANIFEST_BYTES:
            return None
        return manifest if blake3(manifest).digest() == digest else None

    async def _store(
        self, key: str, subkey: str, value: bytes, *, expires_at_s: float, deadline_s: float
    ) -> bool:
        dht = self._parts.dht
        try:
            async with self._within(deadline_s):
                if await dht.store(key, value, expires_at_s, subkey=subkey):
                    return True
                # A replica that has this very value already answers no, as does one that was
                # told of it in the meantime by another replica.
                return (await self._search(key)).get(subkey) == value
        except (TimeoutError, P2PDaemonError, OSError) as error:
            _log.debug("%s was not stored: %r", key, error)
            return False

    async def _fetch(self, key: str, *, deadline_s: float) -> dict[str, bytes]:
        try:
            async with self._within(deadline_s):
                return await self._search(key)
        except (TimeoutError, P2PDaemonError, OSError) as error:
            _log.debug("%s was not read: %r", key, error)
            return {}

    @asynccontextmanager
    async def _within(self, deadline_s: float) -> AsyncIterator[None]:
        """End what is inside with `TimeoutError` at the deadline, or once this node leaves.

        hivemind waits on for the answers of a p2pd that is gone.
        """
        async with asyncio.timeout(0 if self._closing else deadline_s) as limit:
            self._requests.add(limit)
            try:
                yield
            finally:
                self._requests.discard(limit)

    async def _search(self, key: str) -> dict[str, bytes]:
        found = await self._parts.dht.get_many([key], sufficient_expiration_time=_EVERY_REPLICA)
        entry = found[key]
        if entry is None or not isinstance(entry.value, dict):
            return {}
        return {
            subkey: item.value
            for subkey, item in entry.value.items()
            if isinstance(subkey, str) and isinstance(item.value, bytes)
        }

    async def aclose(self) -> None:
        """Leave the network and release everything; safe to call twice."""
        self._closing = True
        for request in self._requests:
            if not request.expired():
                request.reschedule(asyncio.get_running_loop().time())
        async with self._end:
            await self._parts.undo.aclose()

    async def _end_streams(self) -> None:
        self._doorway.close()
        for running in self._handlers:
            running.cancel()
        if self._handlers:
            await asyncio.wait(self._handlers, timeout=HANDLER_GRACE_S)
        for stream in list(self._streams):
            stream.close()
        # p2pd ends next, and the last words that it has not handed on by then would be lost.
        self._quiet.clear()
        while self._streams:
            await self._quiet.wait()
