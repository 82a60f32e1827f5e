"""A few peers on links of their own, for what needs no node."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from gasloc_p2p.simulate.links import Link, Partition
from gasloc_p2p.simulate.network import Hub
from tests.sim.conftest import in_virtual_time

T = TypeVar("T")


def link(
    upload_mbit: float = 0, download_mbit: float = 0, latency_s: float = 0, loss: float = 0
) -> Link:
    return Link(
        upload_mbit=upload_mbit, download_mbit=download_mbit, latency_s=latency_s, loss=loss
    )


def on(
    links: Sequence[Link],
    scenario: Callable[..., Awaitable[T]],
    partitions: Sequence[Partition] = (),
) -> T:
    """Run `scenario` with the networks of as many peers as there are links, called a, b, ..."""

    async def main() -> T:
        async with Hub(verify=lambda *_: True, links=links, partitions=partitions) as hub:
            return await scenario(*[hub.network(name, bytes) for name in "abc"[: len(links)]])

    return in_virtual_time(main)


def now_s() -> float:
    return asyncio.get_running_loop().time()
