"""A place on the network that outlives p2pd: watched, rebuilt, and kept in one swarm."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

from gasloc_p2p.core.errors import (
    BootstrapUnreachableError,
    DaemonError,
    GaslocError,
    PortInUseError,
)
from gasloc_p2p.core.substrate import PeerUnreachableError, Stream, StreamHandler
from gasloc_p2p.core.types import PeerId
from gasloc_p2p.net.addresses import with_same_ports
from gasloc_p2p.net.company import Company
from gasloc_p2p.net.contacts import Contacts, full_addresses
from gasloc_p2p.net.control import DAEMON_ERRORS
from gasloc_p2p.net.daemon import Daemon
from gasloc_p2p.net.identity import Identity
from gasloc_p2p.net.network import Libp2pNetwork
from gasloc_p2p.net.settings import NetConfig
from gasloc_p2p.net.solitude import Backoff
from gasloc_p2p.net.watch import addresses_of, until_unwell

REBUILD_LIMIT_S: Final = 50.0
STEADY_S: Final = 10.0
"""A p2pd that has run for so long is replaced without a pause."""

_log = logging.getLogger(__name__)


def _nothing() -> None:
    pass


class SupervisedNetwork:
    """One node's place on the network; implements `gasloc_p2p.core.substrate.Network`.

    Made by `create`. While `supervise` runs, p2pd is replaced when it ends or falls silent, under
    the same peer id and if possible on the same port. Until the next one is up no stream can be
    opened, and nothing is stored or found; all of that fails at once, and a node goes on alone.

    Attributes:
        on_rebuilt: called each time that the node is back on the network. The DHT entries that it
            held are still there, but other nodes may have dropped it as a place for theirs.
    """

    def __init__(
        self,
        identity: Identity,
        config: NetConfig,
        network: Libp2pNetwork,
        *,
        company: Company,
        addresses: tuple[str, ...],
        warn: Callable[[str], None],
    ) -> None:
        self.on_rebuilt: Callable[[], None] = _nothing
        self._identity = identity
        self._config = config
        self._current: Libp2pNetwork | None = network
        self._company = company
        self._addresses = addresses
        self._warn = warn
        self._handlers: dict[str, StreamHandler] = {}
        self._suspect = asyncio.Event()
        self._supervising: asyncio.Timeout | None = None
        self._replacing = asyncio.Lock()
        self._closing = False

    @classmethod
    async def create(
        cls,
        identity: Identity,
        config: NetConfig,
        *,
        contacts_file: Path | None = None,
        warn: Callable[[str], None] = _log.warning,
    ) -> SupervisedNetwork:
        """Start p2pd and join the DHT, through peers met in an earlier life if need be.

        Args:
            identity: who this node is.
            config: addresses, and how often to try.
            contacts_file: where to remember the peers that are met; None forgets them at the end.
            warn: told, in one line each, what a person should know.

        Raises:
            GaslocError: see `gasloc_p2p.net.join.join`.
        """
        contacts = Contacts(contacts_file, warn=warn)
        await contacts.load()
        async with AsyncExitStack() as undo:
            network = await _join(identity, config, contacts, warn)
            undo.push_async_callback(network.aclose)
            company = Company(
                identity.peer_id, bootstrap=config.bootstrap, contacts=contacts, warn=warn
            )
            addresses = await network.addresses()
            itself = cls(identity, config, network, company=company, addresses=addresses, warn=warn)
            if contacts.known and not config.bootstrap:
                # The swarm that this node founded may live on without it.
                await itself._check(network)
            undo.pop_all()
        return itself

    @property
    def peer_id(self) -> PeerId:
        """This node's own identity."""
        return self._identity.peer_id

    @property
    def daemon(self) -> Daemon | None:
        """The p2pd process; None while it is being replaced."""
        return None if self._current is None else self._current.daemon

    def sign(self, payload: bytes) -> bytes:
        """Sign `payload` with this node's identity; 64 bytes (Ed25519)."""
        return self._identity.sign(payload)

    async def addresses(self) -> tuple[str, ...]:
        """Return the multiaddrs by which others may reach this node, each ending in /p2p/ID.

        While it is off the network, those that it had.
        """
        if self._current is not None:
            self._addresses = await addresses_of(self._current) or self._addresses
        return self._addresses

    async def open_stream(self, peer: PeerId, protocol: str, *, deadline_s: float) -> Stream:
        """Open a stream to `peer`.

        Raises:
            PeerUnreachableError: the peer cannot be reached or does not speak `protocol`, or this
                node is off the network for the moment.
            TimeoutError: nothing happened within `deadline_s`.
        """
        if self._current is None:
            raise PeerUnreachableError(f"{peer}: this node's own network is being rebuilt")
        return await self._current.open_stream(peer, protocol, deadline_s=deadline_s)

    async def serve(self, protocol: str, handler: StreamHandler) -> None:
        """Run `handler` for every stream that a peer opens with `protocol`, from now on.

        The handler owns its stream and closes it.
        """
        self._handlers[protocol] = handler
        if self._current is None:
            return
        try:
            await self._current.serve(protocol, handler)
        except DaemonError as error:
            _log.debug("%s is served once p2pd is replaced: %r", protocol, error)
            self._suspect.set()

    async def publish_record(self, signed: bytes, *, deadline_s: float) -> bool:
        """Store this peer's signed record for its run; False when nobody accepted it.

        Raises:
            RecordError: other peers would refuse the record.
        """
        if self._current is None:
            return False
        return await self._current.publish_record(signed, deadline_s=deadline_s)

    async def fetch_records(self, run_id: str, *, deadline_s: float) -> Sequence[bytes]:
        """Return the signed records of `run_id` that the store holds now, in no order."""
        if self._current is None:
            return []
        return await self._current.fetch_records(run_id, deadline_s=deadline_s)

    async def publish_manifest(self, run_id: str, manifest: bytes, *, deadline_s: float) -> bool:
        """Store a run's manifest under its own digest; False when nobody accepted it."""
        if self._current is None:
            return False
        return await self._current.publish_manifest(run_id, manifest, deadline_s=deadline_s)

    async def fetch_manifest(
        self, run_id: str, digest: bytes, *, deadline_s: float
    ) -> bytes | None:
        """Return the manifest with this blake3 digest, or None when nobody has it."""
        if self._current is None:
            return None
        return await self._current.fetch_manifest(run_id, digest, deadline_s=deadline_s)

    async def aclose(self) -> None:
        """Leave the network and release everything, in a rebuild too; safe to call twice."""
        self._closing = True
        if self._supervising is not None and not self._supervising.expired():
            self._supervising.reschedule(asyncio.get_running_loop().time())
        async with self._replacing:
            if self._current is not None:
                await self._current.aclose()

    async def supervise(self) -> None:
        """Keep the node on the network until it is closed.

        Raises:
            DaemonError: p2pd could not be brought back for `REBUILD_LIMIT_S`.
        """
        try:
            async with asyncio.timeout(None) as self._supervising:
                backoff = Backoff()
                while not self._closing:
                    await self._watch_one(backoff)
        except TimeoutError:
            if not self._closing:
                raise
        finally:
            self._supervising = None

    async def _watch_one(self, backoff: Backoff) -> None:
        """Watch over one p2pd until it fails, and put another one in its place."""
        network = self._current
        assert network is not None
        now_s = asyncio.get_running_loop().time
        began_s = now_s()
        why = await self._until_unwell(network)
        failed_s = now_s()
        async with self._replacing:
            self._current = None
            self._warn(f"{why}; rebuilding")
            network.daemon.kill()
            await network.aclose()
            if failed_s - began_s >= STEADY_S:
                backoff.reset()
            else:
                await asyncio.sleep(backoff.next_s())
            fresh = await self._rebuild(network)
            self._suspect.clear()
            self._current = fresh
        before, after = self._addresses, await self.addresses()
        peers = await self._check(fresh)
        self._warn(
            f"back on the network as {self.peer_id}, after {now_s() - failed_s:.1f} s; "
            f"peers there: {peers}"
        )
        if set(before) != set(after):
            self._warn(f"this node is now at {', '.join(after)}")
        self.on_rebuilt()

    async def _until_unwell(self, network: Libp2pNetwork) -> str:
        """Keep company until something is wrong with p2pd or its place, and return what."""
        async with asyncio.TaskGroup() as tasks:
            company = tasks.create_task(self._keep_company(network))
            why = await until_unwell(network, suspect=self._suspect)
            company.cancel()
        return why

    async def _keep_company(self, network: Libp2pNetwork) -> None:
        while True:
            await self._check(network)
            await asyncio.sleep(self._company.pause_s)

    async def _check(self, network: Libp2pNetwork) -> int:
        try:
            return await self._company.check(network.neighbours)
        except DAEMON_ERRORS as error:
            _log.debug("p2pd did not say who is there: %r", error)
            return 0

    async def _rebuild(self, earlier: Libp2pNetwork) -> Libp2pNetwork:
        """Start p2pd until it is up; it listens where it did, unless others have taken the port.

        Raises:
            DaemonError: it was not up within `REBUILD_LIMIT_S`.
        """
        listen, backoff = with_same_ports(self._config.listen, self._addresses), Backoff()
        failure: GaslocError | None = None
        try:
            async with asyncio.timeout(REBUILD_LIMIT_S):
                while True:
                    try:
                        return await self._start(listen, earlier)
                    except GaslocError as error:
                        failure = error
                    if isinstance(failure, PortInUseError) and listen != self._config.listen:
                        listen = self._config.listen
                        continue
                    self._warn(f"{failure.what} ({failure.why}); trying again")
                    await asyncio.sleep(backoff.next_s())
        except TimeoutError:
            raise DaemonError(
                f"the libp2p daemon could not be brought back within {REBUILD_LIMIT_S:.0f} s",
                why="it did not answer" if failure is None else f"{failure.what}: {failure.why}",
                fix="mend that, and start the node again; its identity is kept",
            ) from failure

    async def _start(self, listen: tuple[str, ...], earlier: Libp2pNetwork) -> Libp2pNetwork:
        """Start p2pd with nobody to join through, so that it is up at once and can be dialled."""
        config = self._config.model_copy(update={"listen": listen, "bootstrap": ()})
        async with AsyncExitStack() as undo:
            network = await Libp2pNetwork.create(self._identity, config, warn=self._warn)
            undo.push_async_callback(network.aclose)
            network.inherit(earlier)
            served: set[str] = set()
            while missing := self._handlers.keys() - served:
                protocol = missing.pop()
                await network.serve(protocol, self._handlers[protocol])
                served.add(protocol)
            undo.pop_all()
        return network


async def _join(
    identity: Identity, config: NetConfig, contacts: Contacts, warn: Callable[[str], None]
) -> Libp2pNetwork:
    """Join through the bootstrap peers, or through the contacts if none of those answers."""
    try:
        return await Libp2pNetwork.create(identity, config, warn=warn)
    except BootstrapUnreachableError as error:
        if not contacts.known:
            raise
        failure = error
    others = {"bootstrap": full_addresses(contacts.known), "join_attempts": 1}
    try:
        network = await Libp2pNetwork.create(
            identity, config.model_copy(update=others), warn=_log.debug
        )
    except BootstrapUnreachableError:
        raise failure from None
    warn("no bootstrap peer answers; joined through peers that this node has met before")
    return network
