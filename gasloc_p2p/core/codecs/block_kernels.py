"""Compiled loops over blocks that are rounded at random, and over their maxima; see `plain`."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import types

from gasloc_p2p.core.codecs.jit import (
    BYTE_ROWS,
    FLOAT_ROWS,
    FLOATS,
    OUT_BYTE_ROWS,
    OUT_FLOAT_ROWS,
    OUT_WORDS,
    WORD_ROWS,
    Loop,
    compiled,
    f32,
    i32,
    inlined,
    steps,
    u8,
    u32,
    u64,
)
from gasloc_p2p.core.codecs.numbers import GOLDEN_32, MIX_32

_A32, _B32, _GOLDEN_32 = u32(MIX_32[0]), u32(MIX_32[1]), u32(GOLDEN_32)
_CHANCE: Final = f32(2.0**-24)


@inlined
def _drawn(
    x: f32, inverse: f32, top: f32, place: u32, key: u32, key2: u32
) -> i32:  # pragma: no cover
    """Return x inverse, rounded at random."""
    v = x * inverse
    v = v if v >= -top else -top
    v = v if v <= top else top
    word = u32(u32(place * _GOLDEN_32) + key)
    word = u32(u32(word ^ (word >> u32(16))) * _A32)
    word = u32(u32(u32(word ^ (word >> u32(15))) ^ key2) * _B32)
    word = u32(word ^ (word >> u32(16)))
    v = np.floor(v + f32(i32(word >> u32(8))) * _CHANCE)
    return i32(v if v <= top else top)


def compile_block_loops(bits: int, block: int) -> tuple[Loop, Loop]:
    half_block, wide, half = block // 2, bits == 8, i32(1 << bits - 1)
    top = f32((1 << bits - 1) - 1)

    def encode(x: Any, inverses: Any, start: Any, key: Any, codes: Any) -> None:  # pragma: no cover
        key1 = u32(key)
        key2 = u32(key >> u64(32))
        for g in range(inverses.size):
            inverse = inverses[g]
            first = u32(u32(start) + u32(g * block))
            if wide:
                for t in range(block):
                    codes[g, t] = u8(_drawn(x[g, t], inverse, top, u32(first + u32(t)), key1, key2))
            else:
                for t in range(half_block):
                    place = u32(first + u32(t))
                    place2 = u32(place + u32(half_block))
                    q = _drawn(x[g, t], inverse, top, place, key1, key2)
                    q2 = _drawn(x[g, t + half_block], inverse, top, place2, key1, key2)
                    codes[g, t] = u8((q & i32(15)) | ((q2 & i32(15)) << i32(4)))

    def difference(
        x: Any, inverses: Any, start: Any, key: Any, own: Any, theirs: Any, codes: Any, out: Any
    ) -> None:  # pragma: no cover
        key1 = u32(key)
        key2 = u32(key >> u64(32))
        for g in range(inverses.size):
            inverse = inverses[g]
            own_step = own[g]
            step = theirs[g]
            first = u32(u32(start) + u32(g * block))
            if wide:
                for t in range(block):
                    q = _drawn(x[g, t], inverse, top, u32(first + u32(t)), key1, key2)
                    p = steps(i32(codes[g, t]), i32(0), half)
                    out[g, t] = f32(p) * step - f32(q) * own_step
            else:
                for t in range(half_block):
                    place = u32(first + u32(t))
                    place2 = u32(place + u32(half_block))
                    q = _drawn(x[g, t], inverse, top, place, key1, key2)
                    q2 = _drawn(x[g, t + half_block], inverse, top, place2, key1, key2)
                    code = codes[g, t]
                    p = steps(i32(code & u8(15)), i32(0), half)
                    p2 = steps(i32(code >> u8(4)), i32(0), half)
                    out[g, t] = f32(p) * step - f32(q) * own_step
                    out[g, t + half_block] = f32(p2) * step - f32(q2) * own_step

    mine = (FLOAT_ROWS, FLOATS, types.int64, types.uint64)
    return (
        compiled(types.void(*mine, OUT_BYTE_ROWS), encode),
        compiled(types.void(*mine, FLOATS, FLOATS, BYTE_ROWS, OUT_FLOAT_ROWS), difference),
    )


def compile_block_maxima() -> Loop:
    def maxima(x: Any, out: Any) -> None:  # pragma: no cover
        for g in range(x.shape[0]):
            bits = i32(0)
            for t in range(x.shape[1]):
                bits = max(bits, i32(x[g, t] & i32(0x7FFFFFFF)))
            out[g] = bits

    return compiled(types.void(WORD_ROWS, OUT_WORDS), maxima)
