"""Options that `gasloc` commands share; imports nothing heavy."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer


class OutputFormat(enum.StrEnum):
    """How figures are written."""

    TEXT = "text"
    JSON = "json"


Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="SECTION.KEY=VALUE",
        help="Change one setting; may be repeated. `gasloc config show` lists them all.",
    ),
]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="Read settings from a TOML file.")
]
Format = Annotated[OutputFormat, typer.Option("--format", help="A table, or JSON (docs/bench.md).")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks and debugging output.")]
Peers = Annotated[int, typer.Option(min=1, max=256, help="How many peers.")]
Rounds = Annotated[int | None, typer.Option(help="Training rounds. [default: 32]")]
Topology = Annotated[
    str | None,
    typer.Option(
        help="Who exchanges: pairs, ring, complete, cycle, exponential, none. [default: pairs]"
    ),
]
AlgorithmName = Annotated[
    str,
    typer.Option(
        metavar="NAME", help="gasloc, diloco, dadam, local-dadam, noloco or ddp (docs/design.md)."
    ),
]
EngineName = Annotated[
    str | None,
    typer.Option(
        help="exact: as real nodes compute, bit for bit. batched: many peers at once, quicker. "
        "[default: exact]"
    ),
]
Codec = Annotated[
    str | None,
    typer.Option(help="none (fp32), bf16, fp16, int8, int4, mod8 or mod4. [default: none]"),
]
LocalSteps = Annotated[
    int | None, typer.Option(help="Inner steps of each peer in a round. [default: 30]")
]
Seed = Annotated[
    int | None, typer.Option(help="Seed of parameters, pairings and samples. [default: 0]")
]
CompareSolo = Annotated[
    bool, typer.Option("--compare-solo", help="Also train the same peers alone, and compare.")
]
Report = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write a JSON report (see docs/report.md).")
]
Keep = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Keep reports, parameters, identities and logs in this folder.",
    ),
]
ChaosSeed = Annotated[
    int | None,
    typer.Option(
        min=0,
        metavar="SEED",
        help="Kill, stop, restart and cut off nodes while they train, as drawn from this seed.",
    ),
]
