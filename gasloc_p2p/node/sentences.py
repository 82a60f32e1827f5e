"""What an event means, in a sentence for a person."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gasloc_p2p.core.types import PeerId
from gasloc_p2p.node.events import (
    Event,
    Invitation,
    Jumped,
    Left,
    Notice,
    Online,
    PeersChanged,
    Training,
    Waiting,
)

_WITH_WHOM: Final[Mapping[str, str]] = {
    "pairs": "in random pairs",
    "ring": "in a random ring",
    "complete": "with everybody",
    "cycle": "in a fixed ring",
}

_MANY: Final = 100_000
"""From so many on, parameters are counted in millions."""


def sentence(event: Event) -> str:
    """Return what an event means in words; empty for those that tables show better."""
    match event:
        case Online(peer_id=peer_id):
            return f"online as {peer_id}"
        case Invitation(invite=invite):
            return f"others join with: gasloc join {invite}"
        case Waiting(reason=reason):
            return f"waiting: {reason}"
        case Training():
            return _training(event)
        case PeersChanged():
            return _changes(event)
        case Jumped(from_round=a, to_round=b):
            return f"the swarm was ahead: skipped from round {a} to round {b}"
        case Notice(text=text):
            return text
        case Left(finished=finished):
            return "finished" if finished else "left the swarm"
        case _:
            return ""


def short_id(peer_id: PeerId) -> str:
    """Return the last characters of a peer id, which is where ids differ."""
    return peer_id[-6:]


def _training(event: Training) -> str:
    what = "fp32 parameters" if event.codec == "none" else f"{event.codec} codes"
    whom = _WITH_WHOM.get(event.topology, f"in topology {event.topology}")
    exchange = "nothing" if event.topology == "none" else f"{what} {whom}"
    count = event.parameters
    many = f"{count:,}" if count < _MANY else f"{count / 1e6:,.1f} M"
    return (
        f"trains {event.model}, a {event.architecture} of {many} parameters, in "
        f"{event.precision} on {event.device}; text: {event.text}; exchanges {exchange}"
    )


def _changes(event: PeersChanged) -> str:
    kinds = (
        ("joined", event.joined, "joined", "joined"),
        ("left", event.left, "left", "left"),
        ("gone", event.gone, "is gone", "are gone"),
    )
    parts = [
        f"peer {short_id(event.names[kind])} {one}" if count == 1 else f"{count} peers {several}"
        for kind, count, one, several in kinds
        if count
    ]
    # That nobody else is left has a sentence of its own.
    now = f" ({event.peers} peers)" if event.peers > 1 else ""
    return ", ".join(parts) + now
