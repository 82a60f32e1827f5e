"""Multiaddrs: which ones are accepted, who holds a port, whether a bootstrap peer answers."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from multiaddr import Multiaddr
from multiaddr.exceptions import ParseError

from gasloc_p2p.core.errors import ConfigError, PortInUseError
from gasloc_p2p.core.types import PeerId
from gasloc_p2p.net.settings import NetConfig

_IP_FAMILIES: Final = {"ip4": socket.AF_INET, "ip6": socket.AF_INET6}
_NAME_FAMILIES: Final = {
    "dns": socket.AF_UNSPEC,
    "dns4": socket.AF_INET,
    "dns6": socket.AF_INET6,
}
_FAMILIES: Final = _IP_FAMILIES | _NAME_FAMILIES
_TRANSPORTS: Final = (("tcp",), ("udp", "quic-v1"))
_LISTEN_FORM: Final = "/ip4/ADDRESS/tcp/PORT or /ip4/ADDRESS/udp/PORT/quic-v1 (or ip6)"
_BOOTSTRAP_FORM: Final = "/ip4/ADDRESS/tcp/PORT/p2p/ID"


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """What a multiaddr says about where to dial or listen.

    Attributes:
        text: the multiaddr as it was given.
        protocols: names of its components, in order.
        family: of the host: ip4, ip6, dns, dns4, dns6, or "" when it names none.
        host: address or name.
        transport: tcp, udp, or "".
        port: 0 when absent or when any free one will do.
        peer_id: the last /p2p/ component, "" when there is none.
    """

    text: str
    protocols: tuple[str, ...]
    family: str
    host: str
    transport: str
    port: int
    peer_id: PeerId


def parse_listen(text: str) -> Endpoint:
    """Read an address to listen on.

    Raises:
        ConfigError: it is no multiaddr, or names no local IP address and port.
    """
    endpoint = _parse("net.listen", text, _LISTEN_FORM)
    if endpoint.family not in _IP_FAMILIES or endpoint.protocols[1:] not in _TRANSPORTS:
        raise _refused("net.listen", text, "it is not an IP address with a port", _LISTEN_FORM)
    return endpoint


def parse_announce(text: str) -> Endpoint:
    """Read an address that others are told to dial.

    Raises:
        ConfigError: it is no multiaddr, or names no host and port.
    """
    endpoint = _parse("net.announce", text, _LISTEN_FORM)
    if endpoint.family not in _FAMILIES or endpoint.protocols[1:] not in _TRANSPORTS:
        raise _refused("net.announce", text, "it is not a host with a port", _LISTEN_FORM)
    if endpoint.port == 0:
        raise _refused("net.announce", text, "others cannot dial port 0", _LISTEN_FORM)
    return endpoint


def parse_bootstrap(text: str) -> Endpoint:
    """Read the address of a peer through which a swarm is joined.

    Raises:
        ConfigError: it is no multiaddr, or does not end in /p2p/ID.
    """
    endpoint = _parse("net.bootstrap", text, _BOOTSTRAP_FORM)
    if endpoint.protocols[-1:] != ("p2p",):
        raise _refused(
            "net.bootstrap",
            text,
            "it does not end in /p2p/ID, so an impostor could not be told from the peer",
            _BOOTSTRAP_FORM,
        )
    if not endpoint.host:
        raise _refused("net.bootstrap", text, "it does not say where to dial", _BOOTSTRAP_FORM)
    return endpoint


def check_addresses(config: NetConfig) -> None:
    """Read every address of `config`.

    Raises:
        ConfigError: one of them cannot be used; the message names it.
    """
    for text in config.listen:
        parse_listen(text)
    for text in config.announce:
        parse_announce(text)
    for text in config.bootstrap:
        parse_bootstrap(text)


def is_loopback(address: str) -> bool:
    """Whether only this machine itself can dial `address`.

    Raises:
        ConfigError: it is no multiaddr.
    """
    endpoint = _parse("the address", address, _LISTEN_FORM)
    if endpoint.family in _IP_FAMILIES:
        return ipaddress.ip_address(endpoint.host).is_loopback
    return endpoint.host == "localhost"


def is_dialable(address: str) -> bool:
    """Whether `address`, without a peer id, is a host with a port that others can dial."""
    try:
        endpoint = _parse("the address", address, _LISTEN_FORM)
    except ConfigError:
        return False
    return (
        endpoint.family in _FAMILIES
        and endpoint.protocols[1:] in _TRANSPORTS
        and endpoint.port != 0
        and not _is_unspecified(endpoint)
    )


def _is_unspecified(endpoint: Endpoint) -> bool:
    return endpoint.family in _IP_FAMILIES and ipaddress.ip_address(endpoint.host).is_unspecified


def with_same_ports(listen: Sequence[str], addresses: Sequence[str]) -> tuple[str, ...]:
    """Return `listen` with each port 0 replaced by the one that it had become in `addresses`.

    Args:
        listen: addresses to listen on.
        addresses: those that a node got from them, with or without its id.
    """
    return tuple(_with_same_port(parse_listen(text), addresses) for text in listen)


def _with_same_port(wanted: Endpoint, addresses: Sequence[str]) -> str:
    if wanted.port != 0:
        return wanted.text
    for text in addresses:
        had = _parse("the address", text, _LISTEN_FORM)
        protocols = had.protocols[:-1] if had.peer_id else had.protocols
        if protocols == wanted.protocols and (_is_unspecified(wanted) or had.host == wanted.host):
            place = f"/{wanted.family}/{wanted.host}/{wanted.transport}"
            return wanted.text.replace(f"{place}/0", f"{place}/{had.port}", 1)
    return wanted.text


def probe_port(listen: str) -> None:
    """Bind the port of `listen` for a moment, to learn whether p2pd will have it to itself.

    p2pd shares ports with other p2pd processes without a word, and peers then reach the wrong one.

    Raises:
        PortInUseError: another process holds the port.
        ConfigError: this machine has no such address, or this user may not use the port.
    """
    endpoint = parse_listen(listen)
    if endpoint.port == 0:
        return
    kind = socket.SOCK_STREAM if endpoint.transport == "tcp" else socket.SOCK_DGRAM
    try:
        with socket.socket(_IP_FAMILIES[endpoint.family], kind) as probe:
            if endpoint.transport == "tcp":
                # Connections that this node's last run left in TIME_WAIT are not in the way.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if endpoint.family == "ip6":
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind((endpoint.host, endpoint.port))
    except OSError as error:
        raise _bind_error(endpoint, error) from None


def _bind_error(endpoint: Endpoint, error: OSError) -> PortInUseError | ConfigError:
    if error.errno == errno.EADDRINUSE:
        return PortInUseError(
            f"{endpoint.transport} port {endpoint.port} is in use",
            why=f"another process listens on it, and {endpoint.text} would be shared with it",
            fix=f"`lsof -nP -i {endpoint.transport}:{endpoint.port}` shows who holds it; stop it, "
            "or choose another port in net.listen (0 takes any free one)",
        )
    return ConfigError(
        f"cannot listen on {endpoint.text}",
        why=error.strerror or str(error),
        fix="use an address of this machine (0.0.0.0 for all of them) and a port from 1024 up",
    )


async def probe_bootstrap(address: str, deadline_s: float) -> str | None:
    """Connect to `address` over plain TCP and hang up.

    Returns:
        None when something answers, or when the address is not a TCP one and cannot be probed;
        otherwise the reason why it does not, in a few words.

    Raises:
        ConfigError: it is not a bootstrap address.
    """
    endpoint = parse_bootstrap(address)
    if endpoint.family not in _FAMILIES or endpoint.transport != "tcp":
        return None
    try:
        async with asyncio.timeout(deadline_s):
            _, writer = await asyncio.open_connection(
                endpoint.host, endpoint.port, family=_FAMILIES[endpoint.family]
            )
    except TimeoutError:
        return f"timed out after {deadline_s:.0f} s"
    except ConnectionRefusedError:
        return "connection refused: nobody listens on that port"
    except socket.gaierror:
        return f"name not found: {endpoint.host}"
    except OSError as error:
        return error.strerror or str(error)
    writer.transport.abort()
    return None


def _parse(setting: str, text: str, form: str) -> Endpoint:
    try:
        items = list(Multiaddr(text).items())
    except ParseError as error:
        raise _refused(setting, text, str(error), form) from None
    parts = [(protocol.name, value or "") for protocol, value in items]
    family, host = next(((n, v) for n, v in parts if n in _FAMILIES or n == "dnsaddr"), ("", ""))
    transport, port = next(((n, v) for n, v in parts if n in ("tcp", "udp")), ("", "0"))
    peers = [value for name, value in parts if name == "p2p"]
    return Endpoint(
        text=text,
        protocols=tuple(name for name, _ in parts),
        family=family,
        host=host,
        transport=transport,
        port=int(port),
        peer_id=peers[-1] if peers else "",
    )


def _refused(setting: str, text: str, why: str, form: str) -> ConfigError:
    return ConfigError(f"{setting}: cannot use {text!r}", why=why, fix=f"the form is {form}")
