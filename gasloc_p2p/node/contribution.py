"""What a peer gives to the mix of one round, as its partners receive it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gasloc_p2p.core.codecs import Codec
from gasloc_p2p.core.guard import Guard, distance
from gasloc_p2p.core.types import BytesLike
from gasloc_p2p.node.edge import Judgement


def is_finite(*tensors: Tensor) -> bool:
    """Whether all elements are finite numbers."""
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)


@dataclass(kw_only=True, slots=True)
class _View:
    """The contribution as the partners with these scales see it."""

    partner_scales: bytes
    codes: BytesLike
    copy: Tensor | None = None


class Contribution:
    """A vector and what a codec makes of it; for the compute thread alone.

    Partners mix differences of decoded copies, so the own vector is encoded and decoded as well
    (docs/design.md section 5). What one partner sees is kept until another sees something else;
    without scales that is never.

    Attributes:
        vector: the outgoing tensor, fp32 [P] or a multiple of it.
        scales: what the partners are told in Hello.
    """

    def __init__(self, vector: Tensor, codec: Codec) -> None:
        self.vector = vector
        self.scales = codec.scales(vector)
        self._codec = codec
        self._view: _View | None = None

    def codes(self, partner_scales: bytes) -> BytesLike:
        """Return the codes for a partner; they may not be changed."""
        return self._seen_with(partner_scales).codes

    def copy(self, partner_scales: bytes) -> Tensor:
        """Return the vector as a partner decodes it; it may not be changed."""
        view = self._seen_with(partner_scales)
        if view.copy is None:
            view.copy = self._decode(view.codes, partner_scales)
        return view.copy

    def judge(self, codes: BytesLike, partner_scales: bytes, guard: Guard) -> Judgement | None:
        """Decode a partner's codes and compare them with the own copy.

        Returns:
            None when the difference is not finite.
        """
        received = self._decode(codes, partner_scales)
        length = distance(received, self.copy(partner_scales))
        if not math.isfinite(length):
            return None
        return Judgement(received=received, length=length, clip=guard.factor(length))

    def _decode(self, codes: BytesLike, partner_scales: bytes) -> Tensor:
        return self._codec.decode(
            codes, own=self.vector, scales=self.scales, partner_scales=partner_scales
        )

    def _seen_with(self, partner_scales: bytes) -> _View:
        if self._view is None or self._view.partner_scales != partner_scales:
            codes = self._codec.encode(
                self.vector, scales=self.scales, partner_scales=partner_scales
            )
            self._view = _View(partner_scales=partner_scales, codes=codes)
        return self._view
