"""Small data sets for tests."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

SHARDS, GROUPS, ROWS = 3, 4, 6
"""Shards of the usual data set, row groups of a shard, documents of a row group."""


def document(shard: int, row: int) -> str:
    """A text that is like no other one; some are not ASCII, lengths differ."""
    return f"shard {shard} row {row}: " + ("täglich grüßt 猫 🙂 " * (1 + row % 5)) + f"#{row * 7}"


def documents(shard: int, count: int = GROUPS * ROWS) -> list[str]:
    return [document(shard, row) for row in range(count)]


def write_parquet(
    path: Path, texts: Sequence[str | None], *, field: str = "text", rows: int = ROWS
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({"id": list(range(len(texts))), field: pa.array(texts, type=pa.string())})
    pq.write_table(table, path, row_group_size=rows)


def write_json_lines(path: Path, texts: Sequence[str], *, field: str = "text") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps({"id": i, field: text}) + "\n" for i, text in enumerate(texts))
    data = lines.encode()
    path.write_bytes(gzip.compress(data) if path.name.endswith(".gz") else data)


def write_usual(folder: Path) -> None:
    """Three shards of four row groups."""
    for shard in range(SHARDS):
        write_parquet(folder / "data" / f"part-{shard}.parquet", documents(shard))
