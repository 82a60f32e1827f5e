"""Fetching the swarm's parameters from a donor, as a late joiner does (docs/design.md section 3).

Donors are tried one after the other until one hands over a state that passes every check. A broken
stream goes on where it broke as long as that brings anything.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from torch import Tensor

from gasloc_p2p.core.assembly import FIRST_BLOCK_S, Assembly, block_deadline_s
from gasloc_p2p.core.errors import StateError
from gasloc_p2p.core.outlier import Parts, check_summary, judge_state, summarise
from gasloc_p2p.core.substrate import Compute, Network, PeerUnreachableError, Stream
from gasloc_p2p.core.transfer import (
    MAX_HEAD_BYTES,
    STATE_PROTOCOL,
    BusyError,
    Offer,
    Request,
    StateRequest,
    Summary,
    SummaryRequest,
    TransferError,
    donor_order,
    pack_message,
    summary_limit_bytes,
    unpack_answer,
)
from gasloc_p2p.core.types import PeerId
from gasloc_p2p.core.vectors import is_finite
from gasloc_p2p.node.letters import read_into, read_message

ATTEMPTS: Final = 2
"""A donor is given up after so many streams in a row that brought nothing further."""
REDIAL_PAUSE_S: Final = 1.0
OUTAGE_PAUSE_S: Final = 10.0
"""Pause before the last of these streams where chunks would be lost with the donor."""
BUSY_PAUSE_S: Final = 5.0
BUSY_PATIENCE_S: Final = 600.0
"""How long a joiner waits for its turn where every donor that works serves others."""
WITNESSES: Final = 3
WITNESS_DEADLINE_S: Final = 5.0
_AT_ONCE: Final = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class State:
    """A peer's parameters and the outer rule's memory at the start of a round.

    Attributes:
        theta: fp32 [P] on the CPU.
        memory: the outer rule's memory, fp32, flat.
        round: the round that it belongs to; a fetched one is of the round that the donor names.
        donor: who handed it over; empty for a peer's own.
        remarks: what a person should know about how it was fetched, a sentence each.
    """

    theta: Tensor
    memory: Tensor
    round: int
    donor: PeerId = ""
    remarks: tuple[str, ...] = ()


async def fetch_state(
    *,
    network: Network,
    compute: Compute,
    request: StateRequest,
    donors: Sequence[PeerId],
    elements: int,
    memory_elements: int,
    parts: Sequence[int],
    judge: Callable[[Tensor], float] | None,
    deadline_s: float,
) -> State:
    """Fetch the state of the first donor that hands over one that passes its checks.

    Takes as long as bytes keep coming, and the memory of one theta and one outer memory.

    Args:
        request: run and schema that a donor has to agree with.
        donors: peers that may be asked; joiners ask them in different orders.
        elements: of this peer's own parameter vector.
        memory_elements: of its outer rule's memory.
        parts: elements of each parameter tensor, in schema order.
        judge: loss of parameters, fp32 [P], on held-out text in nats per token; runs in `compute`.
        deadline_s: seconds that a dial may take.

    Raises:
        StateError: no donor could, with one line for each.
    """
    joiner = _Joiner(
        network=network,
        compute=compute,
        request=request,
        parts=Parts.of(parts, memory_elements=memory_elements),
        judge=judge,
        dial_deadline_s=deadline_s,
        assembly=Assembly(elements=elements, memory_elements=memory_elements),
    )
    return await joiner.fetch(donor_order(network.peer_id, donors))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Joiner:
    network: Network
    compute: Compute
    request: StateRequest
    parts: Parts
    judge: Callable[[Tensor], float] | None
    dial_deadline_s: float
    assembly: Assembly
    failures: dict[PeerId, str] = field(default_factory=dict)

    async def fetch(self, donors: Sequence[PeerId]) -> State:
        """Ask one donor after the other, and those that were busy again."""
        waiting, busy = donors, dict[PeerId, str]()
        patience_ends_s = _now_s() + BUSY_PATIENCE_S
        while waiting:
            busy.clear()
            for donor in waiting:
                try:
                    return await self._take_over(donor, donors)
                except BusyError as error:
                    busy[donor] = str(error)
                except TransferError as error:
                    self.failures[donor] = str(error)
            if not busy or _now_s() >= patience_ends_s:
                break
            await asyncio.sleep(BUSY_PAUSE_S)
            waiting = tuple(busy)
        failures = self.failures | busy
        raise StateError(
            "no peer handed over the swarm's parameters",
            why="; ".join(f"{donor}: {why}" for donor, why in failures.items())
            or "no peer of the run is reachable",
            fix="try again in a moment; the parameters are needed to join a run that has begun",
        )

    async def _take_over(self, donor: PeerId, donors: Sequence[PeerId]) -> State:
        """Return the donor's state once it is whole, finite, and like those of others.

        Raises:
            BusyError: the donor serves others.
            TransferError: there is something wrong with the donor or its state.
        """
        # Told first, so that the numbers are of the state's own time however long it takes.
        others = [peer for peer in donors if peer != donor and peer not in self.failures]
        told = await self._summaries(others[:WITNESSES])
        self.assembly.forget()
        await self._receive(donor)
        theta, memory = self.assembly.vectors()
        if not await self.compute.run(lambda: is_finite(theta) and is_finite(memory)):
            raise TransferError("the parameters are not finite numbers")
        remarks = await self._compare(donor, told)
        failed = [f"{peer} handed over no parameters: {why}" for peer, why in self.failures.items()]
        return State(
            theta=theta,
            memory=memory,
            round=self.assembly.round,
            donor=donor,
            remarks=(*failed, *remarks),
        )

    async def _receive(self, donor: PeerId) -> None:
        """Fill the assembly, over as many streams as it takes while they bring anything."""
        most_verified = idle_streams = 0
        while True:
            try:
                await self._receive_over_a_stream(donor)
                return
            except PeerUnreachableError as error:
                failure = str(error)
            except ConnectionError as error:
                failure = f"{error}, {self.assembly.position()} was due"
            except TimeoutError:
                failure = f"nothing came in time, {self.assembly.position()} was due"
            # A donor that offers another state each time must not be listened to for ever.
            progress = self.assembly.verified > most_verified
            most_verified = max(most_verified, self.assembly.verified)
            idle_streams = 0 if progress else idle_streams + 1
            if idle_streams == ATTEMPTS:
                raise TransferError(failure)
            much_to_lose = idle_streams and self.assembly.verified
            await asyncio.sleep(OUTAGE_PAUSE_S if much_to_lose else REDIAL_PAUSE_S)

    async def _receive_over_a_stream(self, donor: PeerId) -> None:
        assembly = self.assembly
        stream = await self.network.open_stream(
            donor, STATE_PROTOCOL, deadline_s=self.dial_deadline_s
        )
        try:
            async with asyncio.timeout(FIRST_BLOCK_S):
                offer = await _ask(stream, assembly.request(self.request), MAX_HEAD_BYTES)
            if not isinstance(offer, Offer):
                raise TransferError("answers with something else than an offer")
            assembly.accept(offer)
            began_s, received_bytes = _now_s(), 0
            while not assembly.complete:
                block = assembly.next_block()
                deadline_s = block_deadline_s(
                    len(block), received_bytes=received_bytes, elapsed_s=_now_s() - began_s
                )
                async with asyncio.timeout(deadline_s):
                    await read_into(stream, block)
                assembly.close_block()
                received_bytes += len(block)
        finally:
            await stream.aclose()

    async def _compare(self, donor: PeerId, told: Mapping[PeerId, Summary]) -> tuple[str, ...]:
        """Compare the state with what other peers told of theirs.

        Returns:
            What a person should know, a sentence each.

        Raises:
            TransferError: it is an outlier.
        """
        theta, memory = self.assembly.vectors()
        judge = self.judge if any(s.val_loss is not None for s in told.values()) else None

        def summarised() -> Summary:
            val_loss = None if judge is None else judge(theta)
            return summarise(
                theta, memory, self.parts, round=self.assembly.round, val_loss=val_loss
            )

        verdict = judge_state(await self.compute.run(summarised), told, donor=donor)
        if verdict.refused:
            raise TransferError(verdict.refused)
        return verdict.remarks

    async def _summaries(self, witnesses: Sequence[PeerId]) -> dict[PeerId, Summary]:
        async with asyncio.TaskGroup() as tasks:
            asked = {peer: tasks.create_task(self._summary_of(peer)) for peer in witnesses}
        answers = {peer: task.result() for peer, task in asked.items()}
        return {peer: summary for peer, summary in answers.items() if summary is not None}

    async def _summary_of(self, peer: PeerId) -> Summary | None:
        """Return what a peer tells of its state; None if that is nothing useful."""
        request = SummaryRequest(
            run_digest=self.request.run_digest, schema_digest=self.request.schema_digest
        )
        limit_bytes = summary_limit_bytes(len(self.parts.theta) + len(self.parts.memory))
        try:
            async with asyncio.timeout(WITNESS_DEADLINE_S):
                stream = await self.network.open_stream(
                    peer, STATE_PROTOCOL, deadline_s=WITNESS_DEADLINE_S
                )
                try:
                    summary = await _ask(stream, request, limit_bytes)
                finally:
                    await stream.aclose()
            if not isinstance(summary, Summary):
                return None
            check_summary(summary, self.parts)
        except (PeerUnreachableError, ConnectionError, TimeoutError, TransferError):
            return None
        return summary


async def _ask(stream: Stream, request: Request, limit_bytes: int) -> Offer | Summary:
    await stream.write(pack_message(request))
    return unpack_answer(await read_message(stream, limit_bytes=limit_bytes))


def _now_s() -> float:
    return asyncio.get_running_loop().time()
