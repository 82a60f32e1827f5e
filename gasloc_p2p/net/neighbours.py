"""The peers that this node shares a DHT with: who is there, and meeting those who are not."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Final

import base58
from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError
from hivemind.proto import p2pd_pb2
from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError

from gasloc_p2p.core.types import PeerId
from gasloc_p2p.net.addresses import is_dialable, is_loopback, probe_bootstrap
from gasloc_p2p.net.control import DAEMON_ERRORS, ask
from gasloc_p2p.net.join import Attachment, stranger

MAX_ADDRESSES: Final = 4
REQUEST_DEADLINE_S: Final = 3.0
PROBE_DEADLINE_S: Final = 5.0
CONNECT_DEADLINE_S: Final = 5.0
PING_DEADLINE_S: Final = 5.0
EXPLORE_DEADLINE_S: Final = 5.0

_log = logging.getLogger(__name__)


class Neighbours:
    """What one p2pd and its DHT node know of other peers.

    Every method ends within a few seconds, and raises one of `control.DAEMON_ERRORS` when p2pd
    does not answer.
    """

    def __init__(self, parts: Attachment) -> None:
        self._parts = parts

    async def present(self) -> frozenset[PeerId]:
        """Return the peers that are connected and stand in the DHT's routing table."""
        table = self._parts.dht.protocol.routing_table
        connected = await self._connections()
        return frozenset(peer for peer in connected if PeerID.from_base58(peer) in table)

    async def addresses_of(self, peer: PeerId) -> tuple[str, ...]:
        """Return where others may dial a connected peer, best first and without its id.

        That is what it announced; failing that, where its connection comes from. Loopback
        addresses count only if there are no others.
        """
        request = p2pd_pb2.DHTRequest(
            type=p2pd_pb2.DHTRequest.FIND_PEER,
            peer=base58.b58decode(peer),
            timeout=int(REQUEST_DEADLINE_S),
        )
        try:
            response = await self._ask(
                p2pd_pb2.Request(type=p2pd_pb2.Request.DHT, dht=request), REQUEST_DEADLINE_S
            )
            announced = _readable(response.dht.peer.addrs)
        except P2PDaemonError:
            announced = ()
        return announced or _readable((await self._connections()).get(peer, ()))

    async def meet(self, peer: PeerId, addresses: Sequence[str]) -> str:
        """Make sure that `peer` and this node stand in each other's routing tables.

        Args:
            peer: is pinged through the DHT, and connected to first if it is not.
            addresses: where to dial it, without its id.

        Returns:
            Why it could not be met, in a few words; "" when it answered.
        """
        try:
            if peer not in await self._connections():
                await self._connect(peer, addresses)
            async with asyncio.timeout(PING_DEADLINE_S):
                answer = await self._parts.dht.protocol.call_ping(PeerID.from_base58(peer))
            # The routing table is brought up to date by a task of its own.
            await asyncio.sleep(0)
        except DAEMON_ERRORS as error:
            return str(error) or "p2pd does not answer"
        return "" if answer is not None else "connected, but its DHT is silent"

    async def explore(self) -> None:
        """Search for this node's own place, so that those nearest to it learn of each other."""
        dht = self._parts.dht
        try:
            async with asyncio.timeout(EXPLORE_DEADLINE_S):
                await dht.find_nearest_nodes([dht.node_id])
        except DAEMON_ERRORS as error:
            _log.debug("the neighbourhood was not explored: %r", error)

    async def _connect(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Connect to `peer` through those of its addresses that answer.

        p2pd remembers every dial that failed and refuses to try again, for minutes in the end.
        A plain connection first costs little, and p2pd never dials in vain.

        Raises:
            ConnectionError: it cannot be reached; the message says why.
        """
        reasons = await asyncio.gather(
            *(probe_bootstrap(f"{a}/p2p/{peer}", PROBE_DEADLINE_S) for a in addresses)
        )
        live = [a for a, reason in zip(addresses, reasons, strict=True) if reason is None]
        if not live:
            raise ConnectionError(
                "; ".join(sorted({reason for reason in reasons if reason})) or "no address is known"
            )
        request = p2pd_pb2.ConnectRequest(
            peer=base58.b58decode(peer),
            addrs=[Multiaddr(address).to_bytes() for address in live],
            timeout=int(CONNECT_DEADLINE_S),
        )
        try:
            await self._ask(
                p2pd_pb2.Request(type=p2pd_pb2.Request.CONNECT, connect=request),
                CONNECT_DEADLINE_S + 1.0,
            )
        except P2PDaemonError as error:
            _log.debug("%s was not connected to: %r", peer, error)
            raise ConnectionError(
                "could not be dialled a moment ago"
                if "dial backoff" in str(error)
                else stranger(f"{live[0]}/p2p/{peer}")
            ) from None

    async def _connections(self) -> dict[PeerId, list[bytes]]:
        """Return the connected peers, each with the binary addresses of its connections."""
        response = await self._ask(
            p2pd_pb2.Request(type=p2pd_pb2.Request.LIST_PEERS), REQUEST_DEADLINE_S
        )
        connections: dict[PeerId, list[bytes]] = {}
        for info in response.peers:
            connections.setdefault(base58.b58encode(info.id).decode(), []).extend(info.addrs)
        return connections

    async def _ask(self, request: Any, deadline_s: float) -> Any:
        return await ask(self._parts.daemon.control_path, request, deadline_s=deadline_s)


def _readable(addresses: Sequence[bytes]) -> tuple[str, ...]:
    """Return the addresses that can be dialled, at most `MAX_ADDRESSES`, in a fixed order."""
    texts = {text for raw in addresses if is_dialable(text := _text(raw))}
    public = {text for text in texts if not is_loopback(text)}
    return tuple(sorted(public or texts)[:MAX_ADDRESSES])


def _text(raw: bytes) -> str:
    """Return the text of a binary multiaddr, "" for a kind that is not known here."""
    try:
        return str(Multiaddr(raw))
    except (MultiaddrError, ValueError):
        return ""
