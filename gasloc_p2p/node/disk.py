"""Whether a disk has room for what a node has to keep."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from gasloc_p2p.core.errors import DiskError


def lacking(needed_bytes: int, folder: Path) -> str:
    """Say what is needed and what is free if that is too little; empty when it is not."""
    free_bytes = shutil.disk_usage(folder).free
    if needed_bytes <= free_bytes:
        return ""
    return f"it needs {needed_bytes / 1e6:,.1f} MB, and the disk has {free_bytes / 1e6:,.1f} MB"


def needless(places: Sequence[tuple[int, Path]], needed_bytes: int, folder: Path) -> list[Path]:
    """Return the folders that have to go for something to fit; none if even all are not enough.

    Args:
        places: those that may go, with their rounds, the first one first.
        needed_bytes: what is to fit.
        folder: where to.
    """
    going: list[Path] = []
    free_bytes = shutil.disk_usage(folder).free
    for _, place in places:
        if free_bytes >= needed_bytes:
            break
        going.append(place)
        free_bytes += sum(file.stat().st_size for file in place.iterdir())
    return going if free_bytes >= needed_bytes else []


def require_room(needed_bytes: int, folder: Path) -> None:
    """Refuse to begin where not even one checkpoint can be kept.

    Args:
        needed_bytes: of one checkpoint.
        folder: where they are to go; it may not be there yet.

    Raises:
        DiskError: there is no room for it.
    """
    there = folder
    while not there.exists():
        there = there.parent
    if why := lacking(needed_bytes, there):
        raise DiskError(
            f"there is no room for a checkpoint in {folder}",
            why=f"{why}; without one, all training is lost when this node ends",
            fix="make room there, or name a folder on another disk with --set node.home=FOLDER",
        )
