"""An in-memory network: streams between peers of one process, and the store they meet in.

Peers on ideal links without partitions meet at once. Otherwise their links decide when a stream
is open, when bytes arrive and when the store answers, all in virtual time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Final, TypeVar

from gasloc_p2p.core.records import Record, Verify, open_record
from gasloc_p2p.core.substrate import PeerUnreachableError, StreamHandler
from gasloc_p2p.core.types import BytesLike, PeerId
from gasloc_p2p.simulate.links import (
    IDEAL,
    Link,
    Partition,
    connected_from_s,
    path_latency_s,
    stream_bytes_s,
)
from gasloc_p2p.simulate.pipes import Lane, Path, Pipe, SlowPipe, window_bytes
from gasloc_p2p.simulate.store import SplitStore, Store

T = TypeVar("T")
DIAL_TIMEOUT_S: Final = 5.0
"""How long a dial goes unanswered before the peer counts as unreachable."""

HANDLER_GRACE_S: Final = 2.0
"""How long a network that closes waits for its handlers to end."""


class MemoryStream:
    """One end of an in-memory stream."""

    def __init__(
        self,
        peer_id: PeerId,
        incoming: Pipe,
        outgoing: Pipe,
        *,
        closed: Callable[[MemoryStream], None],
    ) -> None:
        self._peer_id = peer_id
        self._incoming = incoming
        self._outgoing = outgoing
        self._closed = closed

    @property
    def peer_id(self) -> PeerId:
        """Identity of the other end."""
        return self._peer_id

    async def read(self, max_bytes: int) -> bytes:
        """Return up to `max_bytes` bytes, or b"" once the other end has closed."""
        return await self._incoming.get(max_bytes)

    async def write(self, data: BytesLike) -> None:
        """Send `data` once the other end has read enough of what came before."""
        if len(data):
            await self._outgoing.put(data)

    async def aclose(self) -> None:
        """Close both directions; bytes already written can still be read."""
        self.close()

    def close(self) -> None:
        """Do what `aclose` does."""
        self._incoming.abandon()
        self._outgoing.finish()
        self._closed(self)


@dataclass(kw_only=True, slots=True)
class _Place:
    """Where a peer is plugged in; it keeps it when it leaves and comes back."""

    index: int
    link: Link
    uplink: Lane
    downlink: Lane


class Hub:
    """Connects the networks of all simulated peers; use as an async context manager.

    Args:
        verify: checks a record's signature.
        links: of the peers, in the order in which they are plugged in; those beyond are on
            ideal ones.
        partitions: when peers are cut off from others; the same order gives their indices.
    """

    def __init__(
        self, *, verify: Verify, links: Sequence[Link] = (), partitions: Sequence[Partition] = ()
    ) -> None:
        self._verify = verify
        self._links = links
        self._partitions = list(partitions)
        self._places: dict[PeerId, _Place] = {}
        self._slow: set[PeerId] = set()
        self._peers: dict[PeerId, MemoryNetwork] = {}
        self._store = SplitStore(partitions)
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
        """Plug a peer in; one that was here before has its old index and link."""
        index = len(self._places)
        link = self._links[index] if index < len(self._links) else IDEAL
        place = self._places.setdefault(
            peer_id,
            _Place(
                index=index,
                link=link,
                uplink=Lane(link.upload_bytes_s),
                downlink=Lane(link.download_bytes_s),
            ),
        )
        if place.link != IDEAL:
            self._slow.add(peer_id)
        network = MemoryNetwork(self, peer_id, sign, place.link.latency_s)
        self._peers[peer_id] = network
        # From here on its side's records are its own, whether it asks for them or not.
        self.store_of(peer_id)
        return network

    def partition(self, peers: Iterable[int], *, seconds: float) -> None:
        """Cut the peers with these indices off from all others, from this moment on.

        A stream between peers on ideal links is not held up if it was open when the hub had no
        partition yet.
        """
        now_s = asyncio.get_running_loop().time()
        cut = Partition(from_s=now_s, until_s=now_s + seconds, peers=frozenset(peers))
        self._partitions.append(cut)
        self._store.add(cut)

    def is_instant(self, dialer: PeerId, peer: PeerId) -> bool:
        """Whether nothing ever holds up what goes between two peers."""
        return not self._partitions and dialer not in self._slow and peer not in self._slow

    async def reach(self, dialer: PeerId, peer: PeerId) -> None:
        """Take the time that a dial takes: a round trip, or the wait for an answer.

        Raises:
            PeerUnreachableError: the two are cut off from each other for `DIAL_TIMEOUT_S`.
        """
        near, far = self._places[dialer], self._places.get(peer)
        if far is None:
            return
        now_s = asyncio.get_running_loop().time()
        cut_s = self._connected_from_s(near.index, far.index, now_s) - now_s
        if cut_s > DIAL_TIMEOUT_S:
            await asyncio.sleep(DIAL_TIMEOUT_S)
            raise PeerUnreachableError(f"{peer} did not answer for {DIAL_TIMEOUT_S:g} s")
        await asyncio.sleep(cut_s + 2 * path_latency_s(near.link, far.link))

    def connect(self, dialer: MemoryNetwork, peer: PeerId, protocol: str) -> MemoryStream:
        """Open a stream and start the peer's handler for it.

        Raises:
            PeerUnreachableError: the peer is not there, or serves no such protocol.
        """
        target = self._peers.get(peer)
        service = target.services.get(protocol) if target is not None else None
        if target is None or service is None:
            raise PeerUnreachableError(f"{peer} does not answer to {protocol}")
        there, back = self._pipes(dialer.peer_id, peer)
        theirs = target.adopt(dialer.peer_id, incoming=there, outgoing=back)
        target.note_running(
            self._handlers.create_task(_serve(service.handler, theirs), context=service.context)
        )
        return dialer.adopt(peer, incoming=back, outgoing=there)

    def _pipes(self, dialer: PeerId, peer: PeerId) -> tuple[Pipe, Pipe]:
        if self.is_instant(dialer, peer):
            return Pipe(), Pipe()
        near, far = self._places[dialer], self._places[peer]
        there, back = SlowPipe(self._path(near, far)), SlowPipe(self._path(far, near))
        there.opposite, back.opposite = back, there
        return there, back

    def _path(self, sender: _Place, receiver: _Place) -> Path:
        latency_s = path_latency_s(sender.link, receiver.link)
        stream_rate = stream_bytes_s(sender.link, receiver.link)
        rate = min(stream_rate, sender.link.upload_bytes_s, receiver.link.download_bytes_s)
        return Path(
            uplink=sender.uplink,
            downlink=receiver.downlink,
            latency_s=latency_s,
            stream_bytes_s=stream_rate,
            window_bytes=window_bytes(rate, latency_s),
            connected_from_s=partial(self._connected_from_s, sender.index, receiver.index),
        )

    def _connected_from_s(self, a: int, b: int, at_s: float) -> float:
        return connected_from_s(self._partitions, a, b, at_s)

    def store_of(self, peer: PeerId) -> Store:
        """Return the record store as a peer that is plugged in finds it."""
        return self._store.at(self._places[peer].index, asyncio.get_running_loop().time())

    def open_record(self, signed: bytes) -> Record:
        """Check a record as the real store does.

        Raises:
            RecordError: the record is malformed or its signature is not its peer's.
        """
        return open_record(signed, verify=self._verify)

    def unplug(self, network: MemoryNetwork) -> None:
        """Remove a peer, unless it has been plugged in again since; its records stay."""
        if self._peers.get(network.peer_id) is network:
            del self._peers[network.peer_id]


async def _serve(handler: StreamHandler, stream: MemoryStream) -> None:
    await handler(stream)


@dataclass(frozen=True, slots=True)
class _Service:
    """A handler, which runs in the context of the peer that serves, not of the one that dials."""

    handler: StreamHandler
    context: Context = field(default_factory=copy_context)


class MemoryNetwork:
    """One simulated peer's `Network`.

    Args:
        hub: what it is plugged into.
        peer_id: its identity.
        sign: signs with that identity.
        latency_s: seconds one way between the peer and the backbone.
    """

    def __init__(
        self, hub: Hub, peer_id: PeerId, sign: Callable[[bytes], bytes], latency_s: float
    ) -> None:
        self._hub = hub
        self._peer_id = peer_id
        self._sign = sign
        self._latency_s = latency_s
        self._left = False
        # Dictionaries keep their order, and a run is to be the same every time.
        self._streams: dict[MemoryStream, None] = {}
        self._running: dict[asyncio.Task[None], None] = {}
        self.services: dict[str, _Service] = {}

    @property
    def peer_id(self) -> PeerId:
        """This peer's identity."""
        return self._peer_id

    def sign(self, payload: bytes) -> bytes:
        """Sign with this peer's identity."""
        return self._sign(payload)

    async def open_stream(self, peer: PeerId, protocol: str, *, deadline_s: float) -> MemoryStream:
        """Open a stream; see `Network.open_stream`."""
        self._require_here(peer)
        if self._hub.is_instant(self._peer_id, peer):
            return self._hub.connect(self, peer, protocol)
        async with asyncio.timeout(deadline_s):
            await self._hub.reach(self._peer_id, peer)
            self._require_here(peer)
            return self._hub.connect(self, peer, protocol)

    def _require_here(self, peer: PeerId) -> None:
        if self._left:
            raise PeerUnreachableError(f"{peer}: this peer has left the network")

    async def serve(self, protocol: str, handler: StreamHandler) -> None:
        """Register a handler; see `Network.serve`."""
        self.services[protocol] = _Service(handler)

    def adopt(self, peer: PeerId, *, incoming: Pipe, outgoing: Pipe) -> MemoryStream:
        """Return this peer's end of a stream; it closes with the network."""
        stream = MemoryStream(peer, incoming, outgoing, closed=self._release)
        self._streams[stream] = None
        return stream

    def _release(self, stream: MemoryStream) -> None:
        self._streams.pop(stream, None)

    def note_running(self, task: asyncio.Task[None]) -> None:
        """Remember a handler, which ends with the network."""
        self._running[task] = None
        task.add_done_callback(lambda ended: self._running.pop(ended, None))

    async def publish_record(self, signed: bytes, *, deadline_s: float) -> bool:
        """Store this peer's record; see `Network.publish_record`."""
        record = self._hub.open_record(signed)
        return await self._ask(
            lambda store: store.put_record(record, signed), deadline_s, too_late=False
        )

    async def fetch_records(self, run_id: str, *, deadline_s: float) -> Sequence[bytes]:
        """Return the records of a run; see `Network.fetch_records`."""
        return await self._ask(lambda store: store.records(run_id), deadline_s, too_late=[])

    async def publish_manifest(self, run_id: str, manifest: bytes, *, deadline_s: float) -> bool:
        """Store a manifest; see `Network.publish_manifest`."""

        def put(store: Store) -> bool:
            store.put_manifest(run_id, manifest)
            return True

        return await self._ask(put, deadline_s, too_late=False)

    async def fetch_manifest(
        self, run_id: str, digest: bytes, *, deadline_s: float
    ) -> bytes | None:
        """Return a manifest; see `Network.fetch_manifest`."""
        return await self._ask(
            lambda store: store.manifest(run_id, digest), deadline_s, too_late=None
        )

    async def _ask(self, question: Callable[[Store], T], deadline_s: float, *, too_late: T) -> T:
        """Return the store's answer after a round trip, or `too_late` when that takes longer."""
        latency_s = self._latency_s
        if latency_s == 0:
            return self._answer(question, too_late)
        if 2 * latency_s > deadline_s:
            await asyncio.sleep(deadline_s)
            return too_late
        await asyncio.sleep(latency_s)
        answer = self._answer(question, too_late)
        await asyncio.sleep(latency_s)
        return answer

    def _answer(self, question: Callable[[Store], T], nobody: T) -> T:
        return nobody if self._left else question(self._hub.store_of(self._peer_id))

    async def aclose(self) -> None:
        """Unplug this peer, close its streams and end its handlers."""
        self._left = True
        self._hub.unplug(self)
        for stream in list(self._streams):
            stream.close()
        running = [task for task in self._running if task is not asyncio.current_task()]
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=HANDLER_GRACE_S)
