"""Run one cell, in this process."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

from gasloc_p2p.core.outer import MixPart, OuterRule, OuterState, mix, outer_rule
from gasloc_p2p.core.topology import Graph, build_graph
from gasloc_p2p.node.events import Event, RoundFinished
from gasloc_p2p.simulate.swarm import simulate
from gasloc_p2p.studies.cell import (
    Cell,
    CurvePoint,
    MixCell,
    MixResult,
    Result,
    Standing,
    SwarmCell,
    SwarmResult,
)
from gasloc_p2p.studies.estimate import tokens_per_step
from gasloc_p2p.studies.study import cell_config
from gasloc_p2p.studies.traffic import Traffic, exchanged_blocks

Told = Callable[[int], None]
"""Told how many rounds are done."""

DIMENSION = 256
"""Length of the random vectors; it only averages out their chance."""

SETTLING_SHARE = 0.5
"""Of a long run, the share before the rate is measured, so that faster modes have died out."""


def run_cell(cell: Cell, told: Told) -> Result:
    """Run a cell to its end.

    Raises:
        GaslocError: it cannot be run as it is defined.
    """
    return run_swarm(cell, told) if isinstance(cell, SwarmCell) else run_mix(cell, told)


def run_swarm(cell: SwarmCell, told: Told) -> SwarmResult:
    """Simulate a swarm."""
    config = cell_config(cell)
    traffic = Traffic()
    finished = 0

    def observe(index: int, event: Event) -> None:
        nonlocal finished
        if not isinstance(event, RoundFinished):
            return
        traffic.note(event.report)
        if not event.report.closing:
            finished += 1
            if finished % cell.peers == 0:
                told(finished // cell.peers)

    simulation = simulate(
        config,
        peers=cell.peers,
        observe=observe,
        algorithm=cell.algorithm,
        judged=cell.judged,
    )
    report, honest = simulation.report, [result.report for result in simulation.honest]
    parameters = simulation.results[0].theta.numel()
    own = [peer.val_loss for peer in honest if peer.val_loss is not None]
    return SwarmResult(
        initial_val_loss=finite(report.initial_val_loss),
        averaged_val_loss=finite(report.averaged_val_loss),
        own_val_loss=finite(sum(own) / len(own)) if own else None,
        consensus_distance=finite(report.consensus_distance),
        closing_consensus_distance=finite(report.closing_consensus_distance),
        bytes_sent=sum(peer.bytes_sent for peer in report.peers),
        simulated_s=report.simulated_s,
        wall_s=report.wall_s,
        curve=tuple(
            CurvePoint(round=point.round, time_s=point.time_s, val_loss=finite(point.val_loss))
            for point in report.curve
        ),
        bits_per_parameter=traffic.bits_per_parameter(parameters),
        repaired_shares=traffic.repaired_shares(exchanged_blocks(config, parameters)),
        train_tokens=sum(sum(peer.local_steps) for peer in report.peers) * tokens_per_step(config),
        standings=tuple(
            Standing(
                rounds=point.rounds,
                time_s=point.time_s,
                averaged_val_loss=finite(point.averaged_val_loss),
                own_val_loss=finite(point.own_val_loss),
            )
            for point in simulation.standings
        ),
    )


def run_mix(cell: MixCell, told: Told) -> MixResult:
    """Mix random fp64 vectors with the graphs and rules of `core`, without learning.

    With `fresh` vectors the factor is the mean over rounds of sum ||x - mean||^2 after the mix by
    that before it. Otherwise it is the geometric mean per round of the norm of the peers'
    disagreement, the rule's memory included, over the second half of one long run. Source:
    docs/design.md section 2.
    """
    began_s = time.monotonic()
    generator = torch.Generator().manual_seed(cell.seed)
    ids = [f"{index:04d}" for index in range(cell.peers)]
    rule = outer_rule(cell.rule, lr=cell.lr, momentum=cell.momentum)

    def graph(round: int) -> Graph:
        return build_graph(cell.topology, seed=cell.seed, round=round, peers=ids)

    def draw() -> torch.Tensor:
        return torch.randn(cell.peers, DIMENSION, dtype=torch.float64, generator=generator)

    factor = (
        _mean_contraction(cell, rule, graph, draw, told)
        if cell.fresh
        else _long_run_rate(cell, rule, graph, draw, told)
    )
    return MixResult(factor=factor, wall_s=time.monotonic() - began_s)


def _mean_contraction(
    cell: MixCell,
    rule: OuterRule,
    graph: Callable[[int], Graph],
    draw: Callable[[], torch.Tensor],
    told: Told,
) -> float:
    total = 0.0
    for round in range(cell.rounds):
        x = draw()
        memories = [rule.initial(row) for row in x]
        mixed, _ = mix_round(rule, graph(round), x, memories)
        total += float(centred(mixed).square().sum() / centred(x).square().sum())
        told(round + 1)
    return total / cell.rounds


def _long_run_rate(
    cell: MixCell,
    rule: OuterRule,
    graph: Callable[[int], Graph],
    draw: Callable[[], torch.Tensor],
    told: Told,
) -> float:
    """Return the rate of the disagreement's norm per round.

    The map is linear and keeps the mean at zero, so after every round the state is centred and
    scaled to length one; otherwise rounding would hide what is left of it after some hundred
    rounds.
    """
    x = centred(draw())
    memories = [rule.initial(row) for row in x]
    settling = round(cell.rounds * SETTLING_SHARE)
    logs: list[float] = []
    for number in range(cell.rounds):
        x, memories = mix_round(rule, graph(number), x, memories)
        memory = centred(torch.stack([state.memory for state in memories]))
        x = centred(x)
        norm = float(torch.cat((x, memory)).norm())
        told(number + 1)
        if norm == 0:
            return 0.0
        x, memory = x / norm, memory / norm
        memories = [OuterState(memory=row) for row in memory]
        if number >= settling:
            logs.append(math.log(norm))
    return math.exp(sum(logs) / len(logs))


def mix_round(
    rule: OuterRule, graph: Graph, x: torch.Tensor, memories: list[OuterState]
) -> tuple[torch.Tensor, list[OuterState]]:
    """Return every peer's vector, [peers, dimension], and memory after a round without steps."""
    rows = dict(zip(graph.peers, range(len(graph.peers)), strict=True))
    outgoing = [rule.outgoing(row, row, state) for row, state in zip(x, memories, strict=True)]
    stepped = []
    for peer, row in rows.items():
        parts = [
            MixPart(
                weight=graph.weight(peer, other),
                received=outgoing[rows[other]],
                own_copy=outgoing[row],
            )
            for other in graph.neighbours(peer)
        ]
        mixed = mix(outgoing[row], parts, alpha=1.0)
        stepped.append(rule.step(x[row], x[row], mixed, memories[row]))
    return torch.stack([theta for theta, _ in stepped]), [state for _, state in stepped]


def centred(x: torch.Tensor) -> torch.Tensor:
    """Return the vectors, [peers, dimension], without their mean."""
    return x - x.mean(dim=0)


def finite(value: float | None) -> float | None:
    """Return `value`, or None when it is no finite number, which JSON cannot hold."""
    return value if value is not None and math.isfinite(value) else None
