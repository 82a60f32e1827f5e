"""Links and partitions as people write them, and what an all-reduce costs on them."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gasloc_p2p.core.errors import ConfigError
from gasloc_p2p.simulate.links import (
    IDEAL,
    LINKS,
    MAX_LATENCY_S,
    MIN_MBIT,
    Link,
    Partition,
    check_partitions,
    connected_from_s,
    links_of,
    parse_link,
    parse_partition,
    ring_all_reduce_s,
    stream_bytes_s,
)
from tests.sim.linked import link

DOCS = Path(__file__).resolve().parents[2] / "docs" / "simulator.md"
mbit = st.just(0.0) | st.floats(MIN_MBIT, 1e6)
links = st.builds(
    Link,
    upload_mbit=mbit,
    download_mbit=mbit,
    latency_s=st.floats(0, MAX_LATENCY_S),
    loss=st.floats(0, 1, exclude_max=True),
)
indices = st.integers(0, 3)
partitions = st.builds(
    lambda from_ms, lasts_ms, peers: Partition(
        from_s=from_ms / 1000, until_s=(from_ms + lasts_ms) / 1000, peers=peers
    ),
    st.integers(0, 30),
    st.integers(1, 20),
    st.frozensets(indices, min_size=1),
)


# Links.


@given(links)
def test_a_link_is_read_as_it_is_written(given_link: Link) -> None:
    figures = (
        given_link.upload_mbit,
        given_link.download_mbit,
        given_link.latency_s,
        given_link.loss,
    )
    assert parse_link("/".join(map(repr, figures))) == given_link


@pytest.mark.parametrize("name", LINKS)
def test_a_condition_goes_by_its_name_and_by_its_figures(name: str) -> None:
    named = parse_link(name)
    figures = (named.upload_mbit, named.download_mbit, named.latency_s, named.loss)
    assert parse_link("/".join(map(str, figures))) == named == LINKS[name]


def test_the_figures_of_every_condition_are_documented() -> None:
    about_links, _, _ = DOCS.read_text().partition("\n## Partitions")
    written = {
        row[1]: [cell.strip() for cell in row[2].split("|")]
        for row in re.finditer(r"^\| `(\w+)` \| (.*) \|$", about_links, flags=re.M)
    }
    assert written.keys() == LINKS.keys()
    for name, cells in written.items():
        *figures, stream_mbit = ("0" if cell == "unlimited" else cell for cell in cells)
        assert parse_link("/".join(figures)) == LINKS[name], name
        limit_mbit = stream_bytes_s(LINKS[name], LINKS[name]) * 8e-6
        limited = math.isfinite(limit_mbit)
        assert stream_mbit == (f"{limit_mbit:.1f}" if limited else "0"), name


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "neither a name nor four numbers"),
        ("DSL", "neither a name nor four numbers"),
        ("10/50/0.01", "neither a name nor four numbers"),
        ("10/50/0.01/0/0", "neither a name nor four numbers"),
        ("10/50/0.01/none", "neither a name nor four numbers"),
        ("-1/50/0.01/0", "a rate is 0"),
        ("10/0.0001/0.01/0", "a rate is 0"),
        ("inf/50/0.01/0", "a rate is 0"),
        ("10/nan/0.01/0", "a rate is 0"),
        ("10/50/-0.1/0", "the latency is between 0 and 2 seconds"),
        ("10/50/2.1/0", "the latency is between 0 and 2 seconds"),
        ("10/50/nan/0", "the latency is between 0 and 2 seconds"),
        ("10/50/0.01/1", "the loss is a share"),
        ("10/50/0.01/-0.1", "the loss is a share"),
        ("10/50/0.01/nan", "the loss is a share"),
    ],
)
def test_a_text_that_is_no_link_is_refused(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as refusal:
        parse_link(text)
    assert repr(text) in refusal.value.what
    assert "dsl" in refusal.value.fix


def test_links_are_given_out_in_turn() -> None:
    dsl, lan = LINKS["dsl"], LINKS["lan"]
    assert links_of(["dsl", "lan"], 5) == (dsl, lan, dsl, lan, dsl)
    assert links_of(["dsl", "lan"], 1) == (dsl,)
    assert links_of([], 2) == (IDEAL, IDEAL)
    with pytest.raises(ConfigError, match="nonsense"):
        links_of(["dsl", "nonsense"], 1)


def test_rates_are_in_bytes_and_zero_is_no_limit() -> None:
    assert link(8, 16).upload_bytes_s == 1e6
    assert link(8, 16).download_bytes_s == 2e6
    assert math.inf == IDEAL.upload_bytes_s == IDEAL.download_bytes_s


def test_loss_limits_a_stream() -> None:
    # 1460 B / .2 s x sqrt(1.5 / .01) = 7300 x 12.2474487...
    assert stream_bytes_s(link(latency_s=0.03), link(latency_s=0.07, loss=0.01)) == pytest.approx(
        89_406.375, abs=1e-3
    )
    # 1 - .9 x .8 = .28 of the packets, and never less than 1 ms from end to end and back.
    assert stream_bytes_s(link(loss=0.1), link(loss=0.2)) == pytest.approx(
        1_460_000 * math.sqrt(1.5 / 0.28)
    )
    assert stream_bytes_s(link(latency_s=0.03), link(latency_s=0.07)) == math.inf


# Partitions.


@given(partitions)
def test_a_partition_is_read_as_it_is_written(partition: Partition) -> None:
    peers = "+".join(map(str, sorted(partition.peers)))
    text = f"{partition.from_s:.3f}-{partition.until_s:.3f}:{peers}"
    assert parse_partition(text) == partition


def test_whole_seconds_will_do() -> None:
    expected = Partition(from_s=60.0, until_s=120.0, peers=frozenset({0, 1, 2}))
    assert parse_partition("60-120:0+1+2") == expected


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "not two times"),
        ("60:0", "not two times"),
        ("60-120", "not two times"),
        ("60-120:", "not two times"),
        ("60-120:0,1", "not two times"),
        ("60-120:-1", "not two times"),
        ("60-inf:0", "not two times"),
        ("nan-120:0", "not two times"),
        ("60-120:0+1+2 ", "not two times"),
        (f"60-{'9' * 400}:0", "not two times"),
        ("120-60:0", "ends before"),
        ("60-60:0", "ends before"),
    ],
)
def test_a_text_that_is_no_partition_is_refused(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as refusal:
        parse_partition(text)
    assert repr(text) in refusal.value.what
    assert "60-120:0+1+2" in refusal.value.fix


def test_a_partition_of_peers_that_are_not_there_is_refused() -> None:
    check_partitions([parse_partition("0-1:0+3")], 4)
    with pytest.raises(ConfigError, match="there is no peer 4"):
        check_partitions([parse_partition("0-1:0"), parse_partition("0-1:4+1")], 4)


@given(st.lists(partitions, max_size=6), indices, indices, st.integers(0, 50))
def test_peers_are_connected_from_the_first_moment_without_a_cut(
    cuts: list[Partition], a: int, b: int, at_ms: int
) -> None:
    def is_cut(at_s: float) -> bool:
        return any(p.is_active(at_s) and (a in p.peers) != (b in p.peers) for p in cuts)

    at_s = at_ms / 1000
    moments = [at_s, *sorted(p.until_s for p in cuts if p.until_s > at_s)]
    expected = next(moment for moment in moments if not is_cut(moment))
    assert connected_from_s(cuts, a, b, at_s) == connected_from_s(cuts, b, a, at_s) == expected


def test_cuts_that_meet_are_one() -> None:
    texts = ("30-40:2", "20-30:0", "10-20:0+1", "0-15:0+1+2", "50-60:0")
    cuts = [parse_partition(text) for text in texts]
    assert connected_from_s(cuts, 0, 2, 12.0) == 40.0
    assert connected_from_s(cuts, 0, 1, 12.0) == 12.0
    assert connected_from_s(cuts, 2, 0, 55.0) == 60.0


# The cost of an all-reduce.


def test_an_all_reduce_takes_what_its_formula_says() -> None:
    # 2 x 3 steps of a quarter of 4 MB: 1 s each at 1 MB/s, and 2 x 10 ms of latency.
    one = link(8, 80, 0.01)
    assert ring_all_reduce_s([one] * 4, 4e6) == pytest.approx(6 * (1 + 0.02))
    # Peers on faster links wait for the slowest one, whichever direction holds it up,
    quick = link(800, 800, 0.001)
    assert ring_all_reduce_s([quick, one, quick, quick], 4e6) == pytest.approx(6 * (1 + 0.011))
    assert ring_all_reduce_s([quick, link(80, 8, 0.01)], 4e6) == pytest.approx(2 * (2 + 0.011))
    # and for what loss leaves of the longest path, 1460 B / .2 s x sqrt(1.5 / .01).
    lossy = [link(latency_s=0.05, loss=0.01), link(latency_s=0.05), link(latency_s=0.01)]
    assert ring_all_reduce_s(lossy, 89_406.375 * 3) == pytest.approx(4 * (1 + 0.1))


def test_an_all_reduce_costs_nothing_where_nothing_holds_it_up() -> None:
    assert ring_all_reduce_s([link(8, 8, 1.0)], 1e9) == 0.0
    assert ring_all_reduce_s([], 1e9) == 0.0
    assert ring_all_reduce_s([IDEAL] * 5, 1e9) == 0.0


@given(st.lists(links, min_size=2, max_size=5), st.floats(0, 1e9))
def test_an_all_reduce_depends_on_the_worst_link_and_not_on_the_order(
    peers: list[Link], payload_bytes: float
) -> None:
    cost_s = ring_all_reduce_s(peers, payload_bytes)
    assert cost_s == ring_all_reduce_s(peers[::-1], payload_bytes)
    assert cost_s <= ring_all_reduce_s([*peers, peers[0]], payload_bytes) * (1 + 1e-9)
    pairs = list(itertools.combinations(peers, 2))
    assert cost_s >= 2 * (len(peers) - 1) * max(a.latency_s + b.latency_s for a, b in pairs)


def test_many_peers_move_twice_the_payload() -> None:
    one = link(8, 8)
    assert ring_all_reduce_s([one] * 2, 1e6) == pytest.approx(1.0)
    assert ring_all_reduce_s([one] * 10_000, 1e6) == pytest.approx(2.0, rel=1e-3)
