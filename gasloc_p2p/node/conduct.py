"""What a peer makes of what its partners send."""

from __future__ import annotations

from collections.abc import Callable

from gasloc_p2p.core.guard import Guard
from gasloc_p2p.core.types import EdgeOutcome, PeerId
from gasloc_p2p.node.events import Notice, Observer


def note_conduct(
    guard: Guard,
    t: int,
    outcome: EdgeOutcome,
    *,
    rounds_apart: int,
    awaited: bool,
    closing: bool,
    left_out: Callable[[PeerId, int], str],
    observe: Observer,
) -> None:
    """Learn from what a partner sent; name it at a first offence and when it is left out.

    Args:
        guard: the peer's own.
        t: the round of the edge.
        outcome: how it ended.
        rounds_apart: of those that skip rounds, who move away from each other for so long; what is
            usual is this much more.
        awaited: whether the round waited for it. A partner from whom nothing comes for long may be
            far away and honest; it is clipped all the same, but not left out for that.
        closing: whether round t only mixes.
        left_out: says why a partner is left out in a round; empty when it is not.
        observe: told of it.
    """
    partner, length = outcome.partner, outcome.length / rounds_apart
    if outcome.mixes and not closing:
        guard.accept(length)
    what = outcome.offence
    far = awaited and rounds_apart == 1 and guard.is_far(length)
    if far:
        what = f"its parameters are {guard.ratio(length):.0f} times as far away as usual"
    if not (what or outcome.mixes):
        return
    offences = guard.note(partner, t, offence=bool(outcome.offence), far=far)
    why = left_out(partner, t + 1)
    if why or (what and offences <= 1):
        ending = f"; it is {why}" if why else ""
        observe(Notice(text=f"{partner} in round {t}: {what}{ending}"))
