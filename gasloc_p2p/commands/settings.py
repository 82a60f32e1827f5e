"""`gasloc config`: write, check and explain settings."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from gasloc_p2p.config import LoadedConfig, default_toml, known_keys
from gasloc_p2p.core.errors import ConfigError
from gasloc_p2p.core.stability import radius
from gasloc_p2p.core.topology import TOPOLOGIES
from gasloc_p2p.founding import check_outer
from gasloc_p2p.sense import idle_settings


def init(path: Path) -> None:
    """Write a commented file of defaults.

    Raises:
        ConfigError: there is a file already, or it cannot be written.
    """
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(default_toml())
    except FileExistsError:
        raise ConfigError(
            f"{path} is there already", why="it may hold settings of yours", fix="name another file"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}",
            why=error.strerror or str(error),
            fix="name a file in a folder that you can write to",
        ) from None
    print(f"wrote {path}; use it with --config {path}")


def check(loaded: LoadedConfig) -> None:
    """Check what only shows when values are taken together.

    Raises:
        ConfigError: settings contradict each other, or no outer rule, topology or codec has the
            name that is set.
        UnstableError: peers would drift apart with this outer step and topology.
    """
    check_outer(loaded.config)
    tell_idle(loaded)
    outer, topology = loaded.config.outer, loaded.config.gossip.topology
    print("all settings are accepted")
    try:
        found = radius(outer.rule, outer.lr, outer.momentum, outer.alpha, topology)
    except ConfigError as error:
        print(f"{error.what}: {error.why}")
        return
    redrawn = TOPOLOGIES.named(topology).redrawn
    what = "mean square disagreement" if redrawn else "disagreement"
    print(
        f"without gradients, the {what} between peers goes to {found:.2f} of itself per round"
        " (below 1 they come together)"
    )


def tell_idle(loaded: LoadedConfig) -> None:
    """Write a line to standard error about every setting that was chosen for nothing."""
    for sentence in idle_settings(loaded):
        print(f"gasloc: {sentence}", file=sys.stderr)


def show(loaded: LoadedConfig) -> None:
    """Print every setting with its value, its origin and its meaning."""
    values = loaded.config.model_dump(mode="json")
    section = ""
    for key, field in known_keys().items():
        head, _, name = key.partition(".")
        if head != section:
            section = head
            print(f"\n[{section}]")
        print(
            f"{name} = {json.dumps(values[section][name])}  ({loaded.origins.get(key, 'default')})"
        )
        print(f"    {field.description}")
