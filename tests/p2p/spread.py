"""Streams of several lanes on loopback, where round trips are too short for them, or of one."""

from __future__ import annotations

import math

import pytest

from gasloc_p2p.net import lanes


def stay_on_one_lane(patch: pytest.MonkeyPatch) -> None:
    """Have every stream of every node in this process stay on one lane, however busy it is."""
    patch.setattr(lanes, "LONG_ROUND_TRIP_S", math.inf)


def spread_at_once(patch: pytest.MonkeyPatch) -> None:
    """Have every stream of every node in this process spread as soon as it is used."""
    patch.setattr(lanes, "LONG_ROUND_TRIP_S", 0.0)
    patch.setattr(lanes, "GROW_BYTES", 0)
