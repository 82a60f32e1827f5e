"""Two peers train a model of 30 M parameters in a process, and take the memory that was planned."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig

from gasloc_p2p.train.memory import memory_plan

PROGRAM = """
import re, sys
from pathlib import Path
from gasloc_p2p.config import Layer, load
from gasloc_p2p.node.events import Left
from gasloc_p2p.simulate.swarm import simulate

folder, codec = sys.argv[1:]
settings = {
    "run.id": "x", "run.rounds": 3, "run.closing_rounds": 0, "run.initial_peers": 2,
    "inner.local_steps": 2, "inner.batch_size": 2, "gossip.codec": codec,
    "data.validation_tokens": 64, "node.validate_every_rounds": 0, "model.sequence_length": 64,
}
named = {"model.name": "their/model", "device.model_folder": folder}

def bytes_of(name):
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(name + r":\\s+(\\d+) kB", status)[1])

peaks = [0]

def observe(index, event):
    # What comes later is the simulator's own judging of all models.
    if not isinstance(event, Left):
        peaks.append(bytes_of("VmHWM"))

def run(settings):
    config = load([Layer(name="test", values=settings)]).config
    return simulate(config, peers=2, observe=observe)

run(settings)
before = bytes_of("VmRSS")
edges = [result.report.edges.applied for result in run({**settings, **named}).results]
assert edges == [3, 3], edges
print(max(peaks) - before)
"""
ELEMENTS = 29_042_176
KEPT = 2 * ELEMENTS
CODE_BYTES = {"none": 4 * ELEMENTS, "mod4": ELEMENTS // 2}


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
@pytest.mark.parametrize("codec", CODE_BYTES)
def test_peers_take_the_memory_that_is_planned(tmp_path: Path, codec: str) -> None:
    LlamaConfig(
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=9,
        num_attention_heads=8,
        vocab_size=256,
        tie_word_embeddings=True,
    ).save_pretrained(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), codec],
        check=True,
        timeout=380,
        stdout=subprocess.PIPE,
        text=True,
    )
    plan = memory_plan(elements=ELEMENTS, kept=KEPT, activations=0, code_bytes=CODE_BYTES[codec])
    # The simulator keeps a copy of the initial parameters.
    measured = int(done.stdout) - 4 * ELEMENTS
    assert measured == pytest.approx(2 * plan.host_bytes, rel=0.1)
