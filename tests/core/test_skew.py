"""Clocks that disagree are named, once each."""

from __future__ import annotations

from gasloc_p2p.core.skew import REMEMBERED_PEERS, SKEW_S, SkewWatch


def test_one_clock_that_is_ahead_is_that_peers() -> None:
    watch = SkewWatch()
    for peer in "abc":
        assert watch.observe(peer, signed_s=100.0, now_s=100.5) is None
    told = watch.observe("d", signed_s=130.0, now_s=101.0)
    assert told is not None
    assert told.startswith("the clock of d is about 29 s ahead")
    assert watch.observe("d", signed_s=131.0, now_s=102.0) is None, "once is enough"


def test_when_most_are_ahead_it_is_our_own() -> None:
    watch = SkewWatch()
    first = watch.observe("a", signed_s=110.0, now_s=100.0)
    assert first is not None
    assert first.startswith("the clock of a"), "nobody else can tell which of the two is wrong"
    told = watch.observe("b", signed_s=112.0, now_s=100.0)
    assert told is not None
    assert told.startswith("this machine's clock is about 12 s behind those of 2 peers")
    assert watch.observe("c", signed_s=111.0, now_s=100.0) is None


def test_old_records_and_small_differences_prove_nothing() -> None:
    watch = SkewWatch()
    assert watch.observe("a", signed_s=100.0 + SKEW_S, now_s=100.0) is None
    assert watch.observe("b", signed_s=0.0, now_s=100.0) is None


def test_what_is_remembered_is_bounded() -> None:
    watch = SkewWatch()
    told = [
        watch.observe(str(peer), signed_s=100.0 + 10 * (peer % 2), now_s=100.0)
        for peer in range(4 * REMEMBERED_PEERS)
    ]
    assert sum(text is not None for text in told) <= REMEMBERED_PEERS + 1
