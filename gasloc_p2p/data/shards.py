"""Where documents lie: the shards of a data set, on this machine or elsewhere."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

from gasloc_p2p.core.errors import DataError

HUB = "hub:"
"""How a `data.path` begins that names a data set of the Hugging Face hub."""
STREAMED = (".parquet", ".jsonl", ".jsonl.gz", ".json.gz")
"""Suffixes of files that hold documents wherever they lie."""
NAMED = (*STREAMED, ".json")
"""Suffixes of files that hold documents when a person names them."""


class Shards(Protocol):
    """The files of a data set.

    Attributes:
        names: sorted; the same at every peer with the same data.
        version: changes when what lies under the names does.
        local: whether they lie on this machine, so that they are at hand at any time.
    """

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def version(self) -> str: ...

    @property
    def local(self) -> bool: ...

    def check(self, name: str) -> None:
        """Raise if a shard is no longer what it was when its run began.

        Raises:
            DataError: it has changed, or is gone.
        """
        ...

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

    local = True

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
            self._noted = {name: self._note(name) for name in self.names}
        except OSError as error:
            raise DataError(
                f"The documents in {path} cannot be read.",
                why=str(error),
                fix="Make them readable, or point data.path at other files.",
            ) from error
        # Without the times, so that a copy of the same files goes on with their stream.
        self.version = " ".join(str(self._noted[name][0]) for name in self.names)

    def check(self, name: str) -> None:
        """Raise if a file has changed since this was made.

        Raises:
            DataError: it has, or it is gone.
        """
        size, changed_ns = self._noted[name]
        try:
            size_now, changed_now_ns = self._note(name)
        except OSError as error:
            raise DataError(
                f"{name} cannot be read any more.",
                why=str(error),
                fix="Put it back as it was, then start again.",
            ) from error
        if (size, changed_ns) == (size_now, changed_now_ns):
            return
        raise DataError(
            f"{name} has changed while the run lasts.",
            why=f"It had {size} bytes when the node started, and has {size_now}."
            if size != size_now
            else "It was written to after the node had started.",
            fix="Put it back as it was, or remove the folder `data` in the node's home to begin "
            "with the text as it is; then start again.",
        )

    def _note(self, name: str) -> tuple[int, int]:
        """Return size and time of the last change, in nanoseconds."""
        status = (self._root / name).stat()
        return status.st_size, status.st_mtime_ns

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
