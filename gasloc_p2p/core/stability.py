"""Whether the disagreement between peers dies out, for an outer rule on a topology.

Without gradients a linear rule maps the peers' disagreement S = (theta, memory) to
S' = A S + B W S, with A and B 2 x 2 and W acting on the peers. A and B are read off the rule
itself, and the spectrum of W is known in closed form for every built-in topology. Source:
docs/design.md section 2, Stability.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gasloc_p2p.core.errors import ConfigError, UnstableError
from gasloc_p2p.core.outer import OuterRule, OuterState, outer_rule
from gasloc_p2p.core.topology import TOPOLOGIES, Graph, build_graph, exponential_hops

Matrix: TypeAlias = NDArray[np.float64]
Modes: TypeAlias = NDArray[np.float64]
"""Eigenvalues of W over the disagreement, fp64 [m]."""

_CLOSED_NEIGHBOURHOOD = MappingProxyType({"pairs": 2, "ring": 3})
"""Peers that mix with each other on the random topologies, a peer itself counted."""

_GIVEN_PEERS = 64
"""Peers of the graph that stands for the limit of many, where there is no closed form."""

_DRAWS = 200
"""Rounds over which the moments of W are averaged, where there is no closed form."""

_MODES_OF_A_LIMIT = 513
"""How densely an interval of modes is searched when its ends do not decide."""

_ROUNDING = 1e-9
"""How far above 1 a radius of exactly 1 can come out in fp64, with room to spare."""

_LIMIT_PRECISION = 1e-4
"""Where bisection stops; a person is shown three decimals."""

_SMALLEST = 1e-3
"""Where it begins: a learning rate of 0 is refused, and a rule may divide by it."""


def disagreement_map(rule: str, lr: float, momentum: float) -> tuple[Matrix, Matrix]:
    """Return A and B of S' = A S + B W S, fp64 [2, 2], where S stacks theta and the rule's memory.

    They are what the rule does to unit vectors when the local steps change nothing (g = 0).

    Raises:
        ConfigError: there is no such rule, it is not linear, or it returns tensors of a wrong size.
    """
    outer = outer_rule(rule, lr=lr, momentum=momentum)
    parts = outer.vectors
    inputs = torch.eye(2 + parts, dtype=torch.float64)[:, :, None]
    columns = [_one_round(outer, unit)[:, 0] for unit in inputs]
    linear = torch.stack(columns, dim=1)
    for scale in (1e-6, 1.0, 1e6):
        # Anything will do that is neither a multiple of a unit vector nor equal in all elements.
        probe = scale * torch.arange(1, 1 + 3 * (2 + parts), dtype=torch.float64).sin().view(-1, 3)
        expected = linear @ probe
        if not torch.allclose(_one_round(outer, probe), expected, rtol=1e-9, atol=1e-9 * scale):
            raise ConfigError(
                f"the stability of the outer rule {rule!r} cannot be computed",
                why="without gradients it is not a linear map of theta, memory and mix",
                fix="set outer.force = true to run it unchecked",
            )
    outgoing, step = linear[:parts, :2], linear[parts:]
    return step[:, :2].numpy(), (step[:, 2:] @ outgoing).numpy()


def _one_round(outer: OuterRule, inputs: Tensor) -> Tensor:
    """Return what goes out and what a round ends with, when its local steps change nothing.

    Args:
        outer: the rule.
        inputs: theta, memory, and the parts of the mix, fp64 [2 + vectors, P].

    Returns:
        The parts of `outgoing`, then theta and memory after the round, fp64 [vectors + 2, P].
    """
    theta, memory, *mix = inputs
    state = OuterState(memory=memory)
    outgoing = outer.outgoing(theta, theta, state)
    stepped, kept = outer.step(theta, theta, torch.cat(mix), state)
    found = (outgoing, stepped, kept.memory)
    size = len(theta)
    if [tuple(tensor.shape) for tensor in found] != [(outer.vectors * size,), (size,), (size,)]:
        raise ConfigError(
            f"the outer rule {outer.name!r} returns tensors of a wrong size",
            why="`outgoing` is `vectors` times as long as theta; `step` returns parameters and a "
            "memory of theta's shape",
            fix="mend `outgoing`, `step` or `vectors` of the rule",
        )
    return torch.cat(found).view(-1, size)


def radius(
    rule: str, lr: float, momentum: float, alpha: float, topology: str, peers: int | None = None
) -> float:
    """Return the factor by which the peers' disagreement grows per round in the long run.

    On topologies that are drawn anew each round (`pairs`, `ring`) it is the factor of the mean
    square disagreement E ||S||^2. On fixed ones it is the factor of ||S|| itself, the spectral
    radius of one round; on `none` nothing mixes and it is 1. Either way disagreement dies out below
    1. A peer alone has no disagreement, hence 0.

    Args:
        rule: name of the outer rule.
        lr: eta, at least 0.
        momentum: gamma, in [0, 1).
        alpha: relaxation of the mix, in (0, 1].
        topology: name of the topology.
        peers: number of peers, or None for the limit of many. For a topology that is not built in
            64 peers stand for the limit, and its graphs are drawn and measured.

    Raises:
        ConfigError: there is no such rule or topology, or the rule is not linear.
        ValueError: a number is out of its range.
    """
    redrawn = TOPOLOGIES.named(topology).redrawn
    if not (lr >= 0 and 0 <= momentum < 1 and 0 < alpha <= 1):
        raise ValueError(f"out of range: lr {lr}, momentum {momentum}, alpha {alpha}")
    if peers is not None and peers < 1:
        raise ValueError(f"out of range: {peers} peers")
    a, b = disagreement_map(rule, lr, momentum)
    if peers == 1:
        return 0.0
    # (1 - alpha) I + alpha W moves I's share of the mix from B W to A.
    a, b = a + (1 - alpha) * b, alpha * b
    if redrawn:
        return _spectral_radius(covariance_map(a, b, *_moments(topology, peers)))
    modes = _modes(topology, peers)
    if np.linalg.matrix_rank(b, rtol=1e-9) < 2:
        # Trace and determinant of A + mode B are then affine in the mode, and the modes whose
        # spectral radius stays below a bound form an interval, so its ends decide.
        modes = np.array([modes.min(), modes.max()])
    return _spectral_radius(a + modes[:, None, None] * b)


def check_stability(
    rule: str, lr: float, momentum: float, alpha: float, topology: str, peers: int | None = None
) -> None:
    """Refuse an outer configuration under which the peers drift apart.

    Arguments and their ranges are those of `radius`.

    Raises:
        UnstableError: the radius exceeds 1; its `fix` names the largest stable momentum at this
            learning rate and the largest stable learning rate at this momentum, where there is one.
        ConfigError: there is no such rule or topology, or the rule is not linear.
        ValueError: a number is out of its range.
    """
    growth = radius(rule, lr, momentum, alpha, topology, peers)
    if growth <= 1 + _ROUNDING:
        return

    def stable_momentum(value: float) -> bool:
        return radius(rule, lr, value, alpha, topology, peers) <= 1 + _ROUNDING

    def stable_lr(value: float) -> bool:
        return radius(rule, value, momentum, alpha, topology, peers) <= 1 + _ROUNDING

    limits = {
        "outer.momentum": _largest_stable(stable_momentum, momentum),
        "outer.lr": _largest_stable(stable_lr, lr),
    }
    choices = [f"{key} to at most {value:g}" for key, value in limits.items() if value is not None]
    redrawn = TOPOLOGIES.named(topology).redrawn
    quantity = "mean square disagreement" if redrawn else "disagreement"
    swarm = "many peers" if peers is None else f"{peers} peers"
    raise UnstableError(
        f"the outer rule {rule!r} diverges on the topology {topology!r} (radius {growth:.3f})",
        why=f"with lr {lr:g}, momentum {momentum:g}, alpha {alpha:g} and {swarm} the peers' "
        f"{quantity} grows {growth:.3f}-fold per round, and it must not grow",
        fix=f"set {', or '.join(choices)}" if choices else "use another rule or topology",
    )


def covariance_map(a: Matrix, b: Matrix, l1: float, l2: float) -> Matrix:
    """Return the map C -> C' = E[S' S'^T] of one round as an fp64 [4, 4] matrix on vec(C).

    C' = A C A^T + l1 (A C B^T + B C A^T) + l2 B C B^T. It is exact for any number of peers when
    rounds are drawn independently and the draw favours no peer: E W and E W^2 are then multiples of
    the identity over the disagreement.

    Args:
        a: A of the relaxed rule.
        b: B of the relaxed rule.
        l1: E tr(W~) / (n - 1), where W~ is the unrelaxed W over the disagreement.
        l2: E tr(W~^2) / (n - 1).
    """
    once = np.kron(a, b) + np.kron(b, a)
    return np.asarray(np.kron(a, a) + l1 * once + l2 * np.kron(b, b), dtype=np.float64)


@lru_cache(maxsize=128)
def _moments(topology: str, peers: int | None) -> tuple[float, float]:
    """Return l1 and l2 of a redrawn topology for two or more peers.

    Weights uniform over closed neighbourhoods of one size k have tr(W) = tr(W^2) = n / k, hence
    l1 = l2 for the built-in ones.
    """
    size = _CLOSED_NEIGHBOURHOOD.get(topology)
    if size is None:
        count = peers or _GIVEN_PEERS
        drawn = [_gossip_matrix(_graph(topology, count, round=t)) for t in range(_DRAWS)]
        traces = [(np.trace(w), np.square(w).sum()) for w in drawn]
        # The mean's own eigenvalue of 1 is no part of the disagreement.
        l1, l2 = (np.mean(traces, axis=0) - 1) / (count - 1)
        return float(l1), float(l2)
    if peers is None:
        return 1 / size, 1 / size
    # Of an odd number one peer goes unpaired and keeps its whole weight; two peers have no ring.
    unpaired = peers % 2 if topology == "pairs" else 0
    mean_mode = max(0.0, (peers - size + unpaired) / (size * (peers - 1)))
    return mean_mode, mean_mode


@lru_cache(maxsize=128)
def _modes(topology: str, peers: int | None) -> Modes:
    """Return the eigenvalues of a fixed W over the disagreement of two or more peers."""
    closed_form = _CLOSED_FORMS.get(topology)
    if closed_form is not None:
        return closed_form(peers)
    graph = _graph(topology, peers or _GIVEN_PEERS, round=0)
    # The largest one is the mean's.
    return np.asarray(np.linalg.eigvalsh(_gossip_matrix(graph))[:-1], dtype=np.float64)


def _cycle_modes(peers: int | None) -> Modes:
    return _limit_modes(-1 / 3) if peers is None else _circulant_modes(peers, (1,))


def _exponential_modes(peers: int | None) -> Modes:
    """Return the modes of `exponential`.

    With many peers a mode is the mean of cos(2^j x) over j, which is least where x is a third of a
    turn, since doubling only mirrors it.
    """
    if peers is None:
        return _limit_modes(-1 / 2)
    return _circulant_modes(peers, exponential_hops(peers))


def _limit_modes(lowest: float) -> Modes:
    return np.linspace(lowest, 1.0, _MODES_OF_A_LIMIT)


def _circulant_modes(peers: int, hops: Iterable[int]) -> Modes:
    """Return the modes when every peer mixes evenly with those `hops` places away."""
    reached = {place % peers for hop in hops for place in (hop, -hop)}
    waves = np.arange(1, peers // 2 + 1)
    total = np.ones(len(waves))
    for place in reached:
        total += np.cos(math.tau * waves * place / peers)
    return total / (1 + len(reached))


_CLOSED_FORMS: Mapping[str, Callable[[int | None], Modes]] = MappingProxyType(
    {
        "complete": lambda peers: np.zeros(1),
        "cycle": _cycle_modes,
        "exponential": _exponential_modes,
        "none": lambda peers: np.ones(1),
    }
)


def _graph(topology: str, peers: int, *, round: int) -> Graph:
    return build_graph(topology, seed=0, round=round, peers=[f"peer {i}" for i in range(peers)])


def _gossip_matrix(graph: Graph) -> Matrix:
    """Return W as fp64 [n, n]."""
    place = {peer: index for index, peer in enumerate(graph.peers)}
    matrix = np.eye(len(place))
    for a, b in graph.edges:
        i, j, weight = place[a], place[b], graph.weight(a, b)
        matrix[[i, j], [j, i]] = weight
        matrix[[i, j], [i, j]] -= weight
    return matrix


def _spectral_radius(matrix: Matrix) -> float:
    return float(np.abs(np.linalg.eigvals(matrix)).max())


def _largest_stable(stable: Callable[[float], bool], unstable: float) -> float | None:
    """Return the largest stable value below `unstable`, rounded down to three decimals.

    Stable values are taken to form an interval that starts near 0; None when it is empty.
    """
    if unstable <= _SMALLEST or not stable(_SMALLEST):
        return None
    low, high = _SMALLEST, unstable
    while high - low > _LIMIT_PRECISION:
        middle = (low + high) / 2
        low, high = (middle, high) if stable(middle) else (low, middle)
    return math.floor(low * 1000) / 1000
