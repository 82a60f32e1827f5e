"""A node's life: join the swarm, run rounds, leave it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine
from typing import Any

from torch import Tensor

from gasloc_p2p.config import Config
from gasloc_p2p.core.manifest import Manifest
from gasloc_p2p.core.outer import OuterRule
from gasloc_p2p.core.pace import Pace, RoundPhase
from gasloc_p2p.core.records import LEASE_ROUNDS, Verify, Work
from gasloc_p2p.core.roster import AHEAD_ROUNDS
from gasloc_p2p.core.substrate import Clock, Compute, LocalModel, Network
from gasloc_p2p.core.transfer import STATE_PROTOCOL, StateRequest
from gasloc_p2p.core.types import MIXED_KINDS
from gasloc_p2p.node.arrival import Arrival
from gasloc_p2p.node.checkpoint import Checkpoint, CheckpointStore
from gasloc_p2p.node.company import Company
from gasloc_p2p.node.dialling import EXCHANGE_PROTOCOL
from gasloc_p2p.node.donor import Donor
from gasloc_p2p.node.events import (
    Jumped,
    Left,
    Notice,
    Observer,
    PeerWork,
    RoundFinished,
    Validated,
    Waiting,
    WorkTold,
)
from gasloc_p2p.node.membership import Membership, Profile
from gasloc_p2p.node.mixing import Course
from gasloc_p2p.node.peer import Peer
from gasloc_p2p.node.report import RoundReport, peer_report
from gasloc_p2p.node.result import NodeResult
from gasloc_p2p.node.round import run_round
from gasloc_p2p.node.saver import Saver
from gasloc_p2p.node.state import State
from gasloc_p2p.train.parameters import theta_digest

GOODBYE_DEADLINE_S = 3.0
LAST_CHECKPOINT_DEADLINE_S = 5.0
"""With the goodbye, and what is left for the network to close, a node leaves within 10 s."""
MANIFEST_DEADLINE_S = 5.0
MANIFEST_PERIOD_S = 600.0
RENEWAL_GRACE_S = 1.0
UNDER_WAY_ROUNDS = 1
"""A peer that waits for none of its edges is that far behind the swarm at most, or it jumps."""
PEERS_TOLD = 32
"""Of so many peers at most their work is shown."""


class Node:
    """One peer of a run, from joining to leaving; the same on real and simulated substrates.

    Args:
        config: this node's settings; the shared sections are the manifest's.
        manifest: what all peers of the run have in common.
        network, clock, compute: the substrate.
        learner: model, data and inner optimizer.
        pace: when rounds begin and end.
        verify: checks the signature of a record.
        observe: told what happens.
        checkpoints: where this peer's state is kept and found again; None keeps nothing.
        rule: takes the place of the configured outer rule, as an attacker's does in a study.
    """

    def __init__(
        self,
        *,
        config: Config,
        manifest: Manifest,
        network: Network,
        clock: Clock,
        compute: Compute,
        learner: LocalModel,
        pace: Pace,
        verify: Verify,
        observe: Observer,
        checkpoints: CheckpointStore | None = None,
        rule: OuterRule | None = None,
    ) -> None:
        self._config = config
        self._manifest = manifest
        self._network = network
        self._observe = observe
        self._membership = Membership(
            network=network,
            clock=clock,
            run_id=config.run.id,
            rounds=config.run.rounds,
            verify=verify,
            observe=observe,
        )
        self._peer = Peer(
            config=config,
            run_digest=manifest.digest,
            learner=learner,
            network=network,
            membership=self._membership,
            pace=pace,
            clock=clock,
            compute=compute,
            observe=observe,
            rule=rule,
        )
        self._company = Company(peer=self._peer, profile=self._profile)
        self._request = StateRequest(
            run_digest=manifest.digest, schema_digest=learner.schema_digest
        )
        self._arrival = Arrival(peer=self._peer, request=self._request, store=checkpoints)
        self._checkpoints = checkpoints
        self._saver = Saver(checkpoints, compute, observe) if checkpoints is not None else None
        self._round = 0
        self._begun = False
        self._latest: Checkpoint | None = None
        self._offered_round = 0
        self._manifest_due_s = 0.0
        self._reports: list[RoundReport] = []
        self._trained: tuple[Tensor, float] | None = None
        self._val_loss: float | None = None

    async def run(self, leave: asyncio.Event) -> NodeResult:
        """Take part until the run ends or `leave` is set; a leaving node says goodbye.

        A round in progress is dropped when leaving: the parameters are those of its start, and so
        is the last checkpoint.

        Raises:
            DiskError: there is no room for a checkpoint.
        """
        peer = self._peer
        await self._require_room()
        donor = Donor(
            request=self._request,
            current=self._current_state,
            parts=peer.learner.sizes,
            val_loss=lambda: self._val_loss,
            compute=peer.compute,
        )
        await self._network.serve(EXCHANGE_PROTOCOL, peer.inbox.accept)
        await self._network.serve(STATE_PROTOCOL, donor.serve)
        async with asyncio.TaskGroup() as tasks, peer.edges:
            saving = [tasks.create_task(self._saver.run())] if self._saver is not None else []
            try:
                finished = await _until(leave, self._life)
            finally:
                peer.edges.drop()
                peer.inbox.close()
            await self._say_goodbye()
            if self._saver is not None:
                if self._begun and self._latest is None:
                    await self._take_down()
                await self._saver.finish(self._latest, deadline_s=LAST_CHECKPOINT_DEADLINE_S)
            for task in saving:
                task.cancel()
        standing = peer.standing()
        theta, val_loss = self._trained or (standing.theta, None)
        report = peer_report(
            peer_id=peer.id,
            rounds=self._reports,
            val_loss=val_loss,
            theta_digest=theta_digest(theta),
        )
        self._observe(Left(report=report, finished=finished))
        return NodeResult(
            report=report,
            theta=theta,
            closing_theta=standing.theta,
            finished=finished,
            begun=self._begun,
            unsaved=self._saver.failure() if self._saver is not None else None,
        )

    async def _require_room(self) -> None:
        """Refuse to begin where no state can be kept."""
        store = self._checkpoints
        if store is not None:
            like = self._peer.checkpoint(0, run_id=self._manifest.run_id, reports=(), trained=None)
            await self._peer.compute.aside(lambda: store.require_room(like))

    async def _life(self) -> None:
        peer = self._peer
        await self._begin()
        loop = asyncio.get_running_loop()
        while peer.pace.phase(self._round) is not RoundPhase.FINISHED:
            course = await self._company.come_to_turn(self._round)
            await self._company.stand_by(self._round)
            await self._company.wait_for_slower(self._round)
            await self._wait_for_round()
            self._company.tell_changes(self._round)
            began_s = loop.time()
            report = await self._round_while_announced(course)
            peer.note_cycle(loop.time() - began_s - report.wait_s, report)
            following, slept = self._round_after(report)
            if not report.closing:
                await self._validate(self._round, last=peer.is_closing(following))
            self._reports.append(report)
            self._observe(RoundFinished(report=report))
            self._observe(self._work_told())
            if slept:
                following = await self._arrival.catch_up(following)
            if following > self._peer.next_turn(self._round):
                self._observe(Jumped(from_round=self._round, to_round=following))
            self._round = following
            await self._remember()

    async def _begin(self) -> None:
        """Come to the first round; the report includes those that a checkpoint tells of."""
        await self._keep_manifest()
        start = await self._arrival.arrive()
        self._round, self._begun = self._membership.stride().next_turn(start.round), True
        self._reports = list(start.reports)
        if start.resumed is not None:
            progress = start.resumed.progress
            if start.resumed.trained_theta is not None and progress.trained_val_loss is not None:
                self._trained = (start.resumed.trained_theta, progress.trained_val_loss)
        await self._remember(always=True)

    async def _remember(self, *, always: bool = False) -> None:
        """Take down the state at the start of a round, which leaving keeps, and save it if due."""
        await self._take_down()
        every = self._config.checkpoint.every_rounds
        due = every and self._round // every > self._offered_round // every
        if self._saver is not None and self._latest is not None and (always or due):
            self._offered_round = self._round
            self._saver.offer(self._latest)

    async def _take_down(self) -> None:
        """Copy the state at the start of a round; the moments are twice as large as the model."""
        peer = self._peer
        # The old copy goes before there is another one.
        self._latest = None
        peer.model_state = dataclasses.replace(peer.model_state, tensors={})
        peer.model_state = await peer.compute.run(peer.learner.state)
        if self._saver is not None:
            self._latest = peer.checkpoint(
                self._round,
                run_id=self._manifest.run_id,
                reports=self._reports,
                trained=self._trained,
            )

    def _round_after(self, report: RoundReport) -> tuple[int, bool]:
        """Return the next round, and whether this peer slept through rounds on the way to it.

        A peer whose edges all worked is where its partners are, however far others have run ahead
        among themselves; to follow those would leave the partners behind. It does follow once most
        others are out of its reach, as after the network was split.
        """
        # That a late edge of the training rounds failed is no reason to skip a closing round.
        ended = [edge for edge in report.edges if not (report.closing and edge.late)]
        worked = all(edge.kind in MIXED_KINDS for edge in ended)
        # Edges under way show little: those of before this machine slept hang until their deadline.
        reach = AHEAD_ROUNDS if ended else UNDER_WAY_ROUNDS if report.under_way else 0
        swarm_round = self._membership.swarm_round()
        peer, stride = self._peer, self._membership.stride()
        last = peer.next_turn(self._round) - 1
        if worked and swarm_round is not None and swarm_round <= last + reach:
            swarm_round = None
        following = stride.next_turn(
            peer.pace.next_round(self._round, swarm_round, peer.clock.unix_s())
        )
        mixed = report.under_way > 0 or any(edge.kind in MIXED_KINDS for edge in report.edges)
        return following, not mixed and following > last + LEASE_ROUNDS

    def _profile(self) -> Profile:
        """Return what the others are told of this peer."""
        peer, rates = self._peer, self._peer.tempo.rates
        steps = sum(report.local_steps for report in self._reports)
        return Profile(
            work=Work(
                cycle_s=peer.cycle_s,
                step_s=rates.step_s,
                transfer_s=rates.transfer_s,
                tokens=steps * peer.learner.tokens_per_step,
                rounds=sum(not report.closing for report in self._reports),
                bytes_sent=sum(report.bytes_sent for report in self._reports),
            ),
            every=peer.wanted_stride,
        )

    def _work_told(self) -> WorkTold:
        """Return what the records tell of everybody's work, and what this peer did."""
        tokens = self._peer.learner.tokens_per_step
        newest = self._membership.book.newest()
        others = [
            (id, told, told.stride.every_at(told.signed_round)) for id, told in newest.items()
        ]
        others.sort(key=lambda told: -told[1].tokens)
        own = self._peer.id, self._profile().work, self._membership.stride().every_at(self._round)
        return WorkTold(
            peers=tuple(
                PeerWork(
                    peer_id=id,
                    tokens=work.tokens,
                    rounds=work.rounds,
                    bytes_sent=work.bytes_sent,
                    steps=work.tokens / (tokens * max(1, work.rounds)),
                    every=every,
                )
                for id, work, every in (own, *others[: PEERS_TOLD - 1])
            )
        )

    async def _round_while_announced(self, course: Course) -> RoundReport:
        """Run a round while the lease is renewed; a sick record store holds it up only briefly."""
        membership, profile = self._membership, self._profile()
        async with asyncio.TaskGroup() as tasks:
            renewing = tasks.create_task(membership.renew(self._round, profile))
            beside = [
                renewing,
                tasks.create_task(membership.stay_stored(self._round, profile)),
                tasks.create_task(self._keep_manifest()),
            ]
            if self._peer.next_turn(self._round) > self._round + 1:
                beside.append(
                    tasks.create_task(membership.follow(self._peer.next_turn(self._round)))
                )
            report = await run_round(self._peer, self._round, course)
            # A round may be shorter than a store takes, and a lease never renewed lapses.
            await asyncio.wait({renewing}, timeout=RENEWAL_GRACE_S)
            for task in beside:
                task.cancel()
        return report

    async def _wait_for_round(self) -> None:
        peer = self._peer
        pause_s = peer.pace.starts_in_s(self._round, peer.clock.unix_s())
        if pause_s > 0:
            if self._round == 0:
                self._observe(Waiting(reason=f"round 0 begins in {pause_s:.0f} s"))
            await asyncio.sleep(pause_s)
            await self._membership.refresh()

    async def _validate(self, t: int, *, last: bool) -> None:
        """Try the own parameters on the held-out text, now and then and after the last round."""
        peer, every = self._peer, self._config.node.validate_every_rounds
        if not last and (every == 0 or (t + 1) % every):
            return
        val_loss = await peer.compute.run(peer.learner.validation_loss)
        self._val_loss = val_loss
        self._observe(Validated(round=t, val_loss=val_loss))
        if last:
            self._trained = (peer.standing().theta, val_loss)

    async def _keep_manifest(self) -> None:
        """Store the manifest again before it expires; every peer of the run does."""
        now_s = self._peer.clock.unix_s()
        if now_s < self._manifest_due_s:
            return
        stored = await self._network.publish_manifest(
            self._manifest.run_id, self._manifest.encode(), deadline_s=MANIFEST_DEADLINE_S
        )
        if stored:
            self._manifest_due_s = now_s + MANIFEST_PERIOD_S

    async def _say_goodbye(self) -> None:
        try:
            async with asyncio.timeout(GOODBYE_DEADLINE_S):
                await self._membership.say_goodbye(self._round)
        except TimeoutError:
            self._observe(
                Notice(
                    text="nobody has heard the goodbye; the others notice within a few rounds that "
                    "this peer is gone"
                )
            )

    def _current_state(self) -> State | None:
        if not self._begun:
            return None
        standing = self._peer.standing()
        return State(theta=standing.theta, memory=standing.memory.memory, round=self._round)


async def _until(leave: asyncio.Event, life: Callable[[], Coroutine[Any, Any, None]]) -> bool:
    """Run `life()` until it ends or `leave` is set; return whether it ended by itself."""
    async with asyncio.TaskGroup() as tasks:
        living = tasks.create_task(life())
        leaving = tasks.create_task(leave.wait())
        await asyncio.wait({living, leaving}, return_when=asyncio.FIRST_COMPLETED)
        living.cancel()
        leaving.cancel()
    return not living.cancelled()
