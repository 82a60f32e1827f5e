"""Things that a configuration chooses by name: outer rules, topologies, codecs."""

from __future__ import annotations

import re
from typing import Final, Generic, TypeVar

from gasloc_p2p.core.errors import ConfigError

NAME_PATTERN: Final = r"^[a-z0-9][a-z0-9-]{0,31}$"
"""What a name looks like."""

T = TypeVar("T")


def is_name(text: str) -> bool:
    """Whether `text` can be a name."""
    return re.fullmatch(NAME_PATTERN, text) is not None


class Registry(Generic[T]):
    """Values of one kind by name, in the order in which they were registered.

    Args:
        kind: what the values are, as messages call it.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._article = "an" if kind[0] in "aeiou" else "a"
        self._values: dict[str, T] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Every name so far, the default first."""
        return tuple(self._values)

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def register(self, name: str, value: T) -> None:
        """Make `value` known as `name`.

        Raises:
            ConfigError: the name is malformed or taken.
        """
        if not is_name(name):
            raise ConfigError(
                f"{name!r} is no name for {self._article} {self.kind}",
                why="a name is at most 32 lower-case letters, digits and hyphens",
                fix="choose another name, such as 'my-own'",
            )
        if name in self._values:
            raise ConfigError(
                f"there is {self._article} {self.kind} {name!r} already",
                why="a name stands for one thing, and built-in ones cannot be replaced",
                fix="choose another name",
            )
        self._values[name] = value

    def named(self, name: str) -> T:
        """Return the value with this name.

        Raises:
            ConfigError: there is none.
        """
        if name not in self._values:
            raise ConfigError(
                f"there is no {self.kind} {name!r}",
                why="one of your own is known once node.extensions names the file that "
                "registers it",
                fix=f"use one of {', '.join(map(repr, self._values))}",
            )
        return self._values[name]
