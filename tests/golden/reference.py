"""Every algorithm written down a second time, in NumPy and fp64, straight from its definition.

Shares nothing with the package but the graphs. All arrays are [peers, parameters].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Weights = Callable[[int], Array]
"""Round to the mixing matrix W, [peers, peers]."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Peers that each fit their own noisy target with AdamW; non-linear through a tanh.

    Attributes:
        targets: what each peer pulls towards, [peers, parameters].
        start: common initial parameters, [parameters].
        local_steps: inner steps in a round.
        lr: inner learning rate.
    """

    targets: Array
    start: Array
    local_steps: int
    lr: float

    def gradient(self, theta: Array) -> Array:
        """Gradient of sum (tanh theta - target)^2 / 2, for all peers at once."""
        squashed = np.tanh(theta)
        gradient: Array = (squashed - self.targets) * (1 - squashed**2)
        return gradient


class AdamW:
    """AdamW with decoupled decay, betas .9 and .95, decay .1, epsilon 1e-8."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.first, self.second, self.steps = np.zeros(shape), np.zeros(shape), 0

    def move(self, theta: Array, gradient: Array, lr: float) -> Array:
        """Return theta after one step."""
        self.steps += 1
        self.first = 0.9 * self.first + 0.1 * gradient
        self.second = 0.95 * self.second + 0.05 * gradient**2
        mean = self.first / (1 - 0.9**self.steps)
        spread = np.sqrt(self.second / (1 - 0.95**self.steps)) + 1e-8
        moved: Array = theta * (1 - lr * 0.1) - lr * mean / spread
        return moved


def local_steps(problem: Problem, adam: AdamW, theta: Array) -> Array:
    """Return theta^H of every peer."""
    for _ in range(problem.local_steps):
        theta = adam.move(theta, problem.gradient(theta), problem.lr)
    return theta


def spread_out(problem: Problem) -> Array:
    """Return the initial parameters of every peer."""
    return np.tile(problem.start, (len(problem.targets), 1))


def gasloc(problem: Problem, weights: Weights, rounds: int) -> Array:
    """Mix theta^H, outer Nesterov step with eta .7 and gamma .9."""
    theta, adam = spread_out(problem), AdamW(problem.targets.shape)
    velocity = np.zeros_like(theta)
    for t in range(rounds):
        drop = theta - weights(t) @ local_steps(problem, adam, theta)
        velocity = 0.9 * velocity + drop
        theta = theta - 0.7 * (drop + 0.9 * velocity)
    return theta


def diloco(problem: Problem, weights: Weights, rounds: int) -> Array:
    """One shared model: Nesterov SGD on the mean pseudo-gradient; the graph does not matter."""
    peers = len(problem.targets)
    shared, velocity = problem.start.copy(), np.zeros_like(problem.start)
    adam = AdamW(problem.targets.shape)
    for _ in range(rounds):
        ends = local_steps(problem, adam, np.tile(shared, (peers, 1)))
        gradient = (shared - ends).mean(axis=0)
        velocity = 0.9 * velocity + gradient
        shared = shared - 0.7 * (gradient + 0.9 * velocity)
    return np.tile(shared, (peers, 1))


def local_dadam(problem: Problem, weights: Weights, rounds: int) -> Array:
    """x' = W x plus what AdamW did to the unmixed x; with one local step this is DAdam."""
    theta, adam = spread_out(problem), AdamW(problem.targets.shape)
    for t in range(rounds):
        progress = local_steps(problem, adam, theta) - theta
        theta = weights(t) @ theta + progress
    return theta


def noloco(problem: Problem, weights: Weights, rounds: int) -> Array:
    """m <- .5 m + .7 mean(g) + .7 (mean(phi) - phi); phi <- phi + m, means over the pair."""
    phi, adam = spread_out(problem), AdamW(problem.targets.shape)
    momentum = np.zeros_like(phi)
    for t in range(rounds):
        gradient = local_steps(problem, adam, phi) - phi
        mixing = weights(t)
        momentum = 0.5 * momentum + 0.7 * (mixing @ gradient) + 0.7 * (mixing @ phi - phi)
        phi = phi + momentum
    return phi


def ddp(problem: Problem, weights: Weights, rounds: int) -> Array:
    """One shared model: AdamW on everybody's mean gradient in every step."""
    peers = len(problem.targets)
    shared, adam = problem.start.copy(), AdamW(problem.start.shape)
    for _ in range(rounds * problem.local_steps):
        gradient = problem.gradient(np.tile(shared, (peers, 1))).mean(axis=0)
        shared = adam.move(shared, gradient, problem.lr)
    return np.tile(shared, (peers, 1))
