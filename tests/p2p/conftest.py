"""Nodes on loopback, each with a p2pd of its own, all of them gone after the test."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import TypeAlias

import pytest

from gasloc_p2p.core.records import Reachability, Record, sign_record
from gasloc_p2p.net.identity import Identity
from gasloc_p2p.net.network import Libp2pNetwork
from gasloc_p2p.net.settings import NetConfig
from tests.p2p.spread import spread_at_once, stay_on_one_lane

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)

StartNode: TypeAlias = Callable[..., Awaitable[Libp2pNetwork]]
MakeRecord: TypeAlias = Callable[..., bytes]


@asynccontextmanager
async def _nodes() -> AsyncIterator[StartNode]:
    async with AsyncExitStack() as nodes:

        async def start(index: int, bootstrap: Sequence[str] = ()) -> Libp2pNetwork:
            node = await Libp2pNetwork.create(
                Identity.derived(seed=0, index=index),
                NetConfig(listen=LOOPBACK, bootstrap=tuple(bootstrap), join_attempts=1),
            )
            nodes.push_async_callback(node.aclose)
            return node

        yield start


@pytest.fixture(params=[stay_on_one_lane, spread_at_once], ids=lambda spread: spread.__name__)
def spread(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test twice, the second time with streams that spread."""
    request.param(monkeypatch)


@pytest.fixture
def nodes() -> Callable[[], AbstractAsyncContextManager[StartNode]]:
    """Return a context manager, for any event loop, inside which nodes can be started."""
    return _nodes


@pytest.fixture
async def start_node() -> AsyncIterator[StartNode]:
    """Return a function that starts node `index`: `await start_node(index, bootstrap)`."""
    async with _nodes() as start:
        yield start


@pytest.fixture
def make_record() -> MakeRecord:
    """Return a function that signs a record: `make_record(identity, seq=.., expires_in_s=..)`."""

    def make(
        identity: Identity, *, run_id: str = "run", seq: int = 1, expires_in_s: float = 600.0
    ) -> bytes:
        record = Record(
            run_id=run_id,
            peer_id=identity.peer_id,
            seq=seq,
            signed_round=0,
            first_round=0,
            lease_until=4,
            reachability=Reachability.PUBLIC,
            cycle_s=0.0,
            expires_at=time.time() + expires_in_s,
        )
        return sign_record(record, identity.sign)

    return make
