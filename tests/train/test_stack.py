"""Replicas that train as rows of one matrix do what separate learners do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from gasloc_p2p.core.errors import DataError
from gasloc_p2p.train.data import Corpus
from gasloc_p2p.train.learner import Learner, build_learner
from gasloc_p2p.train.llama import StackedLlama
from gasloc_p2p.train.model import PRESETS
from gasloc_p2p.train.settings import DataConfig, InnerConfig, ModelConfig, PresetName
from gasloc_p2p.train.stack import Stack

LR = 2e-3
TEXT = "".join(f"def square_{n}():\n    return {n * n}\n" for n in range(900)).encode()
CORPUS = Corpus.from_bytes(train=TEXT[:-4000], validation=TEXT[-4000:])
PEERS = tuple("abcdefg")
DATA = DataConfig(validation_tokens=1024)
INNER = InnerConfig(batch_size=2)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def stack(preset: PresetName = "nano", *, inner: InnerConfig = INNER, threads: int = 1) -> Stack:
    return Stack(
        ModelConfig(preset=preset),
        DATA,
        inner,
        seed=3,
        peer_ids=PEERS,
        corpus=CORPUS,
        threads=threads,
    )


def learners(preset: PresetName = "nano", *, inner: InnerConfig = INNER) -> list[Learner]:
    return [
        build_learner(ModelConfig(preset=preset), DATA, inner, seed=3, peer_id=peer, corpus=CORPUS)
        for peer in PEERS
    ]


def all_rows(stack: Stack) -> Tensor:
    return torch.stack([replica.theta() for replica in stack.replicas])


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize(("preset", "steps"), [("nano", 40), ("tiny", 5)])
def test_every_row_follows_its_learner(preset: PresetName, steps: int) -> None:
    batched, apart = stack(preset), learners(preset)
    start = apart[0].theta()
    assert torch.equal(batched.replicas[0].theta(), start)
    for step in range(steps):
        lrs = [LR * (1 + row / 10) * (step + 1) / steps for row in range(len(PEERS))]
        losses = batched.step(range(len(PEERS)), lrs)
        expected = [learner.step(lr) for learner, lr in zip(apart, lrs, strict=True)]
        assert losses == pytest.approx(expected, rel=1e-4)
    for replica, learner in zip(batched.replicas, apart, strict=True):
        assert distance(replica.theta() - start, learner.theta() - start) < 1e-3
        assert distance(replica.theta(), learner.theta()) < 1e-4
        assert replica.validation_loss() == pytest.approx(learner.validation_loss(), rel=1e-4)
        assert replica.elements == learner.elements
        assert replica.schema_digest == learner.schema_digest


def test_rows_move_alone_and_only_when_asked() -> None:
    batched, apart = stack(), learners()
    before = all_rows(batched)
    asked = [5, 1, 2]
    losses = batched.step(asked, [LR] * 3)
    assert losses == pytest.approx([apart[row].step(LR) for row in asked], rel=1e-4)
    after = all_rows(batched)
    for row in range(len(PEERS)):
        assert torch.equal(before[row], after[row]) == (row not in asked)
    batched.replicas[0].step(LR)
    apart[0].step(LR)
    assert distance(batched.replicas[0].theta(), apart[0].theta()) < 1e-5


def test_a_row_with_a_gradient_that_is_not_finite_stays_and_holds_up_nobody() -> None:
    batched, untouched = stack(), stack()
    broken = batched.replicas[1].theta()
    broken[5] = float("inf")
    batched.replicas[1].load(broken)
    rows = range(len(PEERS))
    for _ in range(2):
        losses = batched.step(rows, [LR] * len(PEERS))
        untouched.step(rows, [LR] * len(PEERS))
    assert not torch.isfinite(torch.tensor(losses[1]))
    assert torch.equal(batched.replicas[1].theta(), broken)
    for row in set(rows) - {1}:
        assert distance(batched.replicas[row].theta(), untouched.replicas[row].theta()) < 1e-6
    batched.replicas[1].load(untouched.replicas[1].theta())
    assert torch.isfinite(torch.tensor(batched.replicas[1].step(LR))), "its moments stayed finite"


def test_gradients_can_be_taken_and_applied_apart() -> None:
    batched, (learner, *_) = stack(), learners()
    gradient, loss = batched.replicas[0].gradient()
    expected, expected_loss = learner.gradient()
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert distance(gradient, expected) < 1e-4
    batched.replicas[0].apply(100 * gradient, LR)
    learner.apply(100 * expected, LR)
    assert distance(batched.replicas[0].theta(), learner.theta()) < 1e-5
    assert gradient.norm() < 100, "what was handed in is not clipped in place"


def test_threads_change_nothing() -> None:
    one, three = (
        stack(inner=InnerConfig(batch_size=8)),
        stack(inner=InnerConfig(batch_size=8), threads=3),
    )
    for _ in range(3):
        losses = [each.step(range(len(PEERS)), [LR] * len(PEERS)) for each in (one, three)]
        assert losses[0] == losses[1]
    assert torch.equal(all_rows(one), all_rows(three))


def test_a_validation_loss_leaves_the_row_alone() -> None:
    batched, (learner, *_) = stack(), learners()
    other = 1.1 * batched.replicas[0].theta()
    before = all_rows(batched)
    assert batched.replicas[0].validation_loss(other) == pytest.approx(
        learner.validation_loss(other), rel=1e-5
    )
    assert torch.equal(all_rows(batched), before)


def test_text_shorter_than_a_window_is_refused() -> None:
    with pytest.raises(DataError, match="training text"):
        Stack(
            ModelConfig(),
            DATA,
            INNER,
            seed=0,
            peer_ids=PEERS,
            corpus=Corpus.from_bytes(train=b"short", validation=TEXT),
            threads=1,
        )


def test_another_models_vector_is_refused() -> None:
    with pytest.raises(ValueError, match="preset"):
        StackedLlama.of(PRESETS["tiny"], stack().schema, device=torch.device("cpu"))
