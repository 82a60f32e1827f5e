from __future__ import annotations

import struct
from collections.abc import Iterator

import pytest
import torch
from blake3 import blake3
from torch import Tensor, nn

from gasloc_p2p.core.errors import ConfigError
from gasloc_p2p.train.parameters import ParameterView, Schema, theta_digest


class Mixed(nn.Module):
    """One of everything that a model may hold."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(1)
        self.matrix = nn.Parameter(torch.randn(3, 4, generator=draw))
        self.transposed = nn.Parameter(torch.randn(5, 2, generator=draw).t())
        self.strided = nn.Parameter(torch.randn(4, 6, generator=draw)[:, ::2])
        self.scalar = nn.Parameter(torch.tensor(2.5))
        self.empty = nn.Parameter(torch.empty(0, 7))
        self.also_empty = nn.Parameter(torch.empty(0))
        self.bf16 = nn.Parameter(torch.randn(2, 3, generator=draw).bfloat16())
        self.fp16 = nn.Parameter(torch.randn(5, generator=draw).half())
        self.frozen = nn.Parameter(torch.randn(9, generator=draw), requires_grad=False)
        self.same_object = self.matrix
        self.same_memory = nn.Parameter(self.matrix.detach())
        self.register_buffer("cache", torch.randn(3, generator=draw), persistent=False)

    def trained(self) -> Iterator[Tensor]:
        yield from (self.matrix, self.transposed, self.strided, self.scalar, self.empty)
        yield from (self.also_empty, self.bf16, self.fp16)


TRAINED_NAMES = (
    *("matrix", "transposed", "strided", "scalar", "empty"),
    *("also_empty", "bf16", "fp16"),
)
ELEMENTS = 12 + 10 + 12 + 1 + 0 + 0 + 6 + 5


def test_schema_lists_trainable_parameters_once_and_in_order() -> None:
    schema = ParameterView(Mixed()).schema
    assert schema.names == TRAINED_NAMES
    assert schema.shapes == ((3, 4), (2, 5), (4, 3), (), (0, 7), (0,), (2, 3), (5,))
    assert schema.elements == ELEMENTS


def test_read_is_row_major_fp32_in_schema_order() -> None:
    model = Mixed()
    flat = ParameterView(model).read()
    assert flat.dtype == torch.float32
    assert flat.tolist() == [
        value
        for parameter in model.trained()
        for value in parameter.detach().float().flatten().tolist()
    ]


def test_writing_back_what_was_read_changes_no_bit() -> None:
    model = Mixed()
    view = ParameterView(model)
    before = [parameter.detach().clone() for parameter in model.trained()]
    strides = [parameter.stride() for parameter in model.trained()]
    flat = view.read()
    view.write(torch.zeros_like(flat))
    assert not any(parameter.any() for parameter in model.trained())
    view.write(flat)
    for parameter, old, stride in zip(model.trained(), before, strides, strict=True):
        assert torch.equal(parameter, old)
        assert parameter.dtype == old.dtype
        assert parameter.stride() == stride
    assert theta_digest(view.read()) == theta_digest(flat)


def test_write_rounds_to_the_dtype_of_the_parameter() -> None:
    model = Mixed()
    ParameterView(model).write(torch.full((ELEMENTS,), 1 / 3))
    assert torch.equal(model.matrix, torch.full((3, 4), 1 / 3))
    assert torch.equal(model.bf16, torch.full((2, 3), 1 / 3).bfloat16())
    assert torch.equal(model.fp16, torch.full((5,), 1 / 3).half())


def test_write_reaches_ties_and_leaves_frozen_parameters_and_buffers_alone() -> None:
    model = Mixed()
    frozen = model.frozen.detach().clone()
    cache = model.get_buffer("cache").clone()
    ParameterView(model).write(torch.arange(ELEMENTS, dtype=torch.float32))
    assert torch.equal(model.same_memory, torch.arange(12.0).view(3, 4))
    assert torch.equal(model.same_object, model.same_memory)
    assert torch.equal(model.frozen, frozen)
    assert torch.equal(model.get_buffer("cache"), cache)


def test_flat_vectors_are_copies() -> None:
    view = ParameterView(nn.Linear(3, 2))
    first = view.read()
    kept = first.clone()
    view.write(first)
    first.fill_(7.0)
    assert torch.equal(view.read(), kept)


def test_write_does_not_disturb_autograd() -> None:
    model = nn.Linear(3, 2)
    view = ParameterView(model)
    flat = view.read().requires_grad_()
    view.write(flat)
    assert model.weight.is_leaf
    assert model.weight.requires_grad
    assert not view.read().requires_grad


def test_parameters_side_by_side_in_one_storage_are_not_ties() -> None:
    storage = torch.arange(10.0)
    model = nn.ParameterDict({"a": nn.Parameter(storage[:4]), "b": nn.Parameter(storage[4:])})
    view = ParameterView(model)
    assert view.schema.names == ("a", "b")
    view.write(torch.arange(10.0) + 1)
    assert torch.equal(storage, torch.arange(10.0) + 1)


@pytest.mark.parametrize(
    "flat",
    [torch.zeros(7), torch.zeros(9), torch.zeros(2, 4), torch.zeros(8, dtype=torch.float64)],
    ids=["short", "long", "shaped", "fp64"],
)
def test_write_refuses_another_shape_or_dtype(flat: Tensor) -> None:
    view = ParameterView(nn.Linear(3, 2))
    before = view.read()
    with pytest.raises(ValueError, match=r"expected torch\.float32 \[8\]"):
        view.write(flat)
    assert torch.equal(view.read(), before)


def test_persistent_buffers_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    with pytest.raises(ConfigError, match=r"1\.num_batches_tracked, 1\.running_mean"):
        ParameterView(model)


def test_unmixable_models_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"weight has dtype torch\.float64"):
        ParameterView(nn.Linear(3, 2, dtype=torch.float64))
    with pytest.raises(ConfigError, match="no trainable parameters"):
        ParameterView(nn.Linear(3, 2).requires_grad_(False))


def test_schema_digest_is_the_documented_bytes() -> None:
    schema = Schema(names=("w", "norm"), shapes=((2, 3), ()))
    canonical = struct.pack("<QQQQQ", 2, 1, 2, 2, 3) + b"w" + struct.pack("<QQ", 4, 0) + b"norm"
    assert schema.digest == blake3(canonical).digest()
    assert len(schema.digest) == 32


@pytest.mark.parametrize(
    "other",
    [
        Schema(names=("a", "c"), shapes=((2, 3), (4,))),
        Schema(names=("b", "a"), shapes=((2, 3), (4,))),
        Schema(names=("a", "b"), shapes=((3, 2), (4,))),
        Schema(names=("a", "b"), shapes=((2, 3), (4, 1))),
        Schema(names=("a",), shapes=((2, 3),)),
    ],
)
def test_schema_digest_depends_on_names_shapes_and_order(other: Schema) -> None:
    assert other.digest != Schema(names=("a", "b"), shapes=((2, 3), (4,))).digest


def test_theta_digest_is_over_little_endian_bytes() -> None:
    values = [0.0, -0.0, 1.5, -3.25e-30]
    flat = torch.tensor(values)
    assert theta_digest(flat) == blake3(struct.pack("<4f", *values)).hexdigest()
    assert theta_digest(flat) != theta_digest(flat.abs())
    assert theta_digest(torch.arange(8.0)[::2]) == theta_digest(torch.arange(0.0, 8.0, 2))
    with pytest.raises(ValueError, match="float64"):
        theta_digest(flat.double())
