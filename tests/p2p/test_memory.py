"""Two real nodes train a model of 30 M parameters, and take the memory that they said."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from transformers import LlamaConfig

from gasloc_p2p.node.events import Notice
from gasloc_p2p.train.memory import GIB
from tests.p2p.real import RealNode, RealSwarm, real_swarm

pytestmark = [pytest.mark.p2p, pytest.mark.slow, pytest.mark.timeout(600)]

ROUNDS = 3
SETTINGS = (
    f"run.rounds={ROUNDS + 2}",
    "inner.local_steps=8",
    "checkpoint.every_rounds=0",
    "model.sequence_length=64",
)


def peak_gib(node: RealNode) -> float:
    """Return the most resident memory of a process so far."""
    status = Path(f"/proc/{node.child.pid}/status").read_text()
    (kib,) = re.findall(r"^VmHWM:\s+(\d+) kB$", status, flags=re.M)
    return int(kib) * 1024 / GIB


def planned_gib(node: RealNode) -> float:
    """Return the most memory that a node said it would take."""
    said = next(e.text for e in node.of(Notice) if e.text.startswith("memory in GiB"))
    (most,) = re.findall(r"at most (\S+) GiB at one time", said)
    return float(most)


async def peaks_and_plans(swarm: RealSwarm, run: str, *settings: str) -> list[tuple[float, float]]:
    """Run two nodes for a few rounds; return the peak of each, and what it said."""
    nodes = await swarm.nodes_of_run(run, await swarm.bootstrap(), 2, *SETTINGS, *settings)
    for node in nodes:
        await node.reached(ROUNDS)
    found = [(peak_gib(node), planned_gib(node)) for node in nodes]
    for node in nodes:
        kinds = [kind for edges in node.edges().values() for kind, _ in edges]
        assert kinds[: ROUNDS - 1] == ["applied"] * (ROUNDS - 1)
        await node.child.stop()
    return found


@pytest.mark.parametrize("codec", ["none", "mod4"])
async def test_nodes_take_the_memory_that_they_predict(tmp_path: Path, codec: str) -> None:
    LlamaConfig(
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=9,
        num_attention_heads=8,
        vocab_size=256,
        tie_word_embeddings=True,
    ).save_pretrained(tmp_path / "model")
    coded = f"gossip.codec={codec}"
    for name in ("small", "large"):
        (tmp_path / name).mkdir()
    async with real_swarm(tmp_path / "small") as swarm:
        small = await peaks_and_plans(swarm, "small", coded)
    async with real_swarm(tmp_path / "large") as swarm:
        large = await peaks_and_plans(
            swarm,
            "large",
            coded,
            "model.name=their/model",
            f"device.model_folder={tmp_path / 'model'}",
        )
    for (little, said_little), (much, said_much) in zip(small, large, strict=True):
        assert much - little == pytest.approx(said_much - said_little, rel=0.1)
