"""How many steps a peer does so that its rounds last as long as those of the others."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gasloc_p2p.core.tempo import MOST_CHANGE, MOST_STEPS_FACTOR, StepPlan, Tempo

timeless = settings(deadline=None)
"""An example may take long on a busy machine."""

H = 30


@dataclass(frozen=True)
class Told:
    step_s: float
    transfer_s: float


OTHERS = [Told(0.1, 1.0)] * 3
"""The usual peers: a round takes them 4 s."""


class Machine:
    """A peer that does what its tempo plans, at speeds that can change."""

    def __init__(
        self,
        tempo: Tempo,
        *,
        step_s: float,
        transfer_s: float,
        every: int = 1,
        late: bool = False,
    ) -> None:
        self.late = late
        self.tempo = tempo
        self.step_s = step_s
        self.transfer_s = transfer_s
        self.every = every
        self.wanted: int | None = None

    def round(
        self, others: Sequence[Told] = OTHERS, partners: Mapping[str, float] | None = None
    ) -> StepPlan:
        plan = self.tempo.plan(
            others=others, partners={"p": 1.0} if partners is None else partners, every=self.every
        )
        for partner, told_s in ({"p": 1.0} if partners is None else partners).items():
            self.tempo.rates.note_edge(
                partner,
                max(self.transfer_s, told_s),
                awaited=not (self.late and partner in plan.slow),
            )
        self.wanted = self.tempo.note_round(steps=plan.steps, train_s=plan.steps * self.step_s)
        return plan

    def settle(self, rounds: int = 12) -> StepPlan:
        return [self.round() for _ in range(rounds)][-1]


def machine(
    step_s: float = 0.1, transfer_s: float = 1.0, every: int = 1, *, late: bool = False
) -> Machine:
    tempo = Tempo(local_steps=H, late=late)
    return Machine(tempo, step_s=step_s, transfer_s=transfer_s, every=every, late=late)


def test_the_usual_steps_are_done_while_nothing_is_known() -> None:
    plan = Tempo(local_steps=H).plan(others=[], partners={"p": 0.0}, every=2)
    assert plan == StepPlan(steps=2 * H, full_steps=2 * H, every=2, expected_s={"p": 0.0})


@pytest.mark.parametrize(
    ("step_s", "transfer_s", "steps", "reason"),
    [
        (0.1, 1.0, 30, ""),
        (0.108, 1.1, 30, ""),
        (0.5, 1.0, 6, "compute-bound: 6 of 30 steps"),
        (0.1, 2.9, 11, "link-bound: 11 of 30 steps"),
        (0.1, 50.0, 1, "link-bound: 1 of 30 steps"),
        (99.0, 1.0, 1, "compute-bound: 1 of 30 steps"),
        (0.05, 1.0, 60, "faster than most: 60 of 30 steps"),
        (0.001, 1.0, 240, "faster than most: 240 of 30 steps"),
    ],
)
def test_steps_follow_from_rates(step_s: float, transfer_s: float, steps: int, reason: str) -> None:
    peer = machine(step_s, transfer_s)
    assert peer.round().steps == H, "nothing is known yet"
    plan = peer.settle()
    assert (plan.steps, plan.full_steps, plan.reason) == (steps, H, reason)


@pytest.mark.parametrize(("step_s", "steps"), [(0.5, 6), (0.02, 150)])
def test_steps_follow_a_sudden_change_within_three_rounds(step_s: float, steps: int) -> None:
    peer = machine()
    assert peer.settle().steps == H
    peer.step_s = step_s
    assert [peer.round().steps for _ in range(4)][-1] == steps


def test_one_bad_round_changes_nothing() -> None:
    peer = machine()
    peer.settle()
    peer.step_s, peer.transfer_s = 9.0, 50.0
    peer.round()
    peer.step_s, peer.transfer_s = 0.1, 1.0
    # Another partner: what is expected of one that took so long is another matter.
    assert [peer.round(partners={"q": 1.0}).steps for _ in range(4)] == [H] * 4


def test_who_meets_a_slow_peer_first_does_not_take_itself_for_slow() -> None:
    peer = machine()
    peer.round(partners={"slow": 20.0})
    assert peer.round().steps == H
    assert peer.round().steps == H


def test_an_edge_that_takes_longer_costs_this_round_its_steps() -> None:
    peer = machine()
    peer.settle()
    plan = peer.round(partners={"slow": 2.5, "p": 1.0})
    assert plan.expected_s == {"slow": 2.5, "p": 1.0}
    assert (plan.exchange_s, plan.steps) == (2.5, 15)
    assert plan.slow == {"slow"}
    assert plan.reason == "link-bound: 15 of 30 steps"
    assert peer.round().steps == H
    assert peer.round(partners={"slower": 90.0}).steps == 1


def test_a_slow_edge_that_is_not_awaited_costs_nothing() -> None:
    peer = machine(late=True)
    peer.settle()
    for _ in range(3):
        plan = peer.round(partners={"slow": 2.5, "p": 1.0})
        assert (plan.exchange_s, plan.steps) == (1.0, H)
        assert plan.slow == {"slow"}
    assert peer.tempo.rates.exchange_s == 1.0


def test_while_the_others_exchange_a_peer_trains_on_that_waits_for_nobody() -> None:
    peer = machine(late=True)
    peer.settle()
    for _ in range(3):
        plan = peer.round(partners={"slow": 2.5})
        assert (plan.exchange_s, plan.steps) == (0.0, H + 10), "an exchange lasts ten steps"
        assert plan.reason == "nobody to wait for: 40 of 30 steps"
    assert peer.round().steps == H


def test_a_slow_link_costs_no_steps_where_nobody_waits_for_it() -> None:
    peer = machine(transfer_s=9.0, late=True)
    assert {peer.round().steps for _ in range(9)} == {H}
    assert peer.wanted == 3, "9.1 s of rounds of 4 s: one exchange is over before the next begins"


def test_a_peer_that_skips_rounds_fills_them_with_steps() -> None:
    plan = machine(transfer_s=5.0, every=2).settle()
    assert (plan.steps, plan.every, plan.full_steps) == (30, 2, 60)
    assert plan.reason == "link-bound: 30 of 60 steps"


@pytest.mark.parametrize(("transfer_s", "every"), [(3.0, 1), (4.5, 1), (7.0, 2), (1e6, 16)])
def test_a_peer_that_cannot_keep_up_asks_for_a_stride(transfer_s: float, every: int) -> None:
    peer = machine(transfer_s=transfer_s)
    peer.settle()
    assert peer.wanted == every


def test_rounds_without_steps_and_without_rates_ask_for_nothing() -> None:
    tempo = Tempo(local_steps=H)
    assert tempo.note_round(steps=3, train_s=1.0) is None, "no plan was made"
    peer = machine(transfer_s=9.0)
    peer.settle()
    assert peer.tempo.note_round(steps=0, train_s=0.0) is None


@pytest.mark.parametrize(
    "tempo",
    [
        pytest.param(Tempo(local_steps=H, adapt=False), id="off"),
        pytest.param(Tempo(local_steps=H, period_s=4.0), id="by the clock"),
    ],
)
def test_steps_stay_where_they_are_not_to_follow(tempo: Tempo) -> None:
    peer = Machine(tempo, step_s=0.5, transfer_s=9.0)
    plan = peer.settle()
    assert (plan.steps, plan.reason, plan.exchange_s, peer.wanted) == (H, "", 9.0, None)
    by_the_clock = tempo.plan(others=OTHERS, partners={"slow": 30.0}).slow
    assert by_the_clock == (
        {"slow"} if tempo.plan(others=OTHERS, partners={"p": 1.0}).slow else set()
    )


@pytest.mark.parametrize(
    ("tempo", "slow"), [({"period_s": 20.0}, {"q"}), ({"adapt": False}, set())]
)
def test_slow_edges_are_told_of_where_rates_are_used(tempo: dict[str, Any], slow: set[str]) -> None:
    partners = {"p": 1.0, "q": 7.0}
    assert Tempo(local_steps=H, **tempo).plan(others=OTHERS, partners=partners).slow == slow


def test_a_peer_may_be_told_not_to_skip_rounds() -> None:
    peer = Machine(Tempo(local_steps=H, stride=False), step_s=0.1, transfer_s=50.0)
    peer.settle()
    assert peer.wanted is None


speeds = st.floats(1e-9, 1e12)
swarms = st.lists(st.builds(Told, speeds, speeds), max_size=3)


@timeless
@given(
    st.integers(1, 100),
    st.integers(1, 16),
    st.lists(st.tuples(speeds, speeds, swarms)),
    st.booleans(),
)
def test_steps_are_bounded_and_change_by_a_bounded_factor(
    local_steps: int, every: int, rounds: list[tuple[float, float, list[Told]]], paired: bool
) -> None:
    tempo, full = Tempo(local_steps=local_steps), local_steps * every
    before = full
    for step_s, transfer_s, others in rounds:
        partners = {"p": transfer_s} if paired else {}
        steps = tempo.plan(others=others, partners=partners, every=every).steps
        assert 1 <= steps <= min(MOST_STEPS_FACTOR * full, MOST_CHANGE * max(before, 1))
        if not paired:
            # The edges of a round may cost it all its steps but one.
            assert steps >= math.ceil(before / MOST_CHANGE)
            before = steps
        else:
            before = MOST_STEPS_FACTOR * full
        tempo.rates.note_edge("p", transfer_s)
        tempo.note_round(steps=steps, train_s=steps * step_s)


def test_what_is_left_of_a_long_round_is_one_share() -> None:
    plan = StepPlan(steps=90, full_steps=90, every=3)
    assert plan.share == 30
    assert plan.from_here(60).steps == 90
    assert plan.from_here(70).steps == 90
    assert plan.from_here(10).steps == 40, "the others were quicker"
    assert StepPlan(steps=1, full_steps=30, every=3).share == 1


def test_under_overlap_exchanges_cost_no_steps() -> None:
    tempo = Tempo(local_steps=H, late=True, overlap=True)
    slow = Machine(tempo, step_s=0.1, transfer_s=2.2, late=True)
    plan = slow.settle()
    assert plan.steps == H
    assert not plan.slow, "2.2 s fit under 3 s of steps"
    tight = Machine(
        Tempo(local_steps=H, late=True, overlap=True), step_s=0.1, transfer_s=2.6, late=True
    )
    plan = tight.settle()
    assert plan.steps == H
    assert set(plan.slow) == {"p"}, "2.6 s do not if the partner is a bit late"
    far = Machine(
        Tempo(local_steps=H, late=True, overlap=True), step_s=0.1, transfer_s=9.0, late=True
    )
    plan = far.settle()
    assert (plan.steps, set(plan.slow), plan.has_slow_link) == (H, {"p"}, True)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("awaited", [False, True])
def test_peers_that_are_alike_do_the_usual_steps_however_long_exchanges_are(
    overlap: bool, awaited: bool
) -> None:
    tempo, wanted = Tempo(local_steps=H, late=True, overlap=overlap), None
    for _ in range(9):
        plan = tempo.plan(others=[Told(0.1, 50.0)], partners={"p": 50.0})
        assert (plan.steps, plan.reason) == (H, "")
        tempo.rates.note_edge("p", 50.0, awaited=awaited)
        wanted = tempo.note_round(steps=H, train_s=3.0)
    assert wanted == 1
    plan = tempo.plan(others=[Told(0.1, 90.0)] * 2, partners={"p": 90.0})
    assert plan.steps > H or awaited


def test_edges_cost_no_steps_while_nobody_tells_what_is_usual() -> None:
    peer = machine(transfer_s=2.0, late=True)
    others = [Told(0.1, 0.0)]
    assert [peer.round(others, {"p": 2.0}).steps for _ in range(2)] == [H, H]


def test_patience_follows_from_what_is_usual() -> None:
    tempo = Tempo(local_steps=H, late=True)
    assert tempo.plan(others=[], partners={"p": 0.0}).patience_s == 0, "nothing is known"
    # Usual are 1 s and rounds of 4 s: 2 s count as slow.
    assert tempo.plan(others=OTHERS, partners={"p": 0.0}).patience_s == pytest.approx(3.0)
    waits = Tempo(local_steps=H, late=True, adapt=False)
    assert waits.plan(others=OTHERS, partners={"p": 0.0}).patience_s == math.inf
