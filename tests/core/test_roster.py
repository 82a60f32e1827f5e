"""The roster is the same at every peer, whatever the order and delay of the records."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gasloc_p2p.core import records, roster
from gasloc_p2p.core.records import LEASE_ROUNDS, Reachability, Record, RecordError, Verdict, Work
from gasloc_p2p.core.roster import GOODBYE_ROUNDS, JOIN_ROUNDS, MAX_PEERS, RosterBook
from gasloc_p2p.core.types import PeerId

timeless = settings(deadline=None)
"""An example may take long on a busy machine."""

RUN = "run"
OWN = "me"


BASE = Record(
    run_id=RUN,
    peer_id=OWN,
    seq=0,
    signed_round=0,
    first_round=0,
    lease_until=0,
    reachability=Reachability.PUBLIC,
    cycle_s=0.0,
    expires_at=1e9,
)


def sign(message: bytes) -> bytes:
    return bytes(64)


def record(peer: PeerId, *, signed_round: int = 0, **changes: Any) -> Record:
    lease = {"signed_round": signed_round, "lease_until": signed_round + LEASE_ROUNDS}
    return msgspec.structs.replace(BASE, peer_id=peer, **lease | changes)


def observe(book: RosterBook, item: Record, own_round: int = 0) -> Verdict:
    return book.observe(item, signed=records.sign_record(item, sign), own_round=own_round)


def renew(
    book: RosterBook, t: int, *, cycle_s: float = 0.0, every: int | None = None, **rounds: int
) -> Record:
    return book.renew(
        round=t,
        seq=t,
        work=Work(cycle_s=cycle_s),
        every=every,
        reachability=Reachability.PUBLIC,
        expires_at=1e9,
        sign=sign,
        **rounds,
    )


def opened(signed: bytes) -> Record:
    return records.open_record(signed, verify=lambda *_: True)


def book_with(*records: Record, own_round: int = 0) -> RosterBook:
    book = RosterBook(RUN, OWN)
    for item in records:
        observe(book, item, own_round)
    return book


def test_the_newest_record_of_a_peer_is_kept() -> None:
    book = book_with()
    old, new = record("a", seq=1), record("a", seq=2, reachability=Reachability.PRIVATE)
    assert observe(book, old) is Verdict.ACCEPTED
    assert observe(book, new) is Verdict.ACCEPTED
    before = book.at(0)
    assert [observe(book, item) for item in (old, new)] == [Verdict.STALE] * 2
    assert book.at(0) == before
    assert before.records == {"a": new}


@pytest.mark.parametrize(
    ("last", "now_s", "lapsing"),
    [
        pytest.param(record("a"), 1e9 - records.RECORD_TTL_S, ("a",), id="outrun"),
        pytest.param(record("a", signed_round=2, seq=1), 0.0, (), id="covered"),
        pytest.param(record("a", lease_until=2, seq=1), 0.0, (), id="left"),
        pytest.param(record("a", cycle_s=1.0, seq=1), 1e9 - 1, (), id="silent"),
    ],
)
def test_a_peer_whose_lease_was_outrun_is_named(
    last: Record, now_s: float, lapsing: tuple[PeerId, ...]
) -> None:
    book = book_with(record("a"), last)
    renew(book, LEASE_ROUNDS, first_round=0)
    book.expire(now_s)
    assert book.lapsing(LEASE_ROUNDS) == ()
    assert book.lapsing(LEASE_ROUNDS + 1) == lapsing
    assert ("a" in book.at(LEASE_ROUNDS + 1)) == (last.signed_round == 2)


def test_a_foreign_run_is_refused() -> None:
    book = RosterBook(RUN, OWN)
    for peer in ("a", OWN):
        assert observe(book, record(peer, run_id="other")) is Verdict.FOREIGN_RUN
    assert (book.at(0).peers, book.swarm_round(), book.founders()) == ((), None, 0)


def test_our_identity_in_another_process_is_noticed() -> None:
    book = RosterBook(RUN, OWN)
    assert observe(book, record(OWN, seq=0)) is Verdict.OWN_IDENTITY_ELSEWHERE
    assert OWN not in book.at(0)
    renew(book, 3, first_round=0)
    assert observe(book, record(OWN, seq=3), 3) is Verdict.STALE
    assert observe(book, record(OWN, seq=2), 3) is Verdict.STALE
    assert observe(book, record(OWN, seq=4, lease_until=0), 3) is Verdict.OWN_IDENTITY_ELSEWHERE
    assert OWN in book.at(5)


def test_a_record_from_ahead_waits_for_our_round() -> None:
    book = book_with(record("b", seq=1, signed_round=0))
    assert observe(book, record("a", signed_round=roster.AHEAD_ROUNDS), 0) is Verdict.ACCEPTED
    assert observe(book, record("b", seq=3, signed_round=6), 1) is Verdict.AHEAD
    assert observe(book, record("b", seq=3, signed_round=6), 1) is Verdict.STALE
    assert observe(book, record("b", seq=2, signed_round=2), 1) is Verdict.ACCEPTED
    assert book.at(1).records["b"].seq == 2
    book.close_round(2)
    assert book.at(4).records["b"].seq == 3


def test_a_record_from_ahead_is_usable_after_a_jump_to_it() -> None:
    book = book_with(record("a", seq=1, signed_round=50), record("b", seq=1, signed_round=12))
    book.close_round(0)
    assert book.at(2).peers == ()
    assert book.at(11).peers == ("b",)
    assert book.swarm_round() == 12
    assert book.at(49).peers == ("a",)


def test_a_usable_record_supersedes_an_older_one_from_ahead() -> None:
    book = book_with(record("a", seq=1, signed_round=50), record("a", seq=2, signed_round=1))
    assert book.swarm_round() == 1
    assert observe(book, record("a", seq=1, signed_round=50)) is Verdict.STALE
    assert book.at(50).peers == ()


def test_the_number_of_peers_is_limited() -> None:
    book = RosterBook(RUN, OWN)
    renew(book, 0, first_round=0)
    for n in range(MAX_PEERS - 1):
        book.observe(record(f"p{n}"), signed=b"", own_round=0)
    assert observe(book, record("x")) is Verdict.FULL
    assert observe(book, record("p7", seq=1)) is Verdict.ACCEPTED
    assert len(book.at(0).peers) == MAX_PEERS
    assert OWN in book.at(0)
    book.expire(2e9)
    assert observe(book, record("x")) is Verdict.ACCEPTED


def test_a_roster_holds_the_peers_whose_lease_covers_the_round() -> None:
    book = book_with(
        record("z", signed_round=4),
        record("late", signed_round=4, first_round=7),
        record("gone", signed_round=4, lease_until=5),
        record("even", signed_round=4, every=2),
        record("odd", signed_round=4, every=2, phase=1),
        own_round=4,
    )
    book.close_round(4)
    assert [book.at(t).peers for t in (6, 7, 8, 9)] == [
        ("even", "z"),
        ("late", "odd", "z"),
        ("even", "late", "z"),
        (),
    ]


def test_a_roster_reads_the_view_two_rounds_back_or_the_oldest_later_one() -> None:
    book = book_with(record("a"))
    assert book.at(0).peers == ("a",)
    book.close_round(0)
    observe(book, record("b", signed_round=1), 1)
    assert book.at(1).peers == ("a",)
    assert book.at(3).peers == ("a", "b"), "the present view, while none of round 1 is frozen"
    book.close_round(1)
    observe(book, record("c", signed_round=2), 2)
    assert [book.at(t).peers for t in (1, 2, 3)] == [("a",), ("a",), ("a", "b")]


def test_views_are_dropped_when_no_round_needs_them() -> None:
    book = book_with(record("a"))
    for t, peer in enumerate("bcde"):
        book.close_round(t)
        observe(book, record(peer), t)
    assert book.at(3).peers == ("a", "b"), "the view of round 1 is kept"
    assert book.at(2).peers == ("a", "b"), "that of round 0 is not"


def test_the_digest_covers_run_round_and_peers() -> None:
    def digest(run_id: str, t: int, *peers: PeerId) -> bytes:
        book = RosterBook(run_id, OWN)
        for peer in peers:
            observe(book, record(peer, run_id=run_id))
        return book.at(t).digest

    two, other_run = digest(RUN, 1, "a", "b"), digest("other", 1, "a", "b")
    distinct = [two, other_run, digest(RUN, 2, "a", "b"), digest(RUN, 1, "ab")]
    distinct += [digest(RUN, 1, "a"), digest(RUN, 1), digest("run1", 1), digest("run", 11)]
    assert digest(RUN, 1, "b", "a") == two
    assert len(set(distinct)) == len(distinct)
    assert {len(d) for d in distinct} == {roster.DIGEST_BYTES}


def test_only_two_private_peers_may_not_pair() -> None:
    round_0 = book_with(*(record(str(r), reachability=r) for r in Reachability)).at(0)
    pairs = {(a, b): round_0.may_pair(a, b) for a in round_0.peers for b in round_0.peers}
    assert [pair for pair, may in pairs.items() if not may] == [("private", "private")]


def test_our_own_record_takes_part() -> None:
    book = RosterBook(RUN, OWN)
    assert book.own_signed == b""
    assert renew(book, 5) == record(OWN, seq=5, signed_round=5, first_round=5 + JOIN_ROUNDS)
    assert opened(book.own_signed).seq == 5
    assert book.swarm_round() is None, "nobody else is known"
    assert [OWN in book.at(t) for t in (7, 8, 9, 10)] == [False, True, True, False]


def test_a_seq_of_ours_must_rise_and_a_refused_record_changes_nothing() -> None:
    book = RosterBook(RUN, OWN)
    renew(book, 5, first_round=0)
    with pytest.raises(ValueError, match="seq 5 is not above 5"):
        renew(book, 5)
    with pytest.raises(RecordError, match="lease of 5 rounds"):
        renew(book, 6, lease_until=11)
    assert renew(book, 6).first_round == 0


def test_first_round_is_kept_until_the_lease_is_too_short() -> None:
    book = RosterBook(RUN, OWN)
    assert renew(book, 4, first_round=1).lease_until == 8
    assert [renew(book, t).first_round for t in (6, 9, 10)] == [1, 9 + JOIN_ROUNDS, 9 + JOIN_ROUNDS]


def test_a_partner_gets_ours_and_then_the_latest_signed() -> None:
    signed = {"a": 4, "b": 5, "c": 4, "over": 0, "ahead": 10}
    book = book_with(*(record(p, signed_round=r) for p, r in signed.items()), own_round=5)
    observe(book, record("over-too", signed_round=5, lease_until=4), 5)
    renew(book, 5)
    assert [opened(signed).peer_id for signed in book.records_for_partner()] == [OWN, "b", "a", "c"]
    assert book.records_for_partner()[0] == book.own_signed


def test_the_median_cycle_is_that_of_the_peers_that_tell_it() -> None:
    told = {"a": 3.0, "b": 1.0, "c": 9.0, "d": 0.0}
    book = book_with(*(record(peer, cycle_s=cycle_s) for peer, cycle_s in told.items()))
    renew(book, 0, cycle_s=50.0)
    assert book.median_cycle_s([*told, "unheard-of"]) == 3.0
    assert book.median_cycle_s(["a", "b"]) == 1.0
    assert book.median_cycle_s([OWN]) == 50.0
    assert book.median_cycle_s(["d"]) == 0.0
    assert book.median_cycle_s([]) == 0.0


def test_void_records_are_forgotten_and_frozen_views_stay() -> None:
    book = book_with(record("a", expires_at=100.0), record("b", expires_at=101.0))
    observe(book, record("ahead", signed_round=9, expires_at=100.0))
    book.close_round(0)
    book.expire(100.0)
    assert book.at(3).peers == ("a", "b")
    book.expire(100.5)
    assert book.at(2).peers == ("a", "b")
    assert book.at(3).peers == ("b",)
    assert book.swarm_round() is None, "signed an hour ago, and not renewed since"
    assert len(book.records_for_partner()) == 1
    book.expire(102.0)
    assert book.swarm_round() is None


def test_the_swarm_round_is_a_lower_median() -> None:
    book = book_with(*(record(f"p{r}", signed_round=r) for r in (5, 6, 7, 8)), own_round=5)
    assert book.swarm_round() == 6
    for n in range(9):
        observe(book, record(f"gone{n}", signed_round=2), 5)
    assert book.swarm_round() == 2
    renew(book, 7, first_round=0)
    assert book.founders() == 14, "ours, those ahead and those that left have been there at first"
    assert book.swarm_round() == 6, "peers that left long ago do not hold the swarm back"


@st.composite
def batches(draw: st.DrawFn) -> list[list[Record]]:
    """Draw what is heard in each of a few rounds; a peer may sign rounds in any order."""
    facts = st.tuples(st.integers(0, 12), st.integers(0, 8), st.integers(-6, LEASE_ROUNDS))
    keys = st.tuples(st.sampled_from("abcd"), st.integers(0, 9))
    items = [
        record(peer, seq=seq, signed_round=at, first_round=first, lease_until=max(0, at + lease))
        for (peer, seq), (at, first, lease) in draw(st.dictionaries(keys, facts)).items()
    ]
    return [[i for i in items if draw(st.booleans())] for _ in range(draw(st.integers(1, 5)))]


def heard(rounds: Sequence[Sequence[Record]]) -> list[object]:
    book = RosterBook(RUN, OWN)
    facts: list[object] = []
    for t, items in enumerate(rounds):
        for item in items:
            observe(book, item, t)
        facts += [book.swarm_round(), book.records_for_partner()]
        book.close_round(t)
        facts += [book.at(t + ahead) for ahead in range(-1, 3)]
    return facts


@timeless
@given(batches(), st.randoms(use_true_random=False))
def test_order_and_repetition_do_not_matter(
    rounds: list[list[Record]], shuffler: random.Random
) -> None:
    repeated = [shuffler.choices(items, k=len(items)) + items if items else [] for items in rounds]
    assert heard([shuffler.sample(items, len(items)) for items in repeated]) == heard(rounds)


ROUNDS = 16
Says = Callable[[int], dict[str, int] | None]
"""What the peer under test says about its rounds when it renews in a round; None: nothing."""

delays = st.integers(0, 2**32).map(lambda seed: partial(random.Random(seed).randint, 0, 1))


def assert_agreed(
    says: Says, delay: Callable[[], int], present: Callable[[int], bool], *, skips: bool = False
) -> None:
    """Run four steady peers and `x`; records reach each view in their round or one later.

    Every roster, that of `x` too, must be the same, and hold `x` exactly when `present(t)`. If `x`
    skips rounds, it looks at its own ones only.
    """
    steady = ("p0", "p1", "p2", "p3")
    books = {name: RosterBook(RUN, name) for name in (*steady, "x")}
    arrivals: list[list[tuple[RosterBook, Record]]] = [[] for _ in range(ROUNDS + 1)]
    for t in range(ROUNDS):
        published = [renew(books[name], t, first_round=0) for name in steady]
        if (said := says(t)) is not None:
            published.append(renew(books["x"], t, **said))
        for item in published:
            for book in books.values():
                # The initial records are waited for before round 0 begins.
                arrivals[t and t + delay()].append((book, item))
        for book, item in arrivals[t]:
            book.observe(item, signed=b"", own_round=t)
        looking = [books[name] for name in books if name != "x" or not skips or present(t)]
        read = [book.at(t) for book in looking]
        assert len({r.digest for r in read}) == 1, f"round {t}"
        assert read[0].peers == (*steady, *["x"] * present(t)), f"round {t}"
        for book in looking:
            book.close_round(t)


@timeless
@given(st.integers(0, 9), delays)
def test_a_crashed_peer_leaves_every_roster_at_once(last: int, delay: Callable[[], int]) -> None:
    assert_agreed(
        lambda t: {"first_round": 0} if t <= last else None,
        delay,
        present=lambda t: t <= last + LEASE_ROUNDS,
    )


@timeless
@given(st.integers(1, 9), delays)
def test_a_joiner_enters_every_roster_at_once(join: int, delay: Callable[[], int]) -> None:
    assert_agreed(
        lambda t: {"first_round": join + 3} if t >= join else None,
        delay,
        present=lambda t: t >= join + 3,
    )


@timeless
@given(st.integers(0, 9), delays)
def test_a_goodbye_leaves_every_roster_at_once(last: int, delay: Callable[[], int]) -> None:
    goodbye = {"first_round": 0, "lease_until": last + GOODBYE_ROUNDS}
    assert_agreed(
        lambda t: {"first_round": 0} if t < last else goodbye if t == last else None,
        delay,
        present=lambda t: t <= last + GOODBYE_ROUNDS,
    )


@timeless
@given(st.integers(0, 4), st.integers(0, 7), delays)
def test_a_stopped_peer_that_announces_itself_again_is_back(
    stop: int, missed: int, delay: Callable[[], int]
) -> None:
    back = stop + missed + 1
    assert_agreed(
        lambda t: {"first_round": 0} if t == 0 else None if stop < t < back else {},
        delay,
        present=lambda t: missed <= 1 or not stop + LEASE_ROUNDS < t < back + JOIN_ROUNDS,
    )


@timeless
@given(
    st.lists(st.integers(98, 102), min_size=1, max_size=12),
    st.lists(st.sampled_from([0, 10**9]), max_size=11),
    st.sampled_from([0, 100]),
)
def test_a_minority_of_liars_does_not_move_the_swarm_round(
    honest: list[int], lies: list[int], own_round: int
) -> None:
    lies = lies[: len(honest) - 1]
    book = book_with(
        *(record(f"honest{n}", signed_round=r) for n, r in enumerate(honest)),
        *(record(f"liar{n}", signed_round=r) for n, r in enumerate(lies)),
        own_round=own_round,
    )
    assert book.swarm_round() in range(min(honest), max(honest) + 1)
