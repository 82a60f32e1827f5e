"""Documents of a shard, unit by unit: a thousand rows of Parquet, or four megabytes of JSON Lines.

Units bound what is held in memory, and are what is fetched, kept on the disk and thrown away.
"""

from __future__ import annotations

import gzip
import itertools
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

import pyarrow as pa
import pyarrow.parquet as pq

from gasloc_p2p.core.errors import DataError
from gasloc_p2p.data.shards import Shards

UNIT_ROWS = 1000
"""Rows of Parquet in a unit, at most; none reaches over the end of a row group."""
UNIT_BYTES = 4 << 20
"""Lines of JSON that begin in one such range make up a unit."""
MAX_LINE_BYTES = 64 << 20
READ_BYTES = 4 << 20


class Units:
    """Reads the units of shards; fastest when they are asked for in their order.

    Args:
        shards: the data set.
        field: the column, or the key, that holds the text of a document.
        say: told of lines that hold no text.
    """

    def __init__(self, shards: Shards, field: str, say: Callable[[str], None]) -> None:
        self._shards = shards
        self._field = field
        self._say = say
        self._told: set[str] = set()
        self._next = ("", 0)
        self._units: Iterator[list[bytes]] = iter(())
        self._file: BinaryIO | None = None

    def read(self, shard: str, unit: int) -> list[bytes] | None:
        """Return the documents of a unit as UTF-8; None when the shard has no such unit.

        Raises:
            DataError: the shard cannot be read, is damaged, has changed, or its documents have no
                such field.
        """
        try:
            self._shards.check(shard)
            if self._next != (shard, unit):
                self.close()
                self._file = self._shards.open(shard)
                self._units = self._open(self._file, shard, unit)
            documents = next(self._units, None)
            self._shards.check(shard)
        except (pa.ArrowException, zlib.error, gzip.BadGzipFile, EOFError) as error:
            self.close()
            raise DataError(
                f"{shard} is damaged.",
                why=str(error),
                fix="Put a whole copy in its place, or take it away."
                if self._shards.local
                else "See whether the hub has a whole one by now, or leave it out (data.files).",
            ) from error
        except OSError as error:
            self.close()
            raise DataError(
                f"{shard} cannot be read.",
                why=str(error),
                fix="Make it readable, or point data.path at other files.",
            ) from error
        if documents is None:
            self.close()
        else:
            self._next = (shard, unit + 1)
        return documents

    def by_name(self) -> Iterator[list[bytes]]:
        """Yield all units of all shards, in the order of their names.

        Raises:
            DataError: as `read`.
        """
        for name in self._shards.names:
            for unit in itertools.count():
                if (documents := self.read(name, unit)) is None:
                    break
                yield documents

    def close(self) -> None:
        """Close the shard that is open."""
        self._next, self._units = ("", 0), iter(())
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self, file: BinaryIO, shard: str, first: int) -> Iterator[list[bytes]]:
        if shard.endswith(".parquet"):
            return _parquet_units(file, shard, self._field, first)
        if shard.endswith(".gz"):
            plain = cast("BinaryIO", gzip.GzipFile(fileobj=file))
            return _json_units(plain, shard, self._field, first, self._tell, seek=_read_past)
        return _json_units(file, shard, self._field, first, self._tell, seek=_seek)

    def _tell(self, shard: str, lines: str) -> None:
        """Say which lines of a shard are skipped, once however often it is read."""
        if shard not in self._told:
            self._told.add(shard)
            self._say(f"{lines} have no text under {self._field!r} and are skipped")


def _parquet_units(file: BinaryIO, shard: str, field: str, first: int) -> Iterator[list[bytes]]:
    # Without pre-buffering and with a buffer, a large row group is not held in memory as a whole.
    table = pq.ParquetFile(file, buffer_size=READ_BYTES, pre_buffer=False)
    schema = table.schema_arrow
    if field not in schema.names or not _is_text(schema.field(field).type):
        texts = [name for name in schema.names if _is_text(schema.field(name).type)]
        raise _no_field(shard, field, texts)
    for group in range(table.num_row_groups):
        units = -(-table.metadata.row_group(group).num_rows // UNIT_ROWS)
        if first >= units:
            first -= units
            continue
        rows = _rows(table, group, field)
        for _ in range(first * UNIT_ROWS):
            next(rows)
        first = 0
        while unit := list(itertools.islice(rows, UNIT_ROWS)):
            yield [text for text in unit if text]


def _rows(table: pq.ParquetFile, group: int, field: str) -> Iterator[bytes | None]:
    batches = table.iter_batches(
        batch_size=UNIT_ROWS, row_groups=[group], columns=[field], use_threads=False
    )
    for batch in batches:
        # As bytes, so that text which is no UTF-8 does not end the run.
        yield from batch.column(0).cast(pa.large_binary()).to_pylist()


def _is_text(kind: Any) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _json_units(
    file: BinaryIO,
    shard: str,
    field: str,
    first: int,
    tell: Callable[[str, str], None],
    *,
    seek: Callable[[BinaryIO, int], None],
) -> Iterator[list[bytes]]:
    begins = first * UNIT_BYTES
    if first:
        # A line that begins at the very border belongs to the unit behind it.
        seek(file, begins - 1)
        begins += len(_line(file, shard)) - 1
    unit, documents, before = first, list[bytes](), 0
    seen = _Seen(shard=shard, field=field, first=first)
    while line := _line(file, shard):
        while begins // UNIT_BYTES > unit:
            seen.judge(tell)
            yield documents
            unit, documents, before = unit + 1, [], seen.lines
        begins += len(line)
        seen.numbered += 1
        if not line.strip():
            continue
        if text := seen.text_of(line):
            documents.append(text)
    seen.judge(tell)
    if seen.lines > before:
        yield documents


def _line(file: BinaryIO, shard: str) -> bytes:
    line = file.readline(MAX_LINE_BYTES)
    if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
        raise DataError(
            f"{shard} has a line of more than {MAX_LINE_BYTES >> 20} MiB.",
            why="JSON Lines have one document in each line.",
            fix="Write one JSON object per line.",
        )
    return line


@dataclass(kw_only=True, slots=True)
class _Seen:
    """What the lines of a shard held, from unit `first` on."""

    shard: str
    field: str
    first: int
    numbered: int = 0
    lines: int = 0
    bad: int = 0
    first_bad: int = 0
    keys: list[str] | None = None

    def text_of(self, line: bytes) -> bytes | None:
        """Return the text in a line, the next one; None when it has none."""
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        self.lines += 1
        if isinstance(row, dict):
            if self.keys is None:
                self.keys = [key for key, value in row.items() if isinstance(value, str)]
            if isinstance(text := row.get(self.field), str):
                # JSON can write half a surrogate pair, which is no text.
                return text.encode("utf-8", "replace")
        self.bad += 1
        self.first_bad = self.first_bad or self.numbered
        return None

    def judge(self, tell: Callable[[str, str], None]) -> None:
        """Tell of lines without text.

        Raises:
            DataError: the shard begins with a whole unit of them.
        """
        if not self.bad:
            return
        if self.first:
            where = f"{self.shard} from byte {self.first * UNIT_BYTES} on"
            tell(self.shard, f"{self.bad} of {self.lines} lines of {where}")
            return
        if self.bad == self.lines:
            raise self._refused()
        tell(
            self.shard,
            f"{self.bad} of the first {self.lines} lines of {self.shard} (line {self.first_bad} is "
            "the first of them)",
        )

    def _refused(self) -> DataError:
        if self.keys is not None:
            return _no_field(self.shard, self.field, self.keys)
        return DataError(
            f"{self.shard} is no JSON Lines.",
            why=f"None of its first {self.lines} lines is a JSON object.",
            fix="Write one JSON object per line, or give a file of plain text the suffix .txt.",
        )


def _no_field(shard: str, field: str, found: Any) -> DataError:
    has = f"It has text under: {', '.join(found)}." if found else "It has no text under any name."
    return DataError(
        f"{shard} has no text field {field!r}.",
        why=has,
        fix="Name the field that holds the text: --set data.text_field=NAME",
    )


def _seek(file: BinaryIO, offset: int) -> None:
    file.seek(offset)


def _read_past(file: BinaryIO, offset: int) -> None:
    """Come to `offset` of a file that can only be read from its start."""
    while offset:
        piece = file.read(min(offset, READ_BYTES))
        if not piece:
            return
        offset -= len(piece)
