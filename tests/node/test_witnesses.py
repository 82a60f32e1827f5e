"""Outliers: a state that a majority of other peers disagrees with is refused."""

from __future__ import annotations

import msgspec
import pytest
import torch

from gasloc_p2p.core.transfer import Refusal, pack_message
from gasloc_p2p.node.state import ATTEMPTS, WITNESS_DEADLINE_S, State
from tests.node.transfers import (
    REQUEST,
    Outcome,
    Raw,
    Server,
    Wired,
    Witness,
    donor,
    fetch,
    same_bits,
    state,
    summary_of,
)

STATE, OTHER = state(0, round=7), state(1, round=8)


def unlike(reason: str, outcome: Outcome) -> bool:
    """Whether the first donor was refused for this reason and the second one's state taken."""
    if outcome.state is None or outcome.state.donor != outcome.names[1]:
        return False
    return any(
        remark.startswith(f"{outcome.names[0]} handed over no parameters: ") and reason in remark
        for remark in outcome.state.remarks
    )


@pytest.mark.parametrize("scale", [0.0, 0.3, 3.5, 1e6])
def test_scaled_parameters_are_refused_where_two_witnesses_disagree(scale: float) -> None:
    outcome = fetch(
        donor(state(0, theta_scale=scale, round=7)),
        donor(OTHER),
        Witness(summary=summary_of(STATE)),
    )
    assert unlike("2 of 2 other peers have different ones: parameter tensor 0", outcome)


def test_a_scaled_memory_is_refused() -> None:
    lie = State(theta=STATE.theta, memory=6 * STATE.memory, round=7)
    outcome = fetch(donor(lie), donor(OTHER), donor(STATE))
    assert unlike("outer momentum of tensor 0 has norm", outcome)


def test_parameters_of_a_worse_loss_are_refused() -> None:
    lie = State(theta=-STATE.theta, memory=STATE.memory, round=7)

    def judge(theta: torch.Tensor) -> float:
        return 9.0 if torch.equal(theta, lie.theta) else 2.2

    honest = [donor(OTHER, val_loss=2.0), donor(STATE, val_loss=2.0)]
    outcome = fetch(donor(lie), *honest, judge=judge)
    assert unlike("the validation loss is 9, not 2", outcome)
    blind = fetch(donor(lie), *honest).state
    assert blind is not None
    assert same_bits(blind, lie), "without a judge nothing can be said of the loss"


def test_no_loss_is_measured_where_nobody_tells_one() -> None:
    judged: list[torch.Tensor] = []

    def judge(theta: torch.Tensor) -> float:
        judged.append(theta)
        return 2.0

    assert fetch(donor(STATE), donor(OTHER), donor(STATE), judge=judge).state is not None
    assert not judged
    told = fetch(donor(STATE), donor(OTHER), donor(STATE, val_loss=2.0), judge=judge)
    assert told.state is not None
    assert judged == [told.state.theta]


def test_honest_peers_agree_and_nothing_is_said() -> None:
    outcome = fetch(*[donor(state(seed), val_loss=2.0) for seed in range(4)], judge=lambda _: 2.1)
    assert outcome.state is not None
    assert outcome.state.donor == outcome.names[0]
    assert outcome.state.remarks == ()


def test_a_lying_witness_is_outvoted_and_named() -> None:
    liar = Witness(summary=summary_of(state(0, theta_scale=9.0, round=7)))
    outcome = fetch(donor(STATE), donor(OTHER), liar, donor(state(2)))
    assert outcome.state is not None
    assert same_bits(outcome.state, STATE)
    [remark] = outcome.state.remarks
    assert remark.startswith(f"{outcome.names[0]} handed over parameters unlike {outcome.names[2]}")


def test_one_witness_alone_refuses_nothing() -> None:
    outcome = fetch(donor(state(0, theta_scale=9.0, round=7)), donor(STATE))
    assert outcome.state is not None
    assert outcome.state.donor == outcome.names[0]
    different, alone = outcome.state.remarks
    assert different.startswith(f"{outcome.names[0]} handed over parameters unlike")
    assert alone == (
        f"the parameters of {outcome.names[0]} are taken on trust: "
        "only one other peer is there to compare them with"
    )


@pytest.mark.parametrize(
    "useless",
    [
        None,
        Witness(summary=b""),
        Witness(summary=b"\xff\xff\xff\xff"),
        Witness(summary=pack_message(REQUEST)),
        Witness(summary=pack_message(Refusal(reason="no"))),
        Witness(summary=msgspec.structs.replace(summary_of(OTHER), theta_norms=(9.0,))),
        Witness(summary=msgspec.structs.replace(summary_of(OTHER), val_loss=float("nan"))),
        Witness(
            summary=summary_of(state(0, theta_scale=9.0, round=7)), delay_s=WITNESS_DEADLINE_S + 1
        ),
        donor(STATE, request=msgspec.structs.replace(REQUEST, run_digest=b"")),
    ],
)
def test_a_witness_without_a_sound_summary_does_not_count(useless: Server | None) -> None:
    outcome = fetch(donor(STATE), useless, useless)
    assert outcome.state is not None
    [remark] = outcome.state.remarks
    assert remark.endswith("taken on trust: no other peer is there to compare them with")
    assert outcome.ended_s <= WITNESS_DEADLINE_S


def test_at_most_three_witnesses_are_asked_and_none_that_failed() -> None:
    failed = Raw(data=b"")
    witnesses = [Wired(donor=donor(state(seed))) for seed in range(5)]
    outcome = fetch(failed, donor(STATE), *witnesses)
    assert outcome.state is not None
    assert failed.served == ATTEMPTS
    # The first two for each of the donors, which are witnesses for each other too.
    assert [len(witness.sent) for witness in witnesses] == [2, 2, 1, 0, 0]
