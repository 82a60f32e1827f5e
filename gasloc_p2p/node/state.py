"""Handing a peer's parameters to a late joiner, and fetching them as one.

What travels is the donor's state at the start of its round: it stands still while the donor trains.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import torch
from blake3 import blake3
from torch import Tensor

from gasloc_p2p.core.codecs import codec_named
from gasloc_p2p.core.errors import StateError
from gasloc_p2p.core.substrate import Compute, Network, PeerUnreachableError, Stream
from gasloc_p2p.core.types import BytesLike, PeerId

_FP32 = codec_named("none")
STATE_PROTOCOL = "gasloc/state/1"
HEADER_LIMIT_BYTES = 4096
PIECE_BYTES = 262_144
PROGRESS_DEADLINE_S = 20.0
"""A transfer may take as long as it needs while bytes keep coming at least this often."""


class StateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a joiner asks for."""

    run_digest: bytes
    schema_digest: bytes


class StateOffer(msgspec.Struct, frozen=True, kw_only=True):
    """What the donor answers; the two tensors follow as little-endian fp32."""

    refused: str = ""
    elements: int = 0
    theta_digest: bytes = b""
    memory_digest: bytes = b""


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """A peer's parameters and the outer rule's memory, [P] fp32 each."""

    theta: Tensor
    memory: Tensor


class Donor:
    """Serves this peer's state to joiners of the same run.

    Args:
        request: what an acceptable request looks like.
        current: returns the state at the start of this peer's round.
        compute: where digests are computed.
    """

    def __init__(
        self, *, request: StateRequest, current: Callable[[], State], compute: Compute
    ) -> None:
        self._expected = request
        self._compute = compute
        self._current = current

    async def serve(self, stream: Stream) -> None:
        """Answer one joiner; the transport calls this."""
        try:
            await self._answer(stream)
        except (ConnectionError, TimeoutError, msgspec.DecodeError):
            return
        finally:
            await stream.aclose()

    async def _answer(self, stream: Stream) -> None:
        request = msgspec.msgpack.decode(await _read_header(stream), type=StateRequest)
        refusal = self._refusal(request)
        if refusal:
            await _write_header(stream, StateOffer(refused=refusal))
            return
        state = self._current()
        parts = await self._compute.run(
            lambda: [_encoded(tensor) for tensor in (state.theta, state.memory)]
        )
        theta_digest, memory_digest = await self._compute.run(
            lambda: [blake3(part).digest() for part in parts]
        )
        await _write_header(
            stream,
            StateOffer(
                elements=state.theta.numel(),
                theta_digest=theta_digest,
                memory_digest=memory_digest,
            ),
        )
        for part in parts:
            for start in range(0, len(part), PIECE_BYTES):
                async with asyncio.timeout(PROGRESS_DEADLINE_S):
                    await stream.write(part[start : start + PIECE_BYTES])

    def _refusal(self, request: StateRequest) -> str:
        if request.run_digest != self._expected.run_digest:
            return "the run's manifest differs"
        if request.schema_digest != self._expected.schema_digest:
            return "the model's parameters differ"
        return ""


async def fetch_state(
    *,
    network: Network,
    compute: Compute,
    request: StateRequest,
    donors: Sequence[PeerId],
    elements: int,
    deadline_s: float,
) -> State:
    """Fetch the state of the first donor that hands over one that passes its checks.

    Donors are tried in an order that depends on who asks, so that joiners spread over them.

    Raises:
        StateError: no donor could, with one line for each.
    """
    failures: list[str] = []
    for donor in sorted(donors, key=lambda donor: _preference(network.peer_id, donor)):
        try:
            stream = await network.open_stream(donor, STATE_PROTOCOL, deadline_s=deadline_s)
            try:
                return await _receive(stream, compute, request, elements)
            finally:
                await stream.aclose()
        except (PeerUnreachableError, ConnectionError, _BadStateError) as error:
            failures.append(f"{donor}: {error}")
        except TimeoutError:
            failures.append(f"{donor}: no answer in time")
    raise StateError(
        "no peer handed over the swarm's parameters",
        why="; ".join(failures) or "no peer of the run is reachable",
        fix="try again in a moment; the parameters are needed to join a run that has begun",
    )


class _BadStateError(Exception):
    """A donor refused, or what it sent did not pass its checks."""


async def _receive(stream: Stream, compute: Compute, request: StateRequest, elements: int) -> State:
    async with asyncio.timeout(PROGRESS_DEADLINE_S):
        await _write_header(stream, request)
        header = await _read_header(stream)
    try:
        offer = msgspec.msgpack.decode(header, type=StateOffer)
    except msgspec.DecodeError as error:
        raise _BadStateError(f"unreadable offer: {error}") from None
    if offer.refused:
        raise _BadStateError(f"refused: {offer.refused[:200]}")
    if offer.elements != elements:
        raise _BadStateError(f"offers {offer.elements} parameters, this model has {elements}")
    theta = await _receive_tensor(stream, compute, elements, offer.theta_digest)
    memory = await _receive_tensor(stream, compute, elements, offer.memory_digest)
    return State(theta=theta, memory=memory)


async def _receive_tensor(stream: Stream, compute: Compute, elements: int, digest: bytes) -> Tensor:
    buffer = bytearray(4 * elements)
    view, filled = memoryview(buffer), 0
    while filled < len(buffer):
        async with asyncio.timeout(PROGRESS_DEADLINE_S):
            piece = await stream.read(min(PIECE_BYTES, len(buffer) - filled))
        if not piece:
            raise _BadStateError(f"the donor went away after {filled} of {len(buffer)} bytes")
        view[filled : filled + len(piece)] = piece
        filled += len(piece)

    def checked() -> Tensor:
        if blake3(buffer).digest() != digest:
            raise _BadStateError("the parameters do not match their digest")
        like = torch.empty(elements)
        tensor = _FP32.decode(buffer, own=like, scales=b"", partner_scales=b"")
        if not bool(torch.isfinite(tensor).all()):
            raise _BadStateError("the parameters are not finite numbers")
        return tensor

    return await compute.run(checked)


async def _write_header(stream: Stream, message: StateRequest | StateOffer) -> None:
    body = msgspec.msgpack.encode(message)
    await stream.write(len(body).to_bytes(4, "little") + body)


async def _read_header(stream: Stream) -> bytes:
    length = int.from_bytes(await _read_exactly(stream, 4), "little")
    if length > HEADER_LIMIT_BYTES:
        raise ConnectionError(f"a header of {length} bytes is too long")
    return await _read_exactly(stream, length)


async def _read_exactly(stream: Stream, size: int) -> bytes:
    collected = bytearray()
    async with asyncio.timeout(PROGRESS_DEADLINE_S):
        while len(collected) < size:
            piece = await stream.read(size - len(collected))
            if not piece:
                raise ConnectionError("the other end went away")
            collected += piece
    return bytes(collected)


def _encoded(tensor: Tensor) -> BytesLike:
    return _FP32.encode(tensor, scales=b"", partner_scales=b"")


def _preference(joiner: PeerId, donor: PeerId) -> bytes:
    return hashlib.sha256(f"{joiner}/{donor}".encode()).digest()
