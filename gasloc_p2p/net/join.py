"""Getting onto the network: p2pd, hivemind's client of it, and a DHT node that knows others."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Final

from hivemind.dht.node import DHTNode
from hivemind.dht.protocol import ValidationError
from hivemind.dht.routing import DHTID
from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError
from hivemind.utils.multiaddr import Multiaddr

from gasloc_p2p.core.errors import BootstrapUnreachableError, DaemonError
from gasloc_p2p.net.addresses import check_addresses, parse_bootstrap, probe_bootstrap, probe_port
from gasloc_p2p.net.daemon import BootstrapRefusedError, Daemon
from gasloc_p2p.net.identity import Identity
from gasloc_p2p.net.settings import NetConfig
from gasloc_p2p.net.validator import EntryValidator

PROBE_DEADLINE_S: Final = 5.0
ATTACH_DEADLINE_S: Final = 10.0
DHT_DEADLINE_S: Final = 15.0
SHUTDOWN_DEADLINE_S: Final = 1.0
FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 30.0


def _is_not_forgotten_wait(record: logging.LogRecord) -> bool:
    """Whether a complaint of asyncio is about anything but a search that was given up.

    hivemind leaves a task behind for each request of such a search.
    """
    return "coro=<Event.wait()" not in record.getMessage()


if "HIVEMIND_LOGLEVEL" not in os.environ:
    # What a person needs to know is in our own messages; the rest is for debugging.
    logging.getLogger("hivemind").setLevel(logging.ERROR)
    logging.getLogger("asyncio").addFilter(_is_not_forgotten_wait)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Attachment:
    """The parts of a node that is on the network.

    Attributes:
        daemon: the p2pd process.
        p2p: hivemind's client of it (`hivemind.p2p.P2P`).
        dht: this node's place in the DHT (`hivemind.dht.node.DHTNode`).
        undo: closes all of them, last one first.
    """

    daemon: Daemon
    p2p: Any
    dht: Any
    undo: AsyncExitStack


class _NobodyAnsweredError(Exception):
    """No bootstrap peer could be joined through; `reasons` says why, address by address."""

    def __init__(self, reasons: Mapping[str, str]) -> None:
        super().__init__("no bootstrap peer answered")
        self.reasons = reasons


async def join(identity: Identity, config: NetConfig, *, warn: Callable[[str], None]) -> Attachment:
    """Bring `identity` onto the network, through the bootstrap peers of `config` if it has any.

    Args:
        identity: who this node is.
        config: addresses, and how often to try.
        warn: told, in one line each, about bootstrap peers that do not answer.

    Raises:
        ConfigError: an address cannot be used.
        PortInUseError: another process holds a listen port.
        BootstrapUnreachableError: no bootstrap peer answered, however often it was tried.
        DaemonError: p2pd did not start.
    """
    check_addresses(config)
    for listen in config.listen:
        probe_port(listen)
    pause_s = FIRST_PAUSE_S
    for attempts_left in reversed(range(config.join_attempts)):
        try:
            return await _join_once(identity, config, warn=warn)
        except _NobodyAnsweredError as failure:
            reasons = failure.reasons
        if attempts_left:
            warn(f"no bootstrap peer answers; trying again in {pause_s:.0f} s")
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
    raise BootstrapUnreachableError(
        f"none of the {len(reasons)} bootstrap addresses leads into the swarm",
        why="\n".join(f"{address}: {reasons[address]}" for address in config.bootstrap),
        fix="check this machine's connection and that one of those peers runs; if the run is "
        "over, nobody is there any more; else ask for a fresh invite, or go on alone with "
        "--set net.bootstrap=",
    )


async def _join_once(
    identity: Identity, config: NetConfig, *, warn: Callable[[str], None]
) -> Attachment:
    dead = await _probe(config.bootstrap)
    live = [address for address in config.bootstrap if address not in dead]
    if config.bootstrap and not live:
        raise _NobodyAnsweredError(dead)
    answering = {parse_bootstrap(address).peer_id for address in live}
    for address, reason in dead.items():
        if parse_bootstrap(address).peer_id not in answering:
            warn(f"bootstrap peer {address} is left out: {reason}")
    async with AsyncExitStack() as undo:
        try:
            daemon = await Daemon.start(identity, config, bootstrap=live)
        except BootstrapRefusedError:
            raise _NobodyAnsweredError(dead | {a: stranger(a) for a in live}) from None
        undo.push_async_callback(daemon.stop)
        p2p = await _attach(daemon, undo)
        try:
            dht = await _enter_dht(p2p, live)
        except _NobodyAnsweredError as failure:
            if daemon.returncode is not None or not live:
                raise _unresponsive(daemon) from None
            raise _NobodyAnsweredError(dead | dict(failure.reasons)) from None
        undo.push_async_callback(_leave_dht, dht, daemon)
        for address in live:
            peer = PeerID.from_base58(parse_bootstrap(address).peer_id)
            if peer not in dht.protocol.routing_table:
                warn(f"bootstrap peer {address} {stranger(address)}")
        return Attachment(daemon=daemon, p2p=p2p, dht=dht, undo=undo.pop_all())


async def _probe(addresses: Sequence[str]) -> dict[str, str]:
    """Return the addresses nobody answers on, with the reason."""
    async with asyncio.TaskGroup() as group:
        probes = [
            (address, group.create_task(probe_bootstrap(address, PROBE_DEADLINE_S)))
            for address in addresses
        ]
    return {address: reason for address, probe in probes if (reason := probe.result())}


def stranger(address: str) -> str:
    """Say what is known about an address that p2pd could not use although no probe failed."""
    answers = "answers on TCP but" if parse_bootstrap(address).transport == "tcp" else "is silent,"
    return f"{answers} is not the peer with that id, or does not speak this protocol"


def _unresponsive(daemon: Daemon) -> DaemonError:
    return DaemonError(
        "the libp2p daemon started but does not answer",
        why=f"the last it said: {daemon.last_line}",
        fix="try again; if it happens again, start with --debug",
    )


async def _attach(daemon: Daemon, undo: AsyncExitStack) -> Any:
    """Return hivemind's client of a p2pd that it has not started."""

    class AttachedP2P(P2P):  # type: ignore[misc]  # hivemind is untyped
        # The socket on which p2pd hands over incoming streams lies beside p2pd's own, where no
        # other user of the machine can connect and claim to be any peer.
        _UNIX_SOCKET_PREFIX = f"/unix{daemon.directory}/"

    try:
        async with asyncio.timeout(ATTACH_DEADLINE_S):
            p2p = await AttachedP2P.replicate(Multiaddr(f"/unix{daemon.control_path}"))
    except (P2PDaemonError, OSError, EOFError) as error:
        raise _unresponsive(daemon) from error
    undo.push_async_callback(_detach, p2p)
    return p2p


async def _detach(p2p: Any) -> None:
    await p2p.shutdown()
    # Where p2pd went first, these have failed, and asyncio would complain of it.
    control = p2p._client.control
    await asyncio.gather(control._read_task, control._write_task, return_exceptions=True)


async def _enter_dht(p2p: Any, live: Sequence[str]) -> Any:
    try:
        async with asyncio.timeout(DHT_DEADLINE_S):
            return await DHTNode.create(
                p2p=p2p,
                # Always the same place, so that a node which comes back is not taken for a
                # further one, and holds one replica of an entry and not several.
                node_id=DHTID.generate(source=str(p2p.peer_id)),
                initial_peers=list(live),
                record_validator=EntryValidator(),
                # A cached copy would hide the newer records that a poll is meant to find. Others
                # may ask a node to cache an entry, and it would then return that one alone in
                # place of all it stores; a cache of negative size keeps nothing.
                cache_size=-1,
                cache_locally=False,
                cache_on_store=False,
                cache_nearest=0,
                cache_refresh_before_expiry=0,
                # Results are shared between searches by the expiration that each would be
                # content with, and ours are never content.
                reuse_get_requests=False,
            )
    except ValidationError as error:
        if "local time" in str(error):
            raise BootstrapUnreachableError(
                "the clocks of this machine and of the swarm disagree",
                why=str(error),
                fix="set this machine's clock, for example with `timedatectl set-ntp true`",
            ) from None
        reasons = dict.fromkeys(live, str(error))
    except TimeoutError:
        reasons = dict.fromkeys(live, f"connected, but silent for {DHT_DEADLINE_S:.0f} s")
    except RuntimeError:
        reasons = {address: stranger(address) for address in live}
    raise _NobodyAnsweredError(reasons)


async def _leave_dht(dht: Any, daemon: Daemon) -> None:
    if daemon.returncode is not None:
        # A dead p2pd never answers.
        return
    try:
        async with asyncio.timeout(SHUTDOWN_DEADLINE_S):
            await dht.shutdown()
    except (P2PDaemonError, OSError) as error:
        _log.debug("the DHT node did not sign off: %r", error)
