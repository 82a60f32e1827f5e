"""The learner of a node, in one process or in several, and what is said of it at the start."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from gasloc_p2p.commands.model import require_windows
from gasloc_p2p.commands.ranks import ranks_of
from gasloc_p2p.config import Config
from gasloc_p2p.core.codecs import codec_named
from gasloc_p2p.core.outer import OUTER_RULES
from gasloc_p2p.core.substrate import Compute
from gasloc_p2p.core.topology import build_graph
from gasloc_p2p.core.types import PeerId
from gasloc_p2p.data.shards import HUB
from gasloc_p2p.net.capped import BYTES_PER_MBIT
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
        require_windows(ranks.size, learner.windows)
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
    """Say what memory a node takes, if that is much, and what its device and its caps can do."""
    plan = _memory_plan(config, learner)
    if plan.host_bytes >= WORTH_TELLING_BYTES:
        notice(plan.sentence())
    notice(learner.measure_peak())
    for sentence in capped_out(config, code_bytes=_code_bytes(config, learner)):
        notice(sentence)


def capped_out(config: Config, *, code_bytes: int) -> list[str]:
    """Return a sentence about every cap of `net` under which no exchange of a run can succeed.

    Args:
        config: the node's settings.
        code_bytes: what goes to a partner in one exchange, and comes from it.
    """
    pace = config.pace
    steps = pace.mode == "steps"
    most_s = pace.edge_ceiling_s if steps else pace.period_s + pace.edge_ceiling_s
    until = "pace.edge_ceiling_s" if steps else "pace.period_s and pace.edge_ceiling_s"
    sentences: list[str] = []
    if config.gossip.topology == "none":
        return sentences
    for key in ("upload_mbit", "download_mbit"):
        mbit = getattr(config.net, key)
        exchange_s = code_bytes / (mbit * BYTES_PER_MBIT) if mbit else 0.0
        if exchange_s > most_s:
            sentences.append(
                f"with net.{key} = {mbit:g} one exchange takes {exchange_s:.0f} s "
                f"({code_bytes / 1e6:.2f} MB), and a partner waits {most_s:g} s at most ({until}): "
                "all exchanges will fail; raise the cap, or found a run with a smaller gossip.codec"
            )
    return sentences


def _memory_plan(config: Config, learner: Learner) -> MemoryPlan:
    """Return what this node needs with as many partners as it has in the run's first round."""
    vectors = OUTER_RULES.named(config.outer.rule).vectors
    peers = [str(index) for index in range(max(2, config.run.initial_peers))]
    graph = build_graph(config.gossip.topology, seed=config.run.seed, round=0, peers=peers)
    partners = max(len(graph.neighbours(peer)) for peer in peers)
    return learner.memory_plan(code_bytes=partners * _code_bytes(config, learner), vectors=vectors)


def _code_bytes(config: Config, learner: Learner) -> int:
    """Return what goes to one partner in one exchange."""
    gossip, vectors = config.gossip, OUTER_RULES.named(config.outer.rule).vectors
    codec = codec_named(gossip.codec)
    return codec.layout(vectors * learner.elements, gossip.chunk_bytes).code_bytes
