"""What arrives is mixed: the outer step of a round, at once or late, and late corrections.

Where a peer exchanges under the inner steps of the next round (`gossip.overlap`), it steps twice:
alone at first, as if every edge had failed, and once the edges have ended it moves from there to
where the step with the mix leads, together with the progress that it has made in between. So the
outer step is that of a peer that waits, only late (docs/design.md section 2).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import SupportsFloat

import torch
from torch import Tensor

from gasloc_p2p.core.types import EdgeOutcome
from gasloc_p2p.core.vectors import is_finite, outer_step
from gasloc_p2p.node.late import OuterStepToCome, UnderWay
from gasloc_p2p.node.peer import Peer


@dataclass(kw_only=True, slots=True)
class Course:
    """What has happened in the course of a round.

    Attributes:
        losses: of the inner steps, in nats per token; on a GPU, until they are asked for.
        train_s: seconds of inner steps.
        edges: how edges ended, with the rounds that they belong to.
        wait_s: seconds of waiting for partners that had not answered yet.
        reverted: whether numbers were not finite.
    """

    losses: list[SupportsFloat] = field(default_factory=list)
    train_s: float = 0.0
    edges: list[tuple[int, EdgeOutcome]] = field(default_factory=list)
    wait_s: float = 0.0
    reverted: bool = False


async def take_in(peer: Peer, course: Course, *, wait: bool) -> None:
    """Take the outer step that is to come, and add what late edges have brought.

    Args:
        peer: whose.
        course: takes note of the edges.
        wait: for the edges of the outer step; otherwise it may stay to come.
    """
    if (to_come := peer.to_come) is not None:
        if not (wait or to_come.is_due):
            return
        began_s = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(peer.membership.keep_current())
            edges = await peer.edges.take(to_come.edges, patience_s=to_come.patience_s)
            await asyncio.wait({to_come.refreshing})
            watching.cancel()
        course.wait_s += max((edge.waited_s(began_s) for edge in to_come.edges), default=0.0)
        _note(peer, course, edges)
        if not await _outer_step(peer, to_come, edges):
            course.reverted = True
        peer.to_come = None
        peer.membership.close_round(to_come.round)
    late = peer.edges.take_late()
    if any(edge.outcome.mixes for edge in late):
        await peer.compute.run(lambda: _correct(peer, late))
    _note(peer, course, late)


async def _outer_step(peer: Peer, to_come: OuterStepToCome, edges: Sequence[UnderWay]) -> bool:
    """Mix what arrived and step, and move the model along; False if that is not finite.

    m_i = sum_j W_ij theta_j^H, in peer order; an edge that failed, or is late, leaves its weight
    with this peer.
    D_i = theta_i - m_i;  v_i <- gamma v_i + D_i;  theta_i <- theta_i - eta (D_i + gamma v_i)
    """
    theta_h = to_come.theta_h
    mixed = await peer.compute.run(lambda: _mixed(peer, edges, to_come.outgoing))
    theta, memory = await peer.compute.run(
        lambda: outer_step(to_come.rule, peer.theta, theta_h, mixed, peer.memory)
    )
    if not await peer.compute.run(lambda: is_finite(theta, memory.memory)):
        await peer.take_back(to_come.round, "the outer step")
        return False
    await peer.compute.run(lambda: peer.drift.note_step(peer.theta, theta))
    await peer.compute.run(lambda: peer.learner.load(_moved_along(peer, to_come, theta)))
    peer.theta, peer.memory = theta, memory
    return True


def _mixed(peer: Peer, edges: Sequence[UnderWay], outgoing: Tensor) -> Tensor:
    """Mix what arrived against this peer's own copy as its partner understood it, codec and all.

    Only differences of such copies enter, clipped by the factor that both sides agreed on, so that
    neither codecs nor clipping move the mean of the swarm.
    """
    mixed = peer.room.copy(outgoing)
    for edge in edges:
        edge.add_difference(mixed, peer.alpha)
    return mixed


def _moved_along(peer: Peer, to_come: OuterStepToCome, theta: Tensor) -> Tensor:
    """Return theta, with the progress since the step that the peer took alone, if it did."""
    if to_come.alone is None:
        return theta
    return peer.learner.theta().sub_(to_come.alone.theta).add_(theta)


def _correct(peer: Peer, late: Sequence[UnderWay]) -> None:
    """Add what late edges brought, so that the pseudo-gradient does not notice."""
    correction = torch.zeros_like(peer.theta)
    for edge in late:
        edge.add_difference(correction, peer.alpha)
    peer.learner.load(peer.learner.theta().add_(correction))
    theta = peer.theta + correction
    peer.drift.note_correction(peer.theta, theta)
    peer.theta = theta


def _note(peer: Peer, course: Course, edges: Sequence[UnderWay]) -> None:
    for edge in edges:
        peer.note_edge(edge.round, edge.outcome, awaited=edge.awaited)
        course.edges.append((edge.round, edge.outcome))
