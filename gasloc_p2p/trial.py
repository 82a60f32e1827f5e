"""Tries what a configuration names on small inputs, so that mistakes show before a run begins.

Built-in rules, topologies and codecs pass; what it is for are those that people write themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from gasloc_p2p.core.codecs import Codec
from gasloc_p2p.core.errors import ConfigError, GaslocError
from gasloc_p2p.core.outer import OuterRule, OuterState
from gasloc_p2p.core.topology import build_graph
from gasloc_p2p.extensions import place_of

ELEMENTS = 5
SWARMS = (1, 2, 3, 8)
"""Numbers of peers with which a topology is tried."""


def try_rule(rule: OuterRule) -> None:
    """Take two rounds with a rule, on an fp32 vector.

    Raises:
        ConfigError: it fails, returns what it must not, or changes one of its arguments.
    """
    with _blaming("outer rule", rule.name):
        theta, theta_h, mixed = torch.split(torch.linspace(-1, 1, 3 * ELEMENTS), ELEMENTS)
        mixed = mixed.repeat(rule.vectors)
        state = rule.initial(theta)
        for _ in range(2):
            given = (theta, theta_h, mixed, state.memory)
            before = [tensor.clone() for tensor in given]
            _check(rule.outgoing(theta, theta_h, state), "outgoing", rule.vectors * ELEMENTS)
            returned = rule.step(theta, theta_h, mixed, state)
            if any(not torch.equal(now, then) for now, then in zip(given, before, strict=True)):
                raise ValueError("it changes one of the tensors that it is given")
            if not (isinstance(returned, tuple) and len(returned) == 2):
                raise TypeError("`step` must return the parameters and an OuterState")
            theta, state = returned
            if not isinstance(state, OuterState):
                raise TypeError("the second value that `step` returns must be an OuterState")
            _check(theta, "step", ELEMENTS)
            _check(state.memory, "memory", ELEMENTS)


def try_topology(name: str) -> None:
    """Build the graphs of two rounds for a few sizes of swarm.

    Raises:
        ConfigError: it fails, or returns what is no list of edges between the peers.
    """
    with _blaming("topology", name):
        for peers in SWARMS:
            for round in range(2):
                build_graph(name, seed=0, round=round, peers=map(str, range(peers)))


def try_codec(codec: Codec) -> None:
    """Send a vector through a codec.

    Raises:
        ConfigError: it fails, or sizes and types do not fit together.
    """
    with _blaming("codec", codec.name):
        x = torch.linspace(-1, 1, ELEMENTS)
        scales = codec.scales(x)
        codes = memoryview(codec.encode(x, scales=scales, partner_scales=scales))
        if codes.nbytes != codec.code_bytes(ELEMENTS):
            raise ValueError(
                f"`encode` made {codes.nbytes} bytes, and `code_bytes` says "
                f"{codec.code_bytes(ELEMENTS)}"
            )
        decoded = codec.decode(codes, own=x, scales=scales, partner_scales=scales)
        _check(decoded, "decode", ELEMENTS)


def _check(found: Tensor, name: str, elements: int) -> None:
    """Check what came back under `name`.

    Raises:
        TypeError: it is no fp32 tensor.
        ValueError: it has another shape, or values that are not finite.
    """
    if not isinstance(found, Tensor) or found.dtype != torch.float32:
        kind = found.dtype if isinstance(found, Tensor) else type(found).__name__
        raise TypeError(f"`{name}` must be of torch.float32, as what it is made from, not {kind}")
    if found.shape != (elements,):
        raise ValueError(f"`{name}` has shape {_list(found.shape)}, expected {_list((elements,))}")
    if not torch.isfinite(found).all():
        raise ValueError(f"`{name}` has values that are not finite")


def _list(shape: Sequence[int]) -> str:
    return str(list(shape))


@contextmanager
def _blaming(kind: str, name: str) -> Iterator[None]:
    """Turn whatever a person's code raises, or does wrong, into an error that says so."""
    try:
        yield
    except GaslocError:
        raise
    except Exception as error:  # a person's file may raise anything
        place = place_of(error)
        raise ConfigError(
            f"the {kind} {name!r} does not work" + (f" ({place})" if place else ""),
            why=f"{type(error).__name__}: {error}",
            fix="mend it; docs/tutorial-research.md shows one that works",
        ) from error
