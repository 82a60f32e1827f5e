"""Fetching a donor's state: only one that passes every check is taken, and it arrives whole."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from gasloc_p2p.core.assembly import CHUNK_BYTES, FIRST_BLOCK_S, MIN_BLOCK_S, Chunks, root_of
from gasloc_p2p.core.substrate import Network, Stream
from gasloc_p2p.core.transfer import Offer, Refusal, pack_message
from gasloc_p2p.node.state import (
    ATTEMPTS,
    BUSY_PATIENCE_S,
    BUSY_PAUSE_S,
    OUTAGE_PAUSE_S,
    REDIAL_PAUSE_S,
    State,
)
from gasloc_p2p.simulate.network import Hub
from tests.node.transfers import (
    ELEMENTS,
    REQUEST,
    STATE_BYTES,
    Faults,
    Raw,
    Server,
    Wired,
    ask,
    donor,
    fetch,
    in_a_swarm,
    same_bits,
    state,
    summary_of,
)

STATE, OTHER = state(0, round=7), state(1, round=8)
CHUNKS = Chunks((STATE.theta, STATE.memory), CHUNK_BYTES)
DIGESTS = CHUNKS.digests()
OFFER = Offer(
    round=7,
    elements=ELEMENTS,
    memory_elements=ELEMENTS,
    chunk_bytes=CHUNK_BYTES,
    root=root_of(DIGESTS),
)
HEAD = pack_message(OFFER)
BODY = STATE.theta.numpy().tobytes() + STATE.memory.numpy().tobytes()
FIRST_CHUNK_AT = len(HEAD) + len(DIGESTS)


def after_chunks(chunks: float) -> int:
    """Return how many bytes a donor's first stream has sent after so many chunks."""
    return FIRST_CHUNK_AT + int(chunks * CHUNK_BYTES)


def sizes(**changes: int) -> bytes:
    return pack_message(msgspec.structs.replace(OFFER, **changes))


def not_finite() -> State:
    memory = STATE.memory.clone()
    memory[-1] = float("nan")
    return State(theta=STATE.theta, memory=memory, round=7)


def test_an_honest_donors_state_arrives_bit_for_bit() -> None:
    outcome = fetch(donor(STATE))
    assert outcome.state is not None
    assert same_bits(outcome.state, STATE)
    assert outcome.state.round == 7
    assert outcome.state.donor == outcome.names[0]
    assert outcome.state.theta.shape == outcome.state.memory.shape == (ELEMENTS,)


BAD_DONORS: dict[str, Server | None] = {
    "does not answer": None,
    "run's manifest differs": donor(
        STATE, request=msgspec.structs.replace(REQUEST, run_digest=b"")
    ),
    "model's parameters differ": donor(
        STATE, request=msgspec.structs.replace(REQUEST, schema_digest=b"")
    ),
    "no parameters of the run yet": donor(lambda: None),
    "offers 1099511627776 parameters": Raw(data=sizes(elements=2**40)),
    "offers 1099511627776 elements of outer memory": Raw(data=sizes(memory_elements=2**40)),
    "`int` >= 4096 - at `$.chunk_bytes`": Raw(data=sizes(chunk_bytes=1)),
    "is too long": Raw(data=b"\xff\xff\xff\xff" + bytes(100)),
    "unreadable answer": Raw(data=b"\x01\0\0\0\xc1"),
    "something else than an offer": Raw(data=pack_message(summary_of(STATE))),
    "the list of digests does not match": Raw(data=HEAD + bytes(len(DIGESTS))),
    "went away, an offer was due": Raw(data=b""),
    "went away, the list of digests was due": Raw(data=HEAD + DIGESTS[:-1]),
    "went away, chunk 1 of 20 was due": Raw(data=HEAD + DIGESTS + BODY[:100]),
    "nothing came in time, an offer was due": Raw(data=HEAD[:-1], stall=True),
    "nothing came in time, chunk 1 of 20 was due": Raw(data=HEAD + DIGESTS, stall=True),
    "corrupt: chunk 1 of 20 does not match": Raw(data=HEAD + DIGESTS + bytes(len(BODY))),
    "corrupt: chunk 20 of 20 does not match": Raw(data=HEAD + DIGESTS + BODY[:-1] + b"x"),
    "not finite": donor(not_finite()),
}


@pytest.mark.parametrize("why", BAD_DONORS)
def test_a_bad_donor_is_named_with_the_reason(why: str) -> None:
    outcome = fetch(BAD_DONORS[why])
    assert outcome.error is not None
    assert outcome.error.why.startswith(f"{outcome.names[0]}: ")
    assert why in outcome.error.why


@pytest.mark.parametrize("why", BAD_DONORS)
def test_the_next_donor_is_asked_when_one_fails_and_the_failure_is_told(why: str) -> None:
    outcome = fetch(BAD_DONORS[why], BAD_DONORS[why], donor(OTHER))
    assert outcome.state is not None
    assert same_bits(outcome.state, OTHER)
    assert outcome.state.donor == outcome.names[2]
    told = [remark for remark in outcome.state.remarks if why in remark]
    assert [remark.split(" handed over")[0] for remark in told] == outcome.names[:2]


def test_all_donors_failing_is_an_error_with_each_of_them() -> None:
    outcome = fetch(*BAD_DONORS.values())
    assert outcome.error is not None
    for name, why in zip(outcome.names, BAD_DONORS, strict=True):
        [reason] = [r for r in outcome.error.why.split("; ") if r.startswith(f"{name}: ")]
        assert why in reason


def test_without_donors_the_error_says_so() -> None:
    outcome = fetch()
    assert outcome.error is not None
    assert outcome.error.why == "no peer of the run is reachable"


# Broken streams.


def test_a_broken_stream_goes_on_where_it_broke_and_sends_nothing_twice() -> None:
    wired = Wired(donor=donor(STATE), faults=[Faults(cut_at=after_chunks(6.5))])
    outcome = fetch(wired, donor(OTHER))
    assert outcome.state is not None
    assert same_bits(outcome.state, STATE)
    assert outcome.state.donor == outcome.names[0]
    first, second = wired.sent[:2]
    assert first == after_chunks(6.5)
    assert second == len(HEAD) + STATE_BYTES - 6 * CHUNK_BYTES


def test_a_stream_may_break_again_and_again_while_it_brings_a_chunk() -> None:
    cuts = [Faults(cut_at=after_chunks(1)), *[Faults(cut_at=len(HEAD) + CHUNK_BYTES)] * 18]
    wired = Wired(donor=donor(STATE), faults=cuts)
    outcome = fetch(wired, donor(OTHER))
    assert outcome.state is not None
    assert same_bits(outcome.state, STATE)
    # One more stream carries the last chunk; nobody asks this donor for a summary.
    assert len(wired.sent) == 20
    assert sum(wired.sent) == STATE_BYTES + len(DIGESTS) + 20 * len(HEAD)
    assert outcome.ended_s == pytest.approx(19 * REDIAL_PAUSE_S, abs=0.1)


def test_two_streams_in_a_row_without_a_chunk_are_the_end() -> None:
    nothing = Faults(cut_at=len(HEAD) + CHUNK_BYTES - 1)
    faults = [Faults(cut_at=after_chunks(3)), nothing, Faults(cut_at=len(HEAD) + CHUNK_BYTES)]
    wired = Wired(donor=donor(STATE), faults=[*faults, *[nothing] * ATTEMPTS])
    outcome = fetch(wired, donor(OTHER))
    assert outcome.state is not None
    assert same_bits(outcome.state, OTHER)
    assert len(wired.sent) == 3 + ATTEMPTS
    assert f"{outcome.names[0]} handed over no parameters" in outcome.state.remarks[0]
    assert "chunk 5 of 20 was due" in outcome.state.remarks[0]


def test_a_donor_that_dies_half_way_is_followed_by_the_next_one() -> None:
    wired = Wired(donor=donor(STATE), faults=[Faults(stall_at=after_chunks(10))])

    async def scenario(joiner: Network, names: list[str], hub: Hub) -> State:
        async with asyncio.TaskGroup() as tasks:
            fetching = tasks.create_task(ask(joiner, names))
            await wired.stalled.wait()
            await hub.network(names[0], bytes).aclose()
        return fetching.result()

    fetched = in_a_swarm([wired, donor(OTHER)], scenario)
    assert same_bits(fetched, OTHER)


def test_a_corrupt_chunk_ends_a_transfer_at_once() -> None:
    wired = Wired(donor=donor(STATE), faults=[Faults(flip_at=after_chunks(7.5))])
    outcome = fetch(wired, donor(OTHER))
    assert outcome.state is not None
    assert same_bits(outcome.state, OTHER)
    assert len(wired.sent) == 1
    assert outcome.state.remarks[0] == (
        f"{outcome.names[0]} handed over no parameters: "
        "corrupt: chunk 8 of 20 does not match its digest"
    )


class Forgetful:
    """A donor that has another state for each stream, and remembers no earlier one."""

    def __init__(self, *states: State) -> None:
        self._donors = [donor(each) for each in states]

    async def serve(self, stream: Stream) -> None:
        serving = self._donors.pop(0) if len(self._donors) > 1 else self._donors[0]
        await serving.serve(stream)


def test_a_donor_that_has_gone_on_to_another_state_hands_over_that_one() -> None:
    wired = Wired(donor=Forgetful(STATE, OTHER), faults=[Faults(cut_at=after_chunks(13))])
    outcome = fetch(wired)
    assert outcome.state is not None
    assert same_bits(outcome.state, OTHER)
    assert outcome.state.round == 8
    assert wired.sent[1] == len(HEAD) + len(DIGESTS) + STATE_BYTES


def test_a_donor_with_another_state_each_time_is_not_listened_to_for_ever() -> None:
    restless = Forgetful(*[state(seed) for seed in range(10)])
    wired = Wired(donor=restless, faults=[Faults(cut_at=after_chunks(2))] * 10)
    outcome = fetch(wired, donor(OTHER))
    assert outcome.state is not None
    assert same_bits(outcome.state, OTHER)
    assert len(wired.sent) == 1 + ATTEMPTS


def test_a_stalled_donor_is_given_up_at_the_deadline() -> None:
    faults = [Faults(stall_at=after_chunks(10)), *[Faults(stall_at=len(HEAD) + 1)] * ATTEMPTS]
    wired = Wired(donor=donor(STATE), faults=faults)
    outcome = fetch(wired, donor(OTHER))
    assert outcome.state is not None
    assert same_bits(outcome.state, OTHER)
    assert len(wired.sent) == 1 + ATTEMPTS
    # A block of a stream that was fast has the shortest deadline, the first ones a fixed one.
    stalled_s = MIN_BLOCK_S + REDIAL_PAUSE_S + FIRST_BLOCK_S + OUTAGE_PAUSE_S + FIRST_BLOCK_S
    assert outcome.ended_s == pytest.approx(stalled_s, abs=0.1)


# Busy donors.


class Busy:
    """Refuses as a donor does that serves others, until a moment has come."""

    def __init__(self, then: Server, *, until_s: float) -> None:
        self._then = then
        self._until_s = until_s

    async def serve(self, stream: Stream) -> None:
        if asyncio.get_running_loop().time() >= self._until_s:
            await self._then.serve(stream)
        else:
            await Raw(data=pack_message(Refusal(reason="busy", busy=True))).serve(stream)


def test_a_busy_donor_is_asked_again_only_when_no_other_one_has_worked() -> None:
    outcome = fetch(Busy(donor(STATE), until_s=99.0), donor(OTHER))
    assert outcome.state is not None
    assert same_bits(outcome.state, OTHER)
    assert outcome.ended_s == 0.0
    assert not any("busy" in remark for remark in outcome.state.remarks)


def test_a_joiner_waits_for_its_turn() -> None:
    gone = Raw(data=b"")
    outcome = fetch(Busy(donor(STATE), until_s=99.0), gone)
    assert outcome.state is not None
    assert same_bits(outcome.state, STATE)
    assert 99.0 <= outcome.ended_s <= 99.0 + BUSY_PAUSE_S
    # Twice as a donor, and once as a witness before it had failed.
    assert gone.served == ATTEMPTS + 1


def test_a_joiner_does_not_wait_for_its_turn_for_ever() -> None:
    outcome = fetch(Busy(donor(STATE), until_s=1e9))
    assert outcome.error is not None
    assert outcome.error.why == f"{outcome.names[0]}: refused: busy"
    assert outcome.ended_s == pytest.approx(BUSY_PATIENCE_S, abs=2 * BUSY_PAUSE_S)
