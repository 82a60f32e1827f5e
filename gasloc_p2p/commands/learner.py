"""The learner of a node, in one process or in several, and what is said of it at the start."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from gasloc_p2p.commands.ranks import ranks_of
from gasloc_p2p.config import Config
from gasloc_p2p.core.codecs import codec_named
from gasloc_p2p.core.errors import ConfigError
from gasloc_p2p.core.outer import OUTER_RULES
from gasloc_p2p.core.substrate import Compute
from gasloc_p2p.core.topology import build_graph
from gasloc_p2p.core.types import PeerId
from gasloc_p2p.data.supply import HUB
from gasloc_p2p.node.events import Training
from gasloc_p2p.train.learner import Learner, build_learner
from gasloc_p2p.train.memory import MemoryPlan
from gasloc_p2p.train.ranks import LeadingLearner
from gasloc_p2p.train.samples import Text

WORTH_TELLING_BYTES = 100 << 20
"""A node that needs less memory does not say what for."""


@asynccontextmanager
async def learner_of(
    config: Config,
    text: Text,
    peer_id: PeerId,
    compute: Compute,
    notice: Callable[[str], None],
) -> AsyncIterator[Learner]:
    """Provide the learner of a node, with as many processes as `device.processes` says.

    Args:
        config: the node's settings.
        text: what it trains on.
        peer_id: its identity.
        compute: where the learner is built, and called from then on.
        notice: told, in one sentence, what a person should know.

    Raises:
        GaslocError: it cannot be had; see `build_learner` and `ranks_of`.
    """

    def build(kind: type[Learner], ranks: int) -> Learner:
        return build_learner(
            config.model,
            config.data,
            config.inner,
            seed=config.run.seed,
            peer_id=peer_id,
            device=config.device,
            notice=notice,
            text=text,
            kind=kind,
            ranks=ranks,
        )

    if config.device.processes == 1:
        learner = await compute.run(lambda: build(Learner, 1))
        await compute.run(lambda: _tell(config, learner, notice))
        yield learner
        return
    async with ranks_of(config, vocabulary=text.vocabulary) as ranks:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(ranks.start())
            learner = await compute.run(lambda: build(LeadingLearner, ranks.size))
        assert isinstance(learner, LeadingLearner)
        if learner.windows < ranks.size:
            raise ConfigError(
                f"device.processes = {ranks.size}, but a step has {learner.windows} windows",
                why="each process takes at least one window of every step",
                fix=f"set device.processes to at most {learner.windows}",
            )
        await compute.run(lambda: learner.lead(ranks.meet()))
        await compute.run(lambda: _tell(config, learner, notice))
        yield learner
        await compute.run(learner.end)


def training_of(config: Config, learner: Learner) -> Training:
    """Return what a person is told of what this node trains."""
    model, data = config.model, config.data
    text = Path(data.path).name or "Python's standard library"
    if data.path.startswith(HUB):
        text = f"{data.path.removeprefix(HUB)} of the hub"
    return Training(
        model=model.name or model.preset,
        architecture=learner.architecture,
        parameters=learner.elements,
        precision=learner.device.precision,
        device=learner.device.name,
        text=f"{text}, {data.subset}" if data.subset else text,
        topology=config.gossip.topology,
        codec=config.gossip.codec,
    )


def _tell(config: Config, learner: Learner, notice: Callable[[str], None]) -> None:
    """Say what memory a node takes, if that is much, and what its device can do."""
    plan = _memory_plan(config, learner)
    if plan.host_bytes >= WORTH_TELLING_BYTES:
        notice(plan.sentence())
    notice(learner.measure_peak())


def _memory_plan(config: Config, learner: Learner) -> MemoryPlan:
    """Return what this node needs with as many partners as it has in the run's first round."""
    gossip, vectors = config.gossip, OUTER_RULES.named(config.outer.rule).vectors
    peers = [str(index) for index in range(max(2, config.run.initial_peers))]
    graph = build_graph(gossip.topology, seed=config.run.seed, round=0, peers=peers)
    partners = max(len(graph.neighbours(peer)) for peer in peers)
    layout = codec_named(gossip.codec).layout(vectors * learner.elements, gossip.chunk_bytes)
    return learner.memory_plan(code_bytes=partners * layout.code_bytes, vectors=vectors)
