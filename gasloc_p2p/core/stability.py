"""Whether the disagreement between peers dies out, for an outer rule on a topology.

Without gradients each rule is a linear map on the peers' disagreement S = (theta, memory):
S' = A S + B W S, with A and B 2 x 2 and W acting on the peers. Source: docs/design.md section 2,
Stability.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from gasloc_p2p.core.errors import UnstableError
from gasloc_p2p.core.outer import outer_rule
from gasloc_p2p.core.topology import require_topology

Matrix: TypeAlias = NDArray[np.float64]
Rows: TypeAlias = tuple[tuple[float, float], tuple[float, float]]

_CLOSED_NEIGHBOURHOOD = {"pairs": 2, "ring": 3}
"""Peers that mix with each other on the random topologies, a peer itself counted."""

_ROUNDING = 1e-9
"""How far above 1 a radius of exactly 1 can come out in fp64, with room to spare."""

_LIMIT_PRECISION = 1e-4
"""Where bisection stops; a person is shown three decimals."""


def disagreement_map(rule: str, lr: float, momentum: float) -> tuple[Matrix, Matrix]:
    """Return A and B of S' = A S + B W S, fp64 [2, 2], where S stacks theta and the rule's memory.

    Source: docs/design.md section 2, the table of rules with g = 0.

    Raises:
        ConfigError: there is no such rule.
    """
    outer = outer_rule(rule, lr=lr, momentum=momentum)
    a, b = _COEFFICIENTS[outer.name](lr, momentum)
    return np.array(a, dtype=np.float64), np.array(b, dtype=np.float64)


def radius(
    rule: str, lr: float, momentum: float, alpha: float, topology: str, peers: int | None = None
) -> float:
    """Return the factor by which the peers' disagreement grows per round in the long run.

    On `pairs` and `ring`, which are drawn anew each round, it is the factor of the mean square
    disagreement E ||S||^2. On fixed graphs (`complete`, `cycle`, `none`) it is the factor of ||S||
    itself, the spectral radius of one round; on `none` nothing mixes and it is 1. Either way
    disagreement dies out below 1. A peer alone has no disagreement, hence 0.

    Args:
        rule: name of the outer rule.
        lr: eta, at least 0.
        momentum: gamma, in [0, 1).
        alpha: relaxation of the mix, in (0, 1].
        topology: name of the topology.
        peers: number of peers, or None for the limit of many.

    Raises:
        ConfigError: there is no such rule or topology.
        ValueError: a number is out of its range.
    """
    require_topology(topology)
    if not (lr >= 0 and 0 <= momentum < 1 and 0 < alpha <= 1):
        raise ValueError(f"out of range: lr {lr}, momentum {momentum}, alpha {alpha}")
    if peers is not None and peers < 1:
        raise ValueError(f"out of range: {peers} peers")
    a, b = disagreement_map(rule, lr, momentum)
    if peers == 1:
        return 0.0
    # (1 - alpha) I + alpha W moves I's share of the mix from B W to A.
    a, b = a + (1 - alpha) * b, alpha * b
    if topology in _CLOSED_NEIGHBOURHOOD:
        return _spectral_radius(covariance_map(a, b, _mean_mode(topology, peers)))
    return max(_spectral_radius(a + mode * b) for mode in _extreme_modes(topology, peers))


def check_stability(
    rule: str, lr: float, momentum: float, alpha: float, topology: str, peers: int | None = None
) -> None:
    """Refuse an outer configuration under which the peers drift apart.

    Arguments and their ranges are those of `radius`.

    Raises:
        UnstableError: the radius exceeds 1; its `fix` names the largest stable momentum at this
            learning rate and the largest stable learning rate at this momentum, where there is one.
        ConfigError: there is no such rule or topology.
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
    quantity = "mean square disagreement" if topology in _CLOSED_NEIGHBOURHOOD else "disagreement"
    swarm = "many peers" if peers is None else f"{peers} peers"
    raise UnstableError(
        f"the outer rule {rule!r} diverges on the topology {topology!r} (radius {growth:.3f})",
        why=f"with lr {lr:g}, momentum {momentum:g}, alpha {alpha:g} and {swarm} the peers' "
        f"{quantity} grows {growth:.3f}-fold per round, and it must not grow",
        fix=f"set {', or '.join(choices)}",
    )


def covariance_map(a: Matrix, b: Matrix, mean_mode: float) -> Matrix:
    """Return the map C -> C' = E[S' S'^T] of one round as an fp64 [4, 4] matrix on vec(C).

    C' = A C A^T + l1 (A C B^T + B C A^T) + l2 B C B^T, with l1 = E tr(W~) / (n - 1) and
    l2 = E tr(W~^2) / (n - 1) over the disagreement. It is exact for any n, since E W~ and E W~^2
    are multiples of the identity when the draw favours no peer. Weights uniform over closed
    neighbourhoods of one size k have tr(W) = tr(W^2) = n / k, hence l1 = l2.

    Args:
        a: A of the relaxed rule.
        b: B of the relaxed rule.
        mean_mode: l1 = l2 of the unrelaxed W.
    """
    mixed = np.kron(a, b) + np.kron(b, a) + np.kron(b, b)
    return np.asarray(np.kron(a, a) + mean_mode * mixed, dtype=np.float64)


def _mean_mode(topology: str, peers: int | None) -> float:
    """Return l1 = l2 for `pairs` or `ring` of two or more peers."""
    size = _CLOSED_NEIGHBOURHOOD[topology]
    if peers is None:
        return 1 / size
    # Of an odd number one peer goes unpaired and keeps its whole weight; two peers have no ring.
    unpaired = peers % 2 if topology == "pairs" else 0
    return max(0.0, (peers - size + unpaired) / (size * (peers - 1)))


def _extreme_modes(topology: str, peers: int | None) -> tuple[float, ...]:
    """Return the smallest and the largest eigenvalue of a fixed W over the disagreement.

    They suffice: B has rank one, so trace and determinant of A + mode B are affine in the mode, and
    the modes whose spectral radius stays below a bound form an interval.
    """
    if topology == "none":
        return (1.0,)
    if topology == "complete" or peers in (2, 3):
        return (0.0,)
    if peers is None:
        return (-1 / 3, 1.0)
    return tuple((1 + 2 * math.cos(math.tau * k / peers)) / 3 for k in (peers // 2, 1))


def _spectral_radius(matrix: Matrix) -> float:
    return float(np.abs(np.linalg.eigvals(matrix)).max())


def _largest_stable(stable: Callable[[float], bool], unstable: float) -> float | None:
    """Return the largest stable value below `unstable`, rounded down to three decimals.

    Stable values form an interval that starts at 0; None when it is empty.
    """
    if not stable(0.0):
        return None
    low, high = 0.0, unstable
    while high - low > _LIMIT_PRECISION:
        middle = (low + high) / 2
        low, high = (middle, high) if stable(middle) else (low, middle)
    return math.floor(low * 1000) / 1000


def _nesterov(eta: float, gamma: float) -> tuple[Rows, Rows]:
    pull = eta * (1 + gamma)
    return ((1 - pull, -eta * gamma**2), (1, gamma)), ((pull, 0), (-1, 0))


def _local(eta: float, gamma: float) -> tuple[Rows, Rows]:
    return ((0, 0), (0, gamma)), ((1, eta * gamma**2), (0, 0))


def _lookahead(_eta: float, gamma: float) -> tuple[Rows, Rows]:
    return ((0, 0), (1, 0)), ((1 + gamma, -gamma), (0, 0))


def _post_mix(_eta: float, gamma: float) -> tuple[Rows, Rows]:
    return ((0, -gamma), (0, 0)), ((1 + gamma, 0), (1, 0))


def _printed(_eta: float, gamma: float) -> tuple[Rows, Rows]:
    return ((gamma, -gamma), (1, 0)), ((1, 0), (0, 0))


def _dadam(_eta: float, _gamma: float) -> tuple[Rows, Rows]:
    return ((0, 0), (0, 0)), ((1, 0), (0, 0))


def _noloco(eta: float, gamma: float) -> tuple[Rows, Rows]:
    return ((1 - eta, gamma), (-eta, gamma)), ((eta, 0), (eta, 0))


_COEFFICIENTS: dict[str, Callable[[float, float], tuple[Rows, Rows]]] = {
    "nesterov": _nesterov,
    "local": _local,
    "lookahead": _lookahead,
    "post-mix": _post_mix,
    "printed": _printed,
    "dadam": _dadam,
    "noloco": _noloco,
}
