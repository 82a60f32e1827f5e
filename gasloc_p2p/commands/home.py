"""Where a node keeps its identity and its results."""

from __future__ import annotations

from pathlib import Path

from gasloc_p2p.commands.arguments import make_folder
from gasloc_p2p.config import Config
from gasloc_p2p.net.identity import Identity


def home_of(config: Config, name: str) -> Path:
    """Return the home folder: `node.home`, or ~/.gasloc/NAME."""
    if config.node.home:
        return Path(config.node.home).expanduser()
    return Path.home() / ".gasloc" / name


def open_identity(config: Config, home: Path) -> Identity:
    """Load the node's identity, or make one; it is locked until it is closed.

    Raises:
        IdentityError: the file cannot be used, or another process uses it.
    """
    if config.net.identity:
        return Identity.load_or_create(Path(config.net.identity).expanduser())
    make_folder(home)
    return Identity.load_or_create(home / "identity")
