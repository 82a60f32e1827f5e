"""From the options of a command to its settings; imports nothing heavy before it is called."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gasloc_p2p.config import Layer, LoadedConfig


def layers_of(file: Path | None, assignments: Sequence[str] | None) -> list[Layer]:
    """Return what a file, the environment and `--set` say, from the weakest to the strongest.

    Raises:
        ConfigError: one of them cannot be read.
    """
    from gasloc_p2p.config import assignment_layer, environment_layer, file_layer

    layers = [file_layer(file)] if file is not None else []
    return [*layers, environment_layer(os.environ), assignment_layer(assignments or ())]


def loaded_from(file: Path | None, assignments: Sequence[str] | None) -> LoadedConfig:
    """Return the settings of a file, the environment and `--set`.

    Raises:
        ConfigError: a setting is not accepted.
    """
    from gasloc_p2p.config import load

    return load(layers_of(file, assignments))


def swarm_config(
    peers: int,
    file: Path | None,
    assignments: Sequence[str] | None,
    algorithm: str,
    rounds: int | None,
    topology: str | None,
    codec: str | None,
    local_steps: int | None,
    seed: int | None,
    engine: str | None = None,
    on_one_machine: bool = False,
) -> LoadedConfig:
    """Merge the options that `testnet` and `simulate` share with all other settings.

    Raises:
        ConfigError: a setting is not accepted.
    """
    from gasloc_p2p.algorithms import load_algorithm
    from gasloc_p2p.commands.settings import tell_idle
    from gasloc_p2p.config import Layer

    options = {
        "run.rounds": rounds,
        "run.seed": seed,
        "gossip.topology": topology,
        "gossip.codec": codec,
        "inner.local_steps": local_steps,
        "simulate.engine": engine,
    }
    defaults: dict[str, object] = {"run.id": "testnet"}
    if on_one_machine:
        # Its nodes are equally fast; what seems to differ is that they hinder each other.
        defaults["pace.adapt_steps"] = False
        # So they compute what `gasloc simulate` does, bit for bit.
        defaults["device.kind"] = "cpu"
    layers = [
        Layer(name="default", values=defaults),
        *layers_of(file, assignments),
        Layer(name="option", values={k: v for k, v in options.items() if v is not None}),
        Layer(name="option --peers", values={"run.initial_peers": peers}),
    ]
    loaded = load_algorithm(algorithm, layers)
    tell_idle(loaded)
    return loaded
