"""Handing out this peer's state to joiners, and a few numbers about it to whoever compares.

What travels is the state at the start of this peer's round. Its tensors are replaced and never
changed in place, so a reference stands still while the peer trains, and no copy is made.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
from torch import Tensor

from gasloc_p2p.core.assembly import CHUNK_BYTES, Chunks, root_of
from gasloc_p2p.core.outlier import Parts, summarise
from gasloc_p2p.core.substrate import Compute, Stream
from gasloc_p2p.core.transfer import (
    MAX_HEAD_BYTES,
    Offer,
    Refusal,
    Request,
    StateRequest,
    Summary,
    SummaryRequest,
    TransferError,
    pack_message,
    unpack_request,
)
from gasloc_p2p.core.types import BytesLike, PeerId
from gasloc_p2p.node.letters import read_message
from gasloc_p2p.node.state import State

MAX_TRANSFERS: Final = 2
MAX_SNAPSHOTS: Final = 2
SNAPSHOT_IDLE_S: Final = 60.0
"""A joiner whose stream broke may come back for the same state within this time."""
REQUEST_DEADLINE_S: Final = 10.0
WRITE_DEADLINE_S: Final = 120.0
"""A joiner that takes longer for a chunk is given up, as it would give up this peer."""


@dataclass(kw_only=True, slots=True, eq=False)
class _Snapshot:
    """A state that is handed out, with the digests of its chunks, and when it is forgotten."""

    state: State
    chunks: Chunks
    digests: bytes
    offer: Offer
    forgotten: asyncio.TimerHandle | None = None


@dataclass(kw_only=True, slots=True, eq=False)
class _Transfer:
    """A joiner's stream, and what it gets once that has its digests."""

    stream: Stream
    snapshot: _Snapshot | None = None


class Donor:
    """Serves this peer's state to joiners of the same run.

    At most `MAX_TRANSFERS` joiners are served at a time. At most `MAX_SNAPSHOTS` states are
    remembered, so that a broken transfer can go on; each keeps theta and the outer memory of an
    earlier round alive, and `DIGEST_BYTES` per chunk, until nobody has asked for it for
    `SNAPSHOT_IDLE_S`.

    Args:
        request: what an acceptable request looks like.
        current: the state at the start of this peer's round; None while it has none of the run.
        parts: elements of each parameter tensor, in schema order.
        val_loss: this peer's last loss on held-out text, None if it has none.
        compute: where digests and norms are computed, once per state.
    """

    def __init__(
        self,
        *,
        request: StateRequest,
        current: Callable[[], State | None],
        parts: Sequence[int],
        val_loss: Callable[[], float | None],
        compute: Compute,
    ) -> None:
        self._expected = request
        self._current = current
        self._parts = parts
        self._val_loss = val_loss
        self._compute = compute
        self._transfers: dict[PeerId, _Transfer] = {}
        self._snapshots: dict[bytes, _Snapshot] = {}
        self._computing = asyncio.Lock()
        self._summary: tuple[weakref.ref[Tensor], Summary] | None = None

    async def serve(self, stream: Stream) -> None:
        """Answer one joiner; the transport calls this."""
        try:
            async with asyncio.timeout(REQUEST_DEADLINE_S):
                body = await read_message(stream, limit_bytes=MAX_HEAD_BYTES)
            await self._answer(stream, unpack_request(body))
        except (ConnectionError, TimeoutError, TransferError):
            return
        finally:
            await stream.aclose()

    async def _answer(self, stream: Stream, request: Request) -> None:
        state = self._current()
        refusal = self._refusal(stream.peer_id, request)
        if refusal is not None:
            await _write(stream, pack_message(refusal))
        elif state is None:
            refusal = Refusal(reason="it has no parameters of the run yet")
            await _write(stream, pack_message(refusal))
        elif isinstance(request, SummaryRequest):
            await _write(stream, pack_message(await self._summarise(state)))
        else:
            await self._hand_over(stream, request, state)

    def _refusal(self, joiner: PeerId, request: Request) -> Refusal | None:
        if request.run_digest != self._expected.run_digest:
            return Refusal(reason="the run's manifest differs")
        if request.schema_digest != self._expected.schema_digest:
            return Refusal(reason="the model's parameters differ")
        others = self._transfers.keys() - {joiner}
        if isinstance(request, StateRequest) and len(others) >= MAX_TRANSFERS:
            return Refusal(reason="busy with other joiners", busy=True)
        return None

    async def _hand_over(self, stream: Stream, request: StateRequest, state: State) -> None:
        joiner, transfer = stream.peer_id, _Transfer(stream=stream)
        earlier = self._transfers.get(joiner)
        self._transfers[joiner] = transfer
        try:
            if earlier is not None:
                # It broke at the joiner's end, which may take long to show at this one.
                await earlier.stream.aclose()
            snapshot = await self._snapshot(transfer, request.root, state)
            await _send_state(stream, snapshot, request)
        finally:
            if self._transfers.get(joiner) is transfer:
                del self._transfers[joiner]
            if transfer.snapshot is not None:
                self._keep_for_a_while(transfer.snapshot)

    async def _snapshot(self, transfer: _Transfer, root: bytes, state: State) -> _Snapshot:
        """Give the transfer the state with this root while it is remembered, else the present one.

        Two joiners that come together wait for one and the same computation.
        """
        async with self._computing:
            snapshot = self._snapshots.get(root) or self._remembered(state)
            if snapshot is None:
                taken = await self._compute.run(lambda: _take_snapshot(state))
                snapshot = self._snapshots.get(taken.offer.root) or self._remember(taken)
            transfer.snapshot = snapshot
        return snapshot

    def _remembered(self, state: State) -> _Snapshot | None:
        for snapshot in self._snapshots.values():
            if snapshot.state.theta is state.theta and snapshot.state.memory is state.memory:
                return snapshot
        return None

    def _remember(self, taken: _Snapshot) -> _Snapshot:
        """Remember a state in place of the oldest one that nobody is getting."""
        idle = [s for s in self._snapshots.values() if not self._in_use(s)]
        for snapshot in idle[: len(self._snapshots) - MAX_SNAPSHOTS + 1]:
            self._forget(snapshot)
        self._snapshots[taken.offer.root] = taken
        return taken

    def _keep_for_a_while(self, snapshot: _Snapshot) -> None:
        if self._snapshots.get(snapshot.offer.root) is not snapshot:
            return
        if snapshot.forgotten is not None:
            snapshot.forgotten.cancel()
        snapshot.forgotten = asyncio.get_running_loop().call_later(
            SNAPSHOT_IDLE_S, self._forget, snapshot
        )

    def _forget(self, snapshot: _Snapshot) -> None:
        if self._in_use(snapshot):
            return
        if snapshot.forgotten is not None:
            snapshot.forgotten.cancel()
        del self._snapshots[snapshot.offer.root]

    def _in_use(self, snapshot: _Snapshot) -> bool:
        return any(transfer.snapshot is snapshot for transfer in self._transfers.values())

    async def _summarise(self, state: State) -> Summary:
        async with self._computing:
            known = self._summary
            if known is None or known[0]() is not state.theta:
                parts = Parts.of(self._parts, memory_elements=state.memory.numel())
                summary = await self._compute.run(
                    lambda: summarise(
                        state.theta, state.memory, parts, round=state.round, val_loss=None
                    )
                )
                # A strong reference would keep the state alive for as long as nobody asks again.
                known = self._summary = (weakref.ref(state.theta), summary)
        return msgspec.structs.replace(known[1], val_loss=self._val_loss())


def _take_snapshot(state: State) -> _Snapshot:
    chunks = Chunks((state.theta, state.memory), CHUNK_BYTES)
    digests = chunks.digests()
    offer = Offer(
        round=state.round,
        elements=state.theta.numel(),
        memory_elements=state.memory.numel(),
        chunk_bytes=CHUNK_BYTES,
        root=root_of(digests),
    )
    return _Snapshot(state=state, chunks=chunks, digests=digests, offer=offer)


async def _send_state(stream: Stream, snapshot: _Snapshot, request: StateRequest) -> None:
    """Send what the joiner is missing, and wait until it has it."""
    await _write(stream, pack_message(snapshot.offer))
    goes_on = request.root == snapshot.offer.root
    if not goes_on:
        for start in range(0, len(snapshot.digests), CHUNK_BYTES):
            await _write(stream, snapshot.digests[start : start + CHUNK_BYTES])
    for index in range(request.first_chunk if goes_on else 0, len(snapshot.chunks)):
        await _write(stream, snapshot.chunks[index])
    # A stream that is closed here may drop what is still under way.
    async with asyncio.timeout(WRITE_DEADLINE_S):
        await stream.read(1)


async def _write(stream: Stream, data: BytesLike) -> None:
    async with asyncio.timeout(WRITE_DEADLINE_S):
        await stream.write(data)
