"""What an exchange between two nodes reaches on a slow and long link, per transport.

    python -m tests.benchmarks.link --mbit 100 --rtt-ms 100 --mb 40

Linux, as root. Two processes in network namespaces of their own, each with its p2pd, exchange the
bytes both ways at once, again and again over one connection. Goodput is the bytes of one direction
by the time from the start of the exchange, opening its streams included, until its last byte has
arrived. `plain` is TCP without libp2p over connections that stay open, as a bound. `tcp` and `quic`
keep each stream on one lane, `node` lets it spread as it does for a node.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from asyncio.subprocess import PIPE
from collections.abc import Sequence

import msgspec

from tests.benchmarks.ends import Plan, Timing
from tests.benchmarks.tapnet import EmulatedLink, emulated_link

ENDS = (sys.executable, "-m", "tests.benchmarks.ends")


def arguments() -> argparse.Namespace:
    """Return what the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mbit", type=float, default=100.0, help="rate of each direction")
    parser.add_argument("--rtt-ms", type=float, default=100.0)
    parser.add_argument("--queue-ms", type=float, default=200.0, help="what the routers hold")
    parser.add_argument("--mb", type=float, default=40.0, help="megabytes (10^6) each way")
    parser.add_argument("--transports", nargs="+", default=["plain", "tcp", "node", "quic"])
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--exchanges", type=int, default=4)
    parser.add_argument("--pause-s", type=float, default=1.0, help="between exchanges")
    parser.add_argument("--keep", action="store_true", help="streams stay open between exchanges")
    parser.add_argument("--congestion", default="", help="of TCP: cubic, bbr; default: as it is")
    parser.add_argument("--cap-mbit", type=float, default=0.0, help="net.upload_mbit of both")
    return parser.parse_args()


async def run(link: EmulatedLink, plan: Plan) -> list[Timing]:
    """Start both ends and return the timings of their exchanges."""
    text = msgspec.json.encode(plan).decode()
    dialled = await asyncio.create_subprocess_exec(
        *link.inside(0), *ENDS, text, "0", stdin=PIPE, stdout=PIPE
    )
    assert dialled.stdin is not None
    assert dialled.stdout is not None
    try:
        contact = (await dialled.stdout.readline()).decode().strip()
        dialling = await asyncio.create_subprocess_exec(
            *link.inside(1), *ENDS, text, "1", contact, stdout=PIPE
        )
        said, _ = await dialling.communicate()
    finally:
        dialled.stdin.close()
        await dialled.wait()
    if dialling.returncode != 0:
        raise SystemExit("the end that dials has failed; see above")
    return msgspec.json.decode(said.splitlines()[-1], type=list[Timing])


def row(plan: Plan, timings: Sequence[Timing], line_mbit: float) -> str:
    """Return a line of the table: the first, the second and the median of all later exchanges."""
    cells = [plan.transport.ljust(6), f"{plan.streams:7}"]
    for some in (timings[:1], timings[1:2], timings[2:]):
        if some:
            rates = [
                plan.exchange_bytes * 8e-6 / statistics.median(times)
                for times in ([t.up_s for t in some], [t.down_s for t in some])
            ]
            slowest = 100 * min(rates) / line_mbit
            cells.append(f"{rates[0]:7.1f} {rates[1]:7.1f} {slowest:4.0f} %")
    return " | ".join(cells)


async def main() -> None:
    """Measure everything that the command line asks for, and print a table."""
    given = arguments()
    line_mbit = given.cap_mbit or given.mbit
    heading = "up, down (Mbit/s), slower of both"
    print(f"{given.mbit:g} Mbit/s, {given.rtt_ms:g} ms, {given.mb:g} MB each way; {heading}")
    print("       | streams | first exchange         | second                 | later, median")
    async with emulated_link(
        mbit=given.mbit,
        rtt_ms=given.rtt_ms,
        queue_ms=given.queue_ms,
        congestion=given.congestion,
    ) as link:
        for transport in given.transports:
            for streams in given.streams:
                plan = Plan(
                    transport=transport,
                    addresses=link.addresses,
                    streams=streams,
                    exchange_bytes=int(given.mb * 1e6),
                    exchanges=given.exchanges,
                    pause_s=given.pause_s,
                    keep=given.keep or transport == "plain",
                    cap_mbit=given.cap_mbit,
                )
                print(row(plan, await run(link, plan), line_mbit), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
