"""Documents of a shard, unit by unit: a thousand rows of Parquet, or four megabytes of JSON Lines.

Units bound what is held in memory, and are what is fetched, kept on the disk and thrown away.
"""

from __future__ import annotations

import gzip
import itertools
import json
import zlib
from collections.abc import Callable, Iterator
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
                fix="Fetch it again, or leave it out (data.files).",
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
            return _json_units(plain, shard, self._field, first, self._say, seek=_read_past)
        return _json_units(file, shard, self._field, first, self._say, seek=_seek)


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
    say: Callable[[str], None],
    *,
    seek: Callable[[BinaryIO, int], None],
) -> Iterator[list[bytes]]:
    begins = first * UNIT_BYTES
    if first:
        # A line that begins at the very border belongs to the unit behind it.
        seek(file, begins - 1)
        begins += len(_line(file, shard)) - 1
    unit, documents, bad, lines = first, list[bytes](), 0, 0
    while line := _line(file, shard):
        while begins // UNIT_BYTES > unit:
            _refuse_other_fields(shard, field, lines=lines, bad=bad, say=say)
            yield documents
            unit, documents, bad, lines = unit + 1, [], 0, 0
        begins += len(line)
        if not line.strip():
            continue
        text = _text_of(line, field)
        lines, bad = lines + 1, bad + (text is None)
        if text:
            documents.append(text)
    _refuse_other_fields(shard, field, lines=lines, bad=bad, say=say)
    if lines:
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


def _text_of(line: bytes, field: str) -> bytes | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    text = row.get(field) if isinstance(row, dict) else None
    # JSON can write half a surrogate pair, which is no text.
    return text.encode("utf-8", "replace") if isinstance(text, str) else None


def _refuse_other_fields(
    shard: str, field: str, *, lines: int, bad: int, say: Callable[[str], None]
) -> None:
    if bad and bad == lines:
        raise _no_field(shard, field, ())
    if bad:
        say(f"{bad} of {lines} lines in a part of {shard} have no text under {field!r}")


def _no_field(shard: str, field: str, found: Any) -> DataError:
    has = f"It has text under: {', '.join(found)}." if found else "No line of it has one."
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
