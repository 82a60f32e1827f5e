"""One exchange of parameters between two processes: hivemind's averager, and ours.

    python -m tests.benchmarks.averager --rounds 5
    python -m tests.benchmarks.averager --link --mbit 100 --rtt-ms 100

Each round both processes average the same number of fp32 parameters; its time runs from the word
to begin until both have the result. Groups are warm: the first round is not counted. Rounds of the
sides that are compared alternate, so that whatever else the machine does meets all of them alike.
`--link` needs Linux and root. Prints JSON: seconds a round, medians and all.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final, TypeAlias

from tests.benchmarks.pair import leave, line_of, pair
from tests.benchmarks.tapnet import EmulatedLink, emulated_link

ELEMENTS: Final = 25_000_000
ROUND_S: Final = 120.0
LOOPBACK: Final = "127.0.0.1"
SIDES: Final = ["hivemind:none", "ours:none", "hivemind:fp16", "ours:mod8", "ours:mod4"]

OneRound: TypeAlias = Callable[[], Awaitable[float]]
"""Does a round and returns its seconds."""


@asynccontextmanager
async def hivemind(
    compression: str, elements: int, link: EmulatedLink | None
) -> AsyncIterator[OneRound]:
    """Start two processes with a `DecentralizedAverager` each.

    Args:
        compression: none or fp16.
        elements: fp32 parameters.
        link: between the two; None for loopback.
    """
    async with AsyncExitStack() as undo:
        ends = []
        contact = ""
        for index in range(2):
            inside = link.inside(index) if link is not None else ()
            address = link.addresses[index] if link is not None else LOOPBACK
            command = (sys.executable, "-m", "tests.benchmarks.averager", "--end", str(index))
            what = ("--compression", compression, "--elements", str(elements))
            end = await asyncio.create_subprocess_exec(
                *inside, *command, *what, "--address", address, "--contact", contact,
                stdin=PIPE, stdout=PIPE,
            )  # fmt: skip
            undo.push_async_callback(leave, end)
            contact = contact or await line_of(end)
            ends.append(end)
        await line_of(ends[1])

        async def one_round() -> float:
            began_s = time.monotonic()
            for end in ends:
                assert end.stdin is not None
                end.stdin.write(b"go\n")
            # The clock of all processes is the machine's.
            return max([float(await line_of(end)) for end in ends]) - began_s

        yield one_round


@asynccontextmanager
async def ours(codec: str, elements: int, link: EmulatedLink | None) -> AsyncIterator[OneRound]:
    """Start two processes that exchange with `codec` as nodes do, over real p2pd."""
    async with pair(codec, elements=elements, link=link) as both:

        async def one_round() -> float:
            seconds, _ = await both.exchange()
            return seconds

        yield one_round


def be_an_end(given: argparse.Namespace) -> None:
    """Average whenever a line comes in, until standard input closes.

    hivemind forks, which a process with torch threads must not.
    """
    import torch
    from hivemind import DHT
    from hivemind.averaging import DecentralizedAverager
    from hivemind.compression import Float16Compression, NoCompression

    from gasloc_p2p.core.codecs import codec_named
    from tests.benchmarks.exchanging import vectors

    torch.set_num_threads(1)
    dht = DHT(
        initial_peers=json.loads(given.contact) if given.contact else [],
        host_maddrs=[f"/ip4/{given.address}/tcp/0"],
        start=True,
    )
    averager = DecentralizedAverager(
        [vectors(given.elements, int(given.end), codec_named("none"))[0]],
        dht,
        prefix="bench",
        target_group_size=2,
        min_group_size=2,
        compression=Float16Compression() if given.compression == "fp16" else NoCompression(),
        start=True,
    )
    print(json.dumps([str(address) for address in dht.get_visible_maddrs()]), flush=True)
    for _ in sys.stdin:
        averager.step(timeout=ROUND_S)
        print(time.monotonic(), flush=True)
    averager.shutdown()
    dht.shutdown()


async def compare(given: argparse.Namespace) -> dict[str, object]:
    """Do rounds of each side in turn and return their times."""
    async with AsyncExitStack() as undo:
        link = None
        if given.link:
            building = emulated_link(mbit=given.mbit, rtt_ms=given.rtt_ms)
            link = await undo.enter_async_context(building)
        sides = {}
        for name in given.sides:
            kind, _, codec = name.partition(":")
            side = hivemind if kind == "hivemind" else ours
            sides[name] = await undo.enter_async_context(side(codec, given.elements, link))
        times: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(given.rounds + 1):
            for name, one_round in sides.items():
                times[name].append(round(await one_round(), 4))
    return {
        "elements": given.elements,
        "link": {"mbit": given.mbit, "rtt_ms": given.rtt_ms} if given.link else None,
        "median_s": {name: statistics.median(own[1:]) for name, own in times.items()},
        "seconds": {name: own[1:] for name, own in times.items()},
    }


def main() -> None:
    """Compare, or be an end of a comparison."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sides", nargs="+", default=SIDES)
    parser.add_argument("--elements", type=int, default=ELEMENTS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--link", action="store_true", help="over an emulated link")
    parser.add_argument("--mbit", type=float, default=100.0)
    parser.add_argument("--rtt-ms", type=float, default=100.0)
    for hidden in ("--end", "--address", "--contact", "--compression"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.end is not None:
        be_an_end(given)
    else:
        print(json.dumps(asyncio.run(compare(given)), indent=1))


if __name__ == "__main__":
    main()
