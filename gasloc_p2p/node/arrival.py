"""How a peer comes into a run: with its founders, late, or again after it was away."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from gasloc_p2p.core.errors import ConfigError, StateError
from gasloc_p2p.core.outer import OuterState
from gasloc_p2p.core.pace import RoundPhase
from gasloc_p2p.core.records import Record
from gasloc_p2p.core.roster import JOIN_ROUNDS
from gasloc_p2p.core.transfer import StateRequest
from gasloc_p2p.core.types import PeerId
from gasloc_p2p.node.checkpoint import Checkpoint, CheckpointStore, Progress
from gasloc_p2p.node.events import Notice, Waiting
from gasloc_p2p.node.membership import Profile
from gasloc_p2p.node.peer import Peer
from gasloc_p2p.node.report import RoundReport
from gasloc_p2p.node.state import fetch_state

PATIENCE_CEILINGS = 2.0
PATIENCE_CYCLES = 4.0
"""A joiner waits for the next round this many edge deadlines and cycles of the others."""
FETCH_ATTEMPTS = 3
DIAL_DEADLINE_S = 15.0
WARMUP_STEPS = 20
"""Steps over which the learning rate rises for an optimizer that has no moments yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """Where a peer begins.

    Attributes:
        round: its first round.
        resumed: the checkpoint from which it goes on; None for a peer without one, and for one
            that took over the parameters of a donor instead.
        reports: rounds of this peer's earlier lives, as far as a checkpoint tells of them.
    """

    round: int
    resumed: Checkpoint | None = None
    reports: tuple[RoundReport, ...] = ()


class Arrival:
    """Brings one peer to its first round, with the parameters that it starts from.

    Args:
        peer: gets the parameters.
        request: what a donor has to agree with.
        store: this peer's checkpoints; None when it keeps none.
    """

    def __init__(self, *, peer: Peer, request: StateRequest, store: CheckpointStore | None) -> None:
        self._peer = peer
        self._membership = peer.membership
        self._config = peer.config
        self._request = request
        self._store = store

    async def arrive(self) -> Start:
        """Announce this peer and return where it starts.

        Raises:
            IdentityError: another process uses this peer's identity.
            StateError: a run that has begun cannot be joined.
        """
        saved = await self._read()
        await self._membership.refresh()
        await self._membership.refuse_twin()
        return await (self._found_or_join() if saved is None else self._resume(saved))

    async def catch_up(self, round: int) -> int:
        """Bring a peer that slept to where the swarm is, with a donor's parameters if it can.

        Args:
            round: the round that the swarm is taken to be in.
        """
        try:
            return await self._join_late(round)
        except StateError as error:
            self._say(f"{error.what}; this peer goes on with its own parameters")
            return max(round, self.current_round())

    def current_round(self) -> int:
        """The round in which a newcomer finds the swarm; 0 before anybody has begun."""
        return self._peer.pace.next_round(
            -1, self._membership.swarm_round(), self._peer.clock.unix_s()
        )

    async def _found_or_join(self) -> Start:
        membership = self._membership
        current = self.current_round()
        if current == 0:
            await membership.announce(0, first_round=0)
            if await self._wait_for_founders():
                return Start(round=0)
            current = self.current_round()
        if membership.swarm_round() is None:
            # Only the clock says that the run has begun: this peer is the first to be there.
            await membership.announce(current, first_round=current)
            return Start(round=current)
        return Start(round=await self._join_late(current))

    async def _wait_for_founders(self) -> bool:
        """Wait until round 0 may begin: enough peers are here, or its time has come.

        Returns:
            False when the swarm went on without this peer, which joins late then.
        """
        wanted = self._config.run.initial_peers
        present = -1

        def may_begin() -> bool:
            nonlocal present
            here = self._membership.book.founders()
            if here != present and here < wanted:
                self._peer.observe(Waiting(reason=f"{here} of {wanted} peers are here"))
            present = here
            return here >= wanted or timed_out() or self.current_round() > 0

        def timed_out() -> bool:
            return self._timed and self._peer.pace.starts_in_s(0, self._peer.clock.unix_s()) == 0

        await self._membership.wait_until(may_begin)
        return present >= wanted or timed_out()

    @property
    def _timed(self) -> bool:
        return self._config.pace.mode == "seconds"

    async def _resume(self, saved: Checkpoint) -> Start:
        """Go on from a checkpoint, together with the peers that were there when it was written."""
        at = saved.progress.round
        if self._peer.pace.phase(at) is RoundPhase.FINISHED:
            return await self._go_on(saved, at)
        if self._timed:
            running = bool(self._membership.book.others())
            return await self._rejoin(saved, max(at, self.current_round()), running=running)
        together, elsewhere = await self._gather(saved)
        if elsewhere is not None:
            return await self._rejoin(saved, elsewhere, running=True)
        older = await self._read(at_most=together)
        saved = older if older is not None and older.progress.round == together else saved
        return await self._go_on(saved, saved.progress.round)

    async def _rejoin(self, saved: Checkpoint, current: int, *, running: bool) -> Start:
        """Enter a swarm that went on: at once while it still counts on this peer, else late."""
        first_round = self._membership.unbroken_since(current) if running else current
        if first_round is None:
            start_round = await self._join_late(current)
            return Start(round=start_round, reports=saved.progress.reports)
        await self._membership.announce(current, first_round=first_round)
        return await self._go_on(saved, current)

    async def _gather(self, saved: Checkpoint) -> tuple[int, int | None]:
        """Wait for the peers of the checkpoint, to go on from one round together.

        Returns:
            The newest round that all who gathered can go on from, and the round of a swarm that
            runs without them; None where there is none.
        """
        membership, progress = self._membership, saved.progress
        companions = set(progress.companions) - {self._peer.id}
        heard = membership.book.newest()
        gathered: dict[PeerId, int] = {}
        oldest = min(self._store.rounds(), default=progress.round) if self._store else 0
        await membership.announce(progress.round, first_round=min(oldest, progress.round))
        told = -1

        def settled() -> bool:
            nonlocal told
            # Whoever begins sooner than we look again was seen gathering before.
            gathered.update(self._gathering())
            here = len(companions & gathered.keys())
            if companions and here not in (told, len(companions)):
                self._peer.observe(
                    Waiting(
                        reason=f"{here + 1} of {len(companions) + 1} peers are back after "
                        f"{progress.round} rounds"
                    )
                )
            told = here
            return here == len(companions) or bool(self._running(heard))

        try:
            async with asyncio.timeout(self._config.checkpoint.gather_s):
                await membership.wait_until(settled)
        except TimeoutError:
            self._say("some peers did not come back in time; going on without them")
        together = min([progress.round, *gathered.values()])
        running = [] if companions <= gathered.keys() else self._running(heard)
        return together, statistics.median_low(running) if running else None

    def _gathering(self) -> dict[PeerId, int]:
        newest = self._membership.book.newest()
        return {peer: r.signed_round for peer, r in newest.items() if r.is_gathering}

    def _running(self, heard: Mapping[PeerId, Record]) -> list[int]:
        """Return the rounds of peers whose records rose above those `heard` at first."""
        return [
            record.signed_round
            for peer, record in self._membership.book.newest().items()
            if record.cycle_s > 0 and (peer not in heard or record.seq > heard[peer].seq)
        ]

    async def _join_late(self, current: int) -> int:
        """Take over a donor's parameters and start with everybody else a few rounds from here."""
        membership, peer = self._membership, self._peer
        first_round = -1
        # Whoever has just left can make the swarm look slower than it is, until it counts no more.
        while first_round < current - 1:
            first_round = current + JOIN_ROUNDS
            peer.observe(
                Waiting(reason=f"the swarm is in round {current}, this peer joins at {first_round}")
            )
            peer.inbox.start_at(first_round)
            await membership.announce(current, first_round=first_round)
            await self._stay_announced_until(first_round)
            current = self.current_round()
        await self._take_over_a_donors_state(current)
        return self.current_round()

    async def _take_over_a_donors_state(self, current: int) -> None:
        """Fetch a state while the lease is kept alive, and try again when that fails.

        Raises:
            StateError: nobody handed one over.
        """
        failure: StateError | None = None
        async with asyncio.TaskGroup() as tasks:
            announcing = tasks.create_task(self._stay_announced())
            for _ in range(FETCH_ATTEMPTS):
                try:
                    await self._fetch(current)
                except StateError as error:
                    failure = error
                else:
                    failure = None
                    break
                await asyncio.sleep(self._membership.cycle_s())
                current = self.current_round()
            announcing.cancel()
        if failure is not None:
            raise failure

    async def _fetch(self, current: int) -> None:
        peer = self._peer
        state = await fetch_state(
            network=peer.network,
            compute=peer.compute,
            request=self._request,
            donors=[p for p in self._membership.roster(current).peers if p != peer.id],
            elements=peer.learner.elements,
            memory_elements=peer.memory.memory.numel(),
            parts=peer.learner.sizes,
            judge=peer.learner.validation_loss,
            deadline_s=DIAL_DEADLINE_S,
        )
        for remark in state.remarks:
            self._say(remark)
        peer.theta, peer.memory = state.theta, OuterState(memory=state.memory)

        def take_over() -> None:
            peer.learner.load(peer.theta)
            peer.learner.restart_optimizer(warmup_steps=WARMUP_STEPS)

        await peer.compute.run(take_over)
        self._say(f"took over the parameters of round {state.round} from {state.donor}")

    async def _stay_announced(self) -> None:
        """Renew the lease in each round that the swarm passes; never returns."""
        announced = self.current_round()
        while True:
            await self._membership.wait_until(partial(self._is_past, announced))
            announced = self.current_round()
            await self._membership.renew(announced, Profile())

    def _is_past(self, round: int) -> bool:
        return self.current_round() > round

    async def _stay_announced_until(self, first_round: int) -> None:
        """Keep the lease alive, from each round that the swarm passes, until `first_round`."""
        announced = -1

        def passed() -> bool:
            return self.current_round() >= min(announced + 1, first_round)

        patience_s = self._config.pace.edge_ceiling_s * PATIENCE_CEILINGS
        while self.current_round() < first_round:
            announced = self.current_round()
            await self._membership.renew(announced, Profile())
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

    async def _read(self, *, at_most: int | None = None) -> Checkpoint | None:
        """Return the newest checkpoint that is whole, and say which ones are not."""
        store = self._store
        if store is None:
            return None
        found = await self._peer.compute.aside(lambda: store.read_newest(at_most=at_most))
        for problem in found.problems:
            self._say(problem)
        if found.checkpoint is not None:
            self._require_own(found.checkpoint.progress)
        return found.checkpoint

    def _require_own(self, progress: Progress) -> None:
        if progress.run_digest != self._request.run_digest:
            owner = f"run {progress.run_id}, with other settings"
        elif progress.peer_id != self._peer.id:
            owner = f"peer {progress.peer_id}"
        else:
            return
        raise ConfigError(
            f"the checkpoints in this node's home are those of {owner}",
            why="a node goes on from its own state, in the run that it belongs to",
            fix="name another node.home, or move the folder `checkpoints` away to begin anew",
        )

    async def _go_on(self, saved: Checkpoint, round: int) -> Start:
        """Take over everything that a checkpoint holds."""
        peer, progress = self._peer, saved.progress
        await peer.recall(saved)
        missed = round - progress.round
        skipped = f", {missed} more are skipped" if missed else ""
        self._say(
            f"resumed from the checkpoint after {progress.round} rounds{skipped}: "
            f"{progress.next_sample} samples drawn, learning rate {peer.inner_lr(round):.3g}"
        )
        return Start(round=round, resumed=saved, reports=progress.reports)

    def _say(self, text: str) -> None:
        self._peer.observe(Notice(text=text))
