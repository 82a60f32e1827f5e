"""One round of one peer: the whole algorithm (docs/design.md, "The algorithm")."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import torch
from torch import Tensor

from gasloc_p2p.core.codecs import Offer
from gasloc_p2p.core.guard import distance
from gasloc_p2p.core.outer import OuterRule
from gasloc_p2p.core.roster import Roster
from gasloc_p2p.core.tempo import StepPlan
from gasloc_p2p.core.topology import Graph, build_graph
from gasloc_p2p.core.types import EdgeOutcome, PeerId
from gasloc_p2p.node.edge import EdgeWork, decline_edge, run_edge
from gasloc_p2p.node.events import RoundStarted
from gasloc_p2p.node.peer import Peer
from gasloc_p2p.node.report import RoundReport, round_report


async def run_round(peer: Peer, t: int) -> RoundReport:
    """Train locally, exchange with this round's partners, mix, and take the outer step.

    theta [P] fp32 and the outer rule's memory [P] change together at the very end, so a round
    that is cancelled leaves the peer as it was when the round began. So does one whose numbers are
    not finite, which are neither sent nor kept.
    """
    now_s = asyncio.get_running_loop().time
    closing = peer.is_closing(t)
    rule = peer.closing_rule if closing else peer.rule

    # Everybody computes the same graph from the same roster; nobody asks anybody.
    roster = peer.membership.roster(t)
    graph = await peer.compute.run(
        lambda: build_graph(
            peer.topology, seed=peer.seed, round=t, peers=roster.peers, may_pair=roster.may_pair
        )
    )
    partners = graph.neighbours(peer.id)
    peer.inbox.open_round(t, [p for p in partners if not peer.left_out(p, t)])
    plan = peer.plan(t, partners, roster)
    peer.observe(
        RoundStarted(
            round=t,
            closing=closing,
            partners=partners,
            peers=len(roster.peers),
            reason=plan.reason,
        )
    )

    # H_i inner AdamW steps: theta_i -> theta_i^H.
    train_began_s = now_s()
    losses = [] if closing else await _local_steps(peer, t, plan)

    # Parameters travel both ways over each edge; a failed edge is a value.
    exchange_began_s = now_s()
    theta_h, outgoing, finite = await peer.compute.run(lambda: _contribute(peer, rule, t))
    if reverted := not finite:
        await peer.take_back(t, "the local steps")
        theta_h, outgoing, _ = await peer.compute.run(lambda: _contribute(peer, rule, t))
    motion = await peer.compute.run(
        lambda: peer.drift.motion(peer.theta, theta_h, vectors=rule.vectors)
    )
    offer = await peer.compute.run(lambda: peer.offer(t, outgoing, motion))
    edges = await _exchange(peer, t, partners, offer, roster)

    # m_i = sum_j W_ij theta_j^H, in peer order; a failed edge leaves its weight with this peer.
    # D_i = theta_i - m_i;  v_i <- gamma v_i + D_i;  theta_i <- theta_i - eta (D_i + gamma v_i)
    mixed = await peer.compute.run(lambda: _mixed(peer, graph, edges, outgoing))
    theta, memory = await peer.compute.run(
        lambda: rule.step(peer.theta, theta_h, mixed, peer.memory)
    )
    if await peer.compute.run(lambda: is_finite(theta, memory.memory)):
        await peer.compute.run(lambda: peer.drift.note_step(peer.theta, theta))
        peer.theta, peer.memory = theta, memory
        await peer.compute.run(lambda: peer.learner.load(peer.theta))
    else:
        reverted = True
        await peer.take_back(t, "the outer step")
    peer.membership.close_round(t)
    return round_report(
        round=t,
        closing=closing,
        losses=losses,
        outcomes=edges,
        reverted=reverted,
        train_s=exchange_began_s - train_began_s,
        exchange_s=now_s() - exchange_began_s,
        every=plan.every,
        reason=plan.reason,
    )


async def _local_steps(peer: Peer, t: int, plan: StepPlan) -> list[float]:
    """Do as many inner steps as the pace allows; the learning rate follows the round's fraction."""
    began_s = peer.clock.unix_s()
    budget = peer.pace.budget(t, began_s, plan)
    losses: list[float] = []
    while budget.allows(len(losses), peer.clock.unix_s()):
        fraction = budget.fraction_done(len(losses), peer.clock.unix_s(), started_s=began_s)
        lr = peer.inner_lr(t + plan.every * fraction)
        losses.append(await peer.compute.step(peer.learner, lr))
    return losses


def _contribute(peer: Peer, rule: OuterRule, t: int) -> tuple[Tensor, Tensor, bool]:
    """Return theta^H, what this peer gives to the mix, and whether both are finite."""
    theta_h = peer.learner.theta()
    outgoing = rule.outgoing(peer.theta, theta_h, peer.memory)
    peer.guard.open_round(t, motion=distance(peer.theta, theta_h))
    return theta_h, outgoing, is_finite(theta_h, outgoing)


async def _exchange(
    peer: Peer, t: int, partners: Sequence[PeerId], offer: Offer, roster: Roster
) -> list[EdgeOutcome]:
    """Run the edges of round t side by side; outcomes come back in peer order."""
    work = EdgeWork(
        offer=offer,
        compute=peer.compute,
        clip=peer.guard.factor,
        records=peer.membership.take_records,
    )

    async def edge(partner: PeerId) -> EdgeOutcome:
        exchange = peer.new_exchange(t, partner, roster, offer.scales)
        if left_out := peer.left_out(partner, t):
            return await decline_edge(
                partner=partner,
                dial=peer.dialling.brief_dial(partner),
                exchange=exchange,
                reason=left_out,
            )
        return await run_edge(
            partner=partner,
            contact=peer.dialling.contact(t, partner),
            exchange=exchange,
            work=work,
            deadline_s=peer.edge_deadline_s(t, partner, roster),
        )

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(peer.membership.refresh())
        watching = tasks.create_task(peer.membership.keep_current())
        running = [tasks.create_task(edge(partner)) for partner in partners]
        outcomes = [await edge for edge in running]
        watching.cancel()
    for outcome in outcomes:
        peer.note_edge(t, outcome)
    return outcomes


def _mixed(peer: Peer, graph: Graph, edges: Sequence[EdgeOutcome], outgoing: Tensor) -> Tensor:
    """Mix what arrived against this peer's own copy as its partner understood it, codec and all.

    Only differences of such copies enter, clipped by the factor that both sides agreed on, so that
    neither codecs nor clipping move the mean of the swarm.
    """
    mixed = outgoing.clone()
    for edge in edges:
        if edge.coder is not None:
            weight = graph.weight(peer.id, edge.partner) * edge.clip
            edge.coder.add_difference(mixed, peer.alpha * weight)
    return mixed


def is_finite(*tensors: Tensor) -> bool:
    """Whether all elements are finite numbers."""
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)
