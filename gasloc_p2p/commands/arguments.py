"""Arguments and results that travel through small text files, as containers need them."""

from __future__ import annotations

import os
from pathlib import Path

from gasloc_p2p.core.errors import ConfigError


def read_argument(text: str) -> str:
    """Return `text`, or what the file holds that it names as @FILE.

    Raises:
        ConfigError: the file cannot be read.
    """
    if not text.startswith("@"):
        return text
    try:
        return Path(text[1:]).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot read {text[1:]}", why=_reason(error), fix="name a readable text file after @"
        ) from None


def read_addresses(addresses: tuple[str, ...]) -> tuple[str, ...]:
    """Return addresses with every @FILE replaced by the comma-separated ones that it holds."""
    return tuple(
        address.strip()
        for entry in addresses
        for address in read_argument(entry).split(",")
        if address.strip()
    )


def write_text_file(name: str, text: str) -> None:
    """Write a small file in one step, so that whoever waits for it never reads half of it."""
    path = Path(name).expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def check_output_file(path: Path | None) -> None:
    """Make sure that a result can be written before the work for it begins.

    Raises:
        ConfigError: `path` is a folder, or its folder is missing or cannot be written to.
    """
    if path is None:
        return
    folder = path.absolute().parent
    if path.is_dir():
        why = "it is a folder"
    elif not folder.is_dir():
        why = f"there is no folder {folder}"
    elif not os.access(path if path.exists() else folder, os.W_OK):
        why = "writing to it is not permitted"
    else:
        return
    raise ConfigError(f"cannot write {path}", why=why, fix="name a file in an existing folder")


def check_place(path: Path, setting: str) -> None:
    """Make sure that a folder can be written to, or made, without making it.

    Raises:
        ConfigError: it cannot; `setting` names it.
    """
    there = next(p for p in (path, *path.absolute().parents) if os.path.exists(p))
    if not there.is_dir():
        why = f"{there} is a file" if there.is_file() else f"{there} is no folder"
    elif not os.access(there, os.W_OK | os.X_OK):
        why = f"writing to {there} is not permitted"
    else:
        return
    raise ConfigError(
        f"cannot use the folder {path}",
        why=why,
        fix=f"name one that you can write to: --set {setting}=...",
    )


def make_folder(path: Path) -> None:
    """Create a folder for results, and those above it, unless it is there.

    Raises:
        ConfigError: it cannot be made or written to.
    """
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        probe = path / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"cannot use the folder {path}",
            why=error.strerror or str(error),
            fix="name a folder that you can write to",
        ) from None


def remove_stale_file(name: str) -> None:
    """Remove what an earlier process left in a file that others wait for; "" is no file."""
    if name:
        Path(name).expanduser().unlink(missing_ok=True)


def _reason(error: OSError | UnicodeDecodeError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or "it is not text"
