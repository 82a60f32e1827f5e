"""The simulated network keeps what every network promises, on whatever link."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from gasloc_p2p.core.substrate import Network
from gasloc_p2p.net.identity import Identity
from gasloc_p2p.simulate.links import LINKS, Link, Partition, parse_link, parse_partition
from gasloc_p2p.simulate.network import Hub
from gasloc_p2p.testing.clock import in_virtual_time
from gasloc_p2p.testing.conformance import CHECKS, Check, Trial
from gasloc_p2p.testing.network import FaultyNetwork

CONDITIONS: dict[str, tuple[Sequence[Link], Sequence[Partition]]] = {
    "none given": ((), ()),
    **{name: ([named] * 3, ()) for name, named in LINKS.items()},
    "one ideal end": ([LINKS["ideal"], LINKS["cable"]], ()),
    "no limit but latency": ([parse_link("0/0/0.1/0")] * 3, ()),
    "lossy": ([parse_link("0/0/0/0.05")] * 3, ()),
    "behind a faulty network": ([LINKS["lan"]] * 3, ()),
    "partitions": ([LINKS["lan"]] * 2, [parse_partition(f"{t}.01-{t + 5}:1") for t in range(6)]),
}


@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("check", CHECKS, ids=str)
def test_promise(check: Check, condition: str) -> None:
    links, partitions = CONDITIONS[condition]

    async def main() -> None:
        async with Hub(verify=Identity.verify, links=links, partitions=partitions) as hub:
            networks: dict[int, Network] = {}

            async def start(index: int) -> Network:
                if index not in networks:
                    identity = Identity.derived(seed=0, index=index)
                    networks[index] = hub.network(identity.peer_id, identity.sign)
                    if condition == "behind a faulty network":
                        networks[index] = FaultyNetwork(networks[index], [])
                return networks[index]

            await check.run(
                Trial(
                    start=start,
                    wait_s=1000.0,
                    # Nothing is prompt while a partition lasts.
                    prompt_s=60.0 if partitions else 2.0,
                    # The path itself holds 250 MB where only latency holds them up.
                    buffered_bytes=(512 if condition == "no limit but latency" else 64) << 20,
                )
            )

    in_virtual_time(main)
