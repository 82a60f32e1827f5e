"""Whether a state that a donor handed over looks like those of other peers.

A digest proves that a state is the one that the donor meant to send, not that it is any good. So
the joiner compares a few numbers about it with those that other peers tell about theirs, and gives
way to a majority of them (docs/design.md section 3).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from gasloc_p2p.core.transfer import Summary, TransferError
from gasloc_p2p.core.types import PeerId

THETA_FACTOR: Final = 2.0
MEMORY_FACTOR: Final = 4.0
"""Norms of one tensor at two peers may differ by these; momentum varies more."""
FLOOR_SHARE: Final = 0.01
"""And by this share of the norm of all parameters, so that small tensors never count."""
MAX_ROUNDS_APART: Final = 8
"""Each round between two states allows as much again, up to here: tensors grow fast at first."""
LOSS_FACTOR: Final = 1.25
LOSS_MARGIN_NATS: Final = 0.5
"""The loss may be above a witness's by both, for that one may be newer, or of another round."""
MIN_WITNESSES: Final = 2
"""With fewer nobody can tell who is the odd one out."""
_AT_ONCE: Final = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """How the two vectors of a state are split into tensors.

    Attributes:
        theta: elements of each parameter tensor, in schema order.
        memory: elements of each part of the outer rule's memory.
    """

    theta: tuple[int, ...]
    memory: tuple[int, ...]

    @classmethod
    def of(cls, parts: Sequence[int], *, memory_elements: int) -> Parts:
        """Split a memory like the parameters where it has as many elements, else not at all."""
        alike = sum(parts) == memory_elements
        return cls(theta=tuple(parts), memory=tuple(parts) if alike else (memory_elements,))


def summarise(
    theta: Tensor, memory: Tensor, parts: Parts, *, round: int, val_loss: float | None
) -> Summary:
    """Return the summary of a state, norms in fp64 over its fp32 tensors.

    Raises:
        ValueError: the vectors are not as long as their parts.
    """
    return Summary(
        round=round,
        theta_norms=_norms(theta, parts.theta),
        memory_norms=_norms(memory, parts.memory),
        val_loss=val_loss,
    )


def check_summary(summary: Summary, parts: Parts) -> None:
    """Accept a peer's summary only if it can be compared.

    Raises:
        TransferError: it has another number of norms, or one that is no finite number.
    """
    if (len(summary.theta_norms), len(summary.memory_norms)) != (
        len(parts.theta),
        len(parts.memory),
    ):
        raise TransferError("the summary has another number of norms")
    norms = (*summary.theta_norms, *summary.memory_norms)
    if not all(math.isfinite(norm) and norm >= 0 for norm in norms):
        raise TransferError("a norm in the summary is not a finite number")
    if summary.val_loss is not None and not math.isfinite(summary.val_loss):
        raise TransferError("the loss in the summary is not a finite number")


def disagreement(own: Summary, told: Summary) -> str:
    """Return how a fetched state differs from what a witness tells of its own; "" if it does not.

    Norms a and b of one tensor, a >= b, of states that are d rounds apart, differ when

        a > (factor + d) b + (1 + d) floor

    with `THETA_FACTOR` or `MEMORY_FACTOR`, d at most `MAX_ROUNDS_APART`, and as floor `FLOOR_SHARE`
    of the norm of all parameters, the smaller of the two peers'. A loss differs when it is above
    the witness's by `LOSS_FACTOR` and `LOSS_MARGIN_NATS`, or is not a number; a better one never
    does.

    Args:
        own: summary of the fetched state, with the loss that this peer itself found.
        told: the witness's, checked.
    """
    apart = min(MAX_ROUNDS_APART, abs(own.round - told.round))
    size = min(math.hypot(*own.theta_norms), math.hypot(*told.theta_norms))
    for what, factor, mine, theirs in (
        ("parameter tensor", THETA_FACTOR, own.theta_norms, told.theta_norms),
        ("outer momentum of tensor", MEMORY_FACTOR, own.memory_norms, told.memory_norms),
    ):
        for index, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            if max(a, b) > (factor + apart) * min(a, b) + (1 + apart) * FLOOR_SHARE * size:
                return f"{what} {index} has norm {a:.3g}, not {b:.3g}"
    if own.val_loss is None or told.val_loss is None:
        return ""
    if own.val_loss <= LOSS_FACTOR * told.val_loss + LOSS_MARGIN_NATS:
        return ""
    return f"the validation loss is {own.val_loss:.3g}, not {told.val_loss:.3g}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What the witnesses say about a fetched state.

    Attributes:
        refused: why it is not to be taken, empty if it is.
        remarks: sentences for a person about one that is.
    """

    refused: str = ""
    remarks: tuple[str, ...] = ()


def judge_state(own: Summary, told: Mapping[PeerId, Summary], *, donor: PeerId) -> Verdict:
    """Refuse a state that more than half of at least `MIN_WITNESSES` witnesses disagree with.

    Args:
        own: summary of the fetched state, with the loss that this peer itself found.
        told: checked summaries of other peers.
        donor: who handed the state over.
    """
    found = {witness: disagreement(own, summary) for witness, summary in told.items()}
    against = {witness: reason for witness, reason in found.items() if reason}
    if len(told) >= MIN_WITNESSES and 2 * len(against) > len(told):
        reason = next(iter(against.values()))
        return Verdict(
            refused=f"{len(against)} of {len(told)} other peers have different ones: {reason}"
        )
    remarks = [f"{donor} handed over parameters unlike {w}'s: {r}" for w, r in against.items()]
    if len(told) < MIN_WITNESSES:
        count = "no other peer is" if not told else "only one other peer is"
        remarks.append(
            f"the parameters of {donor} are taken on trust: {count} there to compare them with"
        )
    return Verdict(remarks=tuple(remarks))


def _norms(vector: Tensor, parts: Sequence[int]) -> tuple[float, ...]:
    """Return the L2 norm of each part."""
    if len(vector) != sum(parts):
        raise ValueError(f"{len(vector)} elements in parts of {sum(parts)}")
    return tuple(_norm(part) for part in vector.split_with_sizes(list(parts)))


def _norm(part: Tensor) -> float:
    # torch makes an fp64 copy of all that it is given.
    norms = (torch.linalg.vector_norm(x, dtype=torch.float64) for x in torch.split(part, _AT_ONCE))
    return math.hypot(*map(float, norms))
