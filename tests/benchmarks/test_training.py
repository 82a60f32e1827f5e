"""A learner is about as quick as a loop without anything of ours, on one thread."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from gasloc_p2p.train.settings import DeviceConfig
from tests.benchmarks.training import (
    LEAST_ON_CPU,
    LEAST_ON_GPU,
    bare_loop,
    compare,
    learner,
)

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_one_thread() -> None:
    tiny = learner("tiny", 8, DeviceConfig(kind="cpu"))
    loop = bare_loop("tiny", tiny, compile=False)
    assert compare("tiny", tiny, loop, rounds=10, steps=3) >= LEAST_ON_CPU


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and there is none")
def test_a_gpu() -> None:
    fast = learner("134m", 32, DeviceConfig(kind="cuda", precision="bf16", compile=True))
    loop = bare_loop("134m", fast, compile=True)
    assert compare("134m", fast, loop, rounds=10, steps=10) >= LEAST_ON_GPU
