"""The decoder of `train/model.py` for many replicas at once: one matrix product serves them all.

Computes what transformers' Llama computes, from flat parameter vectors and without modules, so
that replicas share every call. Tensors are [replicas, ...]; D is the width, T the tokens of one
replica's batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, embedding, scaled_dot_product_attention, silu

from gasloc_p2p.train.model import NORM_EPSILON, ROPE_BASE, VOCABULARY, Preset
from gasloc_p2p.train.parameters import Schema

_EMBEDDING = "model.embed_tokens.weight"
_FINAL_NORM = "model.norm.weight"
_LAYER = "model.layers.{layer}.{part}.weight"


class Leaf(NamedTuple):
    """A stretch of the flat vector that the forward pass uses as one tensor."""

    offset: int
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Length of the stretch."""
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class StackedLlama:
    """Forward pass over the flat parameters of several replicas.

    Attributes:
        leaves: where each tensor lies in the flat vector; projections that read the same input
            are one.
    """

    preset: Preset
    leaves: Mapping[str, Leaf]
    _head: int
    _turns: Tensor
    _pairs: Tensor

    @classmethod
    def of(cls, preset: Preset, schema: Schema, *, device: torch.device) -> StackedLlama:
        """Return the forward pass for a model of `preset` whose flat vector has `schema`."""
        head = preset.width // preset.heads
        frequencies = 1.0 / ROPE_BASE ** (torch.arange(0, head, 2).float() / head)
        angles = torch.outer(torch.arange(preset.sequence_length).float(), frequencies)
        return cls(
            preset=preset,
            leaves=_leaves(preset, schema),
            _head=head,
            _turns=torch.polar(torch.ones_like(angles), angles)[:, None, :].to(device),
            _pairs=_rotary_pairs(preset, head).to(device),
        )

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Return every leaf as a view into `flat`, [replicas, elements]."""
        return {
            name: flat.narrow(1, leaf.offset, leaf.elements).view(len(flat), *leaf.shape)
            for name, leaf in self.leaves.items()
        }

    def losses(self, weights: Mapping[str, Tensor], tokens: Tensor) -> Tensor:
        """Return each replica's mean cross-entropy of predicting tokens[..., 1:], [replicas].

        Args:
            weights: the leaves, [replicas, *shape].
            tokens: int64 [replicas, batch, sequence + 1].
        """
        logits = self._logits(weights, tokens[..., :-1])
        each = cross_entropy(logits.flatten(0, 1), tokens[..., 1:].flatten(), reduction="none")
        return each.view(len(tokens), -1).mean(dim=1)

    def _logits(self, weights: Mapping[str, Tensor], tokens: Tensor) -> Tensor:
        """Return [replicas, T, 256]."""
        replicas, batch, _ = tokens.shape
        table = weights["embedding"]
        first_rows = VOCABULARY * torch.arange(replicas, device=tokens.device)
        x = embedding(tokens.flatten(1) + first_rows[:, None], table.flatten(0, 1))
        for layer in range(self.preset.layers):
            read = _gained(weights[f"qkv.{layer}"], weights[f"attention_norm.{layer}"])
            mixed = self._attend(_times(_normed(x), read.index_select(1, self._pairs)), batch)
            x = torch.baddbmm(x, mixed, weights[f"out.{layer}"].mT)
            read = _gained(weights[f"gate_up.{layer}"], weights[f"feed_forward_norm.{layer}"])
            gate, up = _times(_normed(x), read).chunk(2, dim=-1)
            x = torch.baddbmm(x, silu(gate) * up, weights[f"down.{layer}"].mT)
        return _times(_normed(x), _gained(table, weights["final_norm"]))

    def _attend(self, qkv: Tensor, batch: int) -> Tensor:
        """Return causal attention over `qkv`, [replicas, T, (heads + 2 kv heads) x head]."""
        replicas, sequence = len(qkv), qkv.shape[1] // batch
        queries, keys = self.preset.heads, self.preset.key_value_heads
        parts = qkv.view(replicas * batch, sequence, -1, self._head)
        turning, value = torch.split(parts, [queries + keys, keys], dim=2)
        pairs = torch.view_as_complex(torch.unflatten(turning, -1, (-1, 2)))
        turned = torch.view_as_real(pairs * self._turns[:sequence]).flatten(-2)
        query, key = torch.split(turned, [queries, keys], dim=2)
        mixed = scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            is_causal=True,
            enable_gqa=True,
        )
        return mixed.transpose(1, 2).reshape(replicas, batch * sequence, -1)


class _Normed(torch.autograd.Function):
    """x / sqrt(mean(x^2) + epsilon) over the last dimension, in fewer passes than autograd's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = length.square_().div_(x.shape[-1]).add_(NORM_EPSILON).rsqrt_()
        y = x * scale
        ctx.save_for_backward(y, scale)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (gradient,) = gradients
        y, scale = ctx.saved_tensors
        along = (gradient * y).mean(dim=-1, keepdim=True).neg_()
        return torch.addcmul(gradient, y, along).mul_(scale)


def _normed(x: Tensor) -> Tensor:
    normed: Tensor = _Normed.apply(x)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return normed


def _gained(matrix: Tensor, gain: Tensor) -> Tensor:
    """Return the matrix that takes the norm's gain into its columns; cheaper than scaling x."""
    return matrix * gain[:, None, :]


def _times(x: Tensor, matrix: Tensor) -> Tensor:
    return torch.bmm(x, matrix.mT)


def _rotary_pairs(preset: Preset, head: int) -> Tensor:
    """Return the order of query, key and value rows in which rotary pairs are neighbours.

    Llama turns element i with element i + head / 2. Scores do not depend on the order of a head's
    elements as long as queries and keys share it, and neighbours turn as one complex number.
    """
    within = torch.arange(head).view(2, head // 2).t().flatten()
    turning = preset.heads + preset.key_value_heads
    turned = (head * torch.arange(turning)[:, None] + within).flatten()
    kept = torch.arange(head * turning, head * (turning + preset.key_value_heads))
    return torch.cat((turned, kept))


def _leaves(preset: Preset, schema: Schema) -> dict[str, Leaf]:
    """Return the leaves; those of several parameters are neighbours in the flat vector."""
    starts, offset = {}, 0
    for name, size in zip(schema.names, schema.sizes, strict=True):
        starts[name], offset = offset, offset + size
    head = preset.width // preset.heads
    reads = (preset.heads + 2 * preset.key_value_heads) * head
    parts = {
        "qkv": ("self_attn.q_proj", (reads, preset.width)),
        "out": ("self_attn.o_proj", (preset.width, preset.heads * head)),
        "gate_up": ("mlp.gate_proj", (2 * preset.feed_forward, preset.width)),
        "down": ("mlp.down_proj", (preset.width, preset.feed_forward)),
        "attention_norm": ("input_layernorm", (preset.width,)),
        "feed_forward_norm": ("post_attention_layernorm", (preset.width,)),
    }
    first: dict[str, tuple[str, tuple[int, ...]]] = {
        f"{name}.{layer}": (_LAYER.format(layer=layer, part=part), shape)
        for layer in range(preset.layers)
        for name, (part, shape) in parts.items()
    }
    first["embedding"] = (_EMBEDDING, (VOCABULARY, preset.width))
    first["final_norm"] = (_FINAL_NORM, (preset.width,))
    elements = sum(math.prod(shape) for _, shape in first.values())
    if elements != schema.elements or not all(name in starts for name, _ in first.values()):
        raise ValueError("the schema is not that of a model of this preset")
    return {leaf: Leaf(starts[name], shape) for leaf, (name, shape) in first.items()}
