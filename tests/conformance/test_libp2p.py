"""libp2p keeps what every network promises."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence

import pytest
import pytest_asyncio

from gasloc_p2p.core.substrate import Network
from gasloc_p2p.net.identity import Identity
from gasloc_p2p.net.network import Libp2pNetwork
from gasloc_p2p.net.settings import NetConfig
from gasloc_p2p.testing.conformance import CHECKS, Check, Trial
from tests.p2p.spread import spread_at_once, stay_on_one_lane

pytestmark = [pytest.mark.p2p, pytest.mark.asyncio(loop_scope="module")]


async def start_node(index: int, bootstrap: Sequence[str] = ()) -> Libp2pNetwork:
    return await Libp2pNetwork.create(
        Identity.derived(seed=0, index=index),
        NetConfig(listen=("/ip4/127.0.0.1/tcp/0",), bootstrap=tuple(bootstrap), join_attempts=1),
    )


@pytest.fixture(
    scope="module",
    params=[stay_on_one_lane, spread_at_once],
    ids=lambda spread: spread.__name__,
)
def spread(request: pytest.FixtureRequest) -> Iterator[None]:
    """Have streams stay on one lane, and then all of it again over several."""
    with pytest.MonkeyPatch.context() as patch:
        request.param(patch)
        yield


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(spread: None) -> AsyncIterator[tuple[Libp2pNetwork, Libp2pNetwork]]:
    """The two nodes that serve all checks, the second joined through the first."""
    first = await start_node(0)
    second = await start_node(1, await first.addresses())
    yield first, second
    await second.aclose()
    await first.aclose()


@pytest.mark.parametrize("check", CHECKS, ids=str)
async def test_promise(check: Check, pair: tuple[Libp2pNetwork, Libp2pNetwork]) -> None:
    own: list[Libp2pNetwork] = []

    async def start(index: int) -> Network:
        if index < len(pair):
            return pair[index]
        own.append(await start_node(index, await pair[0].addresses()))
        return own[-1]

    try:
        await check.run(Trial(start=start))
    finally:
        for network in own:
            await network.aclose()
