"""Real nodes behind uneven links: how much of the time does each compute, in three modes?

    python -m tests.benchmarks.uneven docs/benchmarks/uneven.md

measures and writes the table; Linux, as root, on a machine that does nothing else. With `--keep`
the nodes' logs stay in a folder; `--modes` runs some of the modes only.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path

from gasloc_p2p.machine import this_machine
from tests.netns.uneven import ELEMENTS, LOCAL_STEPS, MODEL, MODES, SLOW, Measured, Stretch, measure

TITLES = {
    "default": "default",
    "overlap": "`gossip.overlap=true`",
    "diloco": "DiLoCo mode: `gossip.topology=complete`, `pace.adapt_steps=false`",
}


def arguments() -> argparse.Namespace:
    """Return what the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("page", nargs="?", type=Path, help="file to write the table into")
    parser.add_argument("--keep", type=Path, help="an empty folder for homes and logs")
    names = [mode.name for mode in MODES]
    parser.add_argument("--modes", nargs="+", choices=names, default=names)
    return parser.parse_args()


async def main() -> None:
    """Measure every mode and print the table."""
    given = arguments()
    modes = [mode for mode in MODES if mode.name in given.modes]
    found: list[Measured] = []
    with ExitStack() as undo:
        folder = given.keep or Path(undo.enter_context(tempfile.TemporaryDirectory()))
        for mode in modes:
            (folder / mode.name).mkdir(parents=True)
            found.append(await measure(mode, folder / mode.name))
            print(details(found[-1]), flush=True)
    text = page(found)
    print(text)
    if given.page is not None:
        given.page.write_text(text)


def details(measured: Measured) -> str:
    """Return what each node spent its time on, per round."""
    lines = [f"{measured.mode.name}: {measured.mbit:.1f} Mbit/s"]
    for node in measured.nodes:
        rounds = len(node.rounds)
        exchange_s = sum(report.exchange_s for report in node.rounds)
        parts_s = {
            "wall": node.wall_s,
            "train": node.train_s,
            "exchange": exchange_s,
            "rest": node.wall_s - node.train_s - exchange_s,
            "wait": sum(report.wait_s for report in node.rounds),
        }
        lines.append("  ".join(f"{name} {s / rounds:.2f} s" for name, s in parts_s.items()))
    return "\n".join(lines)


def page(found: Sequence[Measured]) -> str:
    """Return the section of docs/benchmarks.md about these measurements."""
    rows = "\n".join(row(measured, index) for measured in found for index in range(SLOW + 1))
    counted = "; ".join(
        f"{TITLES[measured.mode.name]}: rounds {measured.mode.first} to {measured.mode.last}"
        for measured in found
    )
    links = "; ".join(
        f"{TITLES[measured.mode.name]}: {measured.mbit:.1f} Mbit/s, "
        f"{100 * measured.transfer_share:.1f} %"
        for measured in found
    )
    return f"""## uneven: How much of the time do real nodes compute when one has a slow link?

Four nodes in network namespaces around a switch, each with its own p2pd; the link of the last one
has a tenth of the rate of the others. `{MODEL}`, {ELEMENTS / 1e6:.1f} M parameters as fp32,
{LOCAL_STEPS} inner steps a round.

| | Node | Computes | Rounds | Stride | Steps a round | Edges mixed, of these late | Failed |
|---|---|---|---|---|---|---|---|
{rows}

Computes: time of inner steps by wall time, from the end of the round before the first that counts
to the end of the last, all in between included. Counted rounds ({counted}) begin once rates are
known; a run stops right after them, so its closing rounds are not there. Nodes do not validate.

Links are shaped in both directions by the kernel's token bucket. After each round they get their
rates anew, so that at the full rate a peer's parameters take a tenth of a round's inner steps,
however busy the machine is; the median of that rate, and the parameters at it by inner steps, in
the rounds that count: {links}.

Made with

    python -m tests.benchmarks.uneven docs/benchmarks/uneven.md

on {datetime.now(UTC):%Y-%m-%d} on {this_machine().sentence()}.
"""


def row(measured: Measured, index: int) -> str:
    """Return the line of one node in one mode."""
    node: Stretch = measured.nodes[index]
    late = sum(edge.late > 0 for edge in node.mixed)
    cells = (
        TITLES[measured.mode.name] if index == 0 else "",
        f"{index}, slow link" if index == SLOW else f"{index}",
        f"{100 * node.computes:.1f} %",
        f"{len(node.rounds)}",
        f"{max(report.every for report in node.rounds)}",
        f"{node.steps / len(node.rounds):.0f}",
        f"{len(node.mixed)}, {late}",
        f"{len(node.edges) - len(node.mixed)}",
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    asyncio.run(main())
