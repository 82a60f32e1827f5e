"""Messages for a person, and values that every layer shares."""

from __future__ import annotations

from gasloc_p2p.core.errors import ConfigError, GaslocError
from gasloc_p2p.core.substrate import PeerUnreachableError
from gasloc_p2p.core.types import EdgeKind, EdgeOutcome


def test_an_error_says_what_why_and_how_to_mend_it_as_far_as_it_knows() -> None:
    assert str(ConfigError("it broke")) == "it broke"
    assert str(ConfigError("it broke", why="rust", fix="oil it")) == (
        "it broke\nwhy: rust\nfix: oil it"
    )


def test_every_kind_of_error_has_a_code_and_an_exit_code_of_its_own() -> None:
    kinds: list[type[GaslocError]] = [GaslocError, *GaslocError.__subclasses__()]
    assert len({kind.code for kind in kinds}) == len(kinds)
    assert len({kind.exit_code for kind in kinds}) == len(kinds)
    assert not issubclass(PeerUnreachableError, GaslocError), "an edge that fails ends no command"


def test_only_applied_and_asymmetric_edges_are_mixed() -> None:
    mixed = {kind for kind in EdgeKind if EdgeOutcome(partner="p", kind=kind).mixes}
    assert mixed == {EdgeKind.APPLIED, EdgeKind.ASYMMETRIC}
