"""A model that takes over a saved state goes on as the one that was never interrupted, bit for bit.

The same tests run for a learner and for a row of a stack.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeAlias

import pytest
import torch

from gasloc_p2p.core.substrate import LocalModel, ModelState
from gasloc_p2p.train.data import Corpus
from gasloc_p2p.train.inner_state import MOMENTS, STEP
from gasloc_p2p.train.learner import build_learner
from gasloc_p2p.train.settings import DataConfig, InnerConfig, ModelConfig
from gasloc_p2p.train.stack import Stack

LR = 2e-3
TEXT = "".join(f"def square_{n}():\n    return {n * n}\n" for n in range(900)).encode()
CORPUS = Corpus.from_bytes(train=TEXT[:-4000], validation=TEXT[-4000:])
DATA = DataConfig(validation_tokens=1024)
INNER = InnerConfig(batch_size=2)
PEERS = ("a", "b", "c")

Build: TypeAlias = Callable[[], LocalModel]


def learner() -> LocalModel:
    return build_learner(ModelConfig(), DATA, INNER, seed=3, peer_id="b", corpus=CORPUS)


def replica() -> LocalModel:
    stack = Stack(ModelConfig(), DATA, INNER, seed=3, peer_ids=PEERS, corpus=CORPUS, threads=1)
    return stack.replicas[1]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=[learner, replica], ids=lambda build: build.__name__)
def build(request: pytest.FixtureRequest) -> Build:
    made: Build = request.param
    return made


def trained(build: Build, steps: int) -> LocalModel:
    model = build()
    for _ in range(steps):
        model.step(LR)
    return model


def resumed(build: Build, saved: LocalModel) -> LocalModel:
    model = build()
    model.load(saved.theta())
    model.restore(saved.state())
    return model


def go_on_alike(a: LocalModel, b: LocalModel, *, steps: int = 3) -> None:
    for _ in range(steps):
        assert a.step(LR) == b.step(LR)
        assert torch.equal(a.theta(), b.theta())
    assert_equal(a.state(), b.state())


def assert_equal(a: ModelState, b: ModelState) -> None:
    assert a.tensors.keys() == b.tensors.keys()
    for name, tensor in a.tensors.items():
        assert torch.equal(tensor, b.tensors[name]), name
    assert (a.next_sample, a.warmup_steps_left) == (b.next_sample, b.warmup_steps_left)


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_a_resumed_model_goes_on_bit_for_bit(build: Build, steps: int) -> None:
    model = trained(build, steps)
    go_on_alike(model, resumed(build, model))


def test_without_its_state_it_would_not(build: Build) -> None:
    model = trained(build, 2)
    bare = build()
    bare.load(model.theta())
    model.step(LR)
    bare.step(LR)
    assert not torch.equal(model.theta(), bare.theta())


def test_the_state_is_a_copy_of_moments_steps_and_cursor(build: Build) -> None:
    model = trained(build, 2)
    state = model.state()
    assert set(state.tensors) == {*MOMENTS, STEP}
    for name in MOMENTS:
        assert state.tensors[name].shape == (model.elements,)
        assert state.tensors[name].abs().sum() > 0
    assert set(state.tensors[STEP].tolist()) == {2.0}
    assert state.next_sample == 4
    before = {name: tensor.clone() for name, tensor in state.tensors.items()}
    model.step(LR)
    for name, tensor in before.items():
        assert torch.equal(state.tensors[name], tensor)
    assert not torch.equal(model.state().tensors[MOMENTS[0]], before[MOMENTS[0]])


def test_a_restored_state_is_a_copy_too(build: Build) -> None:
    state = trained(build, 2).state()
    before = {name: tensor.clone() for name, tensor in state.tensors.items()}
    model = build()
    model.restore(state)
    model.step(LR)
    for name, tensor in before.items():
        assert torch.equal(state.tensors[name], tensor)


def test_restore_leaves_the_parameters(build: Build) -> None:
    model = build()
    before = model.theta()
    model.restore(trained(build, 2).state())
    assert torch.equal(model.theta(), before)


def other(state: ModelState, name: str, tensor: torch.Tensor) -> ModelState:
    return replace(state, tensors={**state.tensors, name: tensor})


BAD: dict[str, Callable[[ModelState], ModelState]] = {
    "expected": lambda state: other(state, "extra", torch.zeros(1)),
    "not \\['step'\\]": lambda state: replace(state, tensors={STEP: state.tensors[STEP]}),
    "exp_avg_sq: .* \\[7\\]": lambda state: other(state, MOMENTS[1], torch.zeros(7)),
    "exp_avg: .*float64": lambda state: other(
        state, MOMENTS[0], state.tensors[MOMENTS[0]].double()
    ),
    "step: ": lambda state: other(state, STEP, torch.zeros(len(state.tensors[STEP]) + 1)),
    "samples": lambda state: replace(state, next_sample=-1),
    "steps": lambda state: replace(state, warmup_steps_left=-1),
}


@pytest.mark.parametrize("why", BAD)
def test_a_state_of_another_model_is_refused_and_changes_nothing(build: Build, why: str) -> None:
    model, untouched = trained(build, 2), trained(build, 2)
    with pytest.raises(ValueError, match=why):
        model.restore(BAD[why](trained(build, 3).state()))
    go_on_alike(model, untouched, steps=1)


def test_a_restarted_optimizer_is_a_fresh_one_whose_lr_rises(build: Build) -> None:
    model, fresh = trained(build, 3), build()
    fresh.load(model.theta())
    fresh.restore(replace(fresh.state(), next_sample=model.state().next_sample))
    model.restart_optimizer(warmup_steps=3)
    assert model.state().warmup_steps_left == 3
    assert model.state().next_sample == 6, "the cursor is not touched"
    for share in (1 / 4, 2 / 4, 3 / 4, 1.0, 1.0):
        assert model.step(LR) == fresh.step(LR * share)
        assert torch.equal(model.theta(), fresh.theta())
    assert model.state().warmup_steps_left == 0


def test_a_restart_without_warm_up_is_only_fresh(build: Build) -> None:
    model, fresh = trained(build, 3), build()
    fresh.load(model.theta())
    fresh.restore(replace(fresh.state(), next_sample=model.state().next_sample))
    model.restart_optimizer(warmup_steps=0)
    go_on_alike(model, fresh)


def test_a_warm_up_goes_on_after_a_resume(build: Build) -> None:
    model = trained(build, 2)
    model.restart_optimizer(warmup_steps=4)
    model.step(LR)
    go_on_alike(model, resumed(build, model), steps=5)


def test_a_step_that_was_not_taken_does_not_count_for_the_warm_up(build: Build) -> None:
    model = trained(build, 1)
    good = model.theta()
    model.restart_optimizer(warmup_steps=3)
    model.load(torch.full_like(good, torch.nan))
    model.step(LR)
    assert model.state().warmup_steps_left == 3
    model.load(good)
    model.step(LR)
    assert model.state().warmup_steps_left == 2


def test_a_row_takes_over_the_state_of_another_and_leaves_the_rest() -> None:
    stack = Stack(ModelConfig(), DATA, INNER, seed=3, peer_ids=PEERS, corpus=CORPUS, threads=1)
    first, second, third = stack.replicas
    for _ in range(2):
        stack.step([0, 2], [LR, LR])
    before = third.state()
    second.restore(first.state())
    assert_equal(second.state(), first.state())
    first.restart_optimizer(warmup_steps=2)
    assert second.state().tensors[STEP].item() == 2
    assert_equal(third.state(), before)
