"""Every study by name, small and at full scale."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gasloc_p2p.core.errors import ConfigError
from gasloc_p2p.studies.codec import CodecStudy
from gasloc_p2p.studies.local_steps import LocalSteps
from gasloc_p2p.studies.multi_step import MultiStep
from gasloc_p2p.studies.outer_sensitivity import OuterSensitivity
from gasloc_p2p.studies.poison import PoisonStudy
from gasloc_p2p.studies.single_step import SingleStep
from gasloc_p2p.studies.straggler import Straggler
from gasloc_p2p.studies.study import Study
from gasloc_p2p.studies.topology import TopologyStudy


@dataclass(frozen=True, kw_only=True, slots=True)
class Scales:
    """One study at two scales.

    Attributes:
        quick: for a laptop.
        full: for GPUs; None where scale makes no difference.
    """

    quick: Study
    full: Study | None


FULL_MODELS = ("134m", "551m")
FULL_DEFAULTS = {
    "inner.lr": 6e-4,
    "inner.batch_size": 64,
    "node.validate_every_rounds": 0,
    "data.validation_tokens": 2**19,
    "simulate.engine": "batched",
}
"""With the presets' windows of 1024 bytes a peer sees 65,536 in each step."""

STUDIES: Mapping[str, Scales] = {
    scales.quick.name: scales
    for scales in (
        Scales(
            quick=MultiStep(),
            # 5100 steps: eight peers see 20 bytes per parameter of the smaller model.
            full=MultiStep(
                models=FULL_MODELS,
                most_peers={"551m": 16},
                defaults={**FULL_DEFAULTS, "run.rounds": 170, "inner.local_steps": 30},
            ),
        ),
        Scales(
            quick=SingleStep(),
            full=SingleStep(
                models=FULL_MODELS,
                rates=(1.5e-4, 3e-4, 6e-4, 1.2e-3),
                defaults={
                    **{key: value for key, value in FULL_DEFAULTS.items() if key != "inner.lr"},
                    "run.rounds": 5000,
                    "inner.warmup_rounds": 250.0,
                },
            ),
        ),
        Scales(
            quick=LocalSteps(),
            full=LocalSteps(models=FULL_MODELS, total_steps=6000, defaults=FULL_DEFAULTS),
        ),
        Scales(
            quick=OuterSensitivity(),
            full=OuterSensitivity(
                models=FULL_MODELS,
                defaults={
                    **FULL_DEFAULTS,
                    "run.rounds": 40,
                    "inner.local_steps": 30,
                    "outer.force": True,
                },
            ),
        ),
        Scales(quick=TopologyStudy(), full=None),
        Scales(
            quick=PoisonStudy(),
            full=PoisonStudy(
                models=FULL_MODELS,
                defaults={**FULL_DEFAULTS, "run.rounds": 40, "inner.local_steps": 30},
            ),
        ),
        Scales(
            quick=CodecStudy(),
            full=CodecStudy(
                models=FULL_MODELS,
                defaults={**FULL_DEFAULTS, "run.rounds": 40, "inner.local_steps": 30},
            ),
        ),
        Scales(
            quick=Straggler(),
            full=Straggler(
                models=FULL_MODELS,
                defaults={
                    **FULL_DEFAULTS,
                    "run.rounds": 40,
                    "inner.schedule": "constant",
                    "inner.local_steps": 30,
                    "simulate.step_s": 1.0,
                },
            ),
        ),
    )
}
"""Every study by name."""


def study_named(name: str, *, full: bool = False) -> Study:
    """Return a study.

    Raises:
        ConfigError: there is none of this name, or none at full scale.
    """
    if name not in STUDIES:
        raise ConfigError(f"there is no study {name!r}", fix=f"use one of {', '.join(STUDIES)}")
    scales = STUDIES[name]
    if not full:
        return scales.quick
    if scales.full is None:
        raise ConfigError(
            f"the study {name} has no full scale",
            why="it trains nothing, so a larger model would change nothing",
            fix="leave --full away",
        )
    return scales.full
