"""What holds for every codec, and the exact rounding of those that cast."""

from __future__ import annotations

import math
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gasloc_p2p.core.codecs import CODECS, CastCodec, CodesError, codec_named, register_codec
from gasloc_p2p.core.errors import ConfigError
from gasloc_p2p.core.outer import MixPart, mix
from gasloc_p2p.core.vectors import distance
from tests.core.coding import NAMES, edge, normal, offer

EVERY_CODEC = pytest.mark.parametrize("name", NAMES)
CASTS = {"none": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
EVERY_CAST = pytest.mark.parametrize("name", list(CASTS))
DIRECT = pytest.mark.parametrize("name", NAMES[:5])

fp32_bits = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=64)


def vector(bits: list[int]) -> Tensor:
    return torch.from_numpy(np.array(bits, dtype=np.uint32).view(np.float32).copy())


def codes_of(name: str, x: Tensor) -> bytes:
    return bytes(edge(codec_named(name), x, x).of_x.encode(0))


def test_codecs_are_found_by_name() -> None:
    assert CODECS.names[:7] == NAMES, "the default comes first"
    for name in CODECS.names:
        assert codec_named(name).name == name


def test_a_codec_of_ones_own_is_found_by_its_name() -> None:
    codec = CastCodec(name="test-codecs-fp8", dtype=torch.float8_e4m3fn)
    register_codec(codec)
    assert codec_named("test-codecs-fp8") is codec
    with pytest.raises(ConfigError, match="already"):
        register_codec(codec)


def test_an_unknown_codec_is_told_with_the_known_ones() -> None:
    with pytest.raises(ConfigError) as caught:
        codec_named("zip")
    assert "'zip'" in str(caught.value)
    assert "'none', 'bf16', 'fp16', 'int8', 'int4', 'mod8', 'mod4'" in str(caught.value)


def test_codecs_are_there_without_numba() -> None:
    program = "import sys, gasloc_p2p.core.codecs; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@EVERY_CODEC
@pytest.mark.parametrize("elements", [0, 1, 63, 64, 65, 257, 1000, 4099])
def test_both_sides_meet_in_the_middle(name: str, elements: int) -> None:
    x = normal(elements, 1)
    y = x + normal(elements, 2, 0.01)
    both = edge(codec_named(name), x, y, motion=0.04, chunk_bytes=500)
    both.exchange()
    of_x, of_y = both.moves()
    assert torch.equal(of_x, -of_y), "the mean of the two stays"
    # A step of a 4-bit codec at the largest of so many normal numbers, or of the range.
    step = {"int4": 4.5 / 7, "int8": 4.5 / 127, "mod4": 0.1 / 7, "mod8": 0.1 / 127}.get(name, 0.02)
    assert float((of_x - (y - x) / 2).abs().amax() if elements else 0) <= step
    exact = float(torch.linalg.vector_norm((2 * of_x).double()))
    assert math.sqrt(both.of_x.square_distance()) == pytest.approx(exact, rel=1e-6)
    assert both.of_x.square_distance() == both.of_y.square_distance()


@EVERY_CODEC
def test_codes_are_the_same_each_time_and_the_result_independent_of_order(name: str) -> None:
    x, y = normal(3000, 1), normal(3000, 2)
    first, second = (edge(codec_named(name), x, y, motion=0.5, chunk_bytes=300) for _ in range(2))
    chunks = range(first.layout.chunks)
    assert len(chunks) > 3
    codes = [bytes(first.of_y.encode(index)) for index in chunks]
    assert [bytes(second.of_y.encode(index)) for index in reversed(chunks)] == codes[::-1]
    for index in chunks:
        first.of_x.take(index, codes[index])
    for index in reversed(chunks):
        second.of_x.take(index, codes[index])
    assert first.of_x.square_distance() == second.of_x.square_distance()
    moved = torch.zeros(2, 3000)
    first.of_x.add_difference(moved[0], 0.3)
    second.of_x.add_difference(moved[1], 0.3)
    assert torch.equal(moved[0], moved[1])


def test_codes_of_none_are_the_vector_itself() -> None:
    x = normal(500, 1)
    codes = edge(codec_named("none"), x, x).of_x.encode(0)
    assert np.shares_memory(np.frombuffer(codes, np.uint8), x.numpy())


@EVERY_CODEC
def test_every_kind_of_buffer_is_taken_without_a_warning(name: str) -> None:
    x, y = normal(300, 1), normal(300, 2)
    codec = codec_named(name)
    raw = bytes(edge(codec, x, y, motion=4.0).of_y.encode(0))
    odd = memoryview(bytearray(b"?" + raw))[1:]
    moved = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for codes in (raw, bytearray(raw), memoryview(raw), memoryview(bytearray(raw)), odd):
            coder = edge(codec, x, y, motion=4.0).of_x
            assert coder.take(0, codes) == b""
            mixed = x.clone()
            coder.add_difference(mixed, 0.5)
            moved.append(mixed)
            assert bytes(codes) == raw
    assert all(torch.equal(some, moved[0]) for some in moved)


@EVERY_CODEC
@pytest.mark.parametrize("change", [-1, 1])
def test_wrong_sizes_are_refused(name: str, change: int) -> None:
    x = normal(100, 1)
    both = edge(codec_named(name), x, x)
    with pytest.raises(CodesError, match="bytes of codes, expected"):
        both.of_x.take(0, bytes(both.layout.code_sizes[0] + change))
    size = both.layout.scale_bytes + abs(change)
    with pytest.raises(CodesError, match=f"{size} bytes of scales, expected"):
        offer(codec_named(name), x).coder(bytes(size))


@DIRECT
def test_what_is_not_checked_is_not_repaired(name: str) -> None:
    coder = edge(codec_named(name), torch.ones(3), torch.ones(3)).of_x
    assert coder.repaired_blocks == 0
    for call in (
        lambda: coder.repair(0, b"\1"),
        lambda: coder.take_repair(0, b"\1", b""),
    ):
        with pytest.raises(CodesError, match="not checked"):
            call()


@EVERY_CODEC
def test_strides_and_gradients_do_not_matter(name: str) -> None:
    codec = codec_named(name)
    x = torch.arange(200, dtype=torch.float32)
    strided = x[::2]
    codes = [edge(codec, some, some).of_x.encode(0) for some in (strided, strided.clone())]
    assert bytes(codes[0]) == bytes(codes[1])
    codes = [edge(codec, some, some).of_x.encode(0) for some in (x.detach(), x.requires_grad_())]
    assert bytes(codes[0]) == bytes(codes[1])


@EVERY_CODEC
@pytest.mark.parametrize("x", [torch.ones(2, 2), torch.ones(2, dtype=torch.float64)])
def test_only_flat_fp32_is_sent(name: str, x: Tensor) -> None:
    with pytest.raises(ValueError, match="flat fp32"):
        offer(codec_named(name), x)


@settings(deadline=None)
@given(bits=fp32_bits)
def test_none_is_the_little_endian_bits_themselves(bits: list[int]) -> None:
    assert codes_of("none", vector(bits)) == np.array(bits, dtype="<u4").tobytes()


@settings(deadline=None)
@given(bits=fp32_bits)
def test_bf16_rounds_to_nearest_even(bits: list[int]) -> None:
    x = vector(bits)
    got = np.frombuffer(codes_of("bf16", x), dtype="<u2").astype(np.uint32)
    exact = np.array(bits, dtype=np.uint64)
    expected = ((exact + 0x7FFF + ((exact >> 16) & 1)) >> 16).astype(np.uint32)
    number = ~np.isnan(x.numpy())
    assert (got[number] == expected[number]).all()


@settings(deadline=None)
@given(bits=fp32_bits)
def test_fp16_rounds_to_nearest_even_and_never_overflows(bits: list[int]) -> None:
    x = vector(bits)
    got = np.frombuffer(codes_of("fp16", x), dtype="<f2")
    number = ~np.isnan(x.numpy())
    assert np.isnan(got[~number]).all()
    expected = x.numpy()[number].astype(np.float64).clip(-65504, 65504).astype(np.float16)
    assert got[number].tobytes() == expected.tobytes()


@EVERY_CAST
@settings(deadline=None, max_examples=50)
@given(
    elements=st.integers(0, 3000),
    chunk_bytes=st.integers(1, 4000),
    weight=st.floats(0.0, 1.0, width=32),
    spread=st.sampled_from([1e-3, 1.0, 1e5]),
)
def test_adding_chunks_gives_the_bits_of_the_mix(
    name: str, elements: int, chunk_bytes: int, weight: float, spread: float
) -> None:
    x, y = normal(elements, 1, spread), normal(elements, 2, spread)
    limit = torch.finfo(CASTS[name]).max
    copies = [some.clamp(-limit, limit).to(CASTS[name]).float() for some in (x, y)]
    expected = mix(x, [MixPart(weight=weight, received=copies[1], own_copy=copies[0])], 0.7)
    both = edge(codec_named(name), x, y, chunk_bytes=chunk_bytes)
    both.exchange()
    mixed = x.clone()
    both.of_x.add_difference(mixed, 0.7 * weight)
    assert torch.equal(mixed, expected)
    length = distance(copies[1], copies[0])
    assert math.sqrt(both.of_x.square_distance()) == pytest.approx(length, rel=1e-12)


@EVERY_CAST
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_difference_that_is_not_finite_has_no_finite_length(name: str, value: float) -> None:
    y = torch.ones(300)
    y[200] = value
    raw = y.to(CASTS[name]).view(torch.uint8).numpy().tobytes()
    coder = edge(codec_named(name), torch.ones(300), torch.ones(300)).of_x
    coder.take(0, raw)
    assert not math.isfinite(coder.square_distance())
