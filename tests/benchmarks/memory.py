"""Resident memory while a vector is exchanged over two edges at a time, against its bound.

`python -m tests.benchmarks.memory [--mb 400]`: the peak of a process over its idle state may be
the codes of all edges, one mixing buffer, and 64 MiB (docs/design.md section 4).
"""

from __future__ import annotations

import argparse
import asyncio

from tests.benchmarks.exchanging import Measured
from tests.benchmarks.pair import pair

EDGES = 2
SPARE_BYTES = 64 << 20
MIB = 1 << 20


async def exchange(codec: str, elements: int) -> list[Measured]:
    """Do one exchange over all edges and return what each end measured."""
    async with pair(codec, elements=elements, edges=EDGES) as both:
        return (await both.exchange())[1]


def main() -> int:
    """Print a line per codec; return 1 when one needs more than it may."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=400, help="size of the vector in fp32 megabytes")
    parser.add_argument("--codecs", default="none,bf16,int8,mod8,mod4")
    arguments = parser.parse_args()
    elements = arguments.mb * 1_000_000 // 4
    print(f"{arguments.mb} MB of fp32 over {EDGES} edges at a time; MiB over the idle process")
    within = True
    for codec in arguments.codecs.split(","):
        for measured in asyncio.run(exchange(codec, elements)):
            allowed = EDGES * measured.code_bytes + 4 * elements + SPARE_BYTES
            peak = measured.peak_bytes - measured.idle_bytes
            within = within and peak <= allowed
            print(f"{codec:5} peak {peak / MIB:6.0f}  bound {allowed / MIB:6.0f}", flush=True)
    return 0 if within else 1


if __name__ == "__main__":
    raise SystemExit(main())
