from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gasloc_p2p.core.errors import ConfigError, DeviceError
from gasloc_p2p.train import passes as passes_module
from gasloc_p2p.train.activations import activation_bytes
from gasloc_p2p.train.data import Corpus
from gasloc_p2p.train.learner import Learner, build_learner
from gasloc_p2p.train.memory import beside_activations
from gasloc_p2p.train.settings import DataConfig, DeviceConfig, InnerConfig, ModelConfig, PresetName

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
    preset: PresetName = "nano",
    *,
    said: list[str] | None = None,
    inner: InnerConfig | None = None,
    **device: Any,
) -> Learner:
    return build_learner(
        ModelConfig(preset=preset),
        DataConfig(validation_tokens=1024),
        inner or InnerConfig(),
        seed=3,
        peer_id="a",
        corpus=CORPUS,
        device=DeviceConfig.model_validate({"kind": "cpu", **device}),
        notice=(said if said is not None else []).append,
    )


# Tokens per step


def test_tokens_per_step_are_whole_windows() -> None:
    counted = learner(inner=InnerConfig(tokens_per_step=3 * 64))
    assert (counted.windows, counted.tokens_per_step) == (3, 192)
    counted.step(LR)
    assert counted.samples.next_sample == 3
    usual = learner(inner=InnerConfig(batch_size=5))
    assert (usual.windows, usual.tokens_per_step) == (5, 320)


@pytest.mark.parametrize(("tokens", "fix"), [(100, "64 or 128"), (63, "64"), (65, "64 or 128")])
def test_other_tokens_per_step_are_refused_with_the_nearest(tokens: int, fix: str) -> None:
    with pytest.raises(ConfigError, match="not a whole number of windows") as raised:
        learner(inner=InnerConfig(tokens_per_step=tokens))
    assert raised.value.fix == f"set it to {fix}"


# Parts of a step


@pytest.mark.parametrize("micro_batch", [1, 3, 4])
def test_parts_add_up_to_the_whole_step(micro_batch: int) -> None:
    whole, parted = learner(), learner(micro_batch=micro_batch)
    (expected, loss), (found, parted_loss) = whole.gradient(), parted.gradient()
    assert parted_loss == pytest.approx(loss, rel=1e-6)
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-7)
    assert parted.samples.next_sample == whole.samples.next_sample
    assert (found - expected).norm() < 1e-5 * expected.norm()


def test_activation_checkpointing_changes_no_gradient_and_needs_less() -> None:
    plain = learner("tiny")
    dropping = learner("tiny", activation_checkpointing=True)
    (expected, _), (found, _) = plain.gradient(), dropping.gradient()
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-7)

    def a_token(one: Learner, *, checkpointing: bool) -> float:
        passes = one.passes
        return activation_bytes(
            passes._module,
            lambda tokens: passes._loss(passes._logits, tokens),
            tokens=64,
            checkpointing=checkpointing,
        )

    assert a_token(dropping, checkpointing=True) < 0.8 * a_token(plain, checkpointing=False)


def test_a_small_memory_means_small_parts_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    roomy = learner()
    assert roomy.passes.micro_batch == 8
    vectors_bytes = beside_activations(
        elements=roomy.elements, kept=2 * roomy.elements, on_cpu=True
    )
    a_window = 64 * activation_bytes(
        roomy.passes._module,
        lambda tokens: roomy.passes._loss(roomy.passes._logits, tokens),
        tokens=64,
        checkpointing=False,
    )
    free = vectors_bytes + 2.5 * a_window / passes_module.USED_SHARE
    monkeypatch.setattr(passes_module, "available_bytes", lambda: int(free))
    said: list[str] = []
    assert learner(said=said).passes.micro_batch == 2
    assert said == ["memory holds 2 of a step's 8 windows at once; it goes through in 4 parts"]


# Memory that runs out


def fail_above(monkeypatch: pytest.MonkeyPatch, one: Learner, windows: int) -> None:
    """Let passes with more windows fail in the middle, as they do when memory runs out."""
    loss = one.passes._loss

    def limited(forward: object, tokens: torch.Tensor) -> torch.Tensor:
        found = loss(forward, tokens)  # type: ignore[arg-type]  # what it was given
        if len(tokens) > windows:
            torch.autograd.backward(found)
            raise torch.OutOfMemoryError("none is left")
        return found

    monkeypatch.setattr(one.passes, "_loss", limited)


def test_a_step_without_memory_is_done_in_smaller_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    plain, short = learner(micro_batch=2), learner(said=said)
    fail_above(monkeypatch, short, 2)
    for _ in range(2):
        assert plain.step(LR) == short.step(LR)
        assert torch.equal(plain.theta(), short.theta()), "nothing is left of what was dropped"
    assert short.samples.next_sample == 16
    assert said == [
        "memory ran out with 8 windows at once; steps go on in parts of 4",
        "memory ran out with 4 windows at once; steps go on in parts of 2",
    ]


def test_memory_for_no_window_at_all_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    hopeless = learner()
    fail_above(monkeypatch, hopeless, 0)
    before = hopeless.theta()
    with pytest.raises(DeviceError, match="does not hold one window of 64 tokens"):
        hopeless.step(LR)
    assert torch.equal(hopeless.theta(), before)


def test_other_errors_are_not_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = learner()

    def fail(forward: object, tokens: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("a defect")

    monkeypatch.setattr(broken.passes, "_loss", fail)
    with pytest.raises(RuntimeError, match="a defect"):
        broken.step(LR)


SHORT_OF_MEMORY = """
import resource, sys, torch
torch.set_num_threads(1)
sys.path.insert(0, {folder!r})
import psutil
from test_passes import LR, learner
from gasloc_p2p.train.memory import beside_activations
from gasloc_p2p.train.settings import InnerConfig
inner = InnerConfig(batch_size=256)
plain = learner(inner=inner, micro_batch=64)
said = []
short = learner(said=said, inner=inner, micro_batch=256)
losses = [plain.step(LR)]
limit = psutil.Process().memory_info().vms + 120 * 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
found = [short.step(LR)]
assert short.samples.next_sample == 256
assert said and short.passes.micro_batch < 256, said
assert all(abs(a - b) < 1e-4 for a, b in zip(losses, found)), (losses, found)
difference = (plain.theta() - short.theta()).norm() / plain.theta().norm()
assert difference < 1e-3, difference
print("; ".join(said))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS is kept on Linux only")
def test_a_step_is_not_lost_when_the_system_has_no_memory_left() -> None:
    program = SHORT_OF_MEMORY.format(folder=str(Path(__file__).parent))
    done = subprocess.run(
        [sys.executable, "-c", program], timeout=100, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "memory ran out with 256 windows at once" in done.stdout


# Devices


def test_a_device_that_is_not_there_is_refused() -> None:
    missing = "mps" if torch.cuda.is_available() else "cuda"
    if missing == "mps" and torch.backends.mps.is_available():
        pytest.skip("this machine has every device")
    with pytest.raises(DeviceError, match="torch finds no such device"):
        learner(kind=missing)


def test_bf16_arithmetic_learns_and_leaves_parameters_fp32() -> None:
    lowered, plain = learner(precision="bf16"), learner()
    losses = [float(lowered.step(LR)) for _ in range(15)]
    assert losses[-1] < 0.8 * losses[0]
    assert losses[0] == pytest.approx(float(plain.step(LR)), rel=1e-2)
    assert lowered.theta().dtype == torch.float32
    assert not torch.equal(lowered.theta(), lowered.theta().bfloat16().float())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and there is none")
def test_a_gpu_computes_what_the_cpu_does() -> None:
    here = learner()
    kinds: list[dict[str, Any]] = [{"precision": "fp32"}, {"precision": "bf16"}, {"compile": True}]
    for kind in kinds:
        there = learner(**{"kind": "cuda", **kind})
        expected = learner()
        for _ in range(5):
            loss = float(there.step(LR))
            assert loss == pytest.approx(float(expected.step(LR)), rel=2e-2)
        there.restore(there.state())
        here.load(there.theta())
        assert here.validation_loss() == pytest.approx(there.validation_loss(), rel=1e-2)
