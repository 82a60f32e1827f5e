"""What every `Network` promises, as checks that any transport can be put to.

A check gets a function that starts networks by index, each with an identity of its own, all of
which reach each other. Networks 0 and 1 stay open and may serve many checks; one of a higher index
is made for the check that asks for it, which closes it. A promise that is broken is an
`AssertionError` or a `TimeoutError`.
"""

from __future__ import annotations

from typing import Final

from gasloc_p2p.testing.promise import Check, StartNetwork, Trial
from gasloc_p2p.testing.record_promises import RECORD_CHECKS
from gasloc_p2p.testing.stream_promises import STREAM_CHECKS

__all__ = ["CHECKS", "Check", "StartNetwork", "Trial"]

CHECKS: Final = (*STREAM_CHECKS, *RECORD_CHECKS)
"""All promises."""
