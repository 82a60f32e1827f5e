"""Whom a node remembers, when it tries again, and what it says, without a network."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest

from gasloc_p2p.core.errors import ConfigError, DaemonError
from gasloc_p2p.core.types import PeerId
from gasloc_p2p.net import watch
from gasloc_p2p.net.addresses import is_dialable, with_same_ports
from gasloc_p2p.net.company import CHECK_PERIOD_S, LOST_PER_CHECK, Company
from gasloc_p2p.net.contacts import (
    MAX_CONTACTS,
    MAX_FILE_BYTES,
    MAX_LOST,
    Contacts,
    choose,
    group_by_peer,
)
from gasloc_p2p.net.identity import Identity
from gasloc_p2p.net.neighbours import Neighbours
from gasloc_p2p.net.network import Libp2pNetwork
from gasloc_p2p.net.solitude import LONGEST_PAUSE_S, REMIND_PERIOD_S, Backoff, Solitude

PEERS = [Identity.derived(0, index).peer_id for index in range(40)]
OWN = Identity.derived(1, 0).peer_id


class World(Neighbours):
    """Peers that are there or not, without any p2pd."""

    def __init__(self) -> None:
        self.up: set[PeerId] = set()
        self.here: set[PeerId] = set()
        self.behind: dict[PeerId, set[PeerId]] = {}
        self.tried: list[PeerId] = []
        self.at = "/ip4/192.0.2.1/tcp/4001"

    async def present(self) -> frozenset[PeerId]:
        return frozenset(self.here)

    async def addresses_of(self, peer: PeerId) -> tuple[str, ...]:
        return (self.at,)

    async def meet(self, peer: PeerId, addresses: Sequence[str]) -> str:
        assert addresses
        self.tried.append(peer)
        if peer not in self.up:
            return "refused"
        self.here.add(peer)
        return ""

    async def explore(self) -> None:
        for peer in list(self.here):
            self.here |= self.behind.get(peer, set())


def company(
    bootstrap: Sequence[PeerId], contacts: Contacts | None = None
) -> tuple[Company, list[str]]:
    said: list[str] = []
    kept = Contacts(None) if contacts is None else contacts
    addresses = [f"/ip4/192.0.2.9/tcp/4001/p2p/{peer}" for peer in bootstrap]
    return Company(OWN, bootstrap=addresses, contacts=kept, warn=said.append), said


async def remember(peers: Sequence[PeerId], path: Path | None = None) -> Contacts:
    contacts = Contacts(path)
    await contacts.update(peers, World().addresses_of)
    return contacts


def test_pauses_grow_to_half_a_minute_and_start_again() -> None:
    backoff = Backoff()
    assert [backoff.next_s() for _ in range(7)] == [1, 2, 4, 8, 16, 30, 30]
    backoff.reset()
    assert backoff.next_s() == 1


def test_being_alone_is_said_at_once_and_every_few_minutes_until_it_is_over() -> None:
    solitude = Solitude()
    assert solitude.company(0.0, peers=3) == ""
    assert solitude.nobody(10.0, addresses=1).startswith("alone: none of 1 known address answers")
    assert solitude.nobody(10.0 + REMIND_PERIOD_S - 1, addresses=2) == ""
    said = solitude.nobody(10.0 + REMIND_PERIOD_S, addresses=2)
    assert said == "alone since 5 min: none of 2 known addresses answers"
    assert solitude.nobody(11.0 + REMIND_PERIOD_S, addresses=2) == ""
    assert solitude.company(610.0, peers=1) == "no longer alone, after 10 min: 1 peer there"
    assert solitude.company(611.0, peers=1) == ""
    assert solitude.nobody(700.0, addresses=2).startswith("alone: ")


def test_old_acquaintances_stay_and_so_do_the_latest_who_were_lost() -> None:
    known = choose([], PEERS[:20])
    assert set(known) == set(PEERS[:20])
    assert choose(known, PEERS)[:20] == known
    assert len(choose(known, PEERS)) == MAX_CONTACTS
    # The other side of a partition is remembered, however many are on this one.
    kept = choose(known, PEERS[20:])
    assert kept[: MAX_CONTACTS - MAX_LOST] == sorted(PEERS[20:])[: MAX_CONTACTS - MAX_LOST]
    assert kept[MAX_CONTACTS - MAX_LOST :] == known[:MAX_LOST]
    # Whoever was lost last comes first, and those lost long ago make room.
    again = choose(kept, PEERS[:4])
    assert set(again[:4]) == set(PEERS[:4])
    assert again[4] == kept[0]
    assert choose(known, []) == known


async def test_contacts_outlive_the_node(tmp_path: Path) -> None:
    path = tmp_path / "home" / "contacts.json"
    await remember(PEERS[:2], path)
    assert [entry.name for entry in path.parent.iterdir()] == ["contacts.json"]
    assert sorted(json.loads(path.read_text())) == sorted(
        f"/ip4/192.0.2.1/tcp/4001/p2p/{peer}" for peer in PEERS[:2]
    )
    contacts = Contacts(path)
    await contacts.load()
    assert contacts.known == dict.fromkeys(PEERS[:2], ("/ip4/192.0.2.1/tcp/4001",))


async def test_contacts_are_written_only_when_they_change(tmp_path: Path) -> None:
    path = tmp_path / "contacts.json"
    contacts = await remember(PEERS[:2], path)
    path.unlink()
    await contacts.update(PEERS[:1], World().addresses_of)
    assert not path.exists()
    await contacts.update(PEERS[2:3], World().addresses_of)
    assert path.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b'{"a": 1}',
        b'["/ip4/192.0.2.1/tcp/4001"]',
        b'["/ip4/192.0.2.1/tcp/4001/p2p/xyz"]',
        b"[" + b" " * MAX_FILE_BYTES + b"]",
    ],
)
async def test_a_damaged_file_is_ignored_with_a_word(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "contacts.json"
    path.write_bytes(content)
    said: list[str] = []
    contacts = Contacts(path, warn=said.append)
    await contacts.load()
    assert contacts.known == {}
    assert len(said) == 1
    assert said[0].startswith(f"{path} is not used: it is ")


async def test_no_file_is_no_fault_and_a_full_disk_is_said_once(tmp_path: Path) -> None:
    said: list[str] = []
    contacts = Contacts(tmp_path / "contacts.json", warn=said.append)
    await contacts.load()
    assert said == []
    (tmp_path / "blocked").touch()
    contacts = Contacts(tmp_path / "blocked" / "contacts.json", warn=said.append)
    await contacts.load()
    said.clear()
    for count in (1, 2):
        await contacts.update(PEERS[:count], World().addresses_of)
    assert len(said) == 1
    assert "cannot be written" in said[0]
    assert len(contacts.known) == 2


async def test_addresses_that_nobody_could_dial_are_dropped_from_the_file(tmp_path: Path) -> None:
    path = tmp_path / "contacts.json"
    path.write_text(
        json.dumps(
            [
                f"/ip4/0.0.0.0/tcp/4001/p2p/{PEERS[0]}",
                f"/ip4/192.0.2.1/tcp/0/p2p/{PEERS[0]}",
                f"/ip4/192.0.2.1/udp/4001/quic-v1/p2p/{PEERS[1]}",
            ]
        )
    )
    contacts = Contacts(path)
    await contacts.load()
    assert contacts.known == {PEERS[1]: ("/ip4/192.0.2.1/udp/4001/quic-v1",)}


def test_addresses_are_grouped_by_peer() -> None:
    first, second = (f"/ip4/192.0.2.{host}/tcp/1/p2p/{PEERS[0]}" for host in (1, 2))
    assert group_by_peer([first, second, first]) == {
        PEERS[0]: ("/ip4/192.0.2.1/tcp/1", "/ip4/192.0.2.2/tcp/1")
    }
    with pytest.raises(ConfigError):
        group_by_peer(["/ip4/192.0.2.1/tcp/1"])


async def test_bootstrap_peers_are_met_in_every_check_and_contacts_in_turn() -> None:
    world = World()
    world.up = world.here = {PEERS[0]}
    contacts = await remember(PEERS[1:7])
    looking, _ = company([PEERS[0], OWN], contacts)
    for _ in range(3):
        await looking.check(world)
    assert world.tried.count(PEERS[0]) == 3
    assert OWN not in world.tried
    lost = [peer for peer in world.tried if peer != PEERS[0]]
    assert len(lost) == 3 * LOST_PER_CHECK
    assert all(lost.count(peer) == 2 for peer in PEERS[1:7])
    assert looking.pause_s == CHECK_PERIOD_S


async def test_a_lone_node_tries_all_contacts_and_says_what_happens() -> None:
    world = World()
    looking, said = company([PEERS[0]], await remember(PEERS[1:10]))
    assert await looking.check(world) == 0
    assert set(world.tried) == set(PEERS[:10])
    assert said == [
        "alone: none of 10 known addresses answers; going on, and trying again until somebody does"
    ]
    pauses = [looking.pause_s]
    for _ in range(6):
        await looking.check(world)
        pauses.append(looking.pause_s)
    assert pauses == [1, 2, 4, 8, 16, 30, LONGEST_PAUSE_S]
    world.up.add(PEERS[3])
    assert await looking.check(world) == 1
    assert said[1:] == ["no longer alone, after 0 s: 1 peer there"]
    assert looking.pause_s == CHECK_PERIOD_S


async def test_a_node_that_knows_nobody_waits_quietly() -> None:
    looking, said = company([])
    assert await looking.check(World()) == 0
    assert said == []
    assert looking.pause_s == CHECK_PERIOD_S


async def test_another_part_of_the_swarm_is_named_and_a_returning_bootstrap_is() -> None:
    world = World()
    world.up = {PEERS[0], PEERS[1]}
    looking, said = company(PEERS[:1], await remember(PEERS[1:3]))
    await looking.check(world)
    assert said == []
    world.up, world.here = {PEERS[1]}, {PEERS[1]}
    await looking.check(world)
    assert said == [f"bootstrap peer {PEERS[0]} does not answer: refused"]
    said.clear()
    world.up = {PEERS[0], PEERS[1], PEERS[2]}
    world.behind = {PEERS[2]: set(PEERS[10:13])}
    await looking.check(world)
    assert sorted(said) == [
        "4 peers of another part of the swarm found: joined",
        f"bootstrap peer {PEERS[0]} answers again",
    ]
    assert await looking.check(world) == 6
    assert len(said) == 2


async def test_a_peer_that_moved_is_dialled_at_its_latest_address() -> None:
    world = World()
    contacts = await remember(PEERS[:1])
    world.here, world.at = {PEERS[0]}, "/ip4/192.0.2.1/tcp/5001"
    await contacts.update(world.here, world.addresses_of)
    assert contacts.known == {PEERS[0]: ("/ip4/192.0.2.1/tcp/5001",)}


@pytest.mark.parametrize(
    ("listen", "addresses", "kept"),
    [
        ("/ip4/0.0.0.0/tcp/0", ["/ip4/192.0.2.1/tcp/4001"], "/ip4/0.0.0.0/tcp/4001"),
        ("/ip4/127.0.0.1/tcp/0", [f"/ip4/127.0.0.1/tcp/7/p2p/{OWN}"], "/ip4/127.0.0.1/tcp/7"),
        ("/ip4/127.0.0.1/tcp/0", ["/ip4/192.0.2.1/tcp/4001"], "/ip4/127.0.0.1/tcp/0"),
        ("/ip6/::/tcp/0", ["/ip4/192.0.2.1/tcp/1", "/ip6/::1/tcp/2"], "/ip6/::/tcp/2"),
        (
            "/ip4/0.0.0.0/udp/0/quic-v1",
            ["/ip4/192.0.2.1/tcp/1", "/ip4/192.0.2.1/udp/2/quic-v1"],
            "/ip4/0.0.0.0/udp/2/quic-v1",
        ),
        ("/ip4/0.0.0.0/tcp/9", ["/ip4/192.0.2.1/tcp/4001"], "/ip4/0.0.0.0/tcp/9"),
        ("/ip4/0.0.0.0/tcp/0", [], "/ip4/0.0.0.0/tcp/0"),
    ],
)
def test_a_free_port_is_kept_once_it_is_known(listen: str, addresses: list[str], kept: str) -> None:
    assert with_same_ports([listen], addresses) == (kept,)


@pytest.mark.parametrize(
    ("address", "dialable"),
    [
        ("/ip4/192.0.2.1/tcp/4001", True),
        ("/dns4/example.org/udp/4001/quic-v1", True),
        ("/ip4/127.0.0.1/tcp/4001", True),
        ("/ip4/0.0.0.0/tcp/4001", False),
        ("/ip4/192.0.2.1/tcp/0", False),
        (f"/ip4/192.0.2.1/tcp/1/p2p/{OWN}/p2p-circuit", False),
        ("", False),
        ("nonsense", False),
    ],
)
def test_what_others_can_dial(address: str, dialable: bool) -> None:
    assert is_dialable(address) is dialable


async def test_meetings_happen_at_once() -> None:
    class Slow(World):
        async def meet(self, peer: PeerId, addresses: Sequence[str]) -> str:
            self.tried.append(peer)
            if len(self.tried) == 3:
                self.all_asked.set()
            await self.all_asked.wait()
            return "refused"

        def __init__(self) -> None:
            super().__init__()
            self.all_asked = asyncio.Event()

    looking, _ = company(PEERS[:3])
    async with asyncio.timeout(5):
        await looking.check(Slow())


class Moving:
    """A machine whose addresses change while it is looked at; None is a p2pd that is silent."""

    def __init__(self, *stations: Sequence[str] | None) -> None:
        self.left = list(stations)

    async def addresses(self) -> tuple[str, ...]:
        here = self.left.pop(0)
        if here is None:
            raise DaemonError("silent")
        return tuple(f"/ip4/{host}/tcp/4001/p2p/{OWN}" for host in here)


async def test_a_move_is_noticed_once_none_of_the_old_addresses_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watch, "PROBE_PERIOD_S", 0.0)
    home = ("127.0.0.1", "192.0.2.1")
    machine = Moving(
        *(home, (*home, "192.0.2.2"), ("192.0.2.2",), None, ("127.0.0.1",), ("192.0.2.2",)),
        ("127.0.0.1", "192.0.2.3"),
    )
    said = await watch._until_moved(cast("Libp2pNetwork", machine))
    assert said == "this machine's address has changed"
    assert machine.left == []
