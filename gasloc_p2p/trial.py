"""Tries what a configuration names on small inputs, so that mistakes show before a run begins.

Built-in ones pass; what it is for are those that people write themselves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from gasloc_p2p.core.codecs import Codec, Coder, Keys, Layout
from gasloc_p2p.core.errors import ConfigError, GaslocError
from gasloc_p2p.core.outer import OuterRule, OuterState
from gasloc_p2p.core.topology import build_graph
from gasloc_p2p.core.types import BytesLike
from gasloc_p2p.extensions import place_of
from gasloc_p2p.train.optimizers import INNER_OPTIMIZERS, parameter_groups
from gasloc_p2p.train.settings import InnerConfig

ELEMENTS = 5
SENT_ELEMENTS = 301
SENT_CHUNK_BYTES = 256
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
            stepped, kept = returned
            if not isinstance(kept, OuterState):
                raise TypeError("the second value that `step` returns must be an OuterState")
            _check(stepped, "step", ELEMENTS)
            _check(kept.memory, "memory", ELEMENTS)
            _check_part(rule, given, stepped, kept)
            theta, state = stepped, kept


def _check_part(
    rule: OuterRule, given: Sequence[Tensor], stepped: Tensor, kept: OuterState
) -> None:
    """Check that a step over half of the parameters is half of the step over all of them.

    Args:
        rule: which.
        given: theta, theta_h, the mix and the memory before the step.
        stepped, kept: what the step over all parameters returned.

    Raises:
        ValueError: it is not.
    """
    theta, theta_h, mixed, memory = given
    half = slice(ELEMENTS // 2)
    part, state = rule.step(
        theta[half],
        theta_h[half],
        mixed.view(rule.vectors, -1)[:, half].flatten(),
        OuterState(memory=memory[half]),
    )
    for found, whole in ((part, stepped), (state.memory, kept.memory)):
        if not torch.allclose(found, whole[half], rtol=1e-4, atol=1e-6):
            raise ValueError("what `step` does to a parameter depends on other parameters")


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
    """Exchange two vectors that are close to each other, but in one place, through a codec.

    Raises:
        ConfigError: it fails, sizes do not fit together, or the two sides do not move by the same
            amount.
    """
    with _blaming("codec", codec.name):
        x = torch.linspace(-1, 1, SENT_ELEMENTS)
        y = x + torch.linspace(0.02, -0.01, SENT_ELEMENTS)
        y[SENT_ELEMENTS // 2] = 1.0
        layout = codec.layout(SENT_ELEMENTS, SENT_CHUNK_BYTES)
        motion = torch.full((layout.all_blocks,), 0.01) if codec.checked else None
        offers = [
            codec.offer(
                vector,
                motion=motion,
                keys=Keys(round=1, own=own),
                chunk_bytes=SENT_CHUNK_BYTES,
            )
            for own, vector in enumerate((x, y))
        ]
        for offer in offers:
            if offer.layout != layout:
                raise ValueError(f"an offer has {offer.layout}, and `layout` says {layout}")
            _check_size(offer.scales, "scales", layout.scale_bytes)
        mine, theirs = (
            offer.coder(partner.scales)
            for offer, partner in zip(offers, reversed(offers), strict=True)
        )
        for index in range(layout.chunks):
            _exchange_chunk(mine, theirs, layout, index)
        added, taken = torch.zeros(SENT_ELEMENTS), torch.zeros(SENT_ELEMENTS)
        mine.add_difference(added, 0.5)
        theirs.add_difference(taken, 0.5)
        _check(added, "add_difference", SENT_ELEMENTS)
        if not torch.equal(added, -taken):
            raise ValueError("the two sides of an edge do not move by the same amount")
        for coder in (mine, theirs):
            if not math.isfinite(coder.square_distance()):
                raise ValueError("`square_distance` is not finite")


def try_inner_optimizer(inner: InnerConfig) -> None:
    """Take two steps with an inner optimizer, and look at what it remembers of them.

    Raises:
        ConfigError: there is none of this name, it fails, or it keeps other tensors than it says,
            so that a checkpoint would not hold all of them.
    """
    kind = INNER_OPTIMIZERS.named(inner.optimizer)
    with _blaming("inner optimizer", inner.optimizer):
        trainable = [nn.Parameter(torch.linspace(-1, 1, 6).view(2, 3)), nn.Parameter(torch.ones(3))]
        optimizer = kind.make(parameter_groups(trainable, inner), inner)
        for _ in range(2):
            for parameter in trainable:
                parameter.grad = parameter.detach().clone()
            optimizer.step()
        for parameter in trainable:
            kept = optimizer.state.get(parameter, {})
            found = {name: tuple(part.shape) for name, part in kept.items() if part is not None}
            said = dict(kind.kept(parameter, inner)) | ({"step": ()} if kind.counts else {})
            if found != said:
                raise ValueError(f"it keeps {found} of a parameter, and says {said}")
            if not torch.isfinite(parameter).all():
                raise ValueError("its step leads to values that are not finite")


def _exchange_chunk(mine: Coder, theirs: Coder, layout: Layout, index: int) -> None:
    """Send a chunk both ways, and repair what was not understood."""
    sides = ((mine, theirs), (theirs, mine))
    bad = 0
    for sender, receiver in sides:
        codes = sender.encode(index)
        _check_size(codes, "encode", layout.code_sizes[index])
        bad |= int.from_bytes(receiver.take(index, codes), "little")
    if not bad:
        return
    blocks = bad.to_bytes(layout.bitmap_bytes(index), "little")
    for sender, receiver in sides:
        repair = sender.repair(index, blocks)
        _check_size(repair, "repair", layout.repair_bytes(index, blocks))
        if not receiver.take_repair(index, blocks, repair):
            raise ValueError("`take_repair` found blocks that `take` had not found")


def _check_size(data: BytesLike, name: str, size: int) -> None:
    """Check how many bytes came from `name`.

    Raises:
        ValueError: the layout says another number.
    """
    found = memoryview(data).nbytes
    if found != size:
        raise ValueError(f"`{name}` made {found} bytes, and `layout` says {size}")


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
