"""One peer's state and parts, as the round needs them."""

from __future__ import annotations

import dataclasses
import statistics
from collections import deque
from collections.abc import Sequence

from blake3 import blake3
from torch import Tensor

from gasloc_p2p.config import Config
from gasloc_p2p.core.codecs import Keys, Layout, Offer, codec_named
from gasloc_p2p.core.exchange import Exchange
from gasloc_p2p.core.guard import Guard
from gasloc_p2p.core.outer import OuterRule, OuterState, outer_rule
from gasloc_p2p.core.pace import Pace, RoundPhase, lr_at
from gasloc_p2p.core.roster import Roster
from gasloc_p2p.core.substrate import Clock, Compute, LocalModel, ModelState, Network
from gasloc_p2p.core.tempo import StepPlan, Tempo
from gasloc_p2p.core.types import EdgeKind, EdgeOutcome, PeerId
from gasloc_p2p.core.wire import MAX_UNCONFIRMED, PROTOCOL_VERSION, Hello
from gasloc_p2p.node.checkpoint import Checkpoint, Progress
from gasloc_p2p.node.conduct import note_conduct
from gasloc_p2p.node.dialling import Dialling
from gasloc_p2p.node.drift import Drift
from gasloc_p2p.node.events import Notice, Observer
from gasloc_p2p.node.inbox import Inbox
from gasloc_p2p.node.late import MAX_LATE, Edges, OuterStepToCome, Standing
from gasloc_p2p.node.membership import Membership
from gasloc_p2p.node.report import RoundReport
from gasloc_p2p.node.room import Room

REMEMBERED_CYCLES = 5


def inner_lr(config: Config, position: float) -> float:
    """Return the learning rate at `position`, the round plus the fraction of it that is done."""
    inner = config.inner
    return lr_at(
        position,
        rounds=config.run.rounds,
        peak=inner.lr,
        warmup_rounds=inner.warmup_rounds,
        min_ratio=inner.min_lr_ratio,
        schedule=inner.schedule,
        decay_rounds=inner.decay_rounds,
    )


def _key(*parts: int | str) -> int:
    """Return 64 bits that follow from `parts` alone."""
    return int.from_bytes(blake3(" ".join(map(str, parts)).encode()).digest(length=8), "big")


class Peer:
    """What one peer is made of; `node/round.py` tells the story.

    Attributes:
        theta: parameters at the start of the round, [P] fp32 on the CPU.
        memory: the outer rule's state.
        model_state: what the learner held beside theta at the start of the round.
        edges: those that are under way.
        to_come: the outer step of a round that still exchanges, with overlap.
        guard: judges what partners send, and remembers who is left out.
        room: memory that rounds hand on to each other.
        tempo: what it has learned of its own speed, and how many steps follow from that.
    """

    def __init__(
        self,
        *,
        config: Config,
        run_digest: bytes,
        learner: LocalModel,
        network: Network,
        membership: Membership,
        pace: Pace,
        clock: Clock,
        compute: Compute,
        observe: Observer,
        rule: OuterRule | None = None,
    ) -> None:
        outer, gossip = config.outer, config.gossip
        self.id: PeerId = network.peer_id
        self.seed = config.run.seed
        self.config = config
        self.topology = gossip.topology
        self.alpha = outer.alpha
        self.rule = rule or outer_rule(outer.rule, lr=outer.lr, momentum=outer.momentum)
        self.closing_rule = outer_rule("nesterov", lr=1.0, momentum=0.0)
        self.codec = codec_named(gossip.codec)
        self.learner = learner
        self.network = network
        self.membership = membership
        self.pace = pace
        self.clock = clock
        self.compute = compute
        self.observe = observe
        self.guard = Guard(active=gossip.guard)
        self.inbox = Inbox(self._plain_hello, observe, self.left_out)
        self.dialling = Dialling(
            network=network,
            inbox=self.inbox,
            hello=self._plain_hello,
            ceiling_s=config.pace.edge_ceiling_s,
        )
        self.edges = Edges()
        self.to_come: OuterStepToCome | None = None
        self.theta: Tensor = learner.theta()
        self.memory: OuterState = self.rule.initial(self.theta)
        self.drift = Drift(self.codec, elements=self.theta.numel())
        self.model_state: ModelState = learner.state()
        self.room = Room()
        self.tempo = Tempo(
            local_steps=config.inner.local_steps,
            period_s=config.pace.period_s if config.pace.mode == "seconds" else 0.0,
            adapt=config.pace.adapt_steps,
            stride=config.pace.stride,
            late=self.rule.vectors == 1,
            overlap=gossip.overlap,
        )
        self.wanted_stride: int | None = None
        self._run_digest = run_digest
        self._cycles_s: deque[float] = deque(maxlen=REMEMBERED_CYCLES)
        self._unconfirmed: dict[PeerId, deque[int]] = {}

    @property
    def cycle_s(self) -> float:
        """Median seconds of this peer's last rounds, 0 before the first."""
        return statistics.median(self._cycles_s) if self._cycles_s else 0.0

    def is_closing(self, t: int) -> bool:
        """Whether round t only mixes: no inner steps, outer learning rate 1, momentum 0."""
        return self.pace.phase(t) is not RoundPhase.TRAINING

    def plan(self, t: int, partners: Sequence[PeerId], roster: Roster) -> StepPlan:
        """What this peer does in round t, to keep in step with the others."""
        told = {**roster.records, **self.membership.book.newest()}
        plan = self.tempo.plan(
            others=self.membership.book.rates(),
            partners={partner: told[partner].transfer_s for partner in partners},
            every=self.membership.stride().every_at(t),
        )
        return dataclasses.replace(plan, reason="") if self.is_closing(t) else plan

    def note_cycle(self, seconds: float, report: RoundReport) -> None:
        """Learn from how long a round took, waiting for partners excluded."""
        self._cycles_s.append(seconds)
        self.wanted_stride = self.tempo.note_round(steps=report.local_steps, train_s=report.train_s)

    def inner_lr(self, position: float) -> float:
        """Learning rate at `position`, the round plus the fraction of it that is done."""
        return inner_lr(self.config, position)

    def edge_deadline_s(
        self, t: int, partner: PeerId, roster: Roster, *, awaited: bool = True
    ) -> float:
        """Seconds that an edge with `partner` may take, and whether the round waits for it."""
        pace = self.config.pace
        record = roster.records.get(partner)
        return self.pace.edge_deadline_s(
            t + 1 if self.overlaps(t) else t,
            self.clock.unix_s(),
            own_cycle_s=self.cycle_s,
            partner_cycle_s=record.cycle_s if record is not None else 0.0,
            transfer_s=self.tempo.rates.expected_edge_s(
                partner, record.transfer_s if record is not None else 0.0
            ),
            awaited=awaited,
            floor_s=pace.edge_floor_s,
            ceiling_s=pace.edge_ceiling_s,
        )

    def overlaps(self, t: int) -> bool:
        """Whether round t exchanges under the inner steps of this peer's next one."""
        return self.config.gossip.overlap and not self.is_closing(self.next_turn(t))

    def next_turn(self, t: int) -> int:
        """Return the round after t in which this peer takes part by itself."""
        return self.membership.stride().next_turn(t + 1)

    def settles(self, t: int) -> bool:
        """Whether round t waits for everything: it closes the run, or is the last one."""
        return self.is_closing(t) or self.pace.phase(self.next_turn(t)) is RoundPhase.FINISHED

    def awaits(self, t: int, partner: PeerId, plan: StepPlan) -> bool:
        """Whether the outer step of round t waits for the edge with `partner`."""
        return partner not in plan.slow or not self.may_be_late(t)

    def may_be_late(self, t: int) -> bool:
        """Whether edges of round t may end in later ones.

        A rule that sends more than its parameters has no correction to make later, closing rounds
        are there to bring all peers to one model, and after the last one there is no later.
        """
        return self.rule.vectors == 1 and not self.settles(t)

    def is_busy(self, plan: StepPlan) -> bool:
        """Whether too many edges of earlier rounds are under way for further ones to be begun."""
        # On a slow link of its own they would only make each other slower, and it may be one.
        most = MAX_LATE if self.tempo.rates.knows_transfers else 1
        return self.edges.late > (0 if plan.has_slow_link else most)

    def standing(self) -> Standing:
        """Where this peer is; if an outer step is to come, as if it mixed nothing."""
        if self.to_come is not None and self.to_come.alone is not None:
            return self.to_come.alone
        return Standing(theta=self.theta, memory=self.memory)

    def layout(self, t: int) -> Layout:
        """How what this peer gives to round t is cut on the wire."""
        rule = self.closing_rule if self.is_closing(t) else self.rule
        return self.codec.layout(rule.vectors * self.theta.numel(), self.config.gossip.chunk_bytes)

    def offer(self, t: int, vector: Tensor, motion: Tensor | None) -> Offer:
        """What this peer gives to round t, as its codec sees it.

        Args:
            t: the round.
            vector: the outgoing tensor, fp32 [P] or a multiple of it.
            motion: how far this peer has moved, if the codec asks for it; see `Drift`.
        """
        return self.codec.offer(
            vector,
            motion=motion,
            keys=Keys(round=_key(self.seed, t), own=_key(self.seed, t, self.id)),
            chunk_bytes=self.config.gossip.chunk_bytes,
        )

    def hello(
        self, t: int, partner: PeerId | None, roster_digest: bytes, *, late: bool = False
    ) -> Hello:
        """What this peer says first on an edge of round t."""
        layout = self.layout(t)
        return Hello(
            protocol_min=PROTOCOL_VERSION,
            protocol_max=PROTOCOL_VERSION,
            peer_id=self.id,
            run_digest=self._run_digest,
            schema_digest=self.learner.schema_digest,
            round=t,
            roster_digest=roster_digest,
            codec=self.codec.name,
            code_bytes=layout.code_bytes,
            chunk_bytes=self.config.gossip.chunk_bytes,
            scale_bytes=layout.scale_bytes,
            unconfirmed=tuple(self._unconfirmed.get(partner, ())) if partner else (),
            late=late,
        )

    def _plain_hello(self, t: int) -> Hello:
        return self.hello(t, None, b"")

    def new_exchange(
        self, t: int, partner: PeerId, roster: Roster, scales: bytes, *, late: bool
    ) -> Exchange:
        """Return the fresh state machine of this round's edge with `partner`."""
        return Exchange(
            hello=self.hello(t, partner, roster.digest, late=late),
            layout=self.layout(t),
            scales=scales,
            partner=partner,
            dialer=self.id < partner,
            records=self.membership.book.records_for_partner(),
            chunk_memory=self.room.memory,
        )

    def rounds_apart(self, partner: PeerId) -> int:
        """Rounds between two exchanges of the one of this peer and a partner that skips more."""
        told = self.membership.book.newest().get(partner)
        return max(self.membership.stride().every, told.every if told is not None else 1)

    def left_out(self, partner: PeerId, t: int) -> str:
        """Say why this peer leaves `partner` out in round t; empty when it does not."""
        if not self.guard.is_excluded(partner, t):
            return ""
        rounds = self.guard.excluded_through(partner) - t + 1
        return f"left out for {rounds} rounds after repeated offences"

    def checkpoint(
        self,
        t: int,
        *,
        run_id: str,
        reports: Sequence[RoundReport],
        trained: tuple[Tensor, float] | None,
    ) -> Checkpoint:
        """Return everything that this peer needs to go on from the start of round t, its next.

        Args:
            t: the round.
            run_id: name of the run.
            reports: the rounds so far.
            trained: parameters after the last training round and their validation loss.
        """
        trained_theta, trained_val_loss = trained or (None, None)
        standing = self.standing()
        return Checkpoint(
            progress=Progress(
                run_id=run_id,
                run_digest=self._run_digest,
                schema_digest=self.learner.schema_digest,
                peer_id=self.id,
                round=t,
                next_sample=self.model_state.next_sample,
                warmup_steps_left=self.model_state.warmup_steps_left,
                written_unix_s=self.clock.unix_s(),
                companions=self.membership.companions(t),
                unconfirmed={p: tuple(rounds) for p, rounds in self._unconfirmed.items()},
                guard=self.guard.state(),
                reports=tuple(reports),
                trained_val_loss=trained_val_loss,
            ),
            theta=standing.theta,
            memory=standing.memory.memory,
            model=self.model_state,
            trained_theta=trained_theta,
            stepped=self.drift.stepped if self.codec.checked else None,
        )

    async def recall(self, saved: Checkpoint) -> None:
        """Become what `checkpoint` took down."""
        progress = saved.progress

        def take_over() -> None:
            self.learner.load(saved.theta)
            self.learner.restore(saved.model)

        await self.compute.run(take_over)
        self.theta, self.memory = saved.theta, OuterState(memory=saved.memory)
        self.drift.restore(saved.stepped)
        self.guard = Guard(progress.guard, active=self.config.gossip.guard)
        for partner, rounds in progress.unconfirmed.items():
            self._unconfirmed[partner] = deque(rounds, maxlen=MAX_UNCONFIRMED)

    async def take_back(self, t: int, what: str) -> None:
        """Return to the parameters and moments of the start of round t, and say why.

        Samples that were drawn stay drawn, so that a bad batch does not come again.

        Args:
            t: the round.
            what: what led to numbers that are not finite.
        """

        def restore() -> None:
            drawn = self.learner.state().next_sample
            self.learner.load(self.theta)
            self.learner.restore(dataclasses.replace(self.model_state, next_sample=drawn))

        await self.compute.run(restore)
        self.observe(
            Notice(
                text=f"{what} of round {t} led to numbers that are not finite; this peer goes on "
                "from the parameters with which the round began"
            )
        )

    def note_edge(self, t: int, outcome: EdgeOutcome, *, awaited: bool) -> None:
        """Learn from how an edge of round t ended, and whether the round waited for it."""
        self.inbox.release(t, outcome.partner)
        note_conduct(
            self.guard,
            t,
            outcome,
            rounds_apart=self.rounds_apart(outcome.partner),
            awaited=awaited,
            closing=self.is_closing(t),
            left_out=self.left_out,
            observe=self.observe,
        )
        for earlier in outcome.unconfirmed:
            self.observe(
                Notice(
                    text=f"the exchange of round {earlier} with {outcome.partner} broke at its "
                    "last word, so it may count there alone"
                )
            )
        transfer_s = outcome.elapsed_s - outcome.wait_s
        timed_out = outcome.kind is EdgeKind.TIMED_OUT and transfer_s > 0
        if outcome.mixes or timed_out:
            self.tempo.rates.note_edge(
                outcome.partner, transfer_s, awaited=awaited, timed_out=timed_out
            )
        if not outcome.mixes:
            return
        unconfirmed = self._unconfirmed.setdefault(outcome.partner, deque(maxlen=MAX_UNCONFIRMED))
        if outcome.kind is EdgeKind.ASYMMETRIC:
            unconfirmed.append(t)
        else:
            unconfirmed.clear()
