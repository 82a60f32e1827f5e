from __future__ import annotations

import pathlib
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gasloc_p2p.core.errors import DataError
from gasloc_p2p.train.data import Corpus, SampleCursor, validation_windows
from gasloc_p2p.train.learner import Learner, build_learner
from gasloc_p2p.train.model import build_model
from gasloc_p2p.train.parameters import theta_digest
from gasloc_p2p.train.settings import DataConfig, InnerConfig, ModelConfig, PresetName

LR = 2e-3
TEXT = "".join(f"def square_{n}():\n    return {n * n}\n" for n in range(900)).encode()
CORPUS = Corpus.from_bytes(train=TEXT[:-4000], validation=TEXT[-4000:])


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def learner(
    peer_id: str = "a", *, preset: PresetName = "nano", inner: InnerConfig | None = None
) -> Learner:
    return build_learner(
        ModelConfig(preset=preset),
        DataConfig(validation_tokens=1024),
        inner or InnerConfig(),
        seed=3,
        peer_id=peer_id,
        corpus=CORPUS,
    )


def loss_of(model: nn.Module, tokens: Tensor) -> float:
    with torch.no_grad():
        logits = model(input_ids=tokens[:, :-1]).logits
    return cross_entropy(logits.transpose(1, 2), tokens[:, 1:]).item()


def test_training_learns() -> None:
    trained = learner()
    before = trained.validation_loss()
    for _ in range(60):
        last = float(trained.step(LR))
    assert trained.validation_loss() < 0.5 * before
    assert last < 0.5 * before


def test_every_preset_trains() -> None:
    tiny = learner(preset="tiny")
    before = tiny.validation_loss()
    for _ in range(3):
        tiny.step(LR)
    assert tiny.validation_loss() < before


def test_step_returns_the_loss_of_the_next_batch_before_the_update() -> None:
    cursor = SampleCursor(seed=3, peer_id="a")
    batch = cursor.batch(CORPUS.train, batch_size=8, sequence_length=64)
    trained = learner()
    assert trained.step(LR) == pytest.approx(loss_of(build_model("nano", 3), batch), rel=1e-5)
    assert trained.samples.next_sample == cursor.next_sample == 8


def test_validation_loss_is_the_mean_over_the_fixed_windows() -> None:
    windows = validation_windows(CORPUS.validation, tokens=1024, sequence_length=64)
    expected = loss_of(build_model("nano", 3), windows)
    assert learner("a").validation_loss() == pytest.approx(expected, rel=1e-5)
    assert learner("a").validation_loss() == learner("b").validation_loss()


def test_validation_loss_of_other_parameters_leaves_the_current_ones() -> None:
    trained = learner()
    start = trained.theta()
    initial_loss = trained.validation_loss()
    for _ in range(5):
        trained.step(LR)
    current, loss = trained.theta(), trained.validation_loss()
    assert trained.validation_loss(start) == initial_loss != loss
    assert torch.equal(trained.theta(), current)
    with pytest.raises(ValueError, match="expected"):
        trained.validation_loss(start[1:])
    assert trained.validation_loss() == loss
    trained.load(start)
    assert torch.equal(trained.theta(), start)


def test_validation_does_not_change_training() -> None:
    plain, watched = learner(), learner()
    for _ in range(3):
        plain.step(LR)
        watched.step(LR)
        watched.validation_loss(torch.zeros_like(watched.theta()))
    assert torch.equal(plain.theta(), watched.theta())


def test_learning_rate_argument_is_the_one_used() -> None:
    start = learner().theta()

    def moved(lr: float) -> Tensor:
        one = learner(inner=InnerConfig(lr=0.5))
        one.step(lr)
        return one.theta() - start

    assert not moved(0.0).any()
    assert torch.allclose(moved(2e-3), 2 * moved(1e-3), atol=1e-6)
    assert moved(1e-3).abs().max().item() == pytest.approx(1e-3, rel=0.1), "Adam's first step"


def test_decay_is_for_matrices_only() -> None:
    free, decayed = (learner(inner=InnerConfig(weight_decay=decay)) for decay in (0.0, 0.5))
    schema = free.parameters_view.schema
    for one in (free, decayed):
        one.load(one.theta() + 0.1)  # matrices that start at zero have nothing to decay
        one.step(LR)
    same = [
        torch.equal(a, b)
        for a, b in zip(
            free.theta().split_with_sizes(schema.sizes),
            decayed.theta().split_with_sizes(schema.sizes),
            strict=True,
        )
    ]
    assert same == [len(shape) < 2 for shape in schema.shapes]


def test_gradients_are_clipped() -> None:
    loose, tight = (learner(inner=InnerConfig(clip_norm=norm)) for norm in (1e9, 1e-9))
    for one in (loose, tight):
        one.step(LR)
    moved = [(one.theta() - learner().theta()).norm().item() for one in (loose, tight)]
    assert moved[1] < 0.5 * moved[0], "Adam's epsilon swallows gradients this small"


def test_load_keeps_the_moments() -> None:
    plain, reloaded = learner(), learner()
    for _ in range(4):
        plain.step(LR)
        reloaded.step(LR)
        reloaded.load(reloaded.theta())
    assert torch.equal(plain.theta(), reloaded.theta())
    fresh = learner()
    fresh.load(plain.theta())
    fresh.samples.next_sample = plain.samples.next_sample
    for one in (plain, fresh):
        one.step(LR)
    assert not torch.equal(plain.theta(), fresh.theta())


def test_gradient_that_is_not_finite_changes_nothing() -> None:
    plain, poisoned = learner(), learner()
    for one in (plain, poisoned):
        one.step(LR)
    good = poisoned.theta()
    bad = torch.full_like(good, torch.nan)
    poisoned.load(bad)
    assert poisoned.step(LR) != poisoned.step(LR), "the loss is NaN"
    poisoned.load(good)
    plain.samples.next_sample += 16
    for one in (plain, poisoned):
        one.step(LR)
    assert torch.equal(plain.theta(), poisoned.theta())


def test_peers_start_alike_and_part() -> None:
    a, b = learner("a"), learner("b")
    assert torch.equal(a.theta(), b.theta())
    for one in (a, b):
        one.step(LR)
    assert not torch.equal(a.theta(), b.theta())


def test_too_little_text_is_refused_at_the_start() -> None:
    for train, validation in [(64, 65), (65, 64)]:
        corpus = Corpus.from_bytes(train=b"x" * train, validation=b"x" * validation)
        with pytest.raises(DataError, match="64 bytes; at least 65"):
            build_learner(
                ModelConfig(), DataConfig(), InnerConfig(), seed=0, peer_id="a", corpus=corpus
            )


PROGRAM = """
import sys, torch
torch.set_num_threads(1)
sys.path.insert(0, {folder!r})
from test_learner import digest_after
print(digest_after("a", steps=6))
"""


def digest_after(peer_id: str, *, steps: int) -> str:
    one = learner(peer_id)
    for _ in range(steps):
        one.step(LR)
    return theta_digest(one.theta())


def test_interleaved_learners_agree_bit_for_bit() -> None:
    expected = digest_after("a", steps=6)
    twins = learner("a"), learner("a")
    other = learner("b")
    for _ in range(6):
        torch.rand(3)
        for one in (twins[0], other, twins[1]):
            one.step(LR)
    assert [theta_digest(one.theta()) for one in twins] == [expected, expected]
    assert theta_digest(other.theta()) == digest_after("b", steps=6) != expected


def test_another_process_agrees_bit_for_bit() -> None:
    program = PROGRAM.format(folder=str(pathlib.Path(__file__).parent))
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, timeout=100, stdout=subprocess.PIPE, text=True
    )
    assert done.stdout.strip() == digest_after("a", steps=6)
