"""Peers that send harm, and peers whose numbers go wrong, in swarms in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import numpy as np
import pytest
import torch
from torch import Tensor

from gasloc_p2p.config import Config
from gasloc_p2p.core.errors import ConfigError
from gasloc_p2p.core.guard import EXCLUSION_ROUNDS, OFFENCES
from gasloc_p2p.core.outer import Nesterov, OuterRule
from gasloc_p2p.core.outgoing import Cut, Parts
from gasloc_p2p.core.substrate import LocalModel, ModelState
from gasloc_p2p.core.types import BytesLike, PeerId
from gasloc_p2p.founding import found
from gasloc_p2p.net.identity import Identity
from gasloc_p2p.node.events import Notice, RoundFinished, RoundStarted
from gasloc_p2p.node.report import PeerReport, RoundReport
from gasloc_p2p.node.result import NodeResult
from gasloc_p2p.simulate.network import Hub
from gasloc_p2p.simulate.poison import Poison
from gasloc_p2p.simulate.swarm import simulate
from gasloc_p2p.testing.clock import in_virtual_time
from gasloc_p2p.testing.peer import SimulatedPeer
from gasloc_p2p.testing.quadratic import NoisyQuadratic
from tests.sim.conftest import quick_config

Models: TypeAlias = Callable[[PeerId], LocalModel]

HUGE = 3e38
"""Nearly the largest number that fp32 holds."""


class Quadratic(NoisyQuadratic):
    """A quadratic with something like a moment, and one step that goes wrong.

    Attributes:
        moment: the sum of all losses so far.
    """

    def __init__(self, peer_id: PeerId, *, breaks_at: int = -1, value: float = 0.0) -> None:
        super().__init__(seed=0, peer_id=peer_id)
        self.moment = torch.zeros(1)
        self._breaks_at = breaks_at
        self._value = value

    @property
    def steps(self) -> int:
        return self.state().next_sample

    def step(self, lr: float) -> float:
        breaks = self.steps == self._breaks_at
        loss = super().step(lr)
        self.moment += self._value if breaks else loss
        if breaks:
            self.load(torch.full((self.elements,), self._value))
        return loss

    def state(self) -> ModelState:
        return ModelState(
            tensors={"moment": self.moment.clone()},
            next_sample=super().state().next_sample,
            warmup_steps_left=0,
        )

    def restore(self, state: ModelState) -> None:
        self.moment = state.tensors["moment"].clone()
        super().restore(ModelState(tensors={}, next_sample=state.next_sample, warmup_steps_left=0))


class Swarm:
    """Peers that ran to the end of their run; those with a rule of their own have no guard."""

    def __init__(
        self,
        config: Config,
        models: Sequence[Models],
        rules: dict[int, OuterRule] | None = None,
    ) -> None:
        self.peers: list[SimulatedPeer] = []
        self.results: list[NodeResult] = []
        self._config = config
        self._models = models
        self._rules = rules or {}
        in_virtual_time(self._main)

    async def _main(self) -> None:
        async with Hub(verify=Identity.verify) as hub, asyncio.TaskGroup() as tasks:
            manifest = found(self._config, now_s=0.0)
            for index, models in enumerate(self._models):
                rule, config = self._rules.get(index), self._config
                if rule is not None:
                    gossip = config.gossip.model_copy(update={"guard": False})
                    config = config.model_copy(update={"gossip": gossip})
                peer = SimulatedPeer(
                    hub, config, index, models=models, manifest=manifest, rule=rule
                )
                self.peers.append(peer)
            running = [tasks.create_task(peer.run()) for peer in self.peers]
        self.results = [task.result() for task in running]

    def rounds(self, peer: int) -> list[RoundReport]:
        return [event.report for event in self.peers[peer].of(RoundFinished)]

    def report(self, peer: int) -> PeerReport:
        return self.results[peer].report

    def notices(self, peer: int) -> list[str]:
        return [event.text for event in self.peers[peer].of(Notice)]

    def thetas(self, peer: int) -> dict[int, Tensor]:
        return self.peers[peer].life.thetas


def swarm_config(peers: int, *assignments: str) -> Config:
    return quick_config(
        f"run.initial_peers={peers}", "gossip.topology=complete", "inner.lr=0.1", *assignments
    )


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The largest absolute value, or NaN, of every chunk that any peer sends; codec `none`."""
    found: list[float] = []
    frame = Cut.frame

    def watched(self: Cut, data: BytesLike) -> Parts:
        found.append(float(np.abs(np.frombuffer(data, dtype=np.float32)).max()))
        return frame(self, data)

    monkeypatch.setattr(Cut, "frame", watched)
    return found


# Numbers that are not numbers


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_local_steps_that_go_wrong_are_taken_back_and_never_sent(
    value: float, sent: list[float]
) -> None:
    models: dict[int, Quadratic] = {}

    def model(index: int, peer_id: PeerId) -> Quadratic:
        models[index] = Quadratic(peer_id, breaks_at=6 if index == 0 else -1, value=value)
        return models[index]

    swarm = Swarm(swarm_config(3), [partial(model, index) for index in range(3)])
    assert np.isfinite(sent).all()
    assert [report.round for report in swarm.rounds(0) if report.reverted] == [3]
    assert [swarm.report(peer).reverted for peer in range(3)] == [1, 0, 0]
    [notice] = swarm.notices(0)
    assert notice.startswith("the local steps of round 3 led to numbers that are not finite")
    for peer in range(3):
        assert all(torch.isfinite(theta).all() for theta in swarm.thetas(peer).values())
        assert all(e.kind == "applied" for r in swarm.rounds(peer) for e in r.edges)
    assert torch.isfinite(models[0].moment).all(), "the moments come back too"
    assert models[0].steps == 8 * 2, "the samples do not"


def test_a_peer_whose_steps_went_wrong_still_mixes_what_it_had(sent: list[float]) -> None:
    still: list[Models] = [partial(Quadratic, breaks_at=0, value=v) for v in (float("nan"), 2.0)]
    config = swarm_config(2, "inner.local_steps=1", "outer.lr=1", "outer.momentum=0")
    swarm = Swarm(config, still)
    assert sent[:2] in ([0.0, 2.0], [2.0, 0.0])
    for peer in (0, 1):
        assert torch.equal(swarm.thetas(peer)[0], torch.ones(32))


def test_an_outer_step_that_goes_wrong_is_taken_back(sent: list[float]) -> None:
    models: list[Models] = [partial(Quadratic, breaks_at=7, value=HUGE), Quadratic]
    swarm = Swarm(swarm_config(2), models)
    assert np.isfinite(sent).all()
    assert max(sent) == np.float32(HUGE)
    assert [report.round for report in swarm.rounds(0) if report.reverted] == [3]
    [notice] = [text for text in swarm.notices(0) if "led to numbers" in text]
    assert notice.startswith("the outer step of round 3")
    before, after = (swarm.thetas(0)[t] for t in (2, 3))
    assert torch.equal(before, after)
    assert float((swarm.thetas(1)[3] - swarm.thetas(1)[2]).norm()) < 2.0
    [edge] = swarm.rounds(1)[3].edges
    assert (edge.kind, edge.clip < 1e-30) == ("applied", True)
    assert swarm.report(1).edges.clipped == 1


@pytest.mark.parametrize("evil", [0, 1, 2])
def test_who_sends_what_is_not_finite_is_refused_named_and_left_out(evil: int) -> None:
    nan = Poison(
        lr=0.7,
        momentum=0.9,
        honest=Nesterov(lr=0.7, momentum=0.9),
        attack=lambda sent: sent * float("nan"),
    )
    rounds = OFFENCES + EXCLUSION_ROUNDS + OFFENCES + 2
    config = swarm_config(3, f"run.rounds={rounds}", "run.closing_rounds=0")
    swarm = Swarm(config, [Quadratic] * 3, {evil: nan})
    evil_id = swarm.peers[evil].id
    for honest in {0, 1, 2} - {evil}:
        ends = {
            report.round: edge
            for report in swarm.rounds(honest)
            for edge in report.edges
            if edge.partner == evil_id
        }
        again = OFFENCES + EXCLUSION_ROUNDS
        left_out = [*range(OFFENCES, again), *range(again + OFFENCES, rounds)]
        assert [t for t, edge in ends.items() if edge.excluded] == left_out
        assert {edge.kind for t, edge in ends.items() if t in left_out} == {"refused"}
        assert {edge.kind for t, edge in ends.items() if t not in left_out} == {"corrupt"}
        assert "left out for 32 rounds after repeated offences" in ends[OFFENCES].reason
        assert "left out for 1 rounds" in ends[again - 1].reason
        assert swarm.report(honest).edges.excluded == len(left_out)
        first, second, *_ = swarm.notices(honest)
        assert first.startswith(f"{evil_id} in round 0: ")
        assert "not finite" in first
        assert second.endswith("it is left out for 32 rounds after repeated offences")
        assert len(swarm.notices(honest)) == 4
        assert all(torch.isfinite(theta).all() for theta in swarm.thetas(honest).values())
        others = [e.kind for r in swarm.rounds(honest) for e in r.edges if e.partner != evil_id]
        assert others == ["applied"] * rounds
        assert {r.edges[0].kind for r in swarm.rounds(evil) if r.round in left_out} == {"refused"}
        told = [r.edges[0].reason for r in swarm.rounds(evil) if r.round == OFFENCES]
        assert told == ["refused by partner: left out for 32 rounds after repeated offences"]
    assert swarm.report(evil).edges.excluded == 0
    for peer in range(3):
        # In round 0 some peers begin earlier than others.
        exchanging_s = [report.exchange_s for report in swarm.rounds(peer)[1:]]
        assert max(exchanging_s) == 0.0, "being left out costs nobody a deadline"


# Parameters that are too far away


def test_clipping_keeps_the_mean_of_the_two() -> None:
    far = 1000.0
    models: list[Models] = [partial(Quadratic, breaks_at=0, value=v) for v in (1.0, far)]
    settings = ("inner.local_steps=1", "outer.lr=1", "outer.momentum=0", "run.closing_rounds=0")
    swarm = Swarm(swarm_config(2, *settings), models)
    near, away = (swarm.thetas(peer)[0].double() for peer in (0, 1))
    assert torch.allclose(near + away, torch.full((32,), 1.0 + far).double(), rtol=1e-7)
    [clip] = {swarm.rounds(peer)[0].edges[0].clip for peer in (0, 1)}
    assert clip == pytest.approx(1 / (far - 1), rel=1e-6)
    assert torch.allclose(near, torch.full((32,), 1.5).double(), rtol=1e-6)
    [notice, *_] = swarm.notices(0)
    assert notice.startswith(f"{swarm.peers[1].id} in round 0: its parameters are 999 times ")


def own_loss(attack: str, guard: bool) -> float:
    settings = ("run.rounds=10", "inner.local_steps=4", "inner.batch_size=4")
    config = quick_config(
        *settings, "run.initial_peers=4", f"simulate.poison={attack}", f"gossip.guard={guard}"
    )
    simulation = simulate(config, peers=4, observe=lambda index, event: None)
    assert len(simulation.honest) == (3 if attack != "none" else 4)
    losses = [result.report.val_loss for result in simulation.honest]
    assert None not in losses
    return sum(loss for loss in losses if loss is not None) / len(losses)


@pytest.mark.parametrize("attack", ["random", "scaled", "flipped"])
def test_a_guarded_swarm_learns_beside_an_attacker(attack: str) -> None:
    honest, guarded, open_to_all = (
        own_loss(*case) for case in (("none", True), (attack, True), (attack, False))
    )
    assert guarded < 1.1 * honest
    assert open_to_all > 1.3 * honest


def test_without_an_attacker_the_guard_changes_nothing() -> None:
    assert own_loss("none", True) == own_loss("none", False)


@pytest.mark.parametrize(
    ("peers", "algorithm", "settings", "words"),
    [
        (1, "gasloc", (), "nobody to send it to"),
        (2, "diloco", (), "nobody to send it to"),
        (
            2,
            "noloco",
            ("outer.rule=noloco", "outer.momentum=0.5"),
            "cannot be used with outer.rule = 'noloco'",
        ),
    ],
)
def test_an_attack_that_makes_no_sense(
    peers: int, algorithm: str, settings: tuple[str, ...], words: str
) -> None:
    config = quick_config("simulate.poison=flipped", *settings)
    with pytest.raises(ConfigError, match=words):
        simulate(config, peers=peers, observe=lambda index, event: None, algorithm=algorithm)


# Peers that leave


def test_losses_are_continuous_when_peers_leave() -> None:
    config = swarm_config(6, "run.rounds=40", "inner.schedule=constant", "gossip.topology=pairs")
    left_at = 20

    async def main() -> list[SimulatedPeer]:
        async with Hub(verify=Identity.verify) as hub, asyncio.TaskGroup() as tasks:
            peers = [SimulatedPeer(hub, config, index, models=Quadratic) for index in range(6)]
            for peer in peers:
                tasks.create_task(peer.run())
            for leaving in peers[3:]:
                await leaving.reached(left_at)
                leaving.leave.set()
        return peers[:3]

    for peer in in_virtual_time(main):
        assert {event.peers for event in peer.of(RoundStarted)} == {6, 3}
        losses = [r.train_loss for e in peer.of(RoundFinished) if not (r := e.report).closing]
        settled = [loss for loss in losses[left_at // 2 : left_at] if loss is not None]
        after = [loss for loss in losses[left_at:] if loss is not None]
        assert len(after) == 20
        # Half of the peers average out less of the noise.
        assert max(after) < 3 * max(settled) < 0.75 * (losses[0] or 0.0)
