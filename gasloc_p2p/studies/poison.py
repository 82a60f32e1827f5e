"""What does one peer that sends poison do to the others, with the guard and without it?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from gasloc_p2p.simulate.poison import NOBODY
from gasloc_p2p.studies.cell import Cell, Label, Outcome, SwarmResult
from gasloc_p2p.studies.comparison import (
    CLAIM_RULE,
    INTERVALS,
    Claim,
    difference,
    distinct,
    matching,
    titled_groups,
    verdict_sentence,
)
from gasloc_p2p.studies.format import MISSING, loss_text, percent_text
from gasloc_p2p.studies.statistics import Estimate, Verdict, estimate
from gasloc_p2p.studies.study import Setup, Study, Summary, Table, Variant, check_also

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ATTACK = "simulate.poison"
GUARD = "gossip.guard"
GUARDED, UNGUARDED = "on", "off"
BASELINE: Mapping[str, Label] = {ATTACK: NOBODY, GUARD: GUARDED}
"""What everything is compared with: nobody attacks."""

CLAIM = Claim(
    label=GUARDED,
    baseline=NOBODY,
    bound="at most",
    limit=5.0,
    words="With the guard, honest peers are within 5 % of a swarm without an attacker",
)


@dataclass(frozen=True, kw_only=True)
class PoisonStudy(Study):
    """Every attack with the guard and without it, beside a swarm in which all are honest.

    Attributes:
        attacks: values of `simulate.poison`.
    """

    name: ClassVar[str] = "poison"
    question: ClassVar[str] = "What does one peer that sends poison do to seven honest ones?"

    attacks: tuple[str, ...] = ("random", "scaled", "flipped", "stale")
    defaults: dict[str, Any] = field(
        default_factory=lambda: {
            "run.rounds": 24,
            "inner.local_steps": 10,
            "inner.batch_size": 4,
            "node.validate_every_rounds": 0,
            "simulate.engine": "batched",
        }
    )

    def cells(self, setup: Setup, stage: int, outcomes: Sequence[Outcome]) -> list[Cell]:
        """Return the honest swarm and every attack, with the guard and without, seed by seed."""
        check_also(self, [], setup.also)
        return [
            cell
            for seed in setup.evaluated
            for peers in setup.peers or self.peers
            for attack in (NOBODY, *self.attacks)
            for guard in (GUARDED, UNGUARDED)
            for cell in self.swarm_cells(
                setup,
                Variant(label="GASLoC"),
                peers=peers,
                seed=seed,
                labels={ATTACK: attack, GUARD: guard},
                settings={ATTACK: attack, GUARD: guard == GUARDED},
            )
        ]

    def summary(self, outcomes: Sequence[Outcome]) -> Summary:
        """Return the honest peers' losses, and what they are against those without an attacker."""
        groups = titled_groups(outcomes)
        return Summary(
            tables=tuple(_table(title, mine) for title, mine in groups),
            verdicts=tuple(
                (f"{title}. " if len(groups) > 1 else "")
                + verdict_sentence(CLAIM.words, _verdicts(mine))
                for title, mine in groups
            ),
            reading=(
                "Loss: mean over the honest peers of their own model's validation loss after the "
                "last training round, in nats per token. The last peer attacks from the first "
                "round to the last: random sends normal numbers as large as its parameters, scaled "
                "ten times its parameters, flipped their negative, stale the initial ones. It "
                "trains alone and takes nothing from the others. Random pairs: each honest peer "
                "meets it in one round of seven.",
                f"{INTERVALS} {CLAIM_RULE} Within x % means at most x % above.",
            ),
        )

    def figure(self, outcomes: Sequence[Outcome]) -> Figure:
        """Draw the honest peers' losses by attack, with the guard and without it."""
        from gasloc_p2p.studies.plot import legend_outside, new_figure

        groups = titled_groups(outcomes)
        figure, panels = new_figure(self.question, max(len(groups), 1), panel_size=(7.2, 4.6))
        for (title, mine), axes in zip(groups, panels, strict=False):
            _draw(axes, title, mine)
        legend_outside(figure, panels)
        return figure


def _losses(outcomes: Sequence[Outcome], wanted: Mapping[str, Label]) -> dict[int, float]:
    """Return the honest peers' loss by seed; runs that failed or ended non-finite are absent."""
    found: dict[int, float] = {}
    for outcome in matching(outcomes, wanted):
        result = outcome.result
        if isinstance(result, SwarmResult) and result.own_val_loss is not None:
            found[outcome.cell.seed] = result.own_val_loss
    return found


def _against_baseline(outcomes: Sequence[Outcome], wanted: Mapping[str, Label]) -> Estimate | None:
    return difference(_losses(outcomes, wanted), _losses(outcomes, BASELINE))


def _table(title: str, outcomes: Sequence[Outcome]) -> Table:
    rows = []
    for attack in distinct(outcomes, ATTACK):
        for guard in distinct(outcomes, GUARD):
            wanted = {ATTACK: attack, GUARD: guard}
            runs = matching(outcomes, wanted)
            if not runs:
                continue
            found = _losses(outcomes, wanted)
            lost = len(runs) - len(found)
            loss = loss_text(estimate(list(found.values())))
            compared = MISSING
            if wanted != BASELINE:
                compared = percent_text(_against_baseline(outcomes, wanted))
            ending = f" ({lost} of {len(runs)} not finite)" if lost else ""
            rows.append((str(attack), str(guard), f"{loss}{ending}", compared))
    return Table(
        title=title,
        columns=("Attack", "Guard", "Loss of honest peers", "Difference to no attacker"),
        rows=tuple(rows),
        names=2,
    )


def _verdicts(outcomes: Sequence[Outcome]) -> dict[str, Verdict]:
    return {
        str(attack): CLAIM.judge(_against_baseline(outcomes, {ATTACK: attack, GUARD: GUARDED}))
        for attack in distinct(outcomes, ATTACK)
        if attack != NOBODY
    }


def _draw(axes: Axes, title: str, outcomes: Sequence[Outcome]) -> None:
    from gasloc_p2p.studies.plot import draw_estimates

    axes.set_yscale("log")
    attacks = distinct(outcomes, ATTACK)
    for index, (guard, label) in enumerate(((GUARDED, "with the guard"), (UNGUARDED, "without"))):
        values = [
            estimate(list(_losses(outcomes, {ATTACK: attack, GUARD: guard}).values()))
            for attack in attacks
        ]
        draw_estimates(axes, index, label, values, offset=0.1 * (index - 0.5))
    for line in axes.get_lines():
        line.set_linestyle("none")
    baseline = estimate(list(_losses(outcomes, BASELINE).values()))
    if baseline is not None:
        axes.axhline(baseline.mean, color="#333333", linewidth=1.2, label="nobody attacks")
    axes.set_xticks(range(len(attacks)), [str(attack) for attack in attacks])
    axes.set_xlabel("what the attacker sends")
    axes.set_ylabel("validation loss of honest peers\n(nats per token, logarithmic)")
    axes.set_title(f"{title}; lower is better\nmean and 95 % interval over the seeds", loc="left")
