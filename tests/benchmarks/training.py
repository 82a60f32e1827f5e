"""What training costs beside the arithmetic, and the outer step beside an inner one.

    python -m tests.benchmarks.training [--rounds 12] [--skip-134m]

Compares a `Learner` with the loop that one would write by hand around the same model, batch and
optimizer, in turns, so that whatever else the machine does hits both. It returns 1 where the
learner is below 90 % of the tokens per second of the loop (`tiny`, one thread of a CPU), or 95 %
(`134m` with torch.compile and bf16, on a CUDA GPU), or where the outer step of `134m` takes longer
than an inner step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from gasloc_p2p.core.outer import outer_rule
from gasloc_p2p.core.vectors import outer_step
from gasloc_p2p.train.data import Corpus
from gasloc_p2p.train.learner import Learner, build_learner
from gasloc_p2p.train.model import build_model
from gasloc_p2p.train.settings import DataConfig, DeviceConfig, InnerConfig, ModelConfig, PresetName

LR = 1e-3
LEAST_ON_CPU = 0.90
LEAST_ON_GPU = 0.95
TEXT = bytes(32 + n * n % 90 for n in range(200_000))
CORPUS = Corpus.from_bytes(train=TEXT[:-20_000], validation=TEXT[-20_000:])


def learner(preset: PresetName, batch_size: int, device: DeviceConfig) -> Learner:
    """Return a learner on a fixed text."""
    return build_learner(
        ModelConfig(preset=preset),
        DataConfig(validation_tokens=1),
        InnerConfig(batch_size=batch_size),
        seed=0,
        peer_id="a",
        corpus=CORPUS,
        device=device,
    )


def bare_loop(preset: PresetName, like: Learner, *, compile: bool) -> Callable[[int], object]:
    """Return a function that does so many steps of a loop without anything of ours."""
    place, dtype = like.device.place, like.device.autocast
    model: nn.Module = build_model(preset, seed=0).to(place).train()
    inner = InnerConfig()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LR, betas=(inner.beta1, inner.beta2), fused=True
    )
    forward = torch.compile(model, dynamic=False) if compile else model
    tokens = like.samples.batch(like.windows).to(place)

    def steps(count: int) -> object:
        loss = torch.zeros(())
        for _ in range(count):
            optimizer.zero_grad()
            with torch.autocast(place.type, dtype or torch.bfloat16, enabled=dtype is not None):
                logits = forward(input_ids=tokens[:, :-1]).logits
            loss = cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
            torch.autograd.backward(loss)
            nn.utils.clip_grad_norm_(model.parameters(), inner.clip_norm, foreach=True)
            optimizer.step()
        return loss.item()

    return steps


def compare(
    name: str, one: Learner, loop: Callable[[int], object], rounds: int, steps: int
) -> float:
    """Print and return the learner's tokens per second as a part of those of the loop."""

    def ours(count: int) -> object:
        losses = [one.step(LR) for _ in range(count)]
        return [float(loss) for loss in losses]

    seconds: dict[Callable[[int], object], list[float]] = {ours: [], loop: []}
    for each in seconds:
        each(2)
    for round in range(rounds):
        for each in sorted(seconds, key=lambda each: (each is ours) ^ (round % 2)):
            began_s = time.perf_counter()
            each(steps)
            seconds[each].append(time.perf_counter() - began_s)
    ratio = statistics.median(b / o for o, b in zip(seconds[ours], seconds[loop], strict=True))
    tokens_per_s = steps * one.tokens_per_step / statistics.median(seconds[ours])
    one.measure_peak()
    print(
        f"{name}: {tokens_per_s:,.0f} tokens/s, {ratio:.1%} of the bare loop's, "
        f"MFU {one.utilisation(tokens_per_s):.0%}",
        flush=True,
    )
    return ratio


def outer_against_inner(one: Learner) -> float:
    """Print and return the seconds of an outer step as a part of those of an inner one."""
    began_s = time.perf_counter()
    float(one.step(LR))
    inner_s = time.perf_counter() - began_s
    rule = outer_rule("nesterov", lr=0.7, momentum=0.9)
    theta = one.theta()
    theta_h, state = theta + 0.01, rule.initial(theta)
    found_s = []
    for _ in range(3):
        mixed = theta_h.clone()
        began_s = time.perf_counter()
        _, state = outer_step(rule, theta, theta_h, mixed, state)
        found_s.append(time.perf_counter() - began_s)
    outer_s = statistics.median(found_s)
    print(
        f"134m: an outer step takes {outer_s:.2f} s, an inner one of {one.tokens_per_step} tokens "
        f"{inner_s:.2f} s",
        flush=True,
    )
    return outer_s / inner_s


def main() -> int:
    """Print a line per comparison; return 1 when one is worse than it may be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12, help="how often both run")
    parser.add_argument("--skip-134m", action="store_true", help="spare its 4 GB of memory")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cpu = DeviceConfig(kind="cpu")
    tiny = learner("tiny", 8, cpu)
    loop = bare_loop("tiny", tiny, compile=False)
    passed = compare("tiny, one CPU thread", tiny, loop, arguments.rounds, 4) >= LEAST_ON_CPU
    if not arguments.skip_134m:
        passed = outer_against_inner(learner("134m", 1, cpu)) < 1 and passed
    if not torch.cuda.is_available():
        print("134m with torch.compile and bf16: skipped, for there is no CUDA GPU")
        return 0 if passed else 1
    fast = learner("134m", 32, DeviceConfig(kind="cuda", precision="bf16", compile=True))
    loop = bare_loop("134m", fast, compile=True)
    name = f"134m, {fast.device.name}, torch.compile, bf16"
    return 0 if compare(name, fast, loop, arguments.rounds, 10) >= LEAST_ON_GPU and passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
