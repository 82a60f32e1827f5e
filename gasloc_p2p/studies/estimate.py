"""How much computing cells are, and how long that takes here."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec

from gasloc_p2p.config import Config
from gasloc_p2p.simulate.engine import build_engine
from gasloc_p2p.studies.cell import Cell, MixCell, SwarmCell
from gasloc_p2p.studies.study import cell_config
from gasloc_p2p.train.data import Corpus
from gasloc_p2p.train.learner import Learner
from gasloc_p2p.train.model import PRESETS, VOCABULARY, preset_length, windows_per_step
from gasloc_p2p.train.settings import PresetName
from gasloc_p2p.train.speed import FLOPS_PER_PARAMETER_AND_TOKEN
from gasloc_p2p.train.stack import Replica

CALIBRATION_S = 1.0
DEVICE_VECTORS_PER_PEER = 3
"""fp32 vectors that the batched engine holds for each peer: theta and two AdamW moments."""


def parameter_count(preset: PresetName) -> int:
    """Return the number of parameters of a preset."""
    size = PRESETS[preset]
    head = size.width // size.heads
    attention = 2 * size.width * head * (size.heads + size.key_value_heads)
    layer = attention + 3 * size.width * size.feed_forward + 2 * size.width
    return VOCABULARY * size.width + size.layers * layer + size.width


def tokens_per_step(config: Config) -> int:
    """Return the tokens of one inner step of one peer."""
    sequence_length = preset_length(config.model)
    return windows_per_step(config.inner, sequence_length) * sequence_length


def train_tokens(cell: SwarmCell) -> int:
    """Return the tokens that all peers of a swarm train on."""
    config = cell_config(cell)
    steps = cell.peers * config.run.rounds * config.inner.local_steps
    return steps * tokens_per_step(config)


def train_flops(cell: SwarmCell) -> float:
    """Return the floating point operations of a swarm's training."""
    parameters = parameter_count(cell_config(cell).model.preset)
    return float(FLOPS_PER_PARAMETER_AND_TOKEN * parameters * train_tokens(cell))


def cost(cell: Cell) -> float:
    """Return floating point operations of a swarm; of mixed vectors, rounds times peers."""
    if isinstance(cell, MixCell):
        return float(cell.rounds * cell.peers)
    config = cell_config(cell)
    # At the end every peer's model is tried, the averaged one and the initial one.
    models = cell.peers + 2
    if config.node.validate_every_rounds:
        models += cell.peers * (config.run.rounds // config.node.validate_every_rounds)
    if cell.judged:
        models += config.run.rounds
    tried = models * config.data.validation_tokens
    forward = FLOPS_PER_PARAMETER_AND_TOKEN / 3 * parameter_count(config.model.preset)
    return train_flops(cell) + forward * tried


def rounds(cell: Cell) -> int:
    """Return how many training rounds a cell has."""
    return cell.rounds if isinstance(cell, MixCell) else cell_config(cell).run.rounds


def device_gib(cell: SwarmCell) -> float:
    """Return the memory of all peers' parameters and moments, which one GPU must hold."""
    parameters = parameter_count(cell_config(cell).model.preset)
    return cell.peers * parameters * DEVICE_VECTORS_PER_PEER * 4 / 2**30


def measured_rate(cell: Cell, corpus: Corpus | None) -> float:
    """Return how much `cost` one process of this machine does per second, timed for a second.

    Args:
        cell: an example of what will be run.
        corpus: the text, for a swarm.
    """
    if isinstance(cell, MixCell):
        return _mix_rate(cell)
    assert corpus is not None
    step = _swarm_step(cell, corpus)
    step()
    began_s, steps = time.monotonic(), 0
    while time.monotonic() - began_s < CALIBRATION_S:
        step()
        steps += 1
    config = cell_config(cell)
    per_step = train_flops(cell) / (config.run.rounds * config.inner.local_steps)
    return steps * per_step / (time.monotonic() - began_s)


def _swarm_step(cell: SwarmCell, corpus: Corpus) -> Callable[[], object]:
    """Return what does one inner step of every peer of a swarm."""
    import torch

    torch.set_num_threads(1)
    config = cell_config(cell)
    peer_ids = [str(index) for index in range(cell.peers)]
    models = build_engine(config, peer_ids, corpus).models
    replicas = [model for model in models if isinstance(model, Replica)]
    if replicas:
        rows, stack = [replica.row for replica in replicas], replicas[0].stack
        return lambda: stack.step(rows, [0.0] * len(rows))
    return lambda: [model.step(0.0) for model in models if isinstance(model, Learner)]


def _mix_rate(cell: MixCell) -> float:
    from gasloc_p2p.studies.measure import run_mix

    short = msgspec.structs.replace(cell, rounds=10)
    began_s = time.monotonic()
    run_mix(short, lambda done: None)
    return cost(short) / (time.monotonic() - began_s)


def duration_text(seconds: float) -> str:
    """Return a duration as people say it: 40 s, 12 min, 3.5 h, 12 days."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    if seconds < 48 * 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:,.0f} days"


def total_cost(cells: Sequence[Cell]) -> float:
    """Return the cost of cells together."""
    return sum(cost(cell) for cell in cells)
