"""How a flat parameter vector travels: as fp32 (`none`) or rounded to bfloat16 (`bf16`).

Codecs are found by name in `CODECS`, where `register_codec` puts one's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from gasloc_p2p.core.registry import Registry
from gasloc_p2p.core.types import BytesLike


class Codec(Protocol):
    """Turns a flat fp32 vector into codes and back (docs/design.md section 5).

    Partners mix the difference of two decoded vectors, so a peer also decodes its own codes;
    only then do both sides of an edge move by the same amount and the swarm's mean stays.
    """

    @property
    def name(self) -> str:
        """Name in the configuration and in Hello."""
        ...

    def code_bytes(self, elements: int) -> int:
        """Size in bytes of the codes of a vector with `elements` elements."""
        ...

    def scales(self, x: Tensor) -> bytes:
        """What the partner must know before either side encodes; sent in Hello."""
        ...

    def encode(self, x: Tensor, *, scales: bytes, partner_scales: bytes) -> bytearray | memoryview:
        """Return the codes of `x` (flat, fp32, CPU), little endian, independent of `x` afterwards.

        Raises:
            ValueError: `x` is not a flat fp32 vector.
        """
        ...

    def decode(
        self, codes: BytesLike, *, own: Tensor, scales: bytes, partner_scales: bytes
    ) -> Tensor:
        """Return the fp32 vector, shaped like `own`, that `codes` stand for.

        The result shares no memory with `codes` and may hold non-finite values when they do.

        Raises:
            ValueError: `codes` is not as long as the codes of a vector like `own`.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class CastCodec:
    """Sends every element as one `dtype` number, rounded to nearest even; needs no scales.

    Codes are the host's own byte order; every platform that hivemind and torch support together
    is little endian.
    """

    name: str
    dtype: torch.dtype

    def code_bytes(self, elements: int) -> int:
        """Size in bytes of the codes of a vector with `elements` elements."""
        return elements * self.dtype.itemsize

    def scales(self, x: Tensor) -> bytes:
        """A cast needs no scales: always empty."""
        return b""

    def encode(self, x: Tensor, *, scales: bytes, partner_scales: bytes) -> memoryview:
        """Return a private copy of `x` (flat, fp32, CPU) cast to `dtype`, as bytes.

        Raises:
            ValueError: `x` is not a flat fp32 vector.
        """
        if x.dim() != 1 or x.dtype != torch.float32:
            raise ValueError(
                f"expected a flat fp32 vector, got {x.dtype} of shape {tuple(x.shape)}"
            )
        cast = x.detach().to(self.dtype, copy=True, memory_format=torch.contiguous_format)
        return cast.view(torch.uint8).numpy().data

    def decode(
        self, codes: BytesLike, *, own: Tensor, scales: bytes, partner_scales: bytes
    ) -> Tensor:
        """Return the fp32 vector, shaped like `own`, that `codes` stand for.

        Raises:
            ValueError: `codes` is not as long as the codes of a vector like `own`.
        """
        view = memoryview(codes)
        expected = self.code_bytes(own.numel())
        if view.nbytes != expected:
            raise ValueError(f"{view.nbytes} bytes of {self.name} codes, expected {expected}")
        decoded = torch.empty(own.numel(), dtype=torch.float32)
        if expected:
            # torch warns about tensors on read-only memory, even ones that are only read.
            source = bytearray(view) if view.readonly else view
            decoded.copy_(torch.frombuffer(source, dtype=self.dtype))
        return decoded


CODECS: Registry[Codec] = Registry("codec")
"""Every codec by name, the default first."""


def register_codec(codec: Codec) -> None:
    """Make `codec` known by its name.

    Raises:
        ConfigError: the name is malformed or taken.
    """
    CODECS.register(codec.name, codec)


register_codec(CastCodec(name="none", dtype=torch.float32))
register_codec(CastCodec(name="bf16", dtype=torch.bfloat16))


def codec_named(name: str) -> Codec:
    """Return the codec with this name.

    Raises:
        ConfigError: there is no such codec.
    """
    return CODECS.named(name)
