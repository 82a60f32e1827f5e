"""A state machine plays two exchanges against each other, over streams that break."""

from __future__ import annotations

from collections import Counter
from functools import partial

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gasloc_p2p.core.codecs.layout import Layout
from gasloc_p2p.core.exchange import (
    Agreed,
    Complete,
    Finished,
    PartnerHello,
    PartnerRecords,
    PartnerScales,
)
from gasloc_p2p.core.types import EdgeKind
from gasloc_p2p.core.wire import RefuseCode
from tests.core.two_sides import A, Side, check, layout, run, sides

ONCE = (PartnerHello, PartnerRecords, PartnerScales, Complete, Agreed, Finished)
MAX_CHUNKS = 4
on_a = st.booleans()
# Of each chunk, on each side: the bad blocks, and whether the other ones match after a repair.
opinions = st.lists(
    st.tuples(st.integers(0, 3), st.booleans()), min_size=MAX_CHUNKS, max_size=MAX_CHUNKS
)


def _finding(cut: Layout, opinions: list[tuple[int, bool]], index: int) -> bytes:
    # The last chunk may have a single block.
    return bytes([opinions[index][0] & cut.everything(index)[0]])


def _matches(opinions: list[tuple[int, bool]], index: int) -> bool:
    return opinions[index][1]


class TwoSides(RuleBasedStateMachine):
    """Two honest callers; streams split and break at any place, and a side may stop."""

    @initialize(
        elements=st.integers(0, 4 * MAX_CHUNKS),
        checked=st.booleans(),
        scale_bytes=st.sampled_from([0, 3]),
        same_roster=st.booleans(),
        of_a=opinions,
        of_b=opinions,
    )
    def begin(
        self,
        elements: int,
        checked: bool,
        scale_bytes: int,
        same_roster: bool,
        of_a: list[tuple[int, bool]],
        of_b: list[tuple[int, bool]],
    ) -> None:
        cut = layout(elements, checked=checked, scale_bytes=scale_bytes)
        self.a, self.b = sides(cut, same_roster=same_roster)
        for side, opinions in ((self.a, of_a), (self.b, of_b)):
            side.finding = partial(_finding, cut, opinions)
            side.matches = partial(_matches, opinions)
        self.disturbed = False

    def pair(self, on_a: bool) -> tuple[Side, Side]:
        return (self.a, self.b) if on_a else (self.b, self.a)

    @rule(on_a=on_a)
    def write(self, on_a: bool) -> None:
        side, other = self.pair(on_a)
        side.write_to(other)

    @rule(on_a=on_a, count=st.integers(1, 60))
    def read(self, on_a: bool, count: int) -> None:
        self.pair(on_a)[0].read(count)

    @rule(on_a=on_a)
    def work(self, on_a: bool) -> None:
        self.pair(on_a)[0].work()

    @rule(steps=st.integers(1, 4))
    def go_on(self, steps: int) -> None:
        for _ in range(steps):
            for side, other in ((self.a, self.b), (self.b, self.a)):
                side.write_to(other)
                other.read(2**20)
                other.work()

    @rule(arrive=st.tuples(*[st.integers(0, 80)] * 2), late=st.tuples(*[st.integers(0, 2)] * 2))
    def break_streams(self, arrive: tuple[int, int], late: tuple[int, int]) -> None:
        """Lose what is on its way, but for the first bytes; some work is done meanwhile."""
        both = (self.a, self.b)
        for side, count in zip(both, arrive, strict=True):
            side.read(count)
            side.inbox.clear()
        if all(side.exchange.resumable for side in both):
            for side, count in zip(both, late, strict=True):
                side.exchange.reconnect()
                for _ in range(count):
                    side.work()
                side.pending = type(side.pending)(
                    event for event in side.pending if isinstance(event, Complete)
                )
        else:
            self.disturbed = True
            for side in both:
                side.take(side.exchange.end_of_stream())

    @precondition(lambda self: not self.disturbed)
    @rule(on_a=on_a, how=st.sampled_from(["end", "expire", *RefuseCode]))
    def stop(self, on_a: bool, how: str) -> None:
        side, _ = self.pair(on_a)
        self.disturbed = True
        if how == "end":
            side.take(side.exchange.end_of_stream())
        elif how == "expire":
            side.take(side.exchange.expire())
        else:
            side.take(side.exchange.refuse(RefuseCode(how), "stopped"))

    @invariant()
    def every_event_comes_once(self) -> None:
        for side in (self.a, self.b):
            counts = Counter(type(event) for event in side.events)
            assert all(counts[kind] <= 1 for kind in ONCE)

    def teardown(self) -> None:
        if not hasattr(self, "a"):
            return
        run(self.a, self.b)
        if not self.disturbed:
            assert self.a.finished.kind is self.b.finished.kind is EdgeKind.APPLIED
        for side in (self.a, self.b):
            side.take(side.exchange.end_of_stream())
        check(self.a, self.b)
        self.every_event_comes_once()
        assert self.a.name == A


TwoSides.TestCase.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
TestTwoSides = TwoSides.TestCase
