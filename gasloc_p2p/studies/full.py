"""What a study at full scale needs, said before anything starts."""

from __future__ import annotations

import msgspec

from gasloc_p2p.core.errors import ConfigError
from gasloc_p2p.machine import usable_cores, visible_gpus
from gasloc_p2p.studies.cell import SwarmCell
from gasloc_p2p.studies.estimate import (
    device_gib,
    measured_rate,
    train_flops,
    train_tokens,
)
from gasloc_p2p.studies.run import Plan

PROBE = {"model.preset": "tiny", "inner.batch_size": 8, "simulate.engine": "batched"}
"""A model that any machine runs, by which the rate of one without a GPU is measured."""

ACTIVATIONS_GIB = 16.0
"""What a GPU must hold beside parameters and moments."""


def full_text(plan: Plan) -> str:
    """Say in one sentence how much computing a study at full scale is, and how long it takes here.

    Args:
        plan: at full scale.
    """
    cells = [cell for cell in plan.cells if isinstance(cell, SwarmCell)]
    flops = sum(map(train_flops, cells))
    tokens = sum(map(train_tokens, cells))
    rate = (len(visible_gpus()) or usable_cores()) * _rate(plan, cells[0])
    hours = float(f"{flops / rate / 3600:.2g}")
    return (
        f"{len(cells)} simulations on {tokens:.2g} tokens, {flops:.2g} floating point operations "
        f"(6 x parameters x tokens), take about {hours:,.0f} hours at the "
        f"{rate / 1e12:.2g} TFLOP/s that this machine was measured at"
    )


def require_full(plan: Plan) -> None:
    """Refuse a study at full scale on a machine that cannot run it.

    Raises:
        ConfigError: there is no GPU, none that is large enough, or no text of one's own.
    """
    import torch

    largest = max(device_gib(cell) for cell in plan.cells if isinstance(cell, SwarmCell))
    need_gib = largest + ACTIVATIONS_GIB
    missing = []
    if not visible_gpus():
        missing.append("there is no CUDA device")
    else:
        held_gib = torch.cuda.get_device_properties(0).total_memory / 2**30
        if held_gib < need_gib:
            missing.append(f"its GPU has {held_gib:.0f} GiB")
    if not plan.config.data.path:
        missing.append("data.path is empty")
    if missing:
        raise ConfigError(
            f"this machine cannot run the study {plan.study.name} at full scale: "
            f"{' and '.join(missing)}",
            why=full_text(plan),
            fix=f"have a GPU of at least {need_gib:.0f} GiB (with several GPUs as many simulations "
            "run at a time) and FineWeb as text files in a folder, then: gasloc study "
            f"{plan.study.name} --full --out DIR --set data.path=FOLDER",
        )


def _rate(plan: Plan, example: SwarmCell) -> float:
    """Return floating point operations per second of one process, measured for a second."""
    assert plan.corpus is not None
    settings = example.settings if visible_gpus() else {**example.settings, **PROBE}
    alone = msgspec.structs.replace(example, peers=1, settings=settings)
    return measured_rate(alone, plan.corpus)
