"""Where documents lie: the shards of a data set, on this machine or elsewhere."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

from gasloc_p2p.core.errors import DataError

STREAMED = (".parquet", ".jsonl", ".jsonl.gz", ".json.gz")
"""Suffixes of files that hold documents wherever they lie."""
NAMED = (*STREAMED, ".json")
"""Suffixes of files that hold documents when a person names them."""


class Shards(Protocol):
    """The files of a data set.

    Attributes:
        names: sorted; the same at every peer with the same data.
        version: changes when what lies under the names does.
    """

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def version(self) -> str: ...

    def open(self, name: str) -> BinaryIO:
        """Open a shard for reading and seeking.

        Raises:
            DataError: it cannot be had.
            OSError: it cannot be read.
        """
        ...


class LocalShards:
    """A file, or all files with documents in a folder and below it.

    Raises:
        DataError: there is none.
    """

    def __init__(self, path: Path) -> None:
        self._root = path if path.is_dir() else path.parent
        self.names: Sequence[str] = _documents_below(path) if path.is_dir() else [path.name]
        if not self.names:
            raise DataError(
                f"There are no documents in {path}",
                why=f"None of its files ends in {', '.join(STREAMED)}.",
                fix="Point data.path at JSON Lines or Parquet files.",
            )
        try:
            sizes = [(self._root / name).stat().st_size for name in self.names]
        except OSError as error:
            raise DataError(
                f"The documents in {path} cannot be read.",
                why=str(error),
                fix="Make them readable, or point data.path at other files.",
            ) from error
        self.version = " ".join(map(str, sizes))

    def open(self, name: str) -> BinaryIO:
        """Open a shard."""
        return (self._root / name).open("rb")


def holds_documents(path: str) -> bool:
    """Whether `data.path` names JSON Lines or Parquet, and not plain text."""
    chosen = Path(path).expanduser()
    if path and chosen.is_dir():
        return bool(_documents_below(chosen))
    return path.endswith(NAMED)


def _documents_below(root: Path) -> list[str]:
    found: list[str] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        found += [
            Path(folder, name).relative_to(root).as_posix()
            for name in names
            if name.endswith(STREAMED) and not name.startswith(".")
        ]
    return sorted(found)
