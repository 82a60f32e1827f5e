"""Compiled loops over blocks of remainders; `plain.ModularLoops` says the same in torch."""

from __future__ import annotations

from typing import Any, Final

from numba import types

from gasloc_p2p.core.codecs.jit import (
    BYTE_ROWS,
    FLOAT_ROWS,
    FLOATS,
    INDICES,
    OUT_BYTE_ROWS,
    OUT_BYTES,
    OUT_FLOAT_ROWS,
    OUT_WORDS,
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
from gasloc_p2p.core.codecs.numbers import (
    DIGEST_64,
    GOLDEN_32,
    GOLDEN_64,
    INTEGER_LIMIT,
    MIX_32,
    MIX_64,
)

_LIMIT: Final = f32(INTEGER_LIMIT)
_ROUNDING: Final = f32(3 << 22)
"""Above this, fp32 has whole numbers only: adding it rounds to the nearest, ties to even."""

_A32, _B32 = u32(MIX_32[0]), u32(MIX_32[1])
_A64, _B64 = u64(MIX_64[0]), u64(MIX_64[1])
_GOLDEN_32, _GOLDEN_64, _DIGEST_64 = u32(GOLDEN_32), u64(GOLDEN_64), u64(DIGEST_64)


@inlined
def _integer(x: f32, inverse: f32) -> i32:  # pragma: no cover
    """Return the nearest integer to x inverse, ties to even, within the limit."""
    v = x * inverse
    v = v if v >= -_LIMIT else -_LIMIT
    v = v if v <= _LIMIT else _LIMIT
    return i32((v + _ROUNDING) - _ROUNDING)


@inlined
def _low_lane(k: i32, place: int, key: u32) -> u32:  # pragma: no cover
    word = u32(u32(k) + u32(u32(place) * _GOLDEN_32) + key)
    word = u32(u32(word ^ (word >> u32(16))) * _A32)
    return u32(word ^ (word >> u32(15)))


@inlined
def _high_lane(low: u32) -> u32:  # pragma: no cover
    word = u32(low * _B32)
    return u32(word ^ (word >> u32(16)))


@inlined
def _hash(low: u32, high: u32, place: int, key: u64) -> u64:  # pragma: no cover
    word = ((u64(high) << u64(32)) | u64(low)) + u64(place) * _GOLDEN_64 + key
    word = (word ^ (word >> u64(30))) * _A64
    word = (word ^ (word >> u64(27))) * _B64
    return word ^ (word >> u64(31))


@inlined
def _mixed(word: u64) -> u64:  # pragma: no cover
    return (word ^ (word >> u64(32))) * _DIGEST_64


def compile_modular_loops(bits: int, block: int) -> tuple[Loop, Loop, Loop]:
    half_block, half = block // 2, i32(1 << bits - 1)
    wide = bits == 8

    def encode(
        x: Any, delta: Any, places: Any, key: Any, codes: Any, tags: Any
    ) -> Any:  # pragma: no cover
        digest = u64(0)
        key32 = u32(key)
        for g in range(delta.size):
            inverse = f32(1) / delta[g]
            low = u32(0)
            high = u32(0)
            if wide:
                for t in range(block):
                    k = _integer(x[g, t], inverse)
                    codes[g, t] = u8(k)
                    word = _low_lane(k, t, key32)
                    low = u32(low + word)
                    high = u32(high + _high_lane(word))
            else:
                for t in range(half_block):
                    k = _integer(x[g, t], inverse)
                    k2 = _integer(x[g, t + half_block], inverse)
                    codes[g, t] = u8((k & i32(15)) | ((k2 & i32(15)) << i32(4)))
                    word = _low_lane(k, t, key32)
                    word2 = _low_lane(k2, t + half_block, key32)
                    low = u32(low + u32(word + word2))
                    high = u32(high + u32(_high_lane(word) + _high_lane(word2)))
            h = _hash(low, high, places[g], key)
            tags[g, 0] = u8(h >> u64(48))
            tags[g, 1] = u8(h >> u64(56))
            digest += _mixed(h)
        return digest

    def take(
        x: Any,
        delta: Any,
        places: Any,
        key: Any,
        codes: Any,
        tags: Any,
        bad: Any,
        squares: Any,
    ) -> Any:  # pragma: no cover
        digest = u64(0)
        key32 = u32(key)
        for g in range(delta.size):
            inverse = f32(1) / delta[g]
            low = u32(0)
            high = u32(0)
            square = i32(0)
            furthest = i32(0)
            if wide:
                for t in range(block):
                    k = _integer(x[g, t], inverse)
                    d = steps(i32(codes[g, t]), k, half)
                    square = i32(square + i32(d * d))
                    furthest = max(furthest, i32(abs(d)))
                    word = _low_lane(i32(k + d), t, key32)
                    low = u32(low + word)
                    high = u32(high + _high_lane(word))
            else:
                for t in range(half_block):
                    k = _integer(x[g, t], inverse)
                    k2 = _integer(x[g, t + half_block], inverse)
                    code = codes[g, t]
                    d = steps(i32(code & u8(15)), k, half)
                    d2 = steps(i32(code >> u8(4)), k2, half)
                    square = i32(square + i32(i32(d * d) + i32(d2 * d2)))
                    furthest = max(furthest, i32(max(i32(abs(d)), i32(abs(d2)))))
                    word = _low_lane(i32(k + d), t, key32)
                    word2 = _low_lane(i32(k2 + d2), t + half_block, key32)
                    low = u32(low + u32(word + word2))
                    high = u32(high + u32(_high_lane(word) + _high_lane(word2)))
            h = _hash(low, high, places[g], key)
            other = (tags[g, 0] != u8(h >> u64(48))) | (tags[g, 1] != u8(h >> u64(56)))
            bad[g] = other | (furthest >= half)
            squares[g] = square
            digest += _mixed(h)
        return digest

    def difference(x: Any, delta: Any, codes: Any, out: Any) -> None:  # pragma: no cover
        for g in range(delta.size):
            step = delta[g]
            inverse = f32(1) / step
            if wide:
                for t in range(block):
                    k = _integer(x[g, t], inverse)
                    out[g, t] = f32(steps(i32(codes[g, t]), k, half)) * step
            else:
                for t in range(half_block):
                    k = _integer(x[g, t], inverse)
                    k2 = _integer(x[g, t + half_block], inverse)
                    code = codes[g, t]
                    out[g, t] = f32(steps(i32(code & u8(15)), k, half)) * step
                    out[g, t + half_block] = f32(steps(i32(code >> u8(4)), k2, half)) * step

    mine = (FLOAT_ROWS, FLOATS, INDICES, types.uint64)
    told = (OUT_BYTES, OUT_WORDS)
    return (
        compiled(types.uint64(*mine, OUT_BYTE_ROWS, OUT_BYTE_ROWS), encode),
        compiled(types.uint64(*mine, BYTE_ROWS, BYTE_ROWS, *told), take),
        compiled(types.void(FLOAT_ROWS, FLOATS, BYTE_ROWS, OUT_FLOAT_ROWS), difference),
    )
