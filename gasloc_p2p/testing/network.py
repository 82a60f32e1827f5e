"""A network, simulated or real, on whose streams planned faults happen to the bytes themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import msgspec

from gasloc_p2p.core.substrate import Network, Stream, StreamHandler
from gasloc_p2p.core.types import BytesLike, PeerId
from gasloc_p2p.core.wire import (
    Frame,
    FrameDecoder,
    FrameType,
    Hello,
    ProtocolError,
    pack_head,
    pack_message,
    unpack_message,
)
from gasloc_p2p.node.dialling import EXCHANGE_PROTOCOL
from gasloc_p2p.testing.faults import CorruptChunk, DropAck, LieAboutSchema, WireFault

F = TypeVar("F", CorruptChunk, DropAck, LieAboutSchema)


class _Faults:
    """What is still to happen to a peer's streams."""

    def __init__(self, planned: Iterable[WireFault], told: Callable[[WireFault], None]) -> None:
        self._left = list(planned)
        self._told = told

    def strikes(self, kind: type[F], round: int | None) -> bool:
        """Whether a fault of this kind happens now; each one happens once."""
        for fault in self._left:
            if isinstance(fault, kind) and fault.round == round:
                self._left.remove(fault)
                self._told(fault)
                return True
        return False


class FaultyNetwork:
    """A `Network` that hands everything on to another one, with faults in its exchanges.

    Args:
        network: what it stands in front of.
        faults: of this peer; each happens on the first stream of its round.
        told: called with a fault when it happens.
    """

    def __init__(
        self,
        network: Network,
        faults: Sequence[WireFault],
        *,
        told: Callable[[WireFault], None] = lambda fault: None,
    ) -> None:
        self._network = network
        self._faults = _Faults(faults, told)

    @property
    def peer_id(self) -> PeerId:
        """This node's own identity."""
        return self._network.peer_id

    def sign(self, payload: bytes) -> bytes:
        """Sign with this node's identity."""
        return self._network.sign(payload)

    async def open_stream(self, peer: PeerId, protocol: str, *, deadline_s: float) -> Stream:
        """Open a stream; see `Network.open_stream`."""
        return self._wrapped(
            await self._network.open_stream(peer, protocol, deadline_s=deadline_s), protocol
        )

    async def serve(self, protocol: str, handler: StreamHandler) -> None:
        """Register a handler; see `Network.serve`."""

        async def serve_wrapped(stream: Stream) -> None:
            await handler(self._wrapped(stream, protocol))

        await self._network.serve(protocol, serve_wrapped)

    def _wrapped(self, stream: Stream, protocol: str) -> Stream:
        if protocol != EXCHANGE_PROTOCOL:
            return stream
        return _FaultyStream(stream, self._faults)

    async def publish_record(self, signed: bytes, *, deadline_s: float) -> bool:
        """Store this peer's record; see `Network.publish_record`."""
        return await self._network.publish_record(signed, deadline_s=deadline_s)

    async def fetch_records(self, run_id: str, *, deadline_s: float) -> Sequence[bytes]:
        """Return the records of a run; see `Network.fetch_records`."""
        return await self._network.fetch_records(run_id, deadline_s=deadline_s)

    async def publish_manifest(self, run_id: str, manifest: bytes, *, deadline_s: float) -> bool:
        """Store a manifest; see `Network.publish_manifest`."""
        return await self._network.publish_manifest(run_id, manifest, deadline_s=deadline_s)

    async def fetch_manifest(
        self, run_id: str, digest: bytes, *, deadline_s: float
    ) -> bytes | None:
        """Return a manifest; see `Network.fetch_manifest`."""
        return await self._network.fetch_manifest(run_id, digest, deadline_s=deadline_s)

    async def aclose(self) -> None:
        """Leave the network; see `Network.aclose`."""
        await self._network.aclose()


class _FaultyStream:
    """A stream of an exchange; the peer's own Hello tells which round it is."""

    def __init__(self, stream: Stream, faults: _Faults) -> None:
        self._stream = stream
        self._faults = faults
        self._round: int | None = None
        self._outgoing = FrameDecoder()
        self._incoming = FrameDecoder()
        self._arrived = bytearray()
        self._ended = False

    @property
    def peer_id(self) -> PeerId:
        """Identity of the other end."""
        return self._stream.peer_id

    async def write(self, data: BytesLike) -> None:
        """Send the frames that `data` completes, some of them damaged."""
        for frame in self._outgoing.feed(data):
            await self._stream.write(self._sent(frame))

    def _sent(self, frame: Frame) -> bytes:
        data = bytearray(frame.data)
        if frame.head.type is FrameType.HELLO:
            hello = unpack_message(data, Hello)
            self._round = hello.round
            if self._faults.strikes(LieAboutSchema, self._round):
                other = bytes(byte ^ 0xFF for byte in hello.schema_digest)
                return pack_message(msgspec.structs.replace(hello, schema_digest=other))
        if frame.head.type is FrameType.CHUNK and self._faults.strikes(CorruptChunk, self._round):
            data[len(data) // 2] ^= 1
        return pack_head(frame.head) + data

    async def read(self, max_bytes: int) -> bytes:
        """Return what has arrived in whole frames; b"" at the end, or in place of a lost Applied.

        Bytes that are no frames end the stream as well.
        """
        while not self._arrived and not self._ended:
            data = await self._stream.read(max_bytes)
            self._ended = self._ended or not data
            self._arrive(data)
        piece = bytes(self._arrived[:max_bytes])
        del self._arrived[:max_bytes]
        return piece

    def _arrive(self, data: bytes) -> None:
        try:
            for frame in self._incoming.feed(data):
                applied = frame.head.type is FrameType.APPLIED
                if applied and self._faults.strikes(DropAck, self._round):
                    self._ended = True
                    return
                self._arrived += pack_head(frame.head) + frame.data
        except ProtocolError:
            self._ended = True

    async def aclose(self) -> None:
        """Close both directions."""
        self._ended = True
        self._arrived.clear()
        await self._stream.aclose()
