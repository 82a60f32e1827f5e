"""How fast the machines of simulated peers compute, and when that changes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gasloc_p2p.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """From when on which peers are how fast.

    Attributes:
        from_s: virtual second from which it holds.
        factor: inner steps in the time of one at the common speed, above 0.
        peers: indices of the peers.
    """

    from_s: float
    factor: float
    peers: frozenset[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """One peer's machine.

    Attributes:
        changes: of its speed, in the order of time; before the first it has the common speed.
    """

    changes: tuple[Speed, ...] = ()

    def factor(self, at_s: float) -> float:
        """Return its speed at a virtual second, as a multiple of the common one."""
        return next((c.factor for c in reversed(self.changes) if c.from_s <= at_s), 1.0)


STEADY: Final = Machine()
"""A machine of the common speed."""

_NUMBER: Final = r"([0-9]{1,12}(?:\.[0-9]{1,9})?)"
_SPEED: Final = re.compile(rf"{_NUMBER}:{_NUMBER}:([0-9]{{1,9}}(?:\+[0-9]{{1,9}})*)")


def parse_speed(text: str) -> Speed:
    """Return the speed that FROM_S:FACTOR:PEERS describes, as in 60:0.2:0+1+2.

    Raises:
        ConfigError: it is malformed, or the peers would stand still.
    """
    match = _SPEED.fullmatch(text)
    if match is None:
        raise _speed_error(text, "it is not a time in seconds, a factor and indices of peers")
    from_s, factor = float(match[1]), float(match[2])
    if factor == 0:
        raise _speed_error(text, "with a factor of 0 a step would never end")
    return Speed(
        from_s=from_s,
        factor=factor,
        peers=frozenset(int(index) for index in match[3].split("+")),
    )


def _speed_error(text: str, why: str) -> ConfigError:
    return ConfigError(
        f"simulate.speeds: {text!r} is not a speed",
        why=why,
        fix="use FROM_S:FACTOR:PEERS, as in 60:0.2:0+1+2",
    )


def machines_of(texts: Sequence[str], peers: int) -> tuple[Machine, ...]:
    """Return a machine for each of `peers` peers.

    Raises:
        ConfigError: a text is not a speed, or names a peer which the swarm does not have.
    """
    speeds = [parse_speed(text) for text in texts]
    for speed in speeds:
        index = max(speed.peers)
        if index >= peers:
            raise ConfigError(
                f"simulate.speeds: there is no peer {index}",
                why=f"the swarm has {peers} peers, and they are counted from 0",
                fix=f"use indices up to {peers - 1}, or start more peers",
            )
    # Of two for the same second the last one that was written counts.
    speeds.sort(key=lambda speed: speed.from_s)
    return tuple(
        Machine(changes=tuple(speed for speed in speeds if index in speed.peers))
        for index in range(peers)
    )
