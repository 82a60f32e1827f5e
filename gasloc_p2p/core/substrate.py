"""What a node needs from the world: a network, a clock, a model, and somewhere to compute.

`net/` with `commands/node.py` and `simulate/` each provide all of it, so `node/` runs unchanged on
libp2p in real time and on an in-memory network in virtual time.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, SupportsFloat, TypeVar

from torch import Tensor

from gasloc_p2p.core.types import BytesLike, PeerId

T = TypeVar("T")


class PeerUnreachableError(Exception):
    """A stream to a peer could not be opened; the message says why."""


class Stream(Protocol):
    """One bidirectional byte stream to an authenticated peer."""

    @property
    def peer_id(self) -> PeerId:
        """Identity of the other end, proved by the transport."""
        ...

    async def read(self, max_bytes: int) -> bytes:
        """Return between 1 and `max_bytes` bytes, or b"" once the other end is gone."""
        ...

    async def write(self, data: BytesLike) -> None:
        """Send `data`; return once the send buffer is below its limit.

        Raises:
            ConnectionError: the other end is gone.
        """
        ...

    async def aclose(self) -> None:
        """Close both directions; never raises and never waits for the other end."""
        ...


StreamHandler = Callable[[Stream], Awaitable[None]]


class Network(Protocol):
    """Streams to peers, and the key-value store through which they find each other.

    Every method ends within its `deadline_s`.
    """

    @property
    def peer_id(self) -> PeerId:
        """This node's own identity."""
        ...

    def sign(self, payload: bytes) -> bytes:
        """Sign `payload` with this node's identity; 64 bytes (Ed25519)."""
        ...

    async def open_stream(self, peer: PeerId, protocol: str, *, deadline_s: float) -> Stream:
        """Open a stream to `peer`.

        Raises:
            PeerUnreachableError: the peer cannot be reached or does not speak `protocol`.
            TimeoutError: nothing happened within `deadline_s`.
        """
        ...

    async def serve(self, protocol: str, handler: StreamHandler) -> None:
        """Run `handler` for every stream that a peer opens with `protocol`.

        The handler owns its stream and closes it.
        """
        ...

    async def publish_record(self, signed: bytes, *, deadline_s: float) -> bool:
        """Store this peer's signed record for its run; False when nobody accepted it."""
        ...

    async def fetch_records(self, run_id: str, *, deadline_s: float) -> Sequence[bytes]:
        """Return the signed records of `run_id` that the store holds now, in no order."""
        ...

    async def publish_manifest(self, run_id: str, manifest: bytes, *, deadline_s: float) -> bool:
        """Store a run's manifest under its own digest; False when nobody accepted it."""
        ...

    async def fetch_manifest(
        self, run_id: str, digest: bytes, *, deadline_s: float
    ) -> bytes | None:
        """Return the manifest with this blake3 digest, or None when nobody has it."""
        ...

    async def aclose(self) -> None:
        """Leave the network and release everything; safe to call twice."""
        ...


class Clock(Protocol):
    """Wall time; durations come from the running event loop's own clock."""

    def unix_s(self) -> float:
        """Seconds since the Unix epoch (virtual in simulation)."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ModelState:
    """What a local model needs, beside its parameters, to go on exactly where it was.

    Attributes:
        tensors: moments and step counts of the inner optimizer by name, on the CPU; copies.
        next_sample: the data cursor, the number of samples that were drawn.
        warmup_steps_left: steps for which the learning rate is still lowered after the optimizer
            was started afresh; 0 otherwise.
    """

    tensors: Mapping[str, Tensor]
    next_sample: int
    warmup_steps_left: int


class LocalModel(Protocol):
    """A peer's own model with its data and its inner optimizer, whose moments never leave it."""

    @property
    def elements(self) -> int:
        """Elements P of the flat parameter vector."""
        ...

    @property
    def sizes(self) -> Sequence[int]:
        """Elements of each parameter tensor, in the order of the flat vector; their sum is P."""
        ...

    @property
    def schema_digest(self) -> bytes:
        """Digest of what the flat vector holds; peers exchange only when theirs agree."""
        ...

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one inner step."""
        ...

    def utilisation(self, tokens_per_s: float) -> float | None:
        """Return the part of the device's peak that so many tokens a second use; None: unknown."""
        ...

    def step(self, lr: float) -> SupportsFloat:
        """Do one inner step at learning rate `lr` and return its loss in nats per token.

        A device may still be at work on it; whoever turns the loss into a float waits for that.
        """
        ...

    def theta(self) -> Tensor:
        """Return a copy of the parameters, fp32 [P] on the CPU."""
        ...

    def load(self, flat: Tensor) -> None:
        """Set the parameters from `flat`, fp32 [P]; the optimizer's moments stay."""
        ...

    def validation_loss(self, flat: Tensor | None = None) -> float:
        """Return the loss of `flat`, fp32 [P], or of the current parameters, on held-out text."""
        ...

    def state(self) -> ModelState:
        """Return a copy of everything but the parameters that later steps depend on."""
        ...

    def restore(self, state: ModelState) -> None:
        """Take over a state that `state` returned; the parameters stay.

        Raises:
            ValueError: it is that of another model; nothing has changed.
        """
        ...

    def restart_optimizer(self, *, warmup_steps: int) -> None:
        """Forget the optimizer's moments; the learning rate then rises over `warmup_steps`."""
        ...


class Compute(Protocol):
    """Where blocking tensor work runs, off the event loop."""

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work` and return its result."""
        ...

    async def step(self, model: LocalModel, lr: float) -> SupportsFloat:
        """Do one inner step of `model` and return its loss; a virtual clock charges for it."""
        ...

    async def aside(self, work: Callable[[], T]) -> T:
        """Run work on files that must not hold up the work on tensors, and return its result."""
        ...
