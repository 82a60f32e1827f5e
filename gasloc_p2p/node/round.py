"""One round of one peer: the whole algorithm (docs/design.md, "The algorithm")."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from torch import Tensor

from gasloc_p2p.core.codecs import Offer
from gasloc_p2p.core.exchange import Exchange
from gasloc_p2p.core.outer import OuterRule
from gasloc_p2p.core.roster import Roster
from gasloc_p2p.core.tempo import StepPlan
from gasloc_p2p.core.topology import Graph, build_graph
from gasloc_p2p.core.types import EdgeOutcome, PeerId
from gasloc_p2p.core.vectors import distance, is_finite, outer_step
from gasloc_p2p.core.wire import RefuseCode
from gasloc_p2p.node.edge import EdgeWork, Watch, run_edge
from gasloc_p2p.node.events import RoundStarted
from gasloc_p2p.node.few_words import decline_edge
from gasloc_p2p.node.late import OuterStepToCome, Standing, UnderWay
from gasloc_p2p.node.mixing import Course, take_in
from gasloc_p2p.node.peer import Peer
from gasloc_p2p.node.report import RoundReport, round_report


async def run_round(peer: Peer, t: int, course: Course) -> RoundReport:
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

    # H_i inner AdamW steps: theta_i -> theta_i^H. An outer step that is still to come, and what
    # late edges bring, are taken in between.
    if not closing:
        await _local_steps(peer, t, plan, course)

    # Parameters travel both ways over each edge; a failed edge is a value.
    exchange_began_s = now_s()
    await _let_edges_end(peer, t, plan)
    await take_in(peer, course, wait=True)
    theta_h, outgoing, finite = await peer.compute.run(lambda: _contribute(peer, rule, t))
    if not finite:
        course.reverted = True
        await peer.take_back(t, "the local steps")
        theta_h, outgoing, _ = await peer.compute.run(lambda: _contribute(peer, rule, t))
    motion = await peer.compute.run(
        lambda: peer.drift.motion(peer.theta, theta_h, vectors=rule.vectors)
    )
    offer = await peer.compute.run(lambda: peer.offer(t, outgoing, motion))
    patience_s = _patience_s(peer, t, plan, course)
    edges = _exchange(peer, t, graph, offer, roster, plan, patience_s)
    alone = None
    if peer.overlaps(t):
        alone = await peer.compute.run(lambda: _step_alone(peer, rule, theta_h, outgoing))
    peer.to_come = OuterStepToCome(
        round=t,
        rule=rule,
        theta_h=theta_h,
        outgoing=outgoing,
        alone=alone,
        edges=[edge for edge in edges if edge.awaited],
        patience_s=patience_s,
        refreshing=peer.edges.beside(peer.membership.refresh()),
    )

    # m_i = sum_j W_ij theta_j^H, in peer order; a failed edge leaves its weight with this peer.
    # D_i = theta_i - m_i;  v_i <- gamma v_i + D_i;  theta_i <- theta_i - eta (D_i + gamma v_i)
    if alone is None:
        await take_in(peer, course, wait=True)
    tokens = len(course.losses) * peer.learner.tokens_per_step
    return round_report(
        round=t,
        closing=closing,
        losses=course.losses,
        outcomes=course.edges,
        under_way=len(peer.edges.of(t)),
        reverted=course.reverted,
        train_s=course.train_s,
        exchange_s=now_s() - exchange_began_s,
        wait_s=course.wait_s,
        every=plan.every,
        reason=plan.reason,
        tokens=tokens,
        mfu=peer.learner.utilisation(tokens / course.train_s) if course.train_s > 0 else None,
    )


async def train_ahead(
    peer: Peer, t: int, plan: StepPlan, course: Course, is_due: Callable[[], bool]
) -> None:
    """Do inner steps of round t while the others are in rounds before it that this peer skips.

    Args:
        peer: whose turn round t is.
        t: the round.
        plan: for that round.
        course: takes note of the steps.
        is_due: whether the others have come to round t.
    """
    began_s = asyncio.get_running_loop().time()
    while len(course.losses) < plan.steps - plan.share and not is_due():
        await _step(peer, t, plan, course, len(course.losses) / plan.steps)
    course.train_s += asyncio.get_running_loop().time() - began_s


async def _local_steps(peer: Peer, t: int, plan: StepPlan, course: Course) -> None:
    """Do as many inner steps as the pace allows; the learning rate follows the round's fraction."""
    began_s, done = peer.clock.unix_s(), len(course.losses)
    budget = peer.pace.budget(t, began_s, plan.from_here(done))
    train_began_s = asyncio.get_running_loop().time()
    while budget.allows(len(course.losses), peer.clock.unix_s()):
        fraction = budget.fraction_done(len(course.losses), peer.clock.unix_s(), started_s=began_s)
        await _step(peer, t, plan, course, fraction)
    if not all(isinstance(loss, float) for loss in course.losses):
        # Only now is a GPU asked for its losses, and so for the end of its last steps.
        course.losses = await peer.compute.run(lambda: [float(loss) for loss in course.losses])
    course.train_s += asyncio.get_running_loop().time() - train_began_s


async def _step(peer: Peer, t: int, plan: StepPlan, course: Course, fraction: float) -> None:
    """Do an inner step after this fraction of the rounds that end with round t."""
    await take_in(peer, course, wait=False)
    lr = peer.inner_lr(max(0.0, t + 1 - plan.every + plan.every * fraction))
    course.losses.append(await peer.compute.step(peer.learner, lr))


async def _let_edges_end(peer: Peer, t: int, plan: StepPlan) -> None:
    """Wait for edges of earlier rounds: for all, or, while there are too many, for the others.

    Where rounds go by steps, nothing but its edges keeps a peer together with the others.
    """
    if peer.settles(t):
        await peer.edges.settle()
    if not peer.is_busy(plan) or peer.config.pace.mode != "steps":
        return

    def have_come() -> bool:
        swarm_round = peer.membership.swarm_round()
        return swarm_round is None or swarm_round >= t

    async with asyncio.TaskGroup() as tasks:
        ended = tasks.create_task(peer.edges.settle())
        due = tasks.create_task(peer.membership.wait_until(have_come))
        await asyncio.wait({ended, due}, return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        due.cancel()


def _contribute(peer: Peer, rule: OuterRule, t: int) -> tuple[Tensor, Tensor, bool]:
    """Return theta^H, what this peer gives to the mix, and whether both are finite."""
    theta_h = peer.learner.theta()
    outgoing = rule.outgoing(peer.theta, theta_h, peer.memory)
    peer.guard.open_round(t, motion=distance(peer.theta, theta_h))
    return theta_h, outgoing, is_finite(theta_h, outgoing)


def _step_alone(peer: Peer, rule: OuterRule, theta_h: Tensor, outgoing: Tensor) -> Standing:
    """Go on from where the outer step leads without a mix, which comes later."""
    unmixed = peer.room.copy(outgoing)
    theta, memory = outer_step(rule, peer.theta, theta_h, unmixed, peer.memory)
    peer.learner.load(theta)
    return Standing(theta=theta, memory=memory)


def _patience_s(peer: Peer, t: int, plan: StepPlan, course: Course) -> float:
    """How long an edge of round t may take, once met, before the round goes on without it."""
    if not peer.may_be_late(t) or peer.config.pace.mode != "steps":
        return math.inf
    return plan.patience_s or course.train_s


def _exchange(
    peer: Peer,
    t: int,
    graph: Graph,
    offer: Offer,
    roster: Roster,
    plan: StepPlan,
    patience_s: float,
) -> list[UnderWay]:
    """Start the edges of round t, which run side by side, in peer order."""
    pace = peer.config.pace
    partners = graph.neighbours(peer.id)
    if peer.may_be_late(t) and peer.is_busy(plan):
        for partner in partners:
            peer.edges.beside(_sit_out(peer, t, partner, roster))
        return []
    awaited = {partner: peer.awaits(t, partner, plan) for partner in partners}
    exchanges = {
        partner: peer.new_exchange(t, partner, roster, offer.scales, late=not awaited[partner])
        for partner in partners
    }

    def edge(partner: PeerId, watch: Watch) -> Coroutine[Any, Any, EdgeOutcome]:
        exchange = exchanges[partner]
        if left_out := peer.left_out(partner, t):
            return decline_edge(
                partner=partner,
                dial=peer.dialling.brief_dial(partner),
                exchange=exchange,
                code=RefuseCode.EXCLUDED,
                reason=left_out,
            )
        return run_edge(
            partner=partner,
            contact=peer.dialling.contact(t, partner),
            exchange=exchange,
            work=EdgeWork(
                offer=offer,
                compute=peer.compute,
                clip=lambda length: peer.guard.factor(length / peer.rounds_apart(partner)),
                records=peer.membership.take_records,
            ),
            deadline_s=peer.edge_deadline_s(t, partner, roster, awaited=awaited[partner]),
            met_deadline_s=pace.edge_ceiling_s if patience_s < math.inf else 0.0,
            watch=watch,
        )

    return [
        peer.edges.start(
            partial(edge, partner),
            round=t,
            partner=partner,
            weight=graph.weight(peer.id, partner),
            awaited=awaited[partner],
            ask=exchanges[partner].let_go,
        )
        for partner in partners
    ]


async def _sit_out(peer: Peer, t: int, partner: PeerId, roster: Roster) -> None:
    """Do without an edge of round t, and let the partner know at once."""
    peer.inbox.decline(t, partner)
    await decline_edge(
        partner=partner,
        dial=peer.dialling.brief_dial(partner),
        exchange=Exchange(
            hello=peer.hello(t, partner, roster.digest), partner=partner, dialer=peer.id < partner
        ),
        code=RefuseCode.NOT_PARTNER,
        reason="exchanges of earlier rounds are still under way",
    )
