"""Codecs: exact sizes, exact rounding, and results that own their memory."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gasloc_p2p.core.codecs import CODECS, CastCodec, Codec, codec_named, register_codec
from gasloc_p2p.core.errors import ConfigError
from gasloc_p2p.core.types import BytesLike

NONE, BF16 = codec_named("none"), codec_named("bf16")
EVERY_CODEC = pytest.mark.parametrize("codec", [NONE, BF16], ids=["none", "bf16"])

fp32_bits = st.lists(st.integers(0, 2**32 - 1), max_size=64)


def vector(bits: list[int]) -> Tensor:
    return torch.from_numpy(np.array(bits, dtype=np.uint32).view(np.float32).copy())


def encode(codec: Codec, x: Tensor) -> bytearray | memoryview:
    return codec.encode(x, scales=b"", partner_scales=b"")


def decode(codec: Codec, codes: BytesLike, own: Tensor) -> Tensor:
    return codec.decode(codes, own=own, scales=b"", partner_scales=b"")


@settings(deadline=None)
@given(bits=fp32_bits)
def test_none_is_the_little_endian_bits_themselves(bits: list[int]) -> None:
    x = vector(bits)
    codes = encode(NONE, x)
    assert bytes(codes) == np.array(bits, dtype="<u4").tobytes()
    back = decode(NONE, codes, x)
    assert back.view(torch.int32).tolist() == x.view(torch.int32).tolist()


@settings(deadline=None)
@given(bits=fp32_bits)
def test_bf16_rounds_to_nearest_even(bits: list[int]) -> None:
    x = vector(bits)
    codes = encode(BF16, x)
    got = np.frombuffer(codes, dtype="<u2").astype(np.uint32)
    exact = np.array(bits, dtype=np.uint64)
    expected = ((exact + 0x7FFF + ((exact >> 16) & 1)) >> 16).astype(np.uint32)
    finite_or_inf = ~np.isnan(x.numpy())
    assert (got[finite_or_inf] == expected[finite_or_inf]).all()

    back = decode(BF16, codes, x)
    assert back.dtype == torch.float32
    assert torch.isnan(back).tolist() == torch.isnan(x).tolist()
    kept = back.numpy()[finite_or_inf].view(np.uint32)
    assert (kept == expected[finite_or_inf] << 16).all()


@EVERY_CODEC
def test_coding_a_second_time_changes_nothing(codec: Codec) -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    once = decode(codec, encode(codec, x), x)
    assert torch.equal(decode(codec, encode(codec, once), once), once)
    assert float((once - x).abs().max()) <= 2**-8 * float(x.abs().max())


@EVERY_CODEC
@pytest.mark.parametrize("elements", [0, 1, 7, 4096])
def test_code_size(codec: Codec, elements: int) -> None:
    x = torch.ones(elements)
    codes = encode(codec, x)
    assert len(codes) == codec.code_bytes(elements)
    assert decode(codec, codes, x).tolist() == [1.0] * elements
    assert codec.scales(x) == b""


@EVERY_CODEC
def test_codes_do_not_follow_the_vector(codec: Codec) -> None:
    x = torch.ones(8)
    codes = encode(codec, x)
    before = bytes(codes)
    x.zero_()
    assert bytes(codes) == before


@EVERY_CODEC
def test_result_does_not_follow_the_partners_buffer(codec: Codec) -> None:
    own = torch.ones(8)
    buffer = bytearray(encode(codec, own))
    decoded = decode(codec, buffer, own)
    buffer[:] = bytes(len(buffer))
    assert decoded.tolist() == [1.0] * 8
    buffer += b"resizable again"


@EVERY_CODEC
def test_every_kind_of_buffer_is_decoded_without_a_warning(codec: Codec) -> None:
    own = torch.arange(8, dtype=torch.float32)
    raw = bytes(encode(codec, own))
    odd = memoryview(bytearray(b"?" + raw))[1:]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for codes in (raw, bytearray(raw), memoryview(raw), memoryview(bytearray(raw)), odd):
            assert torch.equal(decode(codec, codes, own), own)


@EVERY_CODEC
@pytest.mark.parametrize("change", [-1, 1])
def test_wrong_size_is_refused(codec: Codec, change: int) -> None:
    own = torch.ones(4)
    with pytest.raises(ValueError, match="expected"):
        decode(codec, bytes(codec.code_bytes(4) + change), own)
    with pytest.raises(ValueError, match="expected 0"):
        decode(codec, b"x", torch.empty(0))


@EVERY_CODEC
def test_strides_and_gradients_do_not_matter(codec: Codec) -> None:
    x = torch.arange(10, dtype=torch.float32)
    strided = x[::2]
    assert bytes(encode(codec, strided)) == bytes(encode(codec, strided.clone()))
    assert bytes(encode(codec, x.requires_grad_())) == bytes(encode(codec, x.detach()))


@EVERY_CODEC
@pytest.mark.parametrize("x", [torch.ones(2, 2), torch.ones(2, dtype=torch.float64)])
def test_only_flat_fp32_is_encoded(codec: Codec, x: Tensor) -> None:
    with pytest.raises(ValueError, match="flat fp32"):
        encode(codec, x)


def test_codecs_are_found_by_name() -> None:
    assert CODECS.names[:2] == ("none", "bf16"), "the default comes first"
    for name in CODECS.names:
        assert codec_named(name).name == name


def test_a_codec_of_ones_own_is_found_by_its_name() -> None:
    codec = CastCodec(name="test-codecs-fp16", dtype=torch.float16)
    register_codec(codec)
    assert codec_named("test-codecs-fp16") is codec
    with pytest.raises(ConfigError, match="already"):
        register_codec(codec)


def test_an_unknown_codec_is_told_with_the_known_ones() -> None:
    with pytest.raises(ConfigError) as caught:
        codec_named("zip")
    assert "'zip'" in str(caught.value)
    assert "'none', 'bf16'" in str(caught.value)
