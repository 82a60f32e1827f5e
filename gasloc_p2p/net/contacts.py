"""Addresses of peers that this node has met, in a small file that outlives it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from gasloc_p2p.core.errors import ConfigError
from gasloc_p2p.core.types import PeerId
from gasloc_p2p.net.addresses import is_dialable, parse_bootstrap

CONTACTS_FILE: Final = "contacts.json"
MAX_CONTACTS: Final = 32
MAX_LOST: Final = 16
"""Contacts that are out of reach and are kept nevertheless when there is not room for all: in a
partition they are the way back to the other side."""
MAX_FILE_BYTES: Final = 64 * 1024
MAX_FILE_ADDRESSES: Final = 256

_log = logging.getLogger(__name__)


class Contacts:
    """Peers that this node has met, at most `MAX_CONTACTS`, and where each of them listens.

    Args:
        path: the file to keep them in, a JSON list of multiaddrs that end in /p2p/ID; None keeps
            them in memory only.
        warn: told, in one line, when the file cannot be read or written; nothing else comes of it.
    """

    def __init__(self, path: Path | None, *, warn: Callable[[str], None] = _log.warning) -> None:
        self._path = path
        self._warn = warn
        self._writable = True
        self._known: dict[PeerId, tuple[str, ...]] = {}

    @property
    def known(self) -> Mapping[PeerId, tuple[str, ...]]:
        """Addresses, without the id, by peer; those present first, in the order they were met."""
        return self._known

    async def load(self) -> None:
        """Read the file, if there is one."""
        if self._path is None:
            return
        try:
            self._known = await asyncio.to_thread(_read, self._path)
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            self._warn(f"{self._path} is not used: {_reason(error)}")

    async def update(
        self,
        present: Collection[PeerId],
        addresses_of: Callable[[PeerId], Awaitable[tuple[str, ...]]],
    ) -> None:
        """Take in those who are present, and write the file if anything has changed.

        Args:
            present: peers that are connected.
            addresses_of: finds where a present peer listens; an empty result changes nothing.
        """
        before = self._known
        known = {}
        for peer in choose(list(before), present):
            found = await addresses_of(peer) if peer in present else ()
            if addresses := found or before.get(peer, ()):
                known[peer] = addresses
        self._known = known
        if known != before and self._path is not None:
            await self._save(self._path)

    async def _save(self, path: Path) -> None:
        try:
            await asyncio.to_thread(_write, path, self._known)
        except OSError as error:
            if self._writable:
                self._warn(f"{path} cannot be written: {_reason(error)}")
            self._writable = False
        else:
            self._writable = True


def choose(known: Sequence[PeerId], present: Collection[PeerId]) -> list[PeerId]:
    """Return whom to remember: those present, longest known first, then those lost, latest first.

    Args:
        known: the previous result.
        present: peers that are there, in any order.
    """
    fresh = sorted(peer for peer in present if peer not in known)
    here = [peer for peer in known if peer in present] + fresh
    lost = [peer for peer in known if peer not in present]
    lost = lost[: max(MAX_LOST, MAX_CONTACTS - len(here))]
    return here[: MAX_CONTACTS - len(lost)] + lost


def group_by_peer(addresses: Sequence[str]) -> dict[PeerId, tuple[str, ...]]:
    """Return addresses that end in /p2p/ID by that id, without it.

    Raises:
        ConfigError: one of them is no such address.
    """
    groups: dict[PeerId, list[str]] = {}
    for text in addresses:
        peer = parse_bootstrap(text).peer_id
        groups.setdefault(peer, []).append(text.removesuffix(f"/p2p/{peer}"))
    return {peer: tuple(dict.fromkeys(group)) for peer, group in groups.items()}


def full_addresses(contacts: Mapping[PeerId, Sequence[str]]) -> tuple[str, ...]:
    """Undo `group_by_peer`."""
    return tuple(f"{text}/p2p/{peer}" for peer, group in contacts.items() for text in group)


def _read(path: Path) -> dict[PeerId, tuple[str, ...]]:
    """Read a file of contacts.

    Raises:
        OSError: it cannot be read.
        ValueError: it is damaged.
    """
    with path.open("rb") as file:
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise ValueError("it is too large")
    try:
        contacts = group_by_peer(msgspec.json.decode(content, type=list[str])[:MAX_FILE_ADDRESSES])
    except (msgspec.DecodeError, ConfigError) as error:
        raise ValueError("it is damaged") from error
    usable = {
        peer: tuple(address for address in group if is_dialable(address))
        for peer, group in contacts.items()
    }
    return {peer: group for peer, group in list(usable.items())[:MAX_CONTACTS] if group}


def _write(path: Path, contacts: Mapping[PeerId, Sequence[str]]) -> None:
    """Write the file in one step, so that it is never half there."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(full_addresses(contacts))) + b"\n")
    partial.replace(path)


def _reason(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
