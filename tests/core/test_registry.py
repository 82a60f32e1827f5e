"""Registries: names are well formed, stand for one thing, and are told when one is unknown."""

from __future__ import annotations

import pytest

from gasloc_p2p.core.errors import ConfigError
from gasloc_p2p.core.registry import Registry, is_name


def colours() -> Registry[int]:
    registry = Registry[int]("colour")
    registry.register("red", 0xFF0000)
    registry.register("blue", 0x0000FF)
    return registry


def test_values_are_found_by_name_in_the_order_of_registration() -> None:
    registry = colours()
    assert registry.names == ("red", "blue")
    assert registry.named("blue") == 0x0000FF
    assert "red" in registry
    assert "green" not in registry


def test_a_taken_name_is_refused_and_its_value_stays() -> None:
    registry = colours()
    with pytest.raises(ConfigError, match="there is a colour 'red' already"):
        registry.register("red", 1)
    assert registry.named("red") == 0xFF0000


def test_an_unknown_name_is_told_with_the_known_ones_and_where_own_ones_come_from() -> None:
    with pytest.raises(ConfigError, match="there is no colour 'green'") as refusal:
        colours().named("green")
    assert refusal.value.fix == "use one of 'red', 'blue'"
    assert "node.extensions" in refusal.value.why


@pytest.mark.parametrize("name", ["", "Red", "-red", "a b", "rot\n", "é", "r_1", "a" * 33])
def test_a_malformed_name_is_refused(name: str) -> None:
    registry = colours()
    assert not is_name(name)
    with pytest.raises(ConfigError, match="is no name for a colour"):
        registry.register(name, 1)
    assert registry.names == ("red", "blue")


@pytest.mark.parametrize("name", ["r", "7", "a-b-", "a" * 32])
def test_names_may_have_digits_and_hyphens(name: str) -> None:
    registry = colours()
    registry.register(name, 1)
    assert registry.named(name) == 1
