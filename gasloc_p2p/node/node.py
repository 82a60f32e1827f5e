"""A node's life: join the swarm, run rounds, leave it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from torch import Tensor

from gasloc_p2p.config import Config
from gasloc_p2p.core.errors import StateError
from gasloc_p2p.core.manifest import Manifest
from gasloc_p2p.core.outer import OuterState
from gasloc_p2p.core.pace import Pace, RoundPhase
from gasloc_p2p.core.records import Verify
from gasloc_p2p.core.roster import JOIN_ROUNDS
from gasloc_p2p.core.substrate import Clock, Compute, LocalModel, Network
from gasloc_p2p.core.types import MIXED_KINDS
from gasloc_p2p.node.events import (
    Jumped,
    Left,
    Notice,
    Observer,
    RoundFinished,
    Validated,
    Waiting,
)
from gasloc_p2p.node.membership import Membership
from gasloc_p2p.node.peer import EXCHANGE_PROTOCOL, Peer
from gasloc_p2p.node.report import RoundReport, peer_report
from gasloc_p2p.node.result import NodeResult
from gasloc_p2p.node.round import run_round
from gasloc_p2p.node.state import STATE_PROTOCOL, Donor, State, StateRequest, fetch_state
from gasloc_p2p.train.parameters import theta_digest

GOODBYE_DEADLINE_S = 3.0
PATIENCE_CEILINGS = 2.0
PATIENCE_CYCLES = 4.0
"""A joiner waits for the next round this many edge deadlines and cycles of the others."""
MANIFEST_DEADLINE_S = 5.0
MANIFEST_PERIOD_S = 600.0
RENEWAL_GRACE_S = 1.0


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
    ) -> None:
        self._config = config
        self._manifest = manifest
        self._network = network
        self._observe = observe
        self._membership = Membership(
            network=network, clock=clock, run_id=config.run.id, verify=verify
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
        )
        self._request = StateRequest(
            run_digest=manifest.digest, schema_digest=learner.schema_digest
        )
        self._round = 0
        self._manifest_due_s = 0.0
        self._reports: list[RoundReport] = []
        self._trained: tuple[Tensor, float] | None = None

    async def run(self, leave: asyncio.Event) -> NodeResult:
        """Take part until the run ends or `leave` is set; a leaving node says goodbye.

        A round in progress is dropped when leaving: the parameters are those of its start.
        """
        peer = self._peer
        donor = Donor(request=self._request, current=self._current_state, compute=peer.compute)
        await self._network.serve(EXCHANGE_PROTOCOL, peer.inbox.accept)
        await self._network.serve(STATE_PROTOCOL, donor.serve)
        try:
            finished = await _until(leave, self._life)
        finally:
            peer.inbox.close()
        await self._say_goodbye()
        theta, val_loss = self._trained or (peer.theta, None)
        report = peer_report(
            peer_id=peer.id,
            rounds=self._reports,
            val_loss=val_loss,
            theta_digest=theta_digest(theta),
        )
        self._observe(Left(report=report, finished=finished))
        return NodeResult(report=report, theta=theta, closing_theta=peer.theta, finished=finished)

    async def _life(self) -> None:
        peer = self._peer
        self._round = await self._join()
        loop = asyncio.get_running_loop()
        while peer.pace.phase(self._round) is not RoundPhase.FINISHED:
            await self._wait_for_round()
            began_s = loop.time()
            report = await self._round_while_announced()
            peer.note_cycle(loop.time() - began_s - report.wait_s)
            following = self._round_after(report)
            if not report.closing:
                await self._validate(self._round, last=peer.is_closing(following))
            self._reports.append(report)
            self._observe(RoundFinished(report=report))
            if following > self._round + 1:
                self._observe(Jumped(from_round=self._round, to_round=following))
            self._round = following

    def _round_after(self, report: RoundReport) -> int:
        """Return the next round; only a peer that its partners left behind skips any.

        Where every edge worked this peer is where its partners are, however far others have run
        ahead among themselves; to follow those would leave the partners behind.
        """
        kept_up = bool(report.edges) and all(edge.kind in MIXED_KINDS for edge in report.edges)
        swarm_round = None if kept_up else self._membership.swarm_round()
        return self._peer.pace.next_round(self._round, swarm_round, self._peer.clock.unix_s())

    async def _round_while_announced(self) -> RoundReport:
        """Run a round while the lease is renewed; a sick record store holds it up only briefly."""
        peer, membership = self._peer, self._membership
        async with asyncio.TaskGroup() as tasks:
            renewing = tasks.create_task(membership.renew(self._round, cycle_s=peer.cycle_s))
            beside = (
                renewing,
                tasks.create_task(membership.stay_stored(self._round, cycle_s=peer.cycle_s)),
                tasks.create_task(self._keep_manifest()),
            )
            report = await run_round(peer, self._round)
            # A round may be shorter than a store takes, and a lease never renewed lapses.
            await asyncio.wait({renewing}, timeout=RENEWAL_GRACE_S)
            for task in beside:
                task.cancel()
        return report

    async def _join(self) -> int:
        """Announce this peer and return the round in which it starts."""
        membership = self._membership
        await self._keep_manifest()
        await membership.refresh()
        await membership.refuse_twin()
        current = self._current_round()
        if current == 0:
            await membership.announce(0, first_round=0)
            if await self._wait_for_peers():
                return 0
            current = self._current_round()
        if membership.swarm_round() is None:
            # Only the clock says that the run has begun: this peer is the first to be there.
            await membership.announce(current, first_round=current)
            return current
        return await self._join_late(current)

    def _current_round(self) -> int:
        """The round in which a newcomer finds the swarm; 0 before anybody has begun."""
        return self._peer.pace.next_round(
            -1, self._membership.swarm_round(), self._peer.clock.unix_s()
        )

    async def _wait_for_peers(self) -> bool:
        """Wait until round 0 may begin: enough peers are here, or its time has come.

        Returns:
            False when the swarm went on without this peer, which joins late then.
        """
        wanted = self._config.run.initial_peers
        timed = self._config.pace.mode == "seconds"
        present = -1

        def may_begin() -> bool:
            nonlocal present
            here = self._membership.book.founders()
            if here != present and here < wanted:
                self._observe(Waiting(reason=f"{here} of {wanted} peers are here"))
            present = here
            return here >= wanted or timed_out() or self._current_round() > 0

        def timed_out() -> bool:
            return timed and self._starts_in_s(0) == 0

        await self._membership.wait_until(may_begin)
        return present >= wanted or timed_out()

    def _starts_in_s(self, t: int) -> float:
        return self._peer.pace.starts_in_s(t, self._peer.clock.unix_s())

    async def _join_late(self, current: int) -> int:
        """Take over a donor's parameters and start with everybody else a few rounds from here."""
        membership, peer = self._membership, self._peer
        first_round = -1
        # Whoever has just left can make the swarm look slower than it is, until it counts no more.
        while first_round < current - 1:
            first_round = current + JOIN_ROUNDS
            self._observe(
                Waiting(reason=f"the swarm is in round {current}, this peer joins at {first_round}")
            )
            peer.inbox.start_at(first_round)
            await membership.announce(current, first_round=first_round)
            await self._stay_announced_until(first_round)
            current = self._current_round()
        state = await fetch_state(
            network=self._network,
            compute=peer.compute,
            request=self._request,
            donors=[p for p in membership.roster(current).peers if p != peer.id],
            elements=peer.learner.elements,
            deadline_s=self._config.pace.edge_ceiling_s,
        )
        peer.theta, peer.memory = state.theta, OuterState(memory=state.memory)
        await peer.compute.run(lambda: peer.learner.load(peer.theta))
        return self._current_round()

    async def _stay_announced_until(self, first_round: int) -> None:
        """Keep the lease alive, from each round that the swarm passes, until `first_round`."""
        announced = -1

        def passed() -> bool:
            return self._current_round() >= min(announced + 1, first_round)

        patience_s = self._config.pace.edge_ceiling_s * PATIENCE_CEILINGS
        while self._current_round() < first_round:
            announced = self._current_round()
            await self._membership.renew(announced, cycle_s=0.0)
            try:
                async with asyncio.timeout(
                    patience_s + PATIENCE_CYCLES * self._membership.cycle_s()
                ):
                    await self._membership.wait_until(passed)
            except TimeoutError:
                raise StateError(
                    f"the run stands still in round {announced}",
                    why="peers have announced themselves, but none has begun another round",
                    fix="ask the others whether their nodes still run, then join again",
                ) from None

    async def _wait_for_round(self) -> None:
        pause_s = self._starts_in_s(self._round)
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
        self._observe(Validated(round=t, val_loss=val_loss))
        if last:
            self._trained = (peer.theta, val_loss)

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
            self._observe(Notice(text="the goodbye was not heard; this peer's lease will lapse"))

    def _current_state(self) -> State:
        return State(theta=self._peer.theta, memory=self._peer.memory.memory)


async def _until(leave: asyncio.Event, life: Callable[[], Coroutine[Any, Any, None]]) -> bool:
    """Run `life()` until it ends or `leave` is set; return whether it ended by itself."""
    async with asyncio.TaskGroup() as tasks:
        living = tasks.create_task(life())
        leaving = tasks.create_task(leave.wait())
        await asyncio.wait({living, leaving}, return_when=asyncio.FIRST_COMPLETED)
        living.cancel()
        leaving.cancel()
    return not living.cancelled()
