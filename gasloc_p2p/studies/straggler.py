"""Who waits for the slowest link or machine, in time to a loss?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from gasloc_p2p.studies.cell import Cell, Label, Outcome, SwarmCell
from gasloc_p2p.studies.comparison import (
    CLAIM_RULE,
    any_diverged,
    distinct,
    loss_cell,
    matching,
    titled_groups,
    verdict_sentence,
)
from gasloc_p2p.studies.format import MISSING, interval_text, loss_text
from gasloc_p2p.studies.statistics import Verdict, at_least, estimate
from gasloc_p2p.studies.study import Setup, Study, Summary, Table, Variant, cell_config, check_also
from gasloc_p2p.studies.time_to_loss import (
    BASELINE,
    SCENARIO,
    TARGET_SHARE,
    LossName,
    ratio_of,
    runs_of,
    targets_of,
    times_s_of,
)
from gasloc_p2p.studies.uneven import (
    LINKS,
    SPEEDS,
    TRANSFER_SHARE,
    Scenario,
    all_reduce_s,
    compute_s,
    slowest_compute_s,
    slowest_exchange_s,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OURS = "GASLoC 1-peer"
VARIANTS = (
    Variant(label=BASELINE, algorithm="diloco"),
    Variant(label=OURS, settings={"gossip.topology": "pairs"}),
    Variant(label="GASLoC 2-peer", settings={"gossip.topology": "ring"}),
    Variant(label="without adaptive H", settings={"pace.adapt_steps": False}),
    Variant(label="without stride", settings={"pace.stride": False}),
    Variant(label="with overlap", settings={"gossip.overlap": True}),
)
"""A row each; `OURS` is GASLoC's default configuration."""

SCENARIOS = (
    # Within 5 %: at most 1.05 times DiLoCo's time.
    Scenario(name="all equal", at_least=1 / 1.05),
    Scenario(name="one at 10 % bandwidth", bandwidth=0.1, at_least=3.0),
    Scenario(name="one at 20 % bandwidth", bandwidth=0.2, at_least=2.0),
    Scenario(name="one at 10 % compute", speed=0.1),
)

LOSSES: tuple[tuple[str, LossName], ...] = (
    ("averaged", "averaged_val_loss"),
    ("own", "own_val_loss"),
)


@dataclass(frozen=True, kw_only=True)
class Straggler(Study):
    """Every algorithm in swarms of which the last peer is slower, or not.

    Attributes:
        scenarios: what is uneven.
    """

    name: ClassVar[str] = "straggler"
    question: ClassVar[str] = "Who waits for the slowest link or machine?"
    takes_variants: ClassVar[bool] = True

    scenarios: tuple[Scenario, ...] = SCENARIOS
    defaults: dict[str, Any] = field(
        default_factory=lambda: {
            "run.rounds": 32,
            "inner.lr": 1e-3,
            "inner.schedule": "constant",
            "inner.local_steps": 10,
            "inner.batch_size": 4,
            "data.validation_tokens": 2048,
            "simulate.engine": "batched",
            "simulate.step_s": 1.0,
        }
    )

    def cells(self, setup: Setup, stage: int, outcomes: Sequence[Outcome]) -> list[Cell]:
        """Return every algorithm in every scenario, seed by seed."""
        check_also(self, [variant.label for variant in VARIANTS], setup.also)
        return [
            _uneven(cell, scenario)
            for seed in setup.evaluated
            for peers in setup.peers or self.peers
            for scenario in self.scenarios
            for variant in (*VARIANTS, *setup.also)
            for cell in self.swarm_cells(
                setup,
                variant,
                peers=peers,
                seed=seed,
                labels={SCENARIO: scenario.name},
                settings={
                    LINKS: [],
                    SPEEDS: [],
                    "gossip.codec": "none",
                    "node.validate_every_rounds": 1,
                },
            )
        ]

    def summary(self, outcomes: Sequence[Outcome]) -> Summary:
        """Return times to a loss by scenario, how they compare with DiLoCo's, and the claims."""
        groups = titled_groups(outcomes)
        titled = len(groups) > 1
        return Summary(
            tables=tuple(
                table
                for title, mine in groups
                for table in (
                    _scenarios_table(title, mine),
                    _times_table(title, mine),
                    _claims_table(title, mine, self.scenarios),
                )
            ),
            verdicts=tuple(
                (f"{title}. " if titled else "")
                + verdict_sentence(_words(scenario), _verdicts(mine, scenario))
                for title, mine in groups
                for scenario in _claimed(mine, self.scenarios)
            ),
            reading=(
                f"At the full rate one model takes {TRANSFER_SHARE:g} of a round's compute from "
                "one peer to another; links are full duplex, so an exchange takes no longer. "
                f"{BASELINE}'s round is the slowest compute and a ring all-reduce over the slowest "
                "link, 2 (n - 1) / n models.",
                "Seconds are virtual. They are timed to the loss that "
                f"{BASELINE} had after {100 * TARGET_SHARE:g} % of its rounds with the same seed, "
                "and the loss is taken to change evenly between two measurements. Averaged is the "
                "mean of all peers' parameters, own the mean of each peer's own loss, both of "
                f"what the peers had last; for {BASELINE} they are the same. 1-peer, GASLoC's "
                "default configuration, are random pairs, 2-peer is the random ring; rows with or "
                "without something are 1-peer but for that. Validation takes no time.",
                "± is half of the two-sided 95 % t-interval over the seeds. Ratios are paired by "
                "seed: both runs of a pair start from the same parameters and draw the same "
                f"samples. {CLAIM_RULE.replace('difference', 'ratio')} Within 5 % means at most "
                "1.05 times the time.",
            ),
        )

    def figure(self, outcomes: Sequence[Outcome]) -> Figure:
        """Draw the averaged loss over time in every scenario, and how times compare."""
        from gasloc_p2p.studies.plot import legend_outside, new_figure
        from gasloc_p2p.studies.straggler_plot import draw_curves, draw_ratios

        groups = titled_groups(outcomes)
        each = len(self.scenarios) + 1
        figure, panels = new_figure(
            self.question, each * max(len(groups), 1), columns=3, panel_size=(4.8, 4.0)
        )
        for index, (title, mine) in enumerate(groups):
            *curves, ratios = panels[each * index : each * (index + 1)]
            for axes, scenario in zip(curves, self.scenarios, strict=True):
                draw_curves(axes, title, mine, scenario.name)
            draw_ratios(ratios, mine)
        legend_outside(figure, panels)
        return figure


def _uneven(cell: SwarmCell, scenario: Scenario) -> SwarmCell:
    """Return the cell with the links and speeds that follow from its model and steps."""
    uneven = scenario.settings(cell_config(cell), cell.peers)
    return msgspec.structs.replace(cell, settings={**cell.settings, **uneven}, judged=True)


def _scenarios_table(title: str, outcomes: Sequence[Outcome]) -> Table:
    """Say what the links and machines are, and what DiLoCo's round takes by its formula."""
    rows = []
    for scenario in distinct(outcomes, SCENARIO):
        cells = matching(outcomes, {SCENARIO: scenario})
        cell = next(o.cell for o in cells if isinstance(o.cell, SwarmCell))
        config, peers = cell_config(cell), cell.peers
        round_s = compute_s(config)
        full, *_, last = (link.partition("/")[0] for link in config.simulate.links)
        all_reduce, slowest = all_reduce_s(config, peers), slowest_compute_s(config, peers)
        seconds = (slowest, slowest_exchange_s(config, peers), all_reduce, slowest + all_reduce)
        rows.append(
            (
                str(scenario),
                f"{float(full):.3f}",
                f"{float(last):.3f}",
                f"{round_s:g}",
                *(f"{one / round_s:.4f}" for one in seconds),
            )
        )
    return Table(
        title=f"{title}: what is uneven, and what follows, in a round's compute at full speed",
        columns=(
            *("Scenario", "Links (Mbit/s)", "Last link (Mbit/s)", "A round's compute (s)"),
            *("Slowest compute", "Slowest exchange", "All-reduce", f"{BASELINE}'s round"),
        ),
        rows=tuple(rows),
    )


def _times_table(title: str, outcomes: Sequence[Outcome]) -> Table:
    rows = []
    for scenario in distinct(outcomes, SCENARIO):
        target = loss_text(estimate(list(targets_of(outcomes, scenario).values())))
        for algorithm in distinct(outcomes, "algorithm"):
            runs = runs_of(outcomes, scenario, algorithm).values()
            if not runs:
                continue
            per_hour = [
                3600 * cell_config(cell).run.rounds / run.simulated_s
                for cell, run in runs
                if run.simulated_s
            ]
            millions = [run.train_tokens / 1e6 for _, run in runs if run.train_tokens is not None]
            own = [run.own_val_loss for _, run in runs if run.own_val_loss is not None]
            row = [
                str(scenario),
                str(algorithm),
                interval_text(estimate(per_hour), ".1f"),
                interval_text(estimate(millions), ".3f"),
                loss_cell(outcomes, **{SCENARIO: scenario, "algorithm": algorithm}),
                loss_text(estimate(own)),
                target,
            ]
            for _, loss in LOSSES:
                row += _time_texts(outcomes, scenario, algorithm, loss)
            rows.append(tuple(row))
    return Table(
        title=f"{title}: time to a loss",
        columns=(
            *("Scenario", "Algorithm", "Rounds per hour", "Tokens (10^6)"),
            *("Averaged loss at the end", "Own loss at the end", "Loss to reach"),
            *("Averaged reaches it after (s)", f"{BASELINE}'s time by this"),
            *("Own reaches it after (s)", f"{BASELINE}'s time by this"),
        ),
        rows=tuple(rows),
        names=2,
    )


def _time_texts(
    outcomes: Sequence[Outcome], scenario: Label, algorithm: Label, loss: LossName
) -> list[str]:
    """Return the time to the target and the ratio to DiLoCo's as text."""
    times_s = times_s_of(outcomes, scenario, algorithm, loss).values()
    text = interval_text(estimate([time_s for time_s in times_s if time_s is not None]), ".1f")
    never = sum(time_s is None for time_s in times_s)
    if never:
        text += f" ({never} of {len(times_s)} never)"
    if algorithm == BASELINE:
        return [text, MISSING]
    return [text, interval_text(ratio_of(outcomes, scenario, algorithm, loss), ".2f")]


def _claimed(outcomes: Sequence[Outcome], scenarios: Sequence[Scenario]) -> list[Scenario]:
    """Return the scenarios of which something is claimed and known."""
    known = distinct(outcomes, SCENARIO)
    return [one for one in scenarios if one.at_least is not None and one.name in known]


def _words(scenario: Scenario) -> str:
    times = scenario.at_least or 0.0
    ours = "GASLoC's default configuration is"
    if times < 1:
        return f"With {scenario.name}, {ours} within {100 / times - 100:.0f} % of {BASELINE}'s time"
    return f"With {scenario.name}, {ours} at least {times:g} times faster than {BASELINE}"


def _verdicts(outcomes: Sequence[Outcome], scenario: Scenario) -> dict[str, Verdict]:
    """Return what becomes of a scenario's claim, by the loss that is timed."""
    found: dict[str, Verdict] = {}
    for name, loss in LOSSES:
        wild = any(
            any_diverged(outcomes, **{SCENARIO: scenario.name, "algorithm": one})
            for one in (OURS, BASELINE)
        )
        never = None in times_s_of(outcomes, scenario.name, OURS, loss).values()
        ratio = None if wild or never else ratio_of(outcomes, scenario.name, OURS, loss)
        found[f"{name} loss"] = at_least(ratio, scenario.at_least or 0.0)
    return found


def _claims_table(title: str, outcomes: Sequence[Outcome], scenarios: Sequence[Scenario]) -> Table:
    return Table(
        title=f"{title}: claims of {OURS}",
        columns=("Scenario", "Loss", f"{BASELINE}'s time by GASLoC's", "Limit", "Verdict"),
        rows=tuple(
            (
                scenario.name,
                name,
                interval_text(ratio_of(outcomes, scenario.name, OURS, loss), ".2f"),
                f"≥ {scenario.at_least:.3g}",
                verdict,
            )
            for scenario in _claimed(outcomes, scenarios)
            for (name, loss), verdict in zip(
                LOSSES, _verdicts(outcomes, scenario).values(), strict=True
            )
        ),
        names=2,
    )
