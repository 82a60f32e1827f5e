"""A simulated swarm whose peers can be started, stopped and watched one by one."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

from gasloc_p2p.config import Config, assignment_layer, load
from gasloc_p2p.core.manifest import Manifest
from gasloc_p2p.core.substrate import Clock, Compute
from gasloc_p2p.node.checkpoint import CheckpointStore
from gasloc_p2p.simulate.network import Hub
from gasloc_p2p.simulate.swarm import learner_of
from gasloc_p2p.testing import peer as testing_peer
from gasloc_p2p.testing.clock import in_virtual_time as in_virtual_time
from gasloc_p2p.train.data import Corpus, load_corpus
from gasloc_p2p.train.settings import DataConfig

QUICK = (
    "run.id=test",
    "run.rounds=8",
    "inner.local_steps=2",
    "inner.batch_size=2",
    "data.validation_tokens=512",
    "node.validate_every_rounds=0",
)


def quick_config(*assignments: str) -> Config:
    """Settings of a run that takes no time, changed by `section.key=value` texts."""
    return load([assignment_layer([*QUICK, *assignments])]).config


@cache
def corpus() -> Corpus:
    return load_corpus(DataConfig())


class SimulatedPeer(testing_peer.SimulatedPeer):
    """A peer of the kit that trains a language model on the standard library."""

    def __init__(
        self,
        hub: Hub,
        config: Config,
        index: int,
        *,
        manifest: Manifest | None = None,
        compute: Compute | None = None,
        clock: Clock | None = None,
        home: Path | None = None,
    ) -> None:
        super().__init__(
            hub,
            config,
            index,
            models=lambda peer_id: learner_of(config, peer_id=peer_id, corpus=corpus()),
            manifest=manifest,
            compute=compute,
            clock=clock,
            checkpoints=CheckpointStore(home, keep=config.checkpoint.keep) if home else None,
        )


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
