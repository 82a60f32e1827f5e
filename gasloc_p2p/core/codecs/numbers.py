"""Numbers that every implementation of the loops shares; partners must agree on those of hashes.

numba caches compiled loops by the time and size of `kernels.py`: change that file with this one.
"""

from __future__ import annotations

from typing import Final

INTEGER_LIMIT: Final = 1 << 20
"""Integers of modular codecs are at most this large, so that fp32 holds them and their sums."""

GOLDEN_32: Final = 0x9E3779B9
"""2^32 over the golden ratio: products with places below 2^8 are further than 2^22 apart, so no two
pairs of a place and an integer start from the same value."""

GOLDEN_64: Final = 0x9E3779B97F4A7C15

# Multipliers and shifts of well-known mixers: 32 bits of Wellons' lowbias32, 64 bits of splitmix64.
MIX_32: Final = (0x7FEB352D, 0x846CA68B)
MIX_64: Final = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
DIGEST_64: Final = 0xD6E8FEB86659FD93
