from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from gasloc_p2p.config import Config
from gasloc_p2p.core.errors import ConfigError
from gasloc_p2p.core.manifest import Manifest
from gasloc_p2p.founding import manifest_layer
from gasloc_p2p.train.data import Corpus
from gasloc_p2p.train.learner import Learner, build_learner
from gasloc_p2p.train.optimizers import (
    INNER_OPTIMIZERS,
    InnerOptimizer,
    register_inner_optimizer,
)
from gasloc_p2p.train.settings import DataConfig, InnerConfig, ModelConfig
from gasloc_p2p.train.stack import Stack
from gasloc_p2p.trial import try_inner_optimizer

TEXT = "".join(f"def square_{n}():\n    return {n * n}\n" for n in range(900)).encode()
CORPUS = Corpus.from_bytes(train=TEXT[:-4000], validation=TEXT[-4000:])
RATES = {"adamw": 2e-3, "sgd": 2e-2, "adafactor": 1e-2}

every_optimizer = pytest.mark.parametrize("name", RATES)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def learner(name: str, **inner: float) -> Learner:
    return build_learner(
        ModelConfig(),
        DataConfig(validation_tokens=1024),
        InnerConfig.model_validate({"optimizer": name, "batch_size": 2, **inner}),
        seed=3,
        peer_id="a",
        corpus=CORPUS,
    )


def test_every_built_in_optimizer_is_tested_here() -> None:
    assert set(RATES) == set(INNER_OPTIMIZERS.names)
    assert INNER_OPTIMIZERS.names[0] == InnerConfig().optimizer


@every_optimizer
def test_it_learns(name: str) -> None:
    trained = learner(name)
    before = trained.validation_loss()
    for _ in range(25):
        trained.step(RATES[name])
    assert trained.validation_loss() < 0.8 * before


@every_optimizer
def test_a_resumed_one_goes_on_bit_for_bit(name: str) -> None:
    one, other = learner(name), learner(name)
    for _ in range(3):
        one.step(RATES[name])
    other.load(one.theta())
    other.restore(one.state())
    for _ in range(3):
        assert one.step(RATES[name]) == other.step(RATES[name])
    assert torch.equal(one.theta(), other.theta())
    bare = learner(name)
    bare.load(one.theta())
    bare.samples.next_sample = one.samples.next_sample
    for each in (one, bare):
        each.step(RATES[name])
    assert not torch.equal(one.theta(), bare.theta()), "its state matters"


@every_optimizer
def test_a_state_of_zeros_is_as_good_as_none(name: str) -> None:
    fresh, restored = learner(name), learner(name)
    restored.restore(fresh.state())
    for each in (fresh, restored):
        each.step(RATES[name])
    assert torch.equal(fresh.theta(), restored.theta())


@every_optimizer
def test_a_gradient_that_is_not_finite_changes_nothing(name: str) -> None:
    plain, poisoned = learner(name), learner(name)
    for each in (plain, poisoned):
        each.step(RATES[name])
    good = poisoned.theta()
    poisoned.apply(torch.full_like(good, torch.inf), RATES[name])
    assert torch.equal(poisoned.theta(), good)
    for each in (plain, poisoned):
        each.step(RATES[name])
    assert torch.equal(plain.theta(), poisoned.theta())


@every_optimizer
def test_its_rate_rises_after_a_restart(name: str) -> None:
    restarted = learner(name)
    restarted.restart_optimizer(warmup_steps=3)
    left = []
    for _ in range(4):
        restarted.step(RATES[name])
        left.append(restarted.state().warmup_steps_left)
    assert left == [2, 1, 0, 0]
    bad = torch.full((restarted.elements,), torch.nan)
    restarted.restart_optimizer(warmup_steps=3)
    restarted.apply(bad, RATES[name])
    assert restarted.state().warmup_steps_left == 3


def test_the_step_of_sgd_is_the_plain_one() -> None:
    trained, twin = learner("sgd", beta1=0.0, clip_norm=1e9, weight_decay=0.0), learner("sgd")
    start = trained.theta()
    gradient, _ = twin.gradient()
    trained.step(0.5)
    assert torch.allclose(trained.theta(), start - 0.5 * gradient, atol=1e-7)
    assert not trained.state().tensors


def test_adafactor_keeps_little() -> None:
    kept = sum(part.numel() for part in learner("adafactor").state().tensors.values())
    assert kept < 0.1 * learner("adafactor").elements


def test_the_batched_engine_refuses_what_it_lacks() -> None:
    def stack(model: ModelConfig, inner: InnerConfig) -> None:
        Stack(model, DataConfig(), inner, seed=0, peer_ids=["a"], corpus=CORPUS, threads=1)

    with pytest.raises(ConfigError, match=r"inner\.optimizer = 'sgd'") as raised:
        stack(ModelConfig(), InnerConfig(optimizer="sgd"))
    assert "simulate.engine=exact" in raised.value.fix
    with pytest.raises(ConfigError, match=r"model\.name = 'their/model'"):
        stack(ModelConfig(name="their/model"), InnerConfig())


# One's own


def own(**changes: object) -> InnerOptimizer:
    values: dict[str, object] = {
        "make": lambda groups, inner: torch.optim.RMSprop(list(groups), lr=inner.lr),
        "kept": lambda parameter, inner: {"square_avg": tuple(parameter.shape)},
    }
    return InnerOptimizer(**{**values, **changes})  # type: ignore[arg-type]  # as a person may err


@pytest.fixture
def own_name(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(INNER_OPTIMIZERS, "_values", dict(INNER_OPTIMIZERS._values))
    return "rmsprop"


def test_ones_own_optimizer_trains_and_resumes(own_name: str) -> None:
    register_inner_optimizer(own_name, own())
    try_inner_optimizer(InnerConfig(optimizer=own_name))
    one, other = learner(own_name), learner(own_name)
    one.step(1e-3)
    other.load(one.theta())
    other.restore(one.state())
    for each in (one, other):
        each.step(1e-3)
    assert torch.equal(one.theta(), other.theta())


def test_one_that_does_not_say_what_it_keeps_is_refused(own_name: str) -> None:
    register_inner_optimizer(own_name, own(kept=lambda parameter, inner: {}))
    with pytest.raises(ConfigError, match="'rmsprop' does not work") as raised:
        try_inner_optimizer(InnerConfig(optimizer=own_name))
    assert "square_avg" in raised.value.why


def test_unknown_ones_are_refused() -> None:
    with pytest.raises(ConfigError, match="there is no inner optimizer 'lion'"):
        learner("lion")
    config = Config.model_validate({"inner": {"optimizer": "lion"}, "run": {"id": "x"}})
    manifest = Manifest(run_id="x", founded_s=0.0, sections=config.shared())
    with pytest.raises(ConfigError, match="uses the inner optimizer 'lion'"):
        manifest_layer(manifest)
