"""Studies that take a second, and what they are run with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gasloc_p2p.config import Layer
from gasloc_p2p.studies.cell import Outcome, cell_key
from gasloc_p2p.studies.codec import CodecStudy
from gasloc_p2p.studies.local_steps import LocalSteps
from gasloc_p2p.studies.measure import run_cell
from gasloc_p2p.studies.multi_step import MultiStep
from gasloc_p2p.studies.outer_sensitivity import OuterSensitivity
from gasloc_p2p.studies.poison import PoisonStudy
from gasloc_p2p.studies.single_step import SingleStep
from gasloc_p2p.studies.straggler import Straggler
from gasloc_p2p.studies.study import Setup, Study
from gasloc_p2p.studies.topology import PLAIN, TopologyStudy

FAST: dict[str, Any] = {
    "inner.batch_size": 1,
    "data.validation_tokens": 64,
    "run.closing_rounds": 0,
}
SHORT = {**FAST, "run.rounds": 2, "inner.local_steps": 1}

STUDIES: dict[str, tuple[Study, dict[str, Any]]] = {
    "multi-step": (MultiStep(peers=(3,)), SHORT),
    "single-step": (
        SingleStep(peers=(2,), rates=(0.001, 0.002)),
        {**FAST, "run.rounds": 2, "inner.warmup_rounds": 1},
    ),
    "local-steps": (LocalSteps(peers=(2,), total_steps=2, local_steps=(1, 2)), FAST),
    "outer-sensitivity": (
        OuterSensitivity(
            peers=(2,), topologies=("pairs", "complete"), lrs=(0.7, 10.0), momenta=(0.0, 0.95)
        ),
        {**FAST, "run.rounds": 20, "inner.local_steps": 1},
    ),
    "topology": (
        TopologyStudy(
            peers=(4,),
            contraction_rounds=20,
            rate_rounds=200,
            fixed_peers=8,
            fixed=(("no momentum", "cycle", *PLAIN), ("no momentum", "complete", *PLAIN)),
        ),
        {},
    ),
    "poison": (PoisonStudy(peers=(3,), attacks=("random", "stale")), SHORT),
    "codec": (
        CodecStudy(peers=(3,), codecs=("none", "bf16", "mod8", "mod4"), topologies=("ring",)),
        SHORT,
    ),
    "straggler": (Straggler(peers=(3,)), SHORT),
}


def setup_of(settings: dict[str, Any], **changes: Any) -> Setup:
    """Return what a person asks for with these settings, two seeds unless `changes` say other."""
    layers = (Layer(name="--set", values=settings),)
    return Setup(**{"layers": layers, "seeds": 2, **changes})


def outcomes_of(study: Study, setup: Setup) -> list[Outcome]:
    """Run every cell of a study in this process."""
    found: list[Outcome] = []
    for stage in range(study.stage_count):
        for cell in study.cells(setup, stage, found):
            result = run_cell(cell, lambda rounds: None)
            found.append(Outcome(key=cell_key(cell), cell=cell, result=result))
    return found


def texts(rows: Sequence[Sequence[str]]) -> str:
    """Return the cells of a table as one text."""
    return "\n".join(" | ".join(row) for row in rows)
