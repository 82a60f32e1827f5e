"""Blocks that are rounded at random: bounds, no bias, and scales that no honest peer sends."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gasloc_p2p.core.codecs import CodesError, block_max_difference, codec_named, plain
from gasloc_p2p.core.codecs.backend import backend
from tests.core.coding import edge, normal, offer, on

BLOCKS = pytest.mark.parametrize(("name", "top"), [("int8", 127), ("int4", 7)])
LARGEST = torch.finfo(torch.float32).max


def sent(name: str, x: Tensor, own_key: int = 1) -> Tensor:
    """Return Q(x), as a peer with zeros sees it."""
    sender = offer(codec_named(name), x, own_key=own_key, chunk_bytes=1000).coder(b"")
    receiver = edge(codec_named(name), torch.zeros_like(x), x, chunk_bytes=1000)
    for index in range(receiver.layout.chunks):
        receiver.of_x.take(index, sender.encode(index))
    seen = torch.zeros_like(x)
    receiver.of_x.add_difference(seen, 1.0)
    return seen


@BLOCKS
def test_errors_stay_within_a_step_of_the_blocks_maximum(name: str, top: int) -> None:
    x = normal(5001, 1) * torch.logspace(-20, 20, 5001)
    block = codec_named(name).block_elements
    maxima = block_max_difference(x, None, block)
    # The scale is rounded up to eight bits.
    step = (maxima * (1 + 2**-7) / top).repeat_interleave(block)[:5001]
    assert bool(((sent(name, x) - x).abs() <= step).all())


@BLOCKS
def test_rounding_has_no_bias_and_follows_the_key(name: str, top: int) -> None:
    x = torch.full((256,), 0.3)
    x[::64] = 1.0
    draws = torch.stack([sent(name, x, own_key=key << 20) for key in range(400)])
    step = 1 / top
    assert float((draws.mean(0) - x).abs().amax()) < 5 * step / 2 / math.sqrt(400)
    assert float((draws.mean() - x.mean()).abs()) < 5 * step / 2 / math.sqrt(400 * 256)
    places = (draws[:, 1:64] > 0.3).double()
    assert len({tuple(row.tolist()) for row in places[:20]}) == 20, "keys differ"
    assert len({tuple(column.tolist()) for column in places.T}) == 63, "places differ"
    assert torch.equal(sent(name, x, own_key=5), sent(name, x, own_key=5))
    assert not torch.equal(sent(name, x, own_key=5), sent(name, x, own_key=5 + (1 << 32)))


@BLOCKS
@pytest.mark.parametrize("backend_name", ["compiled", "plain"])
def test_the_ends_of_fp32(name: str, top: int, backend_name: str) -> None:
    codec = on(name, plain if backend_name == "plain" else backend())
    block = codec.block_elements
    x = torch.zeros(5 * block)
    x[0], x[1] = LARGEST, -LARGEST
    x[block] = 2.0**-101
    x[2 * block] = 1e-45
    x[3 * block] = math.nan
    x[4 * block] = math.inf
    both = edge(codec, x, torch.zeros_like(x), chunk_bytes=1 << 16)
    codes = np.frombuffer(bytes(both.of_x.encode(0)), dtype=np.uint8)
    scales = codes[:10].view("<u2").tolist()
    assert scales == [0x7F7F, 0, 0, 0x7F7F, 0x7F7F], "never an infinity, and no tiny ones"
    both.of_y.take(0, codes.tobytes())
    moved = torch.zeros_like(x)
    both.of_y.add_difference(moved, 1.0)
    assert bool(torch.isfinite(moved).all())
    assert moved[:2].tolist() == pytest.approx([LARGEST, -LARGEST], rel=2**-7)
    assert not moved[block : 3 * block].any()


@BLOCKS
@pytest.mark.parametrize("scale", [0x7F80, 0x7F81, 0x7FFF, 0x8000, 0x8001, 0xBF80, 0xFF80, 0xFFFF])
def test_scales_that_are_not_finite_or_negative_are_refused(
    name: str, top: int, scale: int
) -> None:
    x = normal(600, 1)
    both = edge(codec_named(name), x, x)
    codes = bytearray(both.of_y.encode(0))
    codes[2:4] = scale.to_bytes(2, "little")
    with pytest.raises(CodesError, match="negative or not finite"):
        both.of_x.take(0, codes)


@BLOCKS
@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 2**32 - 1))
def test_random_bytes_are_refused_or_have_a_length(name: str, top: int, seed: int) -> None:
    x = normal(300, 1)
    both = edge(codec_named(name), x, x)
    size = both.layout.code_sizes[0]
    codes = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    codes[1 : 2 * both.layout.all_blocks : 2] &= 0x7F
    try:
        both.of_x.take(0, codes.tobytes())
    except CodesError:
        return
    moved = torch.zeros(300)
    both.of_x.add_difference(moved, 1.0)
    finite = bool(torch.isfinite(moved).all())
    assert math.isfinite(both.of_x.square_distance()) == finite
