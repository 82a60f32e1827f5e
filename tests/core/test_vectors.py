"""What goes over long vectors in parts does what it would do to them as a whole."""

from __future__ import annotations

import pytest
import torch

from gasloc_p2p.core.outer import OUTER_RULES, outer_rule
from gasloc_p2p.core.vectors import PART_ELEMENTS, is_finite, outer_step

ELEMENTS = PART_ELEMENTS + 4099


@pytest.mark.parametrize("name", OUTER_RULES.names)
def test_an_outer_step_in_parts_is_the_whole_step(name: str) -> None:
    rule = outer_rule(name, lr=0.7, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    theta, theta_h = torch.randn(2, ELEMENTS, generator=generator)
    mixed = torch.randn(rule.vectors * ELEMENTS, generator=generator)
    _, state = rule.step(theta, theta_h, mixed, rule.initial(theta))
    given = [tensor.clone() for tensor in (theta, theta_h, state.memory)]
    expected, kept = rule.step(theta, theta_h, mixed.clone(), state)
    found, memory = outer_step(rule, theta, theta_h, mixed, state)
    assert torch.equal(found, expected)
    assert torch.equal(memory.memory, kept.memory)
    assert found.data_ptr() == mixed.data_ptr(), "it takes the place of the mix"
    for tensor, before in zip((theta, theta_h, state.memory), given, strict=True):
        assert torch.equal(tensor, before)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [0, PART_ELEMENTS, ELEMENTS - 1])
def test_one_number_that_is_not_finite_is_found(bad: float, place: int) -> None:
    vector = torch.zeros(ELEMENTS)
    assert is_finite(vector, torch.tensor(1.0), torch.zeros(0))
    vector[place] = bad
    assert not is_finite(torch.zeros(2), vector)
