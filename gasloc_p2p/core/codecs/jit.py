"""How loops are compiled with numba; imported only where one is needed.

What keeps the bits those of `plain`: no fast arithmetic, every fp32 operation rounded on its own,
and integers that wrap. Conversions are spelled out in the loops, because numba widens whatever two
32-bit integers give to 64 bits. What is compiled is hidden from coverage, which cannot see it run.
"""

from __future__ import annotations

from collections.abc import Callable
from pickle import UnpicklingError
from typing import Any, Final, TypeAlias, TypeVar, cast

import numba
import numpy as np
from numba import types

F = TypeVar("F", bound=Callable[..., Any])
Loop: TypeAlias = Callable[..., Any]

f32: TypeAlias = np.float32
i32: TypeAlias = np.int32
u32: TypeAlias = np.uint32
u64: TypeAlias = np.uint64
u8: TypeAlias = np.uint8

FLOATS, FLOAT_ROWS = (types.Array(types.float32, rank, "C", readonly=True) for rank in (1, 2))
WORD_ROWS = types.Array(types.int32, 2, "C", readonly=True)
BYTE_ROWS = types.Array(types.uint8, 2, "C", readonly=True)
INDICES = types.Array(types.int64, 1, "C", readonly=True)
OUT_BYTES, OUT_BYTE_ROWS = types.uint8[::1], types.uint8[:, ::1]
OUT_WORDS, OUT_FLOAT_ROWS = types.int32[::1], types.float32[:, ::1]
"""numba's types of the arguments; one for reading takes arrays that can be written, too."""

_OPTIONS: Final[dict[str, Any]] = {"nogil": True, "error_model": "numpy", "boundscheck": False}


def inlined(function: F) -> F:
    """Let loops call a function of single numbers."""
    return cast("F", numba.njit(**_OPTIONS)(function))


@inlined
def steps(code: i32, own: i32, half: i32) -> i32:  # pragma: no cover
    """Return a partner's integer less the own one, modulo 2 half, from -half."""
    return i32(((code - own + half) & i32(2 * half - 1)) - half)


def compiled(signature: Any, function: Callable[..., Any]) -> Loop:
    """Compile a loop, or take it from numba's cache on disk when that can be used.

    Args:
        signature: numba's types of the result and the arguments.
        function: what to compile; its closure holds numbers only, since they tell it from others.
    """
    try:
        loop = numba.njit(signature, cache=True, **_OPTIONS)(function)
    except (RuntimeError, OSError, EOFError, UnpicklingError):
        # No folder to write to, none that has room, or a file in it that a crash cut short.
        loop = numba.njit(signature, **_OPTIONS)(function)
    return cast("Loop", loop)
