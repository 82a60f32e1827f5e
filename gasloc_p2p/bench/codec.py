"""How fast and how exact every codec is on one core of this machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec
import torch
from torch import Tensor

from gasloc_p2p.bench.partners import Side, draw_partners
from gasloc_p2p.core.codecs import CODECS, Codec, Coder, Keys, Layout, Offer
from gasloc_p2p.core.types import BytesLike
from gasloc_p2p.machine import Machine, this_machine

ELEMENTS: Final = 2**22
PASSES: Final = 5
MEGABYTE: Final = 1e6
WEIGHT: Final = 0.5
"""Of the edge; that of random pairs."""


class CodecFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One codec; docs/bench.md describes every field."""

    name: str
    encode_mb_s: float
    decode_mb_s: float
    bits_per_parameter: float
    relative_error: float


class CodecBench(msgspec.Struct, frozen=True, kw_only=True):
    """All codecs, and the machine that they were measured on."""

    codecs: tuple[CodecFigures, ...]
    machine: Machine


def bench_codecs(
    *, chunk_bytes: int, told: Callable[[str], None], elements: int = ELEMENTS
) -> CodecBench:
    """Measure every registered codec on one core.

    Args:
        chunk_bytes: wished size of a chunk of codes.
        told: called with the name of the codec that is measured next.
        elements: of the vectors.
    """
    torch.set_num_threads(1)
    sides = draw_partners(elements)
    figures = []
    for name in CODECS.names:
        told(name)
        figures.append(measure_codec(CODECS.named(name), sides, chunk_bytes=chunk_bytes))
    return CodecBench(codecs=tuple(figures), machine=this_machine())


def measure_codec(
    codec: Codec, sides: tuple[Side, Side], *, chunk_bytes: int, passes: int = PASSES
) -> CodecFigures:
    """Measure one codec between a peer, which is timed, and its partner.

    Encoding is all that a peer does before it can send: its offer, the coder of the edge, and every
    chunk. Decoding is all that it does with what comes back: it takes the partner's chunks, makes
    and takes repairs, finds the distance and, for a checked codec, the largest difference of each
    block, and mixes. Digests of frames are not in it.

    Args:
        codec: the codec.
        sides: the peer and its partner.
        chunk_bytes: wished size of a chunk of codes.
        passes: how many times; medians count. One more comes before them, untimed.
    """
    own, other = (
        _End.of(codec, side, key=key, chunk_bytes=chunk_bytes) for key, side in enumerate(sides)
    )
    partner = _Partner.of(other, own)
    passed = [_pass(own, partner) for _ in range(passes + 1)][1:]
    elements, last = own.x.numel(), passed[-1]
    difference = torch.zeros_like(own.x)
    last.coder.add_difference(difference, 1.0)
    megabytes = elements * own.x.element_size() / MEGABYTE
    return CodecFigures(
        name=codec.name,
        encode_mb_s=megabytes / statistics.median(one.encode_s for one in passed),
        decode_mb_s=megabytes / statistics.median(one.decode_s for one in passed),
        bits_per_parameter=8 * last.sent_bytes / elements,
        relative_error=_relative_error(difference, own.x, other.x),
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _End:
    """One end of the edge, with all that its offers are made of."""

    codec: Codec
    x: Tensor
    motion: Tensor | None
    keys: Keys
    chunk_bytes: int

    @classmethod
    def of(cls, codec: Codec, side: Side, *, key: int, chunk_bytes: int) -> _End:
        block = codec.block_elements
        return cls(
            codec=codec,
            x=side.x,
            motion=side.motion(block) if codec.checked else None,
            keys=Keys(round=0, own=key),
            chunk_bytes=chunk_bytes,
        )

    @property
    def layout(self) -> Layout:
        return self.codec.layout(self.x.numel(), self.chunk_bytes)

    def offer(self) -> Offer:
        return self.codec.offer(
            self.x,
            motion=self.motion,
            keys=self.keys,
            chunk_bytes=self.chunk_bytes,
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Partner:
    """The other end of the edge; what it answers is made before anything is timed.

    Attributes:
        scales, codes: what it sends, codes by chunk.
        bad: which blocks of the timed peer's codes it does not understand, by chunk.
        coder: makes its repairs.
        repairs: those that it made, by chunk and bitmap.
    """

    scales: bytes
    codes: Sequence[BytesLike]
    bad: Sequence[bytes]
    coder: Coder
    repairs: dict[tuple[int, bytes], bytes] = field(default_factory=dict)

    @classmethod
    def of(cls, end: _End, timed: _End) -> _Partner:
        offer, timed_offer = end.offer(), timed.offer()
        coder, timed_coder = offer.coder(timed_offer.scales), timed_offer.coder(offer.scales)
        chunks = range(end.layout.chunks)
        return cls(
            scales=offer.scales,
            codes=[bytes(coder.encode(index)) for index in chunks],
            bad=[coder.take(index, bytes(timed_coder.encode(index))) for index in chunks],
            coder=coder,
        )

    def repair(self, index: int, bad: bytes) -> bytes:
        """Return its repair; the first pass makes it, the timed ones only look it up."""
        if (index, bad) not in self.repairs:
            self.repairs[index, bad] = bytes(self.coder.repair(index, bad))
        return self.repairs[index, bad]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Pass:
    """One pass: its durations, what the timed peer sent, and its coder."""

    encode_s: float
    decode_s: float
    sent_bytes: int
    coder: Coder


def _pass(own: _End, partner: _Partner) -> _Pass:
    layout, mixed = own.layout, own.x.clone()
    began_s = time.perf_counter()
    offer = own.offer()
    coder = offer.coder(partner.scales)
    for index in range(layout.chunks):
        coder.encode(index)
    encoded_s = time.perf_counter()
    answer_bytes = sum(_take(coder, partner, layout, index) for index in range(layout.chunks))
    coder.square_distance()
    coder.add_difference(mixed, WEIGHT)
    mixed_s = time.perf_counter()
    return _Pass(
        encode_s=encoded_s - began_s,
        decode_s=mixed_s - encoded_s,
        sent_bytes=len(offer.scales) + layout.code_bytes + answer_bytes,
        coder=coder,
    )


def _take(coder: Coder, partner: _Partner, layout: Layout, index: int) -> int:
    """Take one chunk, repaired where either side asks for it; return the bytes of the answers."""
    bad = coder.take(index, partner.codes[index])
    answer_bytes = len(bad)
    either = _union(bad, partner.bad[index])
    if either:
        answer_bytes += len(coder.repair(index, either))
        if not coder.take_repair(index, either, partner.repair(index, either)):
            everything = layout.everything(index)
            answer_bytes += len(everything) + len(coder.repair(index, everything))
            coder.take_repair(index, everything, partner.repair(index, everything))
    return answer_bytes


def _union(one: bytes, other: bytes) -> bytes:
    if not (one and other):
        return one or other
    return bytes(a | b for a, b in zip(one, other, strict=True))


def _relative_error(difference: Tensor, own: Tensor, other: Tensor) -> float:
    """Return ||difference - (other - own)|| / ||other - own||, computed in fp64."""
    exact = other.double() - own.double()
    return float((difference.double() - exact).norm() / exact.norm())
