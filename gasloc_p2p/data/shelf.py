"""Tokens on the disk: units that wait for their turn, and how many tokens each one had.

    index            one line a unit: its place, its tokens, and a digest over all lines so far
    unit-00000007    tokens of the unit that comes as the eighth, behind their digest

Files are written beside their places and renamed. A torn or damaged one is as good as none: what
it held is read again from where it came from. Source: docs/design.md section 6.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from blake3 import blake3

from gasloc_p2p.data.order import Place
from gasloc_p2p.data.tokens import Tokens

INDEX: Final = "index"
UNIT: Final = "unit-"
_WRITING: Final = ".writing"
_DIGEST_BYTES: Final = 32
_DTYPES: Final[dict[int, np.dtype[Any]]] = {n: np.dtype(f"<u{n}") for n in (1, 2, 4)}


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One unit on a peer's way.

    Attributes:
        place: where it lies.
        name: 16 hex digits that stand for its shard and number, the same at every peer.
        tokens: how many it has, separators included.
    """

    place: Place
    name: str
    tokens: int


class _Line(msgspec.Struct, frozen=True, kw_only=True):
    entry: Entry
    seal: str


class Shelf:
    """A folder of tokens. One thread may put and note while another one loads and drops.

    Attributes:
        entries: the units that are known, in the order in which they are visited.

    Args:
        folder: made if it is not there.

    Raises:
        OSError: it cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(f"*{_WRITING}"):
            left.unlink()
        self.entries, self._seal, whole = _read_index(folder / INDEX)
        self._index_is_whole = whole
        self._sizes = {
            path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()
        }

    @property
    def held_bytes(self) -> int:
        """Bytes of all files in the folder."""
        return sum(self._sizes.values())

    def units(self) -> Iterator[tuple[int, int]]:
        """Yield number and bytes of each unit that is there."""
        for name, size in sorted(self._sizes.items()):
            if name.startswith(UNIT):
                yield int(name.removeprefix(UNIT)), size

    def holds(self, number: int) -> bool:
        """Whether a unit is there."""
        return _name_of(number) in self._sizes

    def note(self, entry: Entry) -> None:
        """Add a unit to the index; a disk that is full only makes a later start slower."""
        self._seal = _seal_of(self._seal, entry)
        line = msgspec.json.encode(_Line(entry=entry, seal=self._seal)) + b"\n"
        self.entries.append(entry)
        path = self._folder / INDEX
        try:
            if self._index_is_whole:
                with path.open("ab") as file:
                    file.write(line)
            else:
                self._rewrite_index()
            self._index_is_whole = True
            self._sizes[INDEX] = path.stat().st_size
        except OSError:
            self._index_is_whole = False

    def put(self, number: int | str, tokens: Tokens) -> None:
        """Keep the tokens of a unit, or tokens under another name.

        Raises:
            OSError: they cannot be written.
        """
        name = number if isinstance(number, str) else _name_of(number)
        body = bytes([tokens.dtype.itemsize]) + tokens.tobytes()
        self._write(name, blake3(body).digest() + body)

    def load(self, number: int | str) -> Tokens | None:
        """Return the tokens of a unit; None when they are not there as they were written."""
        name = number if isinstance(number, str) else _name_of(number)
        try:
            data = (self._folder / name).read_bytes()
        except OSError:
            data = b""
        digest, body = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
        if not body or blake3(body).digest() != digest:
            self.drop(number)
            return None
        tokens: Tokens = np.frombuffer(body, dtype=_DTYPES[body[0]], offset=1)
        return tokens

    def drop(self, number: int | str) -> None:
        """Throw a unit away."""
        name = number if isinstance(number, str) else _name_of(number)
        self._sizes.pop(name, None)
        with suppress(OSError):
            (self._folder / name).unlink()

    def clear(self, *, but: Sequence[str] = ()) -> None:
        """Throw everything away, except the files named in `but`."""
        for name in set(self._sizes).difference(but):
            self.drop(name)
        self.entries, self._seal, self._index_is_whole = [], "", True

    def read_text(self, name: str) -> bytes:
        """Return the file of this name; empty when there is none."""
        try:
            return (self._folder / name).read_bytes()
        except OSError:
            return b""

    def write_text(self, name: str, text: bytes) -> None:
        """Write a file.

        Raises:
            OSError: it cannot be written.
        """
        self._write(name, text)

    def _rewrite_index(self) -> None:
        seal, lines = "", []
        for entry in self.entries:
            seal = _seal_of(seal, entry)
            lines.append(msgspec.json.encode(_Line(entry=entry, seal=seal)) + b"\n")
        self._write(INDEX, b"".join(lines))

    def _write(self, name: str, data: bytes) -> None:
        beside = self._folder / f"{name}{_WRITING}"
        try:
            # Not flushed to the disk: after a power cut their digests tell.
            beside.write_bytes(data)
            beside.replace(self._folder / name)
        except OSError:
            with suppress(OSError):
                beside.unlink()
            raise
        self._sizes[name] = len(data)


def _name_of(number: int) -> str:
    return f"{UNIT}{number:08}"


def _seal_of(before: str, entry: Entry) -> str:
    return blake3(before.encode() + msgspec.json.encode(entry)).hexdigest(length=8)


def _read_index(path: Path) -> tuple[list[Entry], str, bool]:
    """Return what can be trusted of an index, its last seal, and whether that is all of it."""
    entries: list[Entry] = []
    seal = ""
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError:
        return entries, seal, not path.exists()
    for line in lines:
        try:
            found = msgspec.json.decode(line, type=_Line)
        except msgspec.DecodeError:
            return entries, seal, False
        if not line.endswith(b"\n") or found.seal != _seal_of(seal, found.entry):
            return entries, seal, False
        entries.append(found.entry)
        seal = found.seal
    return entries, seal, True


def read_entries(folder: Path) -> list[Entry]:
    """Return the units that a peer has visited, from the index in its folder."""
    return _read_index(folder / INDEX)[0]
