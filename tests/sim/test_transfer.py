"""Handing over a state on slow, shared, broken and dead links, in virtual time."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter

import pytest

from gasloc_p2p.core.assembly import CHUNK_BYTES, FIRST_BLOCK_S, MIN_BLOCK_S
from gasloc_p2p.core.substrate import Network, Stream
from gasloc_p2p.core.transfer import STATE_PROTOCOL, StateRequest, donor_order
from gasloc_p2p.founding import found
from gasloc_p2p.net.identity import Identity
from gasloc_p2p.node.donor import MAX_TRANSFERS, Donor
from gasloc_p2p.node.state import (
    ATTEMPTS,
    OUTAGE_PAUSE_S,
    REDIAL_PAUSE_S,
    WITNESS_DEADLINE_S,
    State,
    fetch_state,
)
from gasloc_p2p.simulate.clock import InlineCompute
from gasloc_p2p.simulate.links import LINKS, Partition
from gasloc_p2p.simulate.network import DIAL_TIMEOUT_S, Hub
from gasloc_p2p.simulate.swarm import learner_of
from gasloc_p2p.testing.clock import in_virtual_time
from tests.node.transfers import (
    STATE_BYTES,
    Outcome,
    Wired,
    ask,
    donor,
    fetch,
    in_a_swarm,
    same_bits,
    state,
)
from tests.sim.conftest import SimulatedPeer, corpus, quick_config
from tests.sim.linked import link

STATE, OTHER = state(0), state(1)
FOR_EVER = 1e6
JOINER, FIRST_DONOR = 0, 1
HALF_WAY_IN_4_S = link(upload_mbit=STATE_BYTES / 8 * 8e-6)


def took_over(outcome: Outcome, expected: State) -> bool:
    return outcome.state is not None and same_bits(outcome.state, expected)


@pytest.mark.parametrize("name", [name for name in LINKS if name != "ideal"])
def test_named_links_carry_a_state(name: str) -> None:
    wired = Wired(donor=donor(STATE))
    outcome = fetch(wired, links=[LINKS[name]], joiner_link=LINKS[name])
    assert took_over(outcome, STATE)
    assert len(wired.sent) == 1


def test_a_very_slow_link_takes_long_and_is_not_given_up() -> None:
    wired = Wired(donor=donor(STATE))
    outcome = fetch(wired, links=[link(upload_mbit=0.05, latency_s=0.3)])
    assert took_over(outcome, STATE)
    assert len(wired.sent) == 1
    assert outcome.ended_s == pytest.approx(STATE_BYTES / 6250, rel=0.02)


def test_two_joiners_share_a_very_slow_link_to_the_end() -> None:
    wired = Wired(donor=donor(STATE))

    async def scenario(joiner: Network, names: list[str], hub: Hub) -> list[State]:
        async with asyncio.TaskGroup() as tasks:
            joiners = (joiner, hub.network("second", bytes))
            fetching = [tasks.create_task(ask(network, names)) for network in joiners]
        return [task.result() for task in fetching]

    for fetched in in_a_swarm([wired], scenario, links=[link(upload_mbit=0.05)]):
        assert same_bits(fetched, STATE)
    assert len(wired.sent) == 2


def test_an_outage_is_waited_out_and_costs_no_chunk() -> None:
    wired = Wired(donor=donor(STATE))
    outcome = fetch(
        wired,
        donor(OTHER),
        links=[HALF_WAY_IN_4_S],
        partitions=[Partition(from_s=4.0, until_s=24.0, peers=frozenset([JOINER]))],
    )
    assert took_over(outcome, STATE)
    assert len(wired.sent) == 2
    # Lost is what was under way; of what had arrived only the chunk that had not all come.
    assert wired.sent[1] < STATE_BYTES / 2 + 2 * CHUNK_BYTES
    assert outcome.ended_s < 24 + 4 + OUTAGE_PAUSE_S + DIAL_TIMEOUT_S


def test_a_short_outage_is_no_more_than_a_pause() -> None:
    wired = Wired(donor=donor(STATE))
    outcome = fetch(
        wired,
        links=[HALF_WAY_IN_4_S],
        partitions=[Partition(from_s=4.0, until_s=8.0, peers=frozenset([JOINER]))],
    )
    assert took_over(outcome, STATE)
    assert len(wired.sent) == 1
    assert outcome.ended_s == pytest.approx(12.0, abs=0.5)


def test_a_dead_link_is_given_up_within_the_deadlines() -> None:
    first = Wired(donor=donor(STATE))
    outcome = fetch(
        first,
        donor(OTHER),
        links=[HALF_WAY_IN_4_S],
        partitions=[Partition(from_s=4.0, until_s=FOR_EVER, peers=frozenset([FIRST_DONOR]))],
    )
    assert took_over(outcome, OTHER)
    dials_s = REDIAL_PAUSE_S + OUTAGE_PAUSE_S + ATTEMPTS * DIAL_TIMEOUT_S
    assert outcome.ended_s < 4 + MIN_BLOCK_S + dials_s + WITNESS_DEADLINE_S + 1
    assert len(first.sent) == 1


def test_a_donor_that_never_answers_is_given_up_within_the_deadlines() -> None:
    class Mute:
        async def serve(self, stream: Stream) -> None:
            await asyncio.Event().wait()

    outcome = fetch(Mute(), donor(OTHER))
    assert took_over(outcome, OTHER)
    assert outcome.ended_s == pytest.approx(ATTEMPTS * FIRST_BLOCK_S + REDIAL_PAUSE_S, abs=0.1)


def test_ten_joiners_spread_over_three_donors() -> None:
    donors = [Wired(donor=donor(state(seed))) for seed in range(3)]

    async def scenario(_: Network, names: list[str], hub: Hub) -> list[State]:
        async with asyncio.TaskGroup() as tasks:
            joiners = [hub.network(f"joiner {index}", bytes) for index in range(10)]
            fetching = [tasks.create_task(ask(joiner, names)) for joiner in joiners]
        return [task.result() for task in fetching]

    fetched = in_a_swarm(donors, scenario, links=[link(upload_mbit=1)] * 3)
    names = sorted(Counter(each.donor for each in fetched).values())
    assert sum(names) == 10
    assert names[0] >= 2
    for seed, wired in enumerate(donors):
        assert wired.most_at_once == MAX_TRANSFERS
        handed_out = [each for each in fetched if same_bits(each, state(seed))]
        # Nothing goes out for a joiner that is refused, or comes twice.
        transfers = len(handed_out)
        assert sum(wired.sent) < transfers * (STATE_BYTES + CHUNK_BYTES) + 100 * len(wired.sent)


# In a swarm that trains.


def test_in_a_swarm_that_trains_honest_states_pass_and_a_scaled_one_is_refused() -> None:
    config = quick_config(
        "run.initial_peers=4", "run.rounds=8", "simulate.step_s=0.5", "node.validate_every_rounds=1"
    )
    manifest = found(config, now_s=0.0)
    model = learner_of(config, peer_id="joiner", corpus=corpus())
    request = StateRequest(run_digest=manifest.digest, schema_digest=model.schema_digest)

    async def fetch_from(network: Network, donors: list[str]) -> State:
        return await fetch_state(
            network=network,
            compute=InlineCompute(step_s=0.0),
            request=request,
            donors=donors,
            elements=model.elements,
            memory_elements=model.elements,
            parts=model.sizes,
            judge=model.validation_loss,
            deadline_s=5.0,
        )

    async def main() -> tuple[list[State], State]:
        async with Hub(verify=Identity.verify) as hub, asyncio.TaskGroup() as tasks:
            peers = [SimulatedPeer(hub, config, index, manifest=manifest) for index in range(4)]
            ids = [peer.id for peer in peers]
            for peer in peers:
                tasks.create_task(peer.run())
            honest: list[State] = []
            for round in (3, 7):
                await peers[0].reached(round)
                for index in range(4):
                    joiner = hub.network(f"joiner {index}", bytes)
                    honest.append(await fetch_from(joiner, ids))
            lie = dataclasses.replace(honest[-1], theta=10 * honest[-1].theta)
            liar = next(n for n in map(str, range(99)) if donor_order("joiner", [n, *ids])[0] == n)
            server = Donor(
                request=request,
                current=lambda: lie,
                parts=model.sizes,
                val_loss=lambda: 0.0,
                compute=InlineCompute(step_s=0.0),
            )
            await hub.network(liar, bytes).serve(STATE_PROTOCOL, server.serve)
            return honest, await fetch_from(hub.network("joiner", bytes), [liar, *ids])

    honest, taken = in_virtual_time(main)
    assert [fetched.remarks for fetched in honest] == [()] * 8
    assert len({fetched.donor for fetched in honest}) > 1
    [remark] = taken.remarks
    assert "3 of 3 other peers have different ones: parameter tensor" in remark
    assert taken.theta.norm() < 2 * honest[-1].theta.norm()
