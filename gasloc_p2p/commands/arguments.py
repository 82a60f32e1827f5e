"""Arguments and results that travel through small text files, as containers need them."""

from __future__ import annotations

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
            f"cannot read {text[1:]}", why=str(error), fix="name a readable text file after @"
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


def remove_stale_file(name: str) -> None:
    """Remove what an earlier process left in a file that others wait for; "" is no file."""
    if name:
        Path(name).expanduser().unlink(missing_ok=True)
