"""Addresses are checked before p2pd sees them, and each fault gets its own words."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import pytest

from gasloc_p2p.core.errors import ConfigError, PortInUseError
from gasloc_p2p.net.addresses import (
    check_addresses,
    is_loopback,
    parse_announce,
    parse_bootstrap,
    parse_listen,
    probe_bootstrap,
    probe_port,
)
from gasloc_p2p.net.identity import Identity
from gasloc_p2p.net.settings import NetConfig

PEER = Identity.derived(0, 0).peer_id


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (parse_listen, "/ip4/0.0.0.0/tcp/0"),
        (parse_listen, "/ip6/::/udp/4001/quic-v1"),
        (parse_announce, "/ip4/203.0.113.7/tcp/4001"),
        (parse_announce, "/dns4/peer.example/udp/4001/quic-v1"),
        (parse_bootstrap, f"/ip4/203.0.113.7/tcp/4001/p2p/{PEER}"),
        (parse_bootstrap, f"/dnsaddr/peer.example/p2p/{PEER}"),
        (parse_bootstrap, f"/ip4/203.0.113.7/tcp/1/p2p/{PEER}/p2p-circuit/p2p/{PEER}"),
    ],
)
def test_usable_addresses_are_accepted(parse: Callable[[str], object], text: str) -> None:
    assert parse(text)


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (parse_listen, ""),
        (parse_listen, "0.0.0.0:4001"),
        (parse_listen, "/ip4/0.0.0.0"),
        (parse_listen, "/ip4/0.0.0.0/tcp/99999"),
        (parse_listen, "/ip4/0.0.0.0/udp/4001"),
        (parse_listen, "/ip4/0.0.0.0/udp/4001/quic"),
        (parse_listen, "/dns4/peer.example/tcp/4001"),
        (parse_listen, f"/ip4/0.0.0.0/tcp/4001/p2p/{PEER}"),
        (parse_announce, "/ip4/203.0.113.7/tcp/0"),
        (parse_announce, "/tcp/4001"),
        (parse_bootstrap, "/ip4/203.0.113.7/tcp/4001"),
        (parse_bootstrap, f"/ip4/203.0.113.7/tcp/4001/p2p/{PEER}/p2p-circuit"),
        (parse_bootstrap, f"/p2p/{PEER}"),
        (parse_bootstrap, "/ip4/203.0.113.7/tcp/4001/p2p/nobody"),
    ],
)
def test_unusable_addresses_are_named_with_the_right_form(
    parse: Callable[[str], object], text: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert repr(text) in caught.value.what
    assert caught.value.why
    assert "/ip4/ADDRESS/tcp/PORT" in caught.value.fix


def test_every_setting_is_checked() -> None:
    check_addresses(NetConfig())
    for setting in ("listen", "announce", "bootstrap"):
        with pytest.raises(ConfigError, match=rf"net\.{setting}"):
            check_addresses(NetConfig.model_validate({setting: ("junk",)}))


@pytest.mark.parametrize(
    ("address", "loopback"),
    [
        ("/ip4/127.0.0.1/tcp/1", True),
        ("/ip4/127.8.8.8/tcp/1", True),
        ("/ip6/::1/tcp/1", True),
        (f"/dns4/localhost/tcp/1/p2p/{PEER}", True),
        ("/ip4/192.168.0.2/tcp/1", False),
        ("/ip4/0.0.0.0/tcp/1", False),
        ("/dns4/peer.example/tcp/1", False),
    ],
)
def test_loopback_addresses_are_told_apart(address: str, loopback: bool) -> None:
    assert is_loopback(address) is loopback


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        (socket.SOCK_STREAM, "/ip4/{host}/tcp/{port}"),
        (socket.SOCK_DGRAM, "/ip4/{host}/udp/{port}/quic-v1"),
    ],
)
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_held_port_is_named_even_when_its_holder_shares_it(
    kind: socket.SocketKind, form: str, host: str
) -> None:
    with socket.socket(socket.AF_INET, kind) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
        if kind == socket.SOCK_STREAM:
            holder.listen()
        with pytest.raises(PortInUseError, match=f"port {port} is in use") as caught:
            probe_port(form.format(host=host, port=port))
        assert "lsof" in caught.value.fix
    probe_port(form.format(host=host, port=port))


def test_an_address_of_another_machine_cannot_be_listened_on() -> None:
    with pytest.raises(ConfigError, match="cannot listen on"):
        probe_port("/ip4/203.0.113.7/tcp/4001")


async def test_a_probe_tells_answering_refused_and_unknown_apart() -> None:
    server = await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    assert await probe_bootstrap(f"/ip4/127.0.0.1/tcp/{port}/p2p/{PEER}", 5.0) is None
    server.close()
    await server.wait_closed()
    refused = await probe_bootstrap(f"/ip4/127.0.0.1/tcp/{port}/p2p/{PEER}", 5.0)
    assert refused is not None
    assert "refused" in refused
    unknown = await probe_bootstrap(f"/dns4/no-such-host.invalid/tcp/1/p2p/{PEER}", 5.0)
    assert unknown is not None
    assert "name not found" in unknown


async def test_a_probe_gives_up_after_its_deadline() -> None:
    # Connections beyond a full backlog are neither accepted nor refused.
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        name = full.getsockname()
        with socket.socket() as first, socket.socket() as second:
            for filler in (first, second):
                filler.setblocking(False)
                filler.connect_ex(name)
            reason = await probe_bootstrap(f"/ip4/127.0.0.1/tcp/{name[1]}/p2p/{PEER}", 0.2)
    assert reason is not None
    assert "timed out" in reason


async def test_an_address_that_is_not_tcp_cannot_be_probed() -> None:
    assert await probe_bootstrap(f"/ip4/127.0.0.1/udp/9/quic-v1/p2p/{PEER}", 5.0) is None
