"""Random faults, and everything that has to hold in spite of them.

A case is a seed: the same one gives the same faults, the same run and the same verdict.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from types import MappingProxyType
from typing import Final, TypeAlias

from gasloc_p2p.config import Config, assignment_layer, load
from gasloc_p2p.core.substrate import LocalModel
from gasloc_p2p.core.types import PeerId
from gasloc_p2p.simulate.clock import DeadlockError, LivelockError
from gasloc_p2p.testing.faults import FaultPlan
from gasloc_p2p.testing.quadratic import NoisyQuadratic
from gasloc_p2p.testing.swarm import VirtualSwarm
from gasloc_p2p.testing.trace import InvariantError, SwarmTrace

ModelOf: TypeAlias = Callable[[Config, PeerId], LocalModel]

REPLAY: Final = "python -m gasloc_p2p.testing chaos"
STEP_S: Final = 1.0
LEVEL_SEED: Final = 0
"""Of the run without faults; how far apart peers are in it hardly depends on the seed."""

SETTINGS: Final = (
    "run.id=chaos",
    "inner.local_steps=1",
    "inner.schedule=constant",
    "outer.momentum=0.7",
    "node.validate_every_rounds=0",
    f"simulate.step_s={STEP_S}",
    "simulate.links=lan",
    "pace.edge_floor_s=4",
    "pace.edge_ceiling_s=20",
)
"""Of every case: a round takes a second, and a partner that hangs is given up after a few.

At momentum .9 the mean square of what sets peers apart shrinks by less than a tenth a round, at .7
by more than a quarter (docs/design.md section 2): enough for ten rounds to tell a swarm that comes
together again from one that does not.
"""

MODEL_SETTINGS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "quadratic": ("inner.lr=0.05",),
        "nano": ("model.preset=nano", "inner.batch_size=2", "data.validation_tokens=512"),
    }
)
"""What a swarm may train, with the settings that it needs."""


class ChaosFailure(AssertionError):  # noqa: N818  # it is a verdict, and reads as one
    """Something that has to hold did not; the message says what, and how to see it again.

    Attributes:
        case: the case that failed.
        trace: what the swarm did until then.
    """

    def __init__(self, case: Case, what: str, trace: SwarmTrace) -> None:
        super().__init__(
            f"seed {case.seed}: {what}\n  replay: {case.command}\n  digest: {trace.digest}"
        )
        self.case = case
        self.trace = trace


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One random run.

    Attributes:
        seed: of the faults and of the run.
        peers: how many.
        rounds: training rounds.
        model: what they train, a key of `MODEL_SETTINGS`.
        settings: `section.key=value` texts that change `SETTINGS`.
    """

    seed: int
    peers: int = 16
    rounds: int = 40
    model: str = "quadratic"
    settings: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        """The command that runs this case again."""
        arguments = ["--seed", self.seed, "--peers", self.peers, "--rounds", self.rounds]
        if self.model != "quadratic":
            arguments += ["--model", self.model]
        for setting in self.settings:
            arguments += ["--set", setting]
        return f"{REPLAY} {shlex.join(map(str, arguments))}"

    @property
    def plan(self) -> FaultPlan:
        """What goes wrong."""
        return FaultPlan.random(self.seed, peers=self.peers, rounds=self.rounds, round_s=STEP_S)

    def config(self) -> Config:
        """Return the settings of every peer.

        Raises:
            ConfigError: one of `settings` is not accepted.
        """
        own = (
            f"run.seed={self.seed}",
            f"run.rounds={self.rounds}",
            f"run.initial_peers={self.peers}",
        )
        assignments = (*SETTINGS, *MODEL_SETTINGS[self.model], *own, *self.settings)
        return load([assignment_layer(assignments)]).config

    def run(self) -> SwarmTrace:
        """Run the case and check all that has to hold.

        Raises:
            ChaosFailure: something does not hold.
        """
        swarm = self._swarm(self.plan)
        try:
            swarm.run()
            swarm.trace.assert_all(fault_free=_without_faults(replace(self, seed=LEVEL_SEED)))
        except (InvariantError, DeadlockError, LivelockError) as error:
            raise ChaosFailure(self, str(error), swarm.trace) from error
        return swarm.trace

    def without_faults(self) -> SwarmTrace:
        """Run it as if nothing went wrong.

        Raises:
            DeadlockError: nothing can ever happen again.
            LivelockError: the swarm does not come to its end.
        """
        return self._swarm(FaultPlan()).run()

    def _swarm(self, plan: FaultPlan) -> VirtualSwarm:
        config = self.config()
        model_of = _quadratic if self.model == "quadratic" else _learner_of(config)
        return VirtualSwarm(config, peers=self.peers, plan=plan, models=partial(model_of, config))


@cache
def _without_faults(case: Case) -> SwarmTrace:
    return case.without_faults()


def _quadratic(config: Config, peer_id: PeerId) -> LocalModel:
    return NoisyQuadratic(seed=config.run.seed, peer_id=peer_id)


def _learner_of(config: Config) -> ModelOf:
    # Takes seconds to import, which most cases do not need.
    from gasloc_p2p.simulate.swarm import learner_of
    from gasloc_p2p.train.data import load_corpus

    corpus = load_corpus(config.data)
    return lambda config, peer_id: learner_of(config, peer_id=peer_id, corpus=corpus)
