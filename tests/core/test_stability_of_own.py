"""Stability of rules and topologies of one's own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from gasloc_p2p.core.errors import ConfigError, UnstableError
from gasloc_p2p.core.outer import OuterRule, OuterState, register_outer_rule
from gasloc_p2p.core.stability import check_stability, covariance_map, disagreement_map, radius
from gasloc_p2p.core.topology import MayPair, build_graph, register_topology
from gasloc_p2p.core.types import Edge, PeerId
from tests.core.test_stability import RULE_NAMES, drawn_matrices, gossip_matrix, limits, names


def test_inner_modes_can_decide_when_b_has_rank_two() -> None:
    @register_outer_rule
    class Bump(OuterRule):
        name = "test-stability-bump"
        vectors = 2

        def outgoing(self, theta_start: Tensor, theta_h: Tensor, state: OuterState) -> Tensor:
            return torch.cat((theta_h, state.memory), dim=-1)

        def step(
            self, theta_start: Tensor, theta_h: Tensor, mixed: Tensor, state: OuterState
        ) -> tuple[Tensor, OuterState]:
            theta, memory = mixed.tensor_split(2, dim=-1)
            # Mode m gives the matrix [[0, 2 m], [2 (1 - m), 0]], of radius 2 sqrt(m (1 - m)).
            return 2 * memory, OuterState(memory=2 * (theta_start - theta))

    def found(peers: int | None) -> float:
        return radius("test-stability-bump", 0.7, 0.9, 1.0, "exponential", peers)

    for peers in (6, 8, 37, 64):
        graph = build_graph("exponential", seed=0, round=0, peers=names(peers))
        modes = np.linalg.eigvalsh(gossip_matrix(graph).numpy())[:-1]
        expected = 2 * np.sqrt(np.abs(modes * (1 - modes))).max()
        assert found(peers) == pytest.approx(expected)
    # Of the modes in [0, 1] the middle one decides; below 0 the radius is largest at -1/2.
    assert found(None) == pytest.approx(math.sqrt(3))
    cycle = radius("test-stability-bump", 0.7, 0.9, 0.5, "cycle")
    # Relaxed by half the modes fill [1/3, 1]: neither end has the 1 that the middle has.
    assert cycle == pytest.approx(1.0, abs=1e-4)
    assert max(2 * math.sqrt(m * (1 - m)) for m in (1 / 3, 1.0)) < 0.95


@pytest.mark.parametrize("size", [1, 3])
def test_a_rule_that_returns_a_wrong_size_is_refused(size: int) -> None:
    @register_outer_rule
    class WrongSize(OuterRule):
        name = f"test-stability-size-{size}"
        vectors = size

        def outgoing(self, theta_start: Tensor, theta_h: Tensor, state: OuterState) -> Tensor:
            return torch.cat((theta_h, state.memory), dim=-1)

        def step(
            self, theta_start: Tensor, theta_h: Tensor, mixed: Tensor, state: OuterState
        ) -> tuple[Tensor, OuterState]:
            return theta_h, state

    with pytest.raises(ConfigError, match="wrong size"):
        check_stability(WrongSize.name, 0.7, 0.9, 1.0, "pairs")


def sign(theta: Tensor) -> Tensor:
    return theta.sign()


def clipped(theta: Tensor) -> Tensor:
    return theta.clamp(-1000.0, 1000.0)


def normed(theta: Tensor) -> Tensor:
    return theta.div(1.0 + torch.linalg.vector_norm(theta))


def shifted(theta: Tensor) -> Tensor:
    return theta + 1e-3


def smeared(theta: Tensor) -> Tensor:
    return theta.mean().expand_as(theta)


@pytest.mark.parametrize("change", [sign, clipped, normed, shifted, smeared])
def test_a_rule_that_is_not_linear_is_told_so(change: Callable[[Tensor], Tensor]) -> None:
    @register_outer_rule
    class Bent(OuterRule):
        name = f"test-stability-{change.__name__}"

        def step(
            self, theta_start: Tensor, theta_h: Tensor, mixed: Tensor, state: OuterState
        ) -> tuple[Tensor, OuterState]:
            return change(mixed), state

    with pytest.raises(ConfigError, match="cannot be computed") as refusal:
        check_stability(Bent.name, 0.7, 0.9, 1.0, "pairs")
    assert "outer.force = true" in refusal.value.fix


def test_a_rule_of_ones_own_with_no_stable_value_is_told_to_change() -> None:
    @register_outer_rule
    class Doubling(OuterRule):
        name = "test-stability-doubling"

        def step(
            self, theta_start: Tensor, theta_h: Tensor, mixed: Tensor, state: OuterState
        ) -> tuple[Tensor, OuterState]:
            # The search for a stable learning rate must not try 0.
            return (1 / self.lr) * 2 * self.lr * theta_start, state

    with pytest.raises(UnstableError, match=r"radius 4\.000") as refusal:
        check_stability(Doubling.name, 0.7, 0.9, 1.0, "pairs")
    assert refusal.value.fix == "use another rule or topology"


def test_a_rule_of_ones_own_is_checked_like_any_other() -> None:
    @register_outer_rule
    class HeavyBall(OuterRule):
        name = "test-stability-heavy-ball"

        def step(
            self, theta_start: Tensor, theta_h: Tensor, mixed: Tensor, state: OuterState
        ) -> tuple[Tensor, OuterState]:
            memory = self.momentum * state.memory + mixed - theta_start
            return theta_start + self.lr * memory, OuterState(memory=memory)

    rule = HeavyBall.name
    a, b = disagreement_map(rule, 0.7, 0.9)
    assert a == pytest.approx(np.array([[1 - 0.7, 0.7 * 0.9], [-1.0, 0.9]]))
    assert b == pytest.approx(np.array([[0.7, 0.0], [1.0, 0.0]]))
    check_stability(rule, 0.7, 0.5, 1.0, "pairs")
    assert limits(rule, 0.7, 0.9, 1.0, "pairs") == {"momentum": 0.806, "lr": 0.379}
    # On the complete graph theta and m have trace 1 - eta + gamma and determinant gamma.
    assert radius(rule, 0.7, 0.9, 1.0, "complete") == pytest.approx(math.sqrt(0.9))
    # The roots are complex, of modulus sqrt(gamma), until one of them is -1 at eta = 2 (1 + gamma).
    assert limits(rule, 5.0, 0.9, 1.0, "complete")["lr"] == pytest.approx(3.8, abs=0.0011)


@register_topology("test-stability-own-pairs", redrawn=True)
def own_pairs(
    peers: Sequence[PeerId], /, *, seed: int, round: int, may_pair: MayPair
) -> Iterable[Edge]:
    return build_graph("pairs", seed=seed + 1, round=round, peers=peers).edges


def test_a_redrawn_topology_of_ones_own_is_measured() -> None:
    for peers in (4, 9, 64):
        own = radius("nesterov", 0.7, 0.9, 1.0, "test-stability-own-pairs", peers)
        # Every draw has as many pairs, so even the moments of one are exact.
        assert own == pytest.approx(radius("nesterov", 0.7, 0.9, 1.0, "pairs", peers), abs=1e-12)
    assert radius("nesterov", 0.7, 0.9, 1.0, "test-stability-own-pairs", 1) == 0.0
    many = radius("nesterov", 0.7, 0.9, 1.0, "test-stability-own-pairs")
    assert many == pytest.approx(radius("nesterov", 0.7, 0.9, 1.0, "pairs", 64), abs=1e-12)
    with pytest.raises(UnstableError, match="mean square disagreement"):
        check_stability("printed", 0.7, 0.9, 1.0, "test-stability-own-pairs")


def test_a_redrawn_topology_whose_moments_differ() -> None:
    """A star round a random hub: l1 and l2 by hand, and against swarms that are run."""

    @register_topology("test-stability-star", redrawn=True)
    def star(
        peers: Sequence[PeerId], /, *, seed: int, round: int, may_pair: MayPair
    ) -> Iterable[Edge]:
        # Every peer is the hub equally often.
        hub = peers[(seed + 7 * round) % len(peers)]
        return [(hub, peer) for peer in peers]

    count = 8
    # The hub keeps 1/n, the others 1 - 1/n: tr W and tr W^2 without the mean's 1.
    l1 = ((1 + (count - 1) ** 2) / count - 1) / (count - 1)
    squares = 1 + (count - 1) * ((count - 1) ** 2 + 2)
    l2 = (squares / count**2 - 1) / (count - 1)
    assert l1 != pytest.approx(l2, abs=0.01)
    for rule in RULE_NAMES:
        a, b = disagreement_map(rule, 0.7, 0.8)
        expected = np.abs(np.linalg.eigvals(covariance_map(a, b, l1, l2))).max()
        found = radius(rule, 0.7, 0.8, 1.0, "test-stability-star", count)
        assert found == pytest.approx(expected, abs=1e-9)
    # Where theta' = W theta, l2 alone counts.
    assert radius("dadam", 0.7, 0.0, 1.0, "test-stability-star", count) == pytest.approx(l2)
    matrices = drawn_matrices("test-stability-star", count, count)
    theta = torch.randn(count, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    theta -= theta.mean()
    share = (matrices @ theta).square().sum((1, 2)).mean() / theta.square().sum()
    assert share.item() == pytest.approx(l2, rel=1e-9)


def test_a_fixed_topology_of_ones_own_is_measured() -> None:
    @register_topology("test-stability-path")
    def path(
        peers: Sequence[PeerId], /, *, seed: int, round: int, may_pair: MayPair
    ) -> Iterable[Edge]:
        return pairwise(peers)

    for count in (2, 3, 10, 64):
        # Metropolis on a path: 1/3 to each neighbour, modes (1 + 2 cos(pi k / n)) / 3.
        slowest = 0.0 if count == 2 else (1 + 2 * math.cos(math.pi / count)) / 3
        found = radius("lookahead", 0.7, 0.0, 1.0, "test-stability-path", count)
        assert found == pytest.approx(slowest, abs=1e-9)
    assert radius("lookahead", 0.7, 0.0, 1.0, "test-stability-path") == pytest.approx(slowest)
    check_stability("nesterov", 0.7, 0.9, 1.0, "test-stability-path")
    with pytest.raises(UnstableError, match=r"many peers the peers' disagreement grows"):
        check_stability("nesterov", 1.8, 0.9, 1.0, "test-stability-path")
