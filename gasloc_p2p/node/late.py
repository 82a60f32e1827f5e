"""Edges that are under way, some of them longer than the round that they belong to.

A round waits for its edges before its outer step, except for those over links so slow that nobody
should wait for them. What these bring is a correction: alpha W_ij (Q(x_j) - Q(x_i)) is added to
the parameters between two inner steps, once it is there, past the momentum. Both ends add the same
with opposite signs, so the mean of the swarm stays, whenever they do it (docs/design.md section 2).
If one end mixed in its outer step what the other one adds late, the mean would move; so each says
in its Hello when it does not wait, and the other one goes on as well.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Self

from torch import Tensor

from gasloc_p2p.core.outer import OuterRule, OuterState
from gasloc_p2p.core.types import EdgeOutcome, PeerId
from gasloc_p2p.node.edge import Watch

MAX_LATE: Final = 4
"""With more edges of earlier rounds under way a round exchanges nothing; they hold memory."""


@dataclass(kw_only=True, slots=True, eq=False)
class UnderWay:
    """An edge that has been started.

    Attributes:
        round: the round that it belongs to.
        partner: who it is with.
        weight: W_ij.
        awaited: whether the outer step of its round waits for it.
        began_s: when it was started, on the event loop's clock.
        task: returns how it ended.
        ask: lets it go, if that can still be told the partner, and says whether it was.
        answered: set once the partner has answered.
        through: set once no outer step has to wait for it any longer.
        let_go_s: when it was let go; None if it was not.
        met_s: when the partner answered; infinite before.
    """

    round: int
    partner: PeerId
    weight: float
    awaited: bool
    began_s: float
    task: asyncio.Task[EdgeOutcome]
    ask: Callable[[], bool]
    through: asyncio.Event = field(default_factory=asyncio.Event)
    let_go_s: float | None = None
    met_s: float = math.inf
    answered: asyncio.Event = field(default_factory=asyncio.Event)

    def met(self, *, late: bool) -> None:
        """See `gasloc_p2p.node.edge.Watch`."""
        self.met_s = min(self.met_s, asyncio.get_running_loop().time())
        self.answered.set()
        if late:
            self.let_go()

    async def be_patient(self, patience_s: float) -> None:
        """Wait until no outer step has to wait for it; let it go if it takes longer than this.

        Args:
            patience_s: seconds from when the partner has answered.
        """
        async with asyncio.TaskGroup() as tasks:
            through = tasks.create_task(self.through.wait())
            answered = tasks.create_task(self.answered.wait())
            await asyncio.wait({through, answered}, return_when=asyncio.FIRST_COMPLETED)
            answered.cancel()
            if not through.done() and patience_s < math.inf:
                left_s = self.met_s + patience_s - asyncio.get_running_loop().time()
                await asyncio.wait({through}, timeout=max(0.0, left_s))
                if not through.done() and self.ask():
                    self.let_go()

    def let_go(self) -> None:
        """Do not wait for it."""
        if self.awaited:
            self.awaited, self.let_go_s = False, asyncio.get_running_loop().time()
        self.through.set()

    @property
    def outcome(self) -> EdgeOutcome:
        """How it ended."""
        return self.task.result()

    def add_difference(self, mixed: Tensor, alpha: float) -> None:
        """Add alpha W_ij (Q(x_j) - Q(x_i)), clipped, to `mixed`, fp32; nothing if it failed."""
        coder = self.outcome.coder
        if coder is not None:
            coder.add_difference(mixed, alpha * (self.weight * self.outcome.clip))

    def waited_s(self, since_s: float) -> float:
        """Return the seconds from `since_s` on in which the partner had not answered yet."""
        answered_s = self.let_go_s
        if answered_s is None:
            answered_s = self.began_s + self.outcome.wait_s
        return max(0.0, answered_s - since_s)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Standing:
    """Where a peer is between two rounds.

    Attributes:
        theta: parameters, fp32 [P].
        memory: of the outer rule.
    """

    theta: Tensor
    memory: OuterState


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OuterStepToCome:
    """A round that exchanges and has yet to mix what arrives, and to step.

    Attributes:
        round: the round.
        rule: its outer rule.
        theta_h: parameters after its inner steps, fp32 [P].
        outgoing: what this peer gives to the mix.
        alone: where the peer would be if every edge failed; the next round's inner steps begin
            from there in the meantime. None if it waits.
        edges: those that are waited for.
        patience_s: seconds that they may take from when their partners have answered.
        refreshing: fetches the records that the view at the end of the round is made of.
    """

    round: int
    rule: OuterRule
    theta_h: Tensor
    outgoing: Tensor
    alone: Standing | None
    edges: Sequence[UnderWay]
    patience_s: float
    refreshing: asyncio.Task[None]

    @property
    def is_due(self) -> bool:
        """Whether there is nothing left to wait for."""
        return self.refreshing.done() and all(edge.through.is_set() for edge in self.edges)


class Edges:
    """All edges of a peer that are under way; a context that ends those that are left at its end.

    An edge that fails with an exception ends the context with it.
    """

    def __init__(self) -> None:
        self._tasks = asyncio.TaskGroup()
        self._under_way: dict[tuple[int, PeerId], UnderWay] = {}
        self._beside: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.drop()
        await self._tasks.__aexit__(kind, error, trace)

    def start(
        self,
        edge: Callable[[Watch], Coroutine[Any, Any, EdgeOutcome]],
        *,
        round: int,
        partner: PeerId,
        weight: float,
        awaited: bool,
        ask: Callable[[], bool],
    ) -> UnderWay:
        """Let an edge run; see `UnderWay`.

        Args:
            edge: makes it, from whom it tells how it goes.
            round, partner, weight, awaited, ask: see `UnderWay`.
        """

        async def run() -> EdgeOutcome:
            return await edge(under_way)

        under_way = UnderWay(
            round=round,
            partner=partner,
            weight=weight,
            awaited=awaited,
            began_s=asyncio.get_running_loop().time(),
            task=self._tasks.create_task(run()),
            ask=ask,
        )
        under_way.task.add_done_callback(lambda _: under_way.through.set())
        self._under_way[round, partner] = under_way
        return under_way

    def beside(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Let something else run beside the edges."""
        task = self._tasks.create_task(work)
        self._beside.add(task)
        task.add_done_callback(self._beside.discard)
        return task

    def of(self, round: int) -> list[UnderWay]:
        """Return the edges of a round that are under way, or have ended and were not taken."""
        return [edge for edge in self._under_way.values() if edge.round == round]

    def take_late(self) -> list[UnderWay]:
        """Return those that nobody awaits and that have ended, oldest first, and forget them."""
        return self._take([edge for edge in self._late() if edge.task.done()])

    async def take(self, edges: Sequence[UnderWay], *, patience_s: float) -> list[UnderWay]:
        """Wait until no more of these edges is awaited; return those that ended, and forget them.

        If that is cancelled, they go on.

        Args:
            edges: the edges.
            patience_s: see `OuterStepToCome`.
        """
        async with asyncio.TaskGroup() as tasks:
            for edge in edges:
                tasks.create_task(edge.be_patient(patience_s))
        return self._take([edge for edge in edges if edge.awaited])

    @property
    def late(self) -> int:
        """How many of those that nobody awaits have not ended."""
        return sum(not edge.task.done() for edge in self._late())

    async def settle(self) -> None:
        """Wait until those that nobody awaits have ended."""
        if late := self._late():
            await asyncio.wait({edge.task for edge in late})

    def _late(self) -> list[UnderWay]:
        return [edge for _, edge in sorted(self._under_way.items()) if not edge.awaited]

    def _take(self, edges: Sequence[UnderWay]) -> list[UnderWay]:
        for edge in edges:
            del self._under_way[edge.round, edge.partner]
        return list(edges)

    def drop(self) -> None:
        """End all that are under way; nothing of them is mixed."""
        for task in (*self._beside, *(edge.task for edge in self._under_way.values())):
            task.cancel()
        self._under_way.clear()
