"""Clocks that disagree, found from the times at which peers say that they signed their records."""

from __future__ import annotations

from typing import Final

from gasloc_p2p.core.types import PeerId

SKEW_S: Final = 2.0
"""Below this a clock is right enough; DHT nodes refuse each other at 3 s."""
REMEMBERED_PEERS: Final = 256


class SkewWatch:
    """Compares this machine's clock with those of the peers whose records arrive.

    A record takes time to arrive, so one that seems old proves nothing; one from the future does.
    """

    def __init__(self) -> None:
        self._ahead_s: dict[PeerId, float] = {}
        self._told: set[PeerId | None] = set()

    def observe(self, peer: PeerId, *, signed_s: float, now_s: float) -> str | None:
        """Take in a record of `peer`; return a sentence for a person, once for each clock.

        Args:
            peer: who signed it.
            signed_s: unix seconds at which it was signed, by the peer's clock.
            now_s: unix seconds at which it arrived, by ours.
        """
        self._ahead_s.pop(peer, None)
        self._ahead_s[peer] = signed_s - now_s
        if len(self._ahead_s) > REMEMBERED_PEERS:
            del self._ahead_s[next(iter(self._ahead_s))]
        if signed_s - now_s <= SKEW_S:
            return None
        ahead_s = sorted(ahead for ahead in self._ahead_s.values() if ahead > SKEW_S)
        if 2 * len(ahead_s) > len(self._ahead_s) and len(ahead_s) > 1:
            return self._once(
                None,
                f"this machine's clock is about {ahead_s[len(ahead_s) // 2]:.0f} s behind those of "
                f"{len(ahead_s)} peers; set it, for example with `timedatectl set-ntp true`",
            )
        return self._once(
            peer,
            f"the clock of {peer} is about {signed_s - now_s:.0f} s ahead of this machine's; one "
            "of the two should be set",
        )

    def _once(self, clock: PeerId | None, text: str) -> str | None:
        if clock in self._told or len(self._told) > REMEMBERED_PEERS:
            return None
        self._told.add(clock)
        return text
