"""How vectors are cut: sizes, spans and bitmaps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gasloc_p2p.core.codecs import codec_named, cut
from gasloc_p2p.core.codecs.sketch import SKETCH_BYTES
from tests.core.coding import NAMES


@given(
    elements=st.integers(0, 5000),
    chunk_bytes=st.integers(1, 3000),
    name=st.sampled_from(NAMES),
)
def test_chunks_cover_the_vector_without_a_gap(elements: int, chunk_bytes: int, name: str) -> None:
    codec = codec_named(name)
    layout = codec.layout(elements, chunk_bytes)
    covered = [i for index in range(layout.chunks) for i in range(elements)[layout.span(index)]]
    assert covered == list(range(elements))
    blocks = [i for n in range(layout.chunks) for i in range(99999)[layout.block_span(n)]]
    assert blocks == list(range(layout.all_blocks))
    assert layout.all_blocks == -(-elements // codec.block_elements)
    assert layout.chunk_elements % codec.block_elements == 0
    assert layout.chunk_elements % 64 == 0
    smallest = codec.layout(codec.block_elements, 1)
    assert all(size <= max(chunk_bytes, smallest.code_sizes[0], 256) for size in layout.code_sizes)
    assert layout.code_bytes == sum(layout.code_sizes)
    assert layout.checked == codec.checked
    told = layout.all_blocks + SKETCH_BYTES if codec.checked and elements else 0
    assert layout.scale_bytes == told
    assert layout.block_elements == codec.block_elements


@pytest.mark.parametrize(
    ("name", "bits"),
    list(zip(NAMES, (32, 16, 16, 8.0625, 4.25, 8.188, 4.376), strict=True)),
)
def test_bits_per_parameter(name: str, bits: float) -> None:
    elements = 25_000_000
    layout = codec_named(name).layout(elements, 1 << 18)
    assert (layout.code_bytes + layout.scale_bytes) * 8 / elements == pytest.approx(bits, abs=2e-3)
    assert 240_000 <= layout.code_sizes[0] <= 1 << 18


def test_bitmaps() -> None:
    layout = cut(130, chunk_elements=100, block_elements=10, size=lambda n: n, checked=True)
    assert [layout.blocks(0), layout.blocks(1)] == [10, 3]
    assert [layout.bitmap_bytes(0), layout.bitmap_bytes(1)] == [2, 1]
    assert layout.everything(0) == b"\xff\x03"
    assert layout.is_bitmap(0, b"\x00\x03")
    assert not layout.is_bitmap(0, b"\x00\x04"), "a block beyond the last"
    assert not layout.is_bitmap(0, b"\x00")
    assert not layout.is_bitmap(0, b"\x00\x00\x00")
    assert layout.is_bitmap(1, bytearray(b"\x07"))
    assert not layout.is_bitmap(1, b"\x08")


def test_a_full_last_byte_is_a_bitmap() -> None:
    layout = cut(8, chunk_elements=8, block_elements=1, size=lambda n: n)
    assert layout.everything(0) == b"\xff"
    assert layout.is_bitmap(0, b"\xff")


def test_repairs_hold_two_bytes_per_element_that_there_is() -> None:
    layout = cut(125, chunk_elements=100, block_elements=10, size=lambda n: n, checked=True)
    assert layout.repair_bytes(0, b"\x00\x00") == 8
    assert layout.repair_bytes(0, b"\x05\x02") == 3 * 20 + 8
    assert layout.repair_bytes(1, b"\x03") == 40 + 8
    assert layout.repair_bytes(1, b"\x04") == 10 + 8, "the last block has five elements"
    assert layout.repair_bytes(1, layout.everything(1)) == 50 + 8
