"""Remainders: ranges both sides agree on, what is detected, and what repairs it."""

from __future__ import annotations

import math
import struct
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from gasloc_p2p.core.codecs import CodesError, ModularCodec, codec_named, completion
from gasloc_p2p.core.codecs.backend import backend
from gasloc_p2p.core.codecs.grid import GRID, bytes_above, steps, told_motion
from gasloc_p2p.core.codecs.sketch import SKETCH_BYTES, distance, sketch
from tests.core.coding import ROUND_KEY, Edge, deltas, edge, edge_between, normal, offer

MODULAR = pytest.mark.parametrize(("name", "top"), [("mod8", 127), ("mod4", 7)])
RANGE = 0.1
"""Twice the motion of each side."""


def ranged(name: str, x: Tensor, y: Tensor, **more: int) -> tuple[Edge, float]:
    """Return an edge and its half-range, a little above `RANGE`."""
    half = 1.19 * RANGE
    return edge(codec_named(name), x, y, motion=RANGE / 2, half=half, **more), half


def bf16(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).to(torch.float32)


def test_the_grid_rounds_up_and_covers_what_occurs() -> None:
    assert GRID[0] == 0
    assert GRID[160] == 1
    assert (np.diff(GRID.astype(np.float64)) > 0).all()
    magnitudes = np.array([0, 1e-45, GRID[1], 1, 1.0001, GRID[255], 1e30, math.inf, math.nan])
    assert bytes_above(magnitudes.astype(np.float32)).tolist() == [
        *(0, 1, 1, 160, 161, 255, 255, 255, 255),
    ]
    drawn = np.exp(np.random.default_rng(1).uniform(-25, 15, 1000)).astype(np.float32)
    above = GRID[bytes_above(drawn)]
    assert (above >= drawn).all()
    assert (above < drawn * np.float32(1.1893)).all()


told_motions = st.lists(st.integers(0, 255), min_size=3, max_size=3).map(
    lambda told: np.array(told, dtype=np.uint8)
)


@given(
    own=told_motions,
    theirs=told_motions,
    apart=st.floats(0, 1e30),
    codec=st.sampled_from(["mod4", "mod8"]),
)
def test_both_sides_compute_the_same_steps(
    own: NDArray[np.uint8], theirs: NDArray[np.uint8], apart: float, codec: str
) -> None:
    top = 7 if codec == "mod4" else 127
    both = partial(steps, distance=apart, block_elements=64, reach=4.5, top=top)
    delta = both(own, theirs)
    assert delta.dtype == np.float32
    assert np.isfinite(delta).all()
    assert both(theirs, own).tobytes() == delta.tobytes()
    motion = GRID[own].astype(np.float64) + GRID[theirs]
    profile = motion + 0.3 * np.sqrt((motion**2).mean())
    typical = 8 * np.sqrt((profile**2).sum())
    wide = profile * min(4.5 * apart / typical, 2.0**40) if typical else motion
    half = np.maximum(np.maximum(wide, 0.1 * motion), float(GRID[1]))
    assert delta * top == pytest.approx(half, rel=1e-5)


@MODULAR
@given(
    largest=st.floats(2.0**-20, 2.0**26, width=32),
    theirs=st.integers(0, 255),
    apart=st.floats(0, 1e9),
)
def test_integers_stay_small_whatever_the_partner_says(
    name: str, top: int, largest: float, theirs: int, apart: float
) -> None:
    own = told_motion(motion=None, largest=torch.tensor([largest]), top=top)
    told = np.array([theirs], dtype=np.uint8)
    delta = steps(own, told, distance=apart, block_elements=64, reach=4.5, top=top)
    assert largest / float(delta[0]) <= 1 << 20


@MODULAR
def test_what_is_told(name: str, top: int) -> None:
    block = codec_named(name).block_elements
    x = torch.full((3 * block,), 1e-9)
    told = offer(codec_named(name), x, motion=torch.tensor([0.0, 1.0, 2.0])).scales
    assert list(told[:3]) == [told[0], 160, 164]
    assert 0 < told[0] < 60, "the floor of vectors like this"
    assert len(told) == 3 + SKETCH_BYTES
    zeros = offer(codec_named(name), torch.zeros(block)).scales
    assert zeros == bytes(1 + SKETCH_BYTES)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_sketch_that_is_not_finite_is_refused(value: float) -> None:
    told = offer(codec_named("mod4"), torch.zeros(64))
    sketch = struct.pack("<f", value) + bytes(SKETCH_BYTES - 4)
    with pytest.raises(CodesError, match="sketch"):
        told.coder(b"\0" + sketch)


@pytest.mark.parametrize("elements", [0, 1, 1000, 100_000])
def test_sketches_tell_distances(elements: int) -> None:
    x, y = normal(elements, 1), normal(elements, 2)
    ratios = []
    for key in range(40):
        told = distance(*(sketch(v, key) for v in (x, y)))
        assert told == distance(*(sketch(v, key) for v in (y, x)))
        ratios.append(told / float((x - y).norm()) if elements else 1.0 + told)
    assert np.sqrt(np.mean(np.square(ratios))) == pytest.approx(1.0, abs=0.05)
    if elements > 20_000:
        assert np.std(ratios) < 0.08, "about 1 / sqrt(2 x buckets)"


def test_a_sketch_is_not_fooled_by_rows_that_are_alike() -> None:
    """Parameters that move together are what a fixed pattern of signs would miss."""
    apart = torch.ones(100_000)
    zeros = sketch(torch.zeros(100_000), 0)
    told = [distance(sketch(apart, key), zeros) for key in range(40)]
    assert np.std(told) / np.mean(told) < 0.15


@MODULAR
def test_vectors_of_zeros_need_no_range(name: str, top: int) -> None:
    both = edge(codec_named(name), torch.zeros(100), torch.zeros(100))
    assert both.exchange() == [b""]
    assert both.of_x.square_distance() == 0


@MODULAR
@pytest.mark.parametrize("spread", [1e-6, 1e-3, 1.0, 1e3])
def test_differences_in_range_are_off_by_a_step_at_most(name: str, top: int, spread: float) -> None:
    x = normal(5001, 1, spread)
    y = x + (torch.rand(5001, generator=torch.Generator().manual_seed(2)) - 0.5) * spread / 5
    codec = codec_named(name)
    assert isinstance(codec, ModularCodec)
    told = [offer(codec, v, motion=0.052 * spread, chunk_bytes=700) for v in (x, y)]
    both = edge_between(*told)
    assert not any(both.exchange())
    assert both.of_x.repaired_blocks == 0
    of_x, of_y = both.moves(1.0)
    assert torch.equal(of_x, -of_y)
    delta = float(deltas(codec, *told).max())
    assert float((of_x - (y - x)).abs().amax()) <= delta + spread * 2.0**-20
    assert delta * top < 0.5 * spread, "the range follows the distance"


@MODULAR
def test_a_range_that_ends_within_the_block_is_repaired_on_both_sides(name: str, top: int) -> None:
    block = codec_named(name).block_elements
    x = normal(5 * block + 3, 1)
    y = x.clone()
    for place, jump in ((0, 1.2), (2 * block + 1, -1.2), (5 * block + 2, 5.0)):
        y[place] += jump * RANGE * 1.19
    both, _ = ranged(name, x, y)
    assert both.exchange() == [bytes([0b100101])]
    assert both.of_x.repaired_blocks == both.of_y.repaired_blocks == 3
    of_x, of_y = both.moves(1.0)
    assert torch.equal(of_x, -of_y)
    for bad in (slice(0, block), slice(2 * block, 3 * block), slice(5 * block, None)):
        assert torch.equal(of_x[bad], bf16(y[bad]) - bf16(x[bad]))
    assert not of_x[block : 2 * block].any()
    square = float(of_x.double().square().sum())
    assert both.of_x.square_distance() == pytest.approx(square, rel=1e-6)


@MODULAR
def test_half_the_modulus_is_out_of_range_on_both_sides(name: str, top: int) -> None:
    for jump, bad in ((top, False), (top + 1, True), (-top, False), (-top - 1, True)):
        x = torch.zeros(64)
        x[5] = 50.0
        both, half = ranged(name, x, x)
        y = x.clone()
        y[7] += jump * half / top
        both, _ = ranged(name, x, y)
        codes = both.of_x.encode(0), both.of_y.encode(0)
        found = both.of_x.take(0, codes[1]), both.of_y.take(0, codes[0])
        assert [bool(some) for some in found] == [bad, bad]


@MODULAR
def test_errors_that_cancel_and_elements_that_swap_are_found(name: str, top: int) -> None:
    """Whole moduli leave the remainders as they are, so only the hash can tell."""
    block = codec_named(name).block_elements
    x = normal(4 * block, 1)
    both, half = ranged(name, x, x)
    turn = (2 * top + 2) * half / top
    y = x.clone()
    y[3] += turn
    y[4] -= turn
    x[block + 8] = 0.1
    y[block + 8] = 0.1 + turn
    x[block + 9] = 0.1 + turn
    y[block + 9] = 0.1
    y[2 * block + 10 : 2 * block + 14] += torch.tensor([turn, -turn, -turn, turn])
    both, _ = ranged(name, x, y)
    codes = both.of_x.encode(0), both.of_y.encode(0)
    remainders = slice(4 * block * (top + 1).bit_length() // 8)
    assert bytes(codes[0])[remainders] == bytes(codes[1])[remainders], "only hashes differ"
    assert both.of_x.take(0, codes[1]) == both.of_y.take(0, codes[0]) == b"\x07"
    assert both.repair(0, b"\x07")


def collision(name: str, top: int) -> tuple[Tensor, Tensor, float]:
    """Return two blocks, whole moduli apart, whose hashes agree in the 16 bits that travel."""
    block = codec_named(name).block_elements
    x = torch.zeros(block)
    _, half = ranged(name, x, x)
    delta = np.float32(half) / np.float32(top)
    turn = float(delta) * (2 * top + 2)
    rows = 1 << 18
    drawn = np.random.default_rng(3)
    jumps = drawn.integers(-40, 40, (rows, block)).astype(np.float32) * np.float32(turn)
    jumps[0] = 0
    tags = np.empty((rows, 2), dtype=np.uint8)
    bits = (top + 1).bit_length()
    backend().modular_loops(bits, block).encode(
        jumps,
        np.full(rows, delta),
        np.full(rows, 2, dtype=np.int64),
        ROUND_KEY,
        np.empty((rows, block * bits // 8), dtype=np.uint8),
        tags,
    )
    alike = np.flatnonzero((tags == tags[0]).all(1))
    assert len(alike) > 1
    return x, torch.from_numpy(jumps[alike[1]].copy()), half


@MODULAR
def test_the_digest_finds_what_the_hashes_of_blocks_let_pass(name: str, top: int) -> None:
    block = codec_named(name).block_elements
    zeros, jumps, _ = collision(name, top)
    x = torch.zeros(4 * block)
    y = x.clone()
    y[2 * block : 3 * block] = jumps
    both, _ = ranged(name, x, y)
    # The vector must not raise the motion that it tells.
    assert both.layout.chunks == 1
    assert float(jumps.abs().amax()) < 100
    codes = both.of_x.encode(0), both.of_y.encode(0)
    assert both.of_x.take(0, codes[1]) == both.layout.everything(0)
    assert both.of_y.take(0, codes[0]) == both.layout.everything(0)
    assert both.repair(0, both.layout.everything(0))
    of_x, _ = both.moves(1.0)
    assert torch.equal(of_x, bf16(y) - bf16(x))
    assert not zeros.any()


@MODULAR
def test_the_digest_of_the_other_blocks_finds_them_after_a_repair(name: str, top: int) -> None:
    block = codec_named(name).block_elements
    _, jumps, half = collision(name, top)
    x = torch.zeros(4 * block)
    y = x.clone()
    y[2 * block : 3 * block] = jumps
    y[0] = 3 * half
    both, _ = ranged(name, x, y)
    codes = both.of_x.encode(0), both.of_y.encode(0)
    assert both.of_x.take(0, codes[1]) == both.of_y.take(0, codes[0]) == b"\x01"
    assert not both.repair(0, b"\x01")
    assert both.of_x.repaired_blocks == 0, "nothing of it is kept"
    assert both.repair(0, b"\x0f")
    assert both.of_x.repaired_blocks == 4
    of_x, of_y = both.moves(1.0)
    assert torch.equal(of_x, bf16(y) - bf16(x))
    assert torch.equal(of_x, -of_y)


@MODULAR
def test_a_repair_can_be_made_without_encoding_first(name: str, top: int) -> None:
    x, y = normal(300, 1), normal(300, 2)
    first, second = (ranged(name, x, y)[0] for _ in range(2))
    second.of_x.encode(0)
    assert first.of_x.repair(0, b"\x03") == second.of_x.repair(0, b"\x03")


@MODULAR
def test_a_later_repair_replaces_an_earlier_one(name: str, top: int) -> None:
    x = normal(500, 1)
    both, _ = ranged(name, x, x + 0.001)
    both.exchange()
    assert both.repair(0, b"\x01")
    assert both.repair(0, b"\x02")
    assert both.of_x.repaired_blocks == 1
    assert both.repair(0, b"\x00"), "an empty one says only that the rest is right"
    assert both.of_x.repaired_blocks == 0


@MODULAR
def test_repairs_and_bitmaps_of_another_size_are_refused(name: str, top: int) -> None:
    x = normal(2 * 128, 1)
    both, _ = ranged(name, x, x)
    both.exchange()
    repair = both.of_y.repair(0, b"\x01")
    for wrong in (bytes(repair) + b"!", bytes(repair)[:-1]):
        with pytest.raises(CodesError, match="bytes of a repair, expected"):
            both.of_x.take_repair(0, b"\x01", wrong)
    for bad in (b"", b"\x10", b"\x01\x00"):
        with pytest.raises(CodesError, match="bitmap"):
            both.of_x.repair(0, bad)
        with pytest.raises(CodesError):
            both.of_x.take_repair(0, bad, repair)


@MODULAR
def test_a_wrong_digest_asks_for_everything_and_never_twice(name: str, top: int) -> None:
    x = normal(2 * 128, 1)
    both, _ = ranged(name, x, x)
    both.exchange()
    repair = bytearray(both.of_y.repair(0, b"\x01"))
    repair[-1] ^= 1
    assert not both.of_x.take_repair(0, b"\x01", repair)
    everything = both.layout.everything(0)
    repair = bytearray(both.of_y.repair(0, everything))
    repair[-1] ^= 1
    with pytest.raises(CodesError, match="whole chunk"):
        both.of_x.take_repair(0, everything, repair)


@MODULAR
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_repairs_that_are_not_finite_show_in_the_distance(
    name: str, top: int, value: float
) -> None:
    x = normal(300, 1)
    both, _ = ranged(name, x, x)
    both.exchange()
    repair = bytearray(both.of_y.repair(0, b"\x01"))
    repair[:2] = torch.tensor([value], dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()
    assert both.of_x.take_repair(0, b"\x01", repair)
    assert not math.isfinite(both.of_x.square_distance())


@MODULAR
def test_a_changed_byte_of_codes_is_found(name: str, top: int) -> None:
    """Remainders, hashes and digests protect each other against what a partner sends wrongly."""
    x = normal(2 * 128, 1)
    both, _ = ranged(name, x, x)
    codes = bytes(both.of_y.encode(0))
    for place in range(0, len(codes), 7):
        changed = bytearray(codes)
        changed[place] ^= 0x11
        assert both.of_x.take(0, changed)


@MODULAR
@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 2**32 - 1))
def test_random_bytes_harm_nobody(name: str, top: int, seed: int) -> None:
    drawn = np.random.default_rng(seed)
    x = normal(1000, 1)
    mine = offer(codec_named(name), x, motion=0.1)
    told = drawn.integers(0, 256, mine.layout.all_blocks, dtype=np.uint8).tobytes()
    scales = told + drawn.normal(0, 1e3, SKETCH_BYTES // 4).astype("<f4").tobytes()
    coder = mine.coder(scales)
    for index in range(mine.layout.chunks):
        size = mine.layout.code_sizes[index]
        bad = coder.take(index, drawn.integers(0, 256, size, dtype=np.uint8).tobytes())
        assert mine.layout.is_bitmap(index, bad)
        assert bad.count(0) < len(bad)
        size = mine.layout.repair_bytes(index, bad)
        repair = drawn.integers(0, 256, size, dtype=np.uint8).tobytes()
        try:
            assert not coder.take_repair(index, bad, repair)
        except CodesError:
            assert bad == mine.layout.everything(index)
    moved = torch.zeros(1000)
    coder.add_difference(moved, 1.0)
    assert bool(torch.isfinite(moved).all())
    assert math.isfinite(coder.square_distance())


@MODULAR
def test_another_key_hashes_otherwise(name: str, top: int) -> None:
    x = normal(200, 1)
    both, _ = ranged(name, x, x)
    codes = bytes(both.of_x.encode(0))
    other, _ = ranged(name, x, x, round_key=ROUND_KEY + 1)
    remainders = slice(0, -(-200 // codec_named(name).block_elements) * 8)
    assert bytes(other.of_x.encode(0))[remainders] == codes[remainders]
    assert bytes(other.of_x.encode(0)) != codes


@MODULAR
def test_a_chunk_is_mixed_in_pieces_as_it_is_at_once(
    name: str, top: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = codec_named(name).block_elements
    x = normal(5 * block + 3, 1)
    y = x + 0.01 * normal(5 * block + 3, 2)
    y[[3, 2 * block, 5 * block + 1]] += 5.0
    moved = []
    for blocks in (completion.PIECE_BLOCKS, 2, 1):
        monkeypatch.setattr(completion, "PIECE_BLOCKS", blocks)
        both, _ = ranged(name, x, y)
        assert both.exchange() == [bytes([0b100101])]
        moved.append(both.moves())
    assert all(
        torch.equal(a, b) for other in moved[1:] for a, b in zip(moved[0], other, strict=True)
    )
