"""Machines of different speeds: how they are written, and who takes how long in virtual time."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gasloc_p2p.algorithms import ALGORITHMS, load_algorithm
from gasloc_p2p.config import assignment_layer
from gasloc_p2p.core.errors import ConfigError
from gasloc_p2p.report import SwarmReport
from gasloc_p2p.simulate.engine import build_engine
from gasloc_p2p.simulate.links import links_of, ring_all_reduce_s
from gasloc_p2p.simulate.speeds import Speed, machines_of, parse_speed
from gasloc_p2p.simulate.swarm import simulate
from tests.sim.conftest import QUICK, corpus, in_virtual_time, quick_config

ENGINES = ("exact", "batched")
SETTINGS = (
    "run.rounds=2",
    "run.closing_rounds=1",
    "run.initial_peers=3",
    "inner.local_steps=4",
    "simulate.step_s=0.5",
)
speeds = st.builds(
    lambda from_ms, thousandths, peers: Speed(
        from_s=from_ms / 1000, factor=thousandths / 1000, peers=peers
    ),
    st.integers(0, 30_000),
    st.integers(1, 20_000),
    st.frozensets(st.integers(0, 3), min_size=1),
)


def written(speed: Speed) -> str:
    return f"{speed.from_s:.3f}:{speed.factor:.3f}:{'+'.join(map(str, sorted(speed.peers)))}"


def run(algorithm: str, *assignments: str) -> SwarmReport:
    fixed = ALGORITHMS[algorithm].fixed
    chosen = [text for text in (*QUICK, *SETTINGS) if text.partition("=")[0] not in fixed]
    config = load_algorithm(algorithm, [assignment_layer([*chosen, *assignments])]).config
    return simulate(config, peers=3, observe=lambda index, event: None, algorithm=algorithm).report


@given(speeds)
def test_a_speed_is_read_as_it_is_written(speed: Speed) -> None:
    assert parse_speed(written(speed)) == speed


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "not a time in seconds"),
        ("0.1:7", "not a time in seconds"),
        ("0:0.1", "not a time in seconds"),
        ("0:0.1:", "not a time in seconds"),
        ("0:0.1:1,2", "not a time in seconds"),
        ("0:0.1:-1", "not a time in seconds"),
        ("0:-0.1:1", "not a time in seconds"),
        ("-1:0.1:1", "not a time in seconds"),
        ("0:inf:1", "not a time in seconds"),
        ("0:1e-3:1", "not a time in seconds"),
        ("0:0.1:1 ", "not a time in seconds"),
        ("0:0:1", "would never end"),
        ("0:0.000:1", "would never end"),
    ],
)
def test_a_text_that_is_no_speed_is_refused(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as refusal:
        parse_speed(text)
    assert repr(text) in refusal.value.what
    assert "60:0.2:0+1+2" in refusal.value.fix


def test_a_speed_of_peers_that_are_not_there_is_refused() -> None:
    machines_of(["0:0.1:0+3"], 4)
    with pytest.raises(ConfigError, match="there is no peer 4"):
        machines_of(["0:0.1:0", "0:0.1:4+1"], 4)
    with pytest.raises(ConfigError, match="there is no peer 3"):
        run("gasloc", 'simulate.speeds=["0:2:3"]')


@given(st.lists(speeds, max_size=6), st.integers(0, 3), st.integers(0, 40_000))
def test_the_last_change_counts_in_whatever_order_they_are_written(
    given_speeds: list[Speed], index: int, at_ms: int
) -> None:
    at_s, expected, since_s = at_ms / 1000, 1.0, -1.0
    for speed in given_speeds:
        if index in speed.peers and since_s <= speed.from_s <= at_s:
            expected, since_s = speed.factor, speed.from_s
    machine = machines_of([written(speed) for speed in given_speeds], 4)[index]
    assert machine.factor(at_s) == expected


@pytest.mark.parametrize("engine", ENGINES)
def test_a_step_takes_what_holds_when_it_begins(engine: str) -> None:
    speeds = 'simulate.speeds=["1.5:0.2:0", "0:2:1"]'
    config = quick_config("simulate.step_s=1", f"simulate.engine={engine}", speeds)

    async def main() -> tuple[list[float], list[float]]:
        built = build_engine(config, ("a", "b"), corpus())
        loop = asyncio.get_running_loop()

        async def steps(index: int) -> list[float]:
            ends_s = []
            for _ in range(3):
                await built.computes[index].step(built.models[index], 1e-3)
                ends_s.append(loop.time())
            return ends_s

        changing, quick = await asyncio.gather(steps(0), steps(1))
        return changing, quick

    assert in_virtual_time(main) == ([1.0, 2.0, 7.0], [0.5, 1.0, 1.5])


@pytest.mark.parametrize("engine", ENGINES)
def test_a_slow_peer_takes_its_time_and_learns_the_same(engine: str) -> None:
    even = run("gasloc", f"simulate.engine={engine}")
    slow = run("gasloc", f"simulate.engine={engine}", 'simulate.speeds=["0:0.1:2"]')
    assert [peer.train_s for peer in even.peers] == pytest.approx([4.0] * 3)
    assert [peer.train_s for peer in slow.peers] == pytest.approx([4.0, 4.0, 40.0])
    assert slow.simulated_s == pytest.approx(40, abs=1)
    losses = [[peer.train_loss for peer in report.peers] for report in (even, slow)]
    assert losses[0] == [pytest.approx(one, rel=1e-4) for one in losses[1]]
    if engine == "exact":
        assert losses[0] == losses[1]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("algorithm", "means"), [("diloco", 2), ("ddp", 8)])
def test_an_all_reduce_waits_for_the_slowest_peer(algorithm: str, means: int, engine: str) -> None:
    report = run(
        algorithm,
        f"simulate.engine={engine}",
        'simulate.speeds=["0:0.1:2", "0:2:0"]',
        "simulate.links=dsl",
    )
    exchanges_s = means * ring_all_reduce_s(links_of(["dsl"], 3), 4 * 108_864)
    assert report.simulated_s == pytest.approx(40 + exchanges_s)
    trains_s, waits_s = (2.0, 4.0, 40.0), (38.0, 36.0, 0.0)
    for peer, train_s, wait_s in zip(report.peers, trains_s, waits_s, strict=True):
        assert peer.train_s == pytest.approx(train_s)
        assert peer.wait_s == pytest.approx(wait_s)
        assert peer.exchange_s == pytest.approx(wait_s + exchanges_s)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("algorithm", ["gasloc", "diloco", "ddp"])
def test_the_common_speed_changes_nothing(algorithm: str, engine: str) -> None:
    settings = (f"simulate.engine={engine}", "simulate.links=fibre,dsl")
    plain, said = (
        msgspec.structs.replace(run(algorithm, *settings, *speeds), wall_s=0.0, config={})
        for speeds in ((), ('simulate.speeds=["0:1:0+1", "1:1:2"]',))
    )
    assert plain == said
