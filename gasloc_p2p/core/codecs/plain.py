"""The loops of codecs in torch alone; the compiled ones in `kernels` give the same bits.

torch has neither unsigned numbers to calculate with nor logical shifts, so int32 and int64 stand
for words here: products wrap, and what a right shift draws in at the top is masked.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gasloc_p2p.core.codecs.arrays import Bytes, Floats, Indices, Ints
from gasloc_p2p.core.codecs.numbers import (
    DIGEST_64,
    GOLDEN_32,
    GOLDEN_64,
    INTEGER_LIMIT,
    MIX_32,
    MIX_64,
)


def block_loops(bits: int, block_elements: int) -> BlockLoops:
    """Return the loops of a codec that rounds blocks."""
    return BlockLoops(bits=bits, block_elements=block_elements)


def modular_loops(bits: int, block_elements: int) -> ModularLoops:
    """Return the loops of a codec that sends remainders."""
    return ModularLoops(bits=bits, block_elements=block_elements)


def block_maxima(x: Floats, out: Floats) -> None:
    """Write the maximum of |x| per row of `x`, NaN where there is one."""
    torch.amax(torch.from_numpy(x).abs(), 1, out=torch.from_numpy(out))


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockLoops:
    """See `backend.BlockLoops`."""

    bits: int
    block_elements: int

    def encode(self, x: Floats, inverses: Floats, start: int, key: int, codes: Bytes) -> None:
        torch.from_numpy(codes).copy_(_packed(self._drawn(x, inverses, start, key), self.bits))

    def difference(
        self,
        x: Floats,
        inverses: Floats,
        start: int,
        key: int,
        own: Floats,
        theirs: Floats,
        codes: Bytes,
        out: Floats,
    ) -> None:
        mine = self._drawn(x, inverses, start, key).to(torch.float32).mul_(_column(own))
        received = _signed(_unpacked(codes, self.bits), self.bits).to(torch.float32)
        torch.from_numpy(out).copy_(received.mul_(_column(theirs)).sub_(mine))

    def _drawn(self, x: Floats, inverses: Floats, start: int, key: int) -> Tensor:
        """Return the integers of `x`, rounded at random."""
        top = (1 << self.bits - 1) - 1
        scaled = torch.from_numpy(x) * _column(inverses)
        scaled = torch.nan_to_num(scaled.clamp_(-top, top), nan=-top)
        chances = _chances(scaled.numel(), start, key).view_as(scaled)
        return scaled.add_(chances).floor_().clamp_(max=top).to(torch.int32)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModularLoops:
    """See `backend.ModularLoops`."""

    bits: int
    block_elements: int

    def encode(
        self, x: Floats, delta: Floats, places: Indices, key: int, codes: Bytes, tags: Bytes
    ) -> int:
        k = _integers(x, delta)
        torch.from_numpy(codes).copy_(_packed(k, self.bits))
        hashes = _hashes(k, places, key)
        torch.from_numpy(tags).copy_(_tags(hashes))
        return _digest(hashes)

    def take(
        self,
        x: Floats,
        delta: Floats,
        places: Indices,
        key: int,
        codes: Bytes,
        tags: Bytes,
        bad: Bytes,
        squares: Ints,
    ) -> int:
        own = _integers(x, delta)
        difference = self._steps(own, codes)
        hashes = _hashes(own + difference, places, key)
        furthest = difference.abs().amax(1)
        other = (_tags(hashes) != torch.from_numpy(tags.astype(np.int64))).any(1)
        torch.from_numpy(bad).copy_(other | (furthest >= 1 << self.bits - 1))
        torch.from_numpy(squares).copy_((difference * difference).sum(1))
        return _digest(hashes)

    def difference(self, x: Floats, delta: Floats, codes: Bytes, out: Floats) -> None:
        steps = self._steps(_integers(x, delta), codes).to(torch.float32)
        torch.mul(steps, _column(delta), out=torch.from_numpy(out))

    def _steps(self, own: Tensor, codes: Bytes) -> Tensor:
        """Return the partner's integers less the own ones, as close to zero as the codes allow."""
        return _signed(_unpacked(codes, self.bits).sub_(own), self.bits)


def _packed(k: Tensor, bits: int) -> Tensor:
    """Return integers modulo 2^bits; with 4 bits, the first half of a row is in the low ones."""
    codes = k & (1 << bits) - 1
    if bits == 8:
        return codes
    low, high = codes.chunk(2, 1)
    return low | high << 4


def _unpacked(codes: Bytes, bits: int) -> Tensor:
    words = torch.from_numpy(codes.astype(np.int32))
    return words if bits == 8 else torch.cat((words & 15, words >> 4), 1)


def _signed(k: Tensor, bits: int) -> Tensor:
    """Return integers modulo 2^bits as those from -2^(bits - 1)."""
    half = 1 << bits - 1
    return ((k + half) & (1 << bits) - 1).sub_(half)


def _column(values: Floats) -> Tensor:
    return torch.from_numpy(values)[:, None]


def _integers(x: Floats, delta: Floats) -> Tensor:
    scaled = torch.from_numpy(x) * torch.div(torch.ones(()), _column(delta))
    scaled = torch.nan_to_num(scaled.clamp_(-INTEGER_LIMIT, INTEGER_LIMIT), nan=-INTEGER_LIMIT)
    return scaled.round_().to(torch.int32)


def _word(value: int, bits: int) -> int:
    """Return the low bits of `value` as a signed integer."""
    low = value & (1 << bits) - 1
    return low - (1 << bits) if low >> bits - 1 else low


def _shifted(word: Tensor, places: int) -> Tensor:
    """Return a logical right shift."""
    return word >> places & (1 << 8 * word.element_size() - places) - 1


def _chances(elements: int, start: int, key: int) -> Tensor:
    """Return a number in [0, 1) for each of so many elements, with 24 bits."""
    first, second = (_word(constant, 32) for constant in MIX_32)
    word = torch.arange(start, start + elements).to(torch.int32)
    word = word * _word(GOLDEN_32, 32) + _word(key, 32)
    word = (word ^ _shifted(word, 16)) * first
    word = (word ^ _shifted(word, 15) ^ _word(key >> 32, 32)) * second
    word ^= _shifted(word, 16)
    return _shifted(word, 8).to(torch.float32) * 2.0**-24


def _hashes(k: Tensor, places: Indices, key: int) -> Tensor:
    """Return a 64-bit hash of each row of integers, its place, and the key."""
    first, second = (_word(constant, 32) for constant in MIX_32)
    offsets = torch.arange(k.shape[1], dtype=torch.int32) * _word(GOLDEN_32, 32)
    word = k + offsets + _word(key, 32)
    word = (word ^ _shifted(word, 16)) * first
    word ^= _shifted(word, 15)
    low = word.sum(1, dtype=torch.int64) & 0xFFFFFFFF
    word = word * second
    word ^= _shifted(word, 16)
    high = word.sum(1, dtype=torch.int64)
    hashes = (high << 32 | low) + torch.from_numpy(places) * _word(GOLDEN_64, 64) + _word(key, 64)
    first, second = (_word(constant, 64) for constant in MIX_64)
    hashes = (hashes ^ _shifted(hashes, 30)) * first
    hashes = (hashes ^ _shifted(hashes, 27)) * second
    return hashes ^ _shifted(hashes, 31)


def _tags(hashes: Tensor) -> Tensor:
    """Return the two bytes of each hash that travel with its block."""
    return torch.stack((hashes >> 48, hashes >> 56), 1) & 255


def _digest(hashes: Tensor) -> int:
    mixed = (hashes ^ _shifted(hashes, 32)) * _word(DIGEST_64, 64)
    return int(mixed.sum()) & (1 << 64) - 1
