"""Compiled loops give the bits of the plain ones, and are done without where they cannot be had."""

from __future__ import annotations

import importlib
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numba import types

from gasloc_p2p.core.codecs import block_max_difference, kernels, plain
from gasloc_p2p.core.codecs.backend import Backend, backend
from gasloc_p2p.core.codecs.jit import compiled
from tests.core.coding import edge, normal, on, union

BOTH = pytest.mark.parametrize("loops", [kernels, plain], ids=["compiled", "plain"])
SIZES = (0, 1, 7, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1000)
AWKWARD = (0.0, -0.0, float("nan"), float("inf"), float("-inf"), 3e38, -3e38, 1e-45, 1e-30)

vectors = st.fixed_dictionaries(
    {
        "elements": st.one_of(st.sampled_from(SIZES), st.integers(0, 1500)),
        "seed": st.integers(0, 2**31),
        "spread": st.sampled_from([1e-35, 1e-9, 1e-3, 1.0, 1e6, 1e20, 1e37]),
        "apart": st.sampled_from([0.0, 1e-6, 1e-3, 0.05, 1.0]),
        "motion": st.sampled_from([0.0, 1e-9, 1e-3, 0.05, 2.0]),
        "awkward": st.lists(st.tuples(st.integers(0, 1499), st.sampled_from(AWKWARD)), max_size=4),
        "chunk_bytes": st.sampled_from([1, 300, 1 << 20]),
    }
)


def everything_from(
    name: str,
    loops: Backend,
    *,
    elements: int,
    seed: int,
    spread: float,
    apart: float,
    motion: float,
    awkward: list[tuple[int, float]],
    chunk_bytes: int,
) -> Iterator[bytes | float]:
    """Exchange two vectors, and tell all bits that come out on the way."""
    x = normal(elements, seed, spread)
    y = x + normal(elements, seed + 1, spread * apart)
    for place, value in awkward:
        if place < elements:
            (x if place % 2 else y)[place] = value
    codec = on(name, loops)
    both = edge(codec, x, y, motion=motion * spread, chunk_bytes=chunk_bytes)
    sides = ((both.of_x, both.of_y), (both.of_y, both.of_x))
    for index in range(both.layout.chunks):
        bad = b""
        for sender, receiver in sides:
            codes = bytes(sender.encode(index))
            yield codes
            found = receiver.take(index, codes)
            yield found
            bad = union(bad, found)
        for sender, receiver in sides if bad else ():
            repair = bytes(sender.repair(index, bad))
            yield repair
            yield receiver.take_repair(index, bad, repair)
    for side in (both.of_x, both.of_y):
        yield repr(side.square_distance()).encode()
        yield side.repaired_blocks
        mixed = x.nan_to_num().clamp(-1, 1)
        side.add_difference(mixed, 0.4)
        yield torch.where(mixed.isnan(), torch.nan, mixed).numpy().tobytes()


@pytest.mark.parametrize("name", ["int8", "int4", "mod8", "mod4"])
@settings(deadline=None, max_examples=150)
@given(vector=vectors)
def test_compiled_and_plain_loops_agree_in_every_bit(name: str, vector: dict[str, object]) -> None:
    compiled_bits = list(everything_from(name, kernels, **vector))  # type: ignore[arg-type]  # drawn
    plain_bits = list(everything_from(name, plain, **vector))  # type: ignore[arg-type]  # drawn
    assert compiled_bits == plain_bits


@pytest.mark.parametrize("name", ["int8", "int4", "mod8", "mod4"])
@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32 - 1), elements=st.integers(1, 700))
def test_they_agree_on_random_codes(name: str, seed: int, elements: int) -> None:
    told = []
    for loops in (kernels, plain):
        x = normal(elements, seed)
        side = edge(on(name, loops), x, x, motion=0.1).of_x
        size = on(name, loops).layout(elements, 4096).code_sizes[0]
        codes = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
        if name.startswith("int"):
            blocks = on(name, loops).layout(elements, 4096).all_blocks
            codes[1 : 2 * blocks : 2] &= 0x3F
        bad = side.take(0, codes.tobytes())
        mixed = torch.zeros(elements)
        side.add_difference(mixed, 1.0)
        told.append((bad, side.square_distance(), mixed.tolist()))
    assert told[0][0] == told[1][0]
    assert told[0][2] == told[1][2]
    assert told[0][1] == told[1][1]


@BOTH
@given(elements=st.integers(0, 700), block=st.sampled_from([1, 2, 64, 100]))
@example(elements=300_000, block=128)
@settings(deadline=None, max_examples=50)
def test_maxima_of_differences(loops: Backend, elements: int, block: int) -> None:
    a, b = normal(elements, 1), normal(elements, 2)
    if elements > 3:
        a[3] = torch.nan
    if elements > 200:
        b[200] = torch.inf
    found = block_max_difference(a, b, block, lambda: loops)
    expected = [float((a - b)[i : i + block].abs().amax()) for i in range(0, elements, block)]
    assert torch.equal(found.nan_to_num(-1), torch.tensor(expected).nan_to_num(-1))
    largest = block_max_difference(a, None, block, lambda: loops)
    expected = [float(a[i : i + block].abs().amax()) for i in range(0, elements, block)]
    assert torch.equal(largest.nan_to_num(-1), torch.tensor(expected).nan_to_num(-1))


@pytest.fixture
def forgotten() -> Iterator[None]:
    backend.cache_clear()
    yield
    backend.cache_clear()


@pytest.mark.usefixtures("forgotten")
def test_numba_is_used_where_it_is() -> None:
    assert backend() is kernels


@pytest.mark.usefixtures("forgotten")
def test_torch_does_without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    # What an import of a missing module looks for; the package keeps its own copy.
    monkeypatch.setitem(sys.modules, "gasloc_p2p.core.codecs.kernels", None)
    monkeypatch.delattr("gasloc_p2p.core.codecs.kernels")
    assert backend() is plain


def test_loops_are_compiled_where_nothing_can_be_cached() -> None:
    program = compile(textwrap.dedent("def double(x):\n    return 2 * x\n"), "<nowhere>", "exec")
    names: dict[str, FunctionType] = {}
    exec(program, names)
    double = compiled(types.int64(types.int64), names["double"])
    assert double(21) == 42


@pytest.mark.parametrize("name", ["*.nbi", "*.nbc"])
def test_a_cache_that_a_crash_cut_short_is_passed_over(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = f"loops_{name[2:]}"
    (tmp_path / f"{module}.py").write_text("def double(x):\n    return 2 * x\n")
    monkeypatch.syspath_prepend(tmp_path)
    double = importlib.import_module(module).double
    assert compiled(types.int64(types.int64), double)(21) == 42
    files = list((tmp_path / "__pycache__").glob(name))
    assert files
    for file in files:
        file.write_bytes(b"")
    assert compiled(types.int64(types.int64), double)(21) == 42
