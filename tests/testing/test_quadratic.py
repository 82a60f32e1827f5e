"""The noisy quadratic is a model like any other: deterministic, restorable, and it learns."""

from __future__ import annotations

from statistics import fmean

import pytest
import torch

from gasloc_p2p.core.substrate import LocalModel, ModelState
from gasloc_p2p.testing.quadratic import NoisyQuadratic


def model(peer_id: str = "a", seed: int = 0, noise: float = 1.0) -> NoisyQuadratic:
    return NoisyQuadratic(seed=seed, peer_id=peer_id, noise=noise)


def test_it_is_a_local_model() -> None:
    checked: LocalModel = model()
    assert sum(checked.sizes) == checked.elements == checked.theta().numel()
    assert checked.theta().dtype is torch.float32


def test_without_noise_it_comes_to_its_target() -> None:
    quadratic = model(noise=0.0)
    losses = [quadratic.step(0.5) for _ in range(100)]
    assert losses == sorted(losses, reverse=True)
    assert quadratic.validation_loss() < 1e-6 * losses[0]


def test_peers_share_all_but_their_noise() -> None:
    a, b, again, other = model("a"), model("b"), model("a"), model("a", seed=1)
    assert a.schema_digest == b.schema_digest
    assert torch.equal(a.theta(), b.theta())
    first = [quadratic.step(0.1) for quadratic in (a, b, again, other)]
    assert first[0] == first[1] == first[2] != first[3], "the loss is told without the noise"
    assert torch.equal(a.theta(), again.theta())
    assert not torch.equal(a.theta(), b.theta())


def test_the_noise_has_the_size_that_it_says() -> None:
    quadratic = model(noise=3.0)
    plain = model(noise=0.0)
    found = []
    for _ in range(200):
        start = torch.zeros(quadratic.elements)
        for one in (quadratic, plain):
            one.load(start)
            one.step(1.0)
        found.append(quadratic.theta() - plain.theta())
    noise = torch.stack(found)
    assert noise.std().item() == pytest.approx(3.0, rel=0.05)
    assert abs(noise.mean().item()) < 0.15
    together = torch.corrcoef(noise.T) - torch.eye(quadratic.elements)
    assert fmean(together.abs().flatten().tolist()) < 0.1


def test_a_restored_model_goes_on_bit_for_bit() -> None:
    quadratic = model()
    for _ in range(5):
        quadratic.step(0.1)
    theta, state = quadratic.theta(), quadratic.state()
    other = model()
    other.load(theta)
    other.restore(state)
    for one in (quadratic, other):
        one.step(0.1)
    assert torch.equal(quadratic.theta(), other.theta())
    quadratic.restart_optimizer(warmup_steps=20)
    assert quadratic.restarts == 1
    with pytest.raises(ValueError, match="moments"):
        quadratic.restore(
            ModelState(tensors={"m": torch.zeros(1)}, next_sample=0, warmup_steps_left=0)
        )


def test_nothing_is_shared_with_the_caller() -> None:
    quadratic = model()
    given = torch.ones(quadratic.elements)
    quadratic.load(given)
    given.zero_()
    quadratic.theta().zero_()
    assert torch.equal(quadratic.theta(), torch.ones(quadratic.elements))
