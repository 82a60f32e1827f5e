"""Fetching a donor's parameters: only a state that passes every check is taken."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
import torch
from blake3 import blake3

from gasloc_p2p.core.errors import StateError
from gasloc_p2p.core.substrate import Stream
from gasloc_p2p.net.identity import Identity
from gasloc_p2p.node.state import (
    STATE_PROTOCOL,
    Donor,
    State,
    StateOffer,
    StateRequest,
    fetch_state,
)
from gasloc_p2p.simulate.clock import InlineCompute
from gasloc_p2p.simulate.network import Hub
from tests.sim.conftest import in_virtual_time

ELEMENTS = 200_000
REQUEST = StateRequest(run_digest=b"run", schema_digest=b"schema")
STATE = State(theta=torch.linspace(-1, 1, ELEMENTS), memory=torch.linspace(2, 3, ELEMENTS))
COMPUTE = InlineCompute(step_s=0.0)


def honest(state: State = STATE, request: StateRequest = REQUEST) -> Donor:
    return Donor(request=request, current=lambda: state, compute=COMPUTE)


def raw(header: StateOffer | bytes, body: bytes = b"", *, stall: bool = False) -> Donor:
    """A donor that sends these bytes whatever it is asked."""

    class Liar(Donor):
        async def serve(self, stream: Stream) -> None:
            encoded = header if isinstance(header, bytes) else msgspec.msgpack.encode(header)
            await stream.write(len(encoded).to_bytes(4, "little") + encoded + body)
            if stall:
                await asyncio.Event().wait()
            await stream.aclose()

    return Liar(request=REQUEST, current=lambda: STATE, compute=COMPUTE)


def offer(state: State, *, elements: int = ELEMENTS) -> StateOffer:
    digests = [blake3(part.numpy().tobytes()).digest() for part in (state.theta, state.memory)]
    return StateOffer(elements=elements, theta_digest=digests[0], memory_digest=digests[1])


def fetch(*donors: Donor | None) -> State | StateError:
    """Fetch from donors in the order in which the joiner prefers them; None is unreachable."""

    async def main() -> State | StateError:
        async with Hub(verify=Identity.verify) as hub:
            joiner = hub.network("joiner", lambda payload: b"")
            names = []
            for index, donor in enumerate(donors):
                network = hub.network(f"donor {index}", lambda payload: b"")
                names.append(network.peer_id)
                if donor is not None:
                    await network.serve(STATE_PROTOCOL, donor.serve)
            try:
                return await fetch_state(
                    network=joiner,
                    compute=COMPUTE,
                    request=REQUEST,
                    donors=names,
                    elements=ELEMENTS,
                    deadline_s=5.0,
                )
            except StateError as error:
                return error

    return in_virtual_time(main)


def test_an_honest_donors_state_arrives_whole() -> None:
    state = fetch(honest())
    assert isinstance(state, State)
    assert torch.equal(state.theta, STATE.theta)
    assert torch.equal(state.memory, STATE.memory)


BODY = STATE.theta.numpy().tobytes() + STATE.memory.numpy().tobytes()
NAN = State(theta=torch.full((ELEMENTS,), float("nan")), memory=STATE.memory)
BAD_DONORS = {
    "does not answer": None,
    "run's manifest differs": honest(request=msgspec.structs.replace(REQUEST, run_digest=b"x")),
    "model's parameters differ": honest(
        request=msgspec.structs.replace(REQUEST, schema_digest=b"x")
    ),
    "offers 7 parameters": raw(offer(STATE, elements=7)),
    "went away after": raw(offer(STATE), BODY[:1000]),
    "do not match their digest": raw(offer(STATE), bytes(len(BODY))),
    "not finite": raw(offer(NAN), NAN.theta.numpy().tobytes() + NAN.memory.numpy().tobytes()),
    "unreadable offer": raw(b"\xc1"),
    "too long": raw(bytes(5000)),
    "no answer in time": raw(offer(STATE), BODY[:1000], stall=True),
}


@pytest.mark.parametrize("why", BAD_DONORS)
def test_a_bad_donor_is_named_with_the_reason(why: str) -> None:
    error = fetch(BAD_DONORS[why])
    assert isinstance(error, StateError)
    assert error.why.startswith("donor 0: ")
    assert why in error.why


@pytest.mark.parametrize("why", BAD_DONORS)
def test_the_next_donor_is_asked_when_one_fails(why: str) -> None:
    state = fetch(BAD_DONORS[why], BAD_DONORS[why], honest())
    assert isinstance(state, State)
    assert torch.equal(state.theta, STATE.theta)


def test_without_donors_the_error_says_so() -> None:
    error = fetch()
    assert isinstance(error, StateError)
    assert error.why == "no peer of the run is reachable"
