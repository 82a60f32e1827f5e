"""One round of one peer: the whole algorithm (docs/design.md, "The algorithm")."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import torch
from torch import Tensor

from gasloc_p2p.core.outer import MixPart, mix
from gasloc_p2p.core.roster import Roster
from gasloc_p2p.core.topology import Graph, build_graph
from gasloc_p2p.core.types import BytesLike, EdgeOutcome, PeerId
from gasloc_p2p.node.edge import EdgeCallbacks, run_edge
from gasloc_p2p.node.events import RoundStarted
from gasloc_p2p.node.peer import Peer
from gasloc_p2p.node.report import RoundReport, round_report


async def run_round(peer: Peer, t: int) -> RoundReport:
    """Train locally, exchange with this round's partners, mix, and take the outer step.

    theta [P] fp32 and the outer rule's memory [P] change together at the very end, so a round
    that is cancelled leaves the peer as it was when the round began.
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
    peer.inbox.open_round(t, partners)
    peer.observe(RoundStarted(round=t, closing=closing, partners=partners, peers=len(roster.peers)))

    # H_i inner AdamW steps: theta_i -> theta_i^H.
    train_began_s = now_s()
    losses = [] if closing else await _local_steps(peer, t)
    theta_h = await peer.compute.run(peer.learner.theta)

    # Parameters travel both ways over each edge; a failed edge is a value.
    exchange_began_s = now_s()
    outgoing = await peer.compute.run(lambda: rule.outgoing(peer.theta, theta_h, peer.memory))
    edges = await _exchange(peer, t, partners, outgoing, roster)

    # m_i = sum_j W_ij theta_j^H, in peer order; a failed edge leaves its weight with this peer.
    # D_i = theta_i - m_i;  v_i <- gamma v_i + D_i;  theta_i <- theta_i - eta (D_i + gamma v_i)
    peer.theta, peer.memory = await peer.compute.run(
        lambda: rule.step(peer.theta, theta_h, _mixed(peer, graph, edges, outgoing), peer.memory)
    )
    await peer.compute.run(lambda: peer.learner.load(peer.theta))
    peer.membership.close_round(t)
    return round_report(
        round=t,
        closing=closing,
        losses=losses,
        outcomes=edges,
        train_s=exchange_began_s - train_began_s,
        exchange_s=now_s() - exchange_began_s,
    )


async def _local_steps(peer: Peer, t: int) -> list[float]:
    """Do as many inner steps as the pace allows; the learning rate follows the round's fraction."""
    began_s = peer.clock.unix_s()
    budget = peer.pace.budget(t, began_s, peer.transfer_s)
    losses: list[float] = []
    while budget.allows(len(losses), peer.clock.unix_s()):
        fraction = budget.fraction_done(len(losses), peer.clock.unix_s(), started_s=began_s)
        lr = peer.inner_lr(t + fraction)
        losses.append(await peer.compute.step(peer.learner, lr))
    return losses


async def _exchange(
    peer: Peer, t: int, partners: Sequence[PeerId], outgoing: Tensor, roster: Roster
) -> list[EdgeOutcome]:
    """Run the edges of round t side by side; outcomes come back in peer order."""
    codec = peer.codec
    scales = codec.scales(outgoing)

    async def encode(partner_scales: bytes) -> BytesLike:
        return await peer.compute.run(
            lambda: codec.encode(outgoing, scales=scales, partner_scales=partner_scales)
        )

    async def is_finite(codes: BytesLike, partner_scales: bytes) -> bool:
        def check() -> bool:
            decoded = codec.decode(
                codes, own=outgoing, scales=scales, partner_scales=partner_scales
            )
            return bool(torch.isfinite(decoded).all())

        return await peer.compute.run(check)

    callbacks = EdgeCallbacks(
        encode=encode, is_finite=is_finite, records=peer.membership.take_records
    )
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(peer.membership.refresh())
        watching = tasks.create_task(peer.membership.keep_current())
        running = [
            tasks.create_task(
                run_edge(
                    partner=partner,
                    contact=peer.contact(t, partner),
                    exchange=peer.new_exchange(t, partner, roster, scales),
                    callbacks=callbacks,
                    deadline_s=peer.edge_deadline_s(t, partner, roster),
                )
            )
            for partner in partners
        ]
        outcomes = [await edge for edge in running]
        watching.cancel()
    for outcome in outcomes:
        peer.note_edge(t, outcome)
    return outcomes


def _mixed(peer: Peer, graph: Graph, edges: Sequence[EdgeOutcome], outgoing: Tensor) -> Tensor:
    """Mix what arrived against this peer's own copy as its partner understood it, codec and all.

    Only differences of such copies enter, so that no codec moves the mean of the swarm.
    """
    codec, scales = peer.codec, peer.codec.scales(outgoing)
    parts: list[MixPart] = []
    for edge in edges:
        if edge.codes is None:
            continue
        own_codes = codec.encode(outgoing, scales=scales, partner_scales=edge.scales)
        parts.append(
            MixPart(
                weight=graph.weight(peer.id, edge.partner),
                received=codec.decode(
                    edge.codes, own=outgoing, scales=scales, partner_scales=edge.scales
                ),
                own_copy=codec.decode(
                    own_codes, own=outgoing, scales=scales, partner_scales=edge.scales
                ),
            )
        )
    return mix(outgoing, parts, alpha=peer.alpha)
