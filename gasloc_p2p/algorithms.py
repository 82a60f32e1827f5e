"""The algorithms that this project compares, each a name for a combination of settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from gasloc_p2p.config import Layer, LoadedConfig, load
from gasloc_p2p.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Algorithm:
    """A published algorithm as settings of this project.

    Attributes:
        meaning: one sentence for a person.
        fixed: settings without which it would be another algorithm.
        defaults: settings that its authors use, and that may be changed.
        collective: whether the simulator runs it with a barrier and an all-reduce, as published.
        on_nodes: whether a swarm of nodes can run it, by gossip.
    """

    meaning: str
    fixed: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    collective: bool = False
    on_nodes: bool = True


ALGORITHMS: Mapping[str, Algorithm] = MappingProxyType(
    {
        "gasloc": Algorithm(
            meaning="local steps, gossip over the round's graph, outer Nesterov step alone"
        ),
        "diloco": Algorithm(
            meaning="local steps, then one outer Nesterov step on everybody's mean",
            fixed={"gossip.topology": "complete", "outer.rule": "nesterov", "outer.alpha": 1.0},
            collective=True,
        ),
        "dadam": Algorithm(
            meaning="gossip of parameters before every single AdamW step, no outer momentum",
            fixed={"outer.rule": "dadam", "inner.local_steps": 1},
        ),
        "local-dadam": Algorithm(
            meaning="the same gossip once per round of local steps",
            fixed={"outer.rule": "dadam"},
        ),
        "noloco": Algorithm(
            meaning="pairs average parameters and pseudo-gradients, with momentum",
            fixed={"gossip.topology": "pairs", "outer.rule": "noloco"},
            defaults={"outer.lr": 0.7, "outer.momentum": 0.5},
        ),
        "ddp": Algorithm(
            meaning="everybody's mean gradient before every single AdamW step",
            # Alone, and in mixing, it is AdamW without an outer step.
            fixed={"gossip.topology": "complete", "outer.rule": "dadam"},
            collective=True,
            on_nodes=False,
        ),
    }
)
"""Every algorithm by name; docs/design.md section 2 defines them."""


def require_on_nodes(name: str) -> None:
    """Refuse an algorithm that only the simulator runs.

    Raises:
        ConfigError: it needs an all-reduce in every step.
    """
    if not ALGORITHMS[name].on_nodes:
        raise ConfigError(
            f"--algorithm {name} runs in the simulator only",
            why="its peers wait for everybody in every step, and nodes have no all-reduce",
            fix=f"use `gasloc simulate --algorithm {name}`",
        )


def load_algorithm(name: str, layers: Sequence[Layer]) -> LoadedConfig:
    """Merge `layers` over what the algorithm `name` asks for.

    Raises:
        ConfigError: there is no such algorithm, or a layer changes what makes it that algorithm.
    """
    algorithm = ALGORITHMS.get(name)
    if algorithm is None:
        raise ConfigError(
            f"there is no algorithm {name!r}", fix=f"use one of {', '.join(ALGORITHMS)}"
        )
    for layer in layers:
        for key, wanted in algorithm.fixed.items():
            if layer.values.get(key, wanted) != wanted:
                raise ConfigError(
                    f"--algorithm {name} has {key} = {wanted!r}, and {layer.name} sets "
                    f"{layer.values[key]!r}",
                    why=f"{name} is: {algorithm.meaning}",
                    fix=f"leave {key} alone, or choose the settings without --algorithm",
                )
    source = f"--algorithm {name}"
    return load(
        [
            Layer(name=source, values=algorithm.defaults),
            *layers,
            Layer(name=source, values=algorithm.fixed),
        ]
    )
