"""What do compressed exchanges cost in loss, and what do they save in bytes?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from gasloc_p2p.studies.cell import Cell, Label, Outcome, SwarmResult
from gasloc_p2p.studies.comparison import (
    CLAIM_RULE,
    INTERVALS,
    any_diverged,
    difference,
    distinct,
    matching,
    titled_groups,
    verdict_sentence,
)
from gasloc_p2p.studies.format import interval_text, loss_text, percent_text
from gasloc_p2p.studies.statistics import Estimate, Verdict, at_most, estimate
from gasloc_p2p.studies.study import Setup, Study, Summary, Table, Variant, check_also

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CODEC = "gossip.codec"
TOPOLOGY = "gossip.topology"
BASELINE = "none"
"""The codec that the others are compared with: fp32."""

AVERAGED, OWN = "averaged_val_loss", "own_val_loss"
DISTANCE, BITS = "consensus_distance", "bits_per_parameter"

LINEAR_PERCENT = 0.5
TICKS_PERCENT = (-0.5, -0.25, 0.0, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0)
LINES = ("-", "--", ":", "-.")

Unit: TypeAlias = Literal["%", "times", "bits"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """What is claimed of one codec.

    Attributes:
        codec: the codec.
        name: of the figure, for a person.
        figure: field of `SwarmResult`.
        unit: "%" above the baseline's value, "times" that value, or "bits" by themselves.
        most: the claim's limit in this unit.
        words: the claim as a sentence without its verdict.
    """

    codec: str
    name: str
    figure: str
    unit: Unit
    most: float
    words: str


def _loss_limit(codec: str, name: str, figure: str, most: float) -> Limit:
    words = f"With {codec} the {name} is within {most:g} % of that without compression"
    return Limit(codec=codec, name=name, figure=figure, unit="%", most=most, words=words)


def _bits_limit(codec: str, most: float) -> Limit:
    words = f"{codec} sends at most {most:g} bits per parameter"
    name = "bits per parameter"
    return Limit(codec=codec, name=name, figure=BITS, unit="bits", most=most, words=words)


CLAIMS = (
    _loss_limit("mod8", "averaged loss", AVERAGED, 0.1),
    _loss_limit("mod8", "own loss", OWN, 0.1),
    _loss_limit("mod4", "averaged loss", AVERAGED, 0.4),
    _loss_limit("mod4", "own loss", OWN, 0.4),
    Limit(
        codec="mod8",
        name="distance",
        figure=DISTANCE,
        unit="times",
        most=2.0,
        words="With mod8 the distance is at most twice that without compression",
    ),
    _bits_limit("mod8", 8.5),
    _bits_limit("mod4", 4.8),
)


@dataclass(frozen=True, kw_only=True)
class CodecStudy(Study):
    """Every codec on every topology, with the same steps and seeds.

    Attributes:
        codecs: values of `gossip.codec`, `BASELINE` among them.
        topologies: values of `gossip.topology`.
    """

    name: ClassVar[str] = "codec"
    question: ClassVar[str] = "What do compressed exchanges cost in loss, and save in bytes?"

    codecs: tuple[str, ...] = (BASELINE, "bf16", "fp16", "int8", "int4", "mod8", "mod4")
    topologies: tuple[str, ...] = ("pairs", "ring")
    defaults: dict[str, Any] = field(
        default_factory=lambda: {
            "run.rounds": 40,
            "inner.lr": 1e-3,
            "inner.local_steps": 30,
            "inner.batch_size": 4,
            "node.validate_every_rounds": 0,
            "simulate.engine": "batched",
        }
    )

    def cells(self, setup: Setup, stage: int, outcomes: Sequence[Outcome]) -> list[Cell]:
        """Return every codec on every topology, seed by seed."""
        check_also(self, [], setup.also)
        return [
            cell
            for seed in setup.evaluated
            for peers in setup.peers or self.peers
            for topology in self.topologies
            for codec in self.codecs
            for cell in self.swarm_cells(
                setup,
                Variant(label="GASLoC"),
                peers=peers,
                seed=seed,
                labels={TOPOLOGY: topology, CODEC: codec},
                settings={TOPOLOGY: topology, CODEC: codec},
            )
        ]

    def summary(self, outcomes: Sequence[Outcome]) -> Summary:
        """Return losses, distances, bits and repairs by codec, and what the claims make of them."""
        groups = titled_groups(outcomes)
        titled = len(groups) > 1
        return Summary(
            tables=tuple(
                table
                for title, mine in groups
                for table in (_figures_table(title, mine), _claims_table(title, mine))
            ),
            verdicts=tuple(
                (f"{title}. " if titled else "") + verdict_sentence(claim.words, verdicts)
                for title, mine in groups
                for claim, verdicts in _judged(mine)
            ),
            reading=(
                "Losses: validation loss after the last training round in nats per token, of the "
                "averaged model, and in the mean over the peers of each one's own model. Distance: "
                "root mean square over the peers of their distance to the averaged model, by its "
                "norm. The difference of a loss and the ratio of a distance are to those of the "
                f"codec {BASELINE}.",
                "Bits: all that was written to the streams of all edges and rounds, hand-shakes, "
                "scales, checks and repairs included, by the parameters that were mixed; both "
                "directions of an edge count by themselves. Repaired: share of the blocks that "
                "were sent again because a partner had misunderstood them, over all rounds.",
                f"{INTERVALS} {CLAIM_RULE} Within x % means at most x % above.",
            ),
        )

    def figure(self, outcomes: Sequence[Outcome]) -> Figure:
        """Draw what is lost against what is sent, and repairs by round."""
        from gasloc_p2p.studies.plot import legend_outside, new_figure

        groups = titled_groups(outcomes)
        across = len(self.topologies) + 1
        figure, panels = new_figure(
            self.question, across * max(len(groups), 1), columns=across, panel_size=(4.9, 4.4)
        )
        for index, (title, mine) in enumerate(groups):
            *losses, repairs = panels[across * index : across * (index + 1)]
            for axes, topology in zip(losses, self.topologies, strict=True):
                _draw_losses(axes, f"{title}, {topology}", mine, topology)
            _draw_repairs(repairs, mine)
        legend_outside(figure, panels)
        return figure


def _values(
    outcomes: Sequence[Outcome], figure: str, topology: Label, codec: Label
) -> dict[int, float]:
    """Return a figure by seed; runs that failed or have none are absent."""
    found: dict[int, float] = {}
    for outcome in matching(outcomes, {TOPOLOGY: topology, CODEC: codec}):
        value = getattr(outcome.result, figure, None)
        if value is not None:
            found[outcome.cell.seed] = value
    return found


def _compared(
    outcomes: Sequence[Outcome], figure: str, unit: Unit, topology: Label, codec: Label
) -> Estimate | None:
    """Return a figure in a unit of `Limit`; of the baseline itself only bits."""
    if codec == BASELINE and unit != "bits":
        return None
    values = _values(outcomes, figure, topology, codec)
    if unit == "bits":
        return estimate(list(values.values()))
    baseline = _values(outcomes, figure, topology, BASELINE)
    if unit == "%":
        return difference(values, baseline)
    return estimate([values[seed] / baseline[seed] for seed in values if baseline.get(seed)])


def _text(value: Estimate | None, unit: Unit) -> str:
    return percent_text(value) if unit == "%" else interval_text(value, ".2f")


def _runs(outcomes: Sequence[Outcome], topology: Label, codec: Label) -> list[SwarmResult]:
    matched = matching(outcomes, {TOPOLOGY: topology, CODEC: codec})
    return [o.result for o in matched if isinstance(o.result, SwarmResult)]


def _repaired_share(outcomes: Sequence[Outcome], topology: Label, codec: Label) -> Estimate | None:
    """Return the share of repaired blocks over all rounds, in percent."""
    shares = [run.repaired_shares for run in _runs(outcomes, topology, codec)]
    return estimate([100 * sum(found) / len(found) for found in shares if found])


def _figures_table(title: str, outcomes: Sequence[Outcome]) -> Table:
    rows = []
    for topology in distinct(outcomes, TOPOLOGY):
        for codec in distinct(outcomes, CODEC):
            runs = _runs(outcomes, topology, codec)
            if not runs:
                continue
            wild = sum(run.diverged for run in runs)
            row = [str(topology), str(codec) + (f" ({wild} diverged)" if wild else "")]
            for figure in (AVERAGED, OWN):
                loss = estimate(list(_values(outcomes, figure, topology, codec).values()))
                row += [
                    loss_text(loss),
                    percent_text(_compared(outcomes, figure, "%", topology, codec)),
                ]
            distance = estimate(list(_values(outcomes, DISTANCE, topology, codec).values()))
            row += [
                loss_text(distance),
                _text(_compared(outcomes, DISTANCE, "times", topology, codec), "times"),
                _text(_compared(outcomes, BITS, "bits", topology, codec), "bits"),
                interval_text(_repaired_share(outcomes, topology, codec), ".2f"),
            ]
            rows.append(tuple(row))
    return Table(
        title=title,
        columns=(
            *("Topology", "Codec", "Averaged loss", "Difference", "Own loss", "Difference"),
            *("Distance", "Ratio", "Bits per parameter", "Repaired (%)"),
        ),
        rows=tuple(rows),
        names=2,
    )


def _verdict(outcomes: Sequence[Outcome], claim: Limit, topology: Label) -> Verdict:
    wild = any(
        any_diverged(outcomes, **{TOPOLOGY: topology, CODEC: codec})
        for codec in (claim.codec, BASELINE)
    )
    found = _compared(outcomes, claim.figure, claim.unit, topology, claim.codec)
    return at_most(None if wild else found, claim.most)


def _judged(outcomes: Sequence[Outcome]) -> list[tuple[Limit, Mapping[str, Verdict]]]:
    """Return the claims on codecs that were run, each with its verdict by topology."""
    return [
        (claim, {str(one): _verdict(outcomes, claim, one) for one in distinct(outcomes, TOPOLOGY)})
        for claim in CLAIMS
        if claim.codec in distinct(outcomes, CODEC)
    ]


def _claims_table(title: str, outcomes: Sequence[Outcome]) -> Table:
    return Table(
        title=f"{title}: claims",
        columns=("Codec", "Figure", "Topology", "Found", "Limit", "Verdict"),
        rows=tuple(
            (
                claim.codec,
                claim.name,
                topology,
                _text(
                    _compared(outcomes, claim.figure, claim.unit, topology, claim.codec), claim.unit
                ),
                f"≤ {claim.most:g} {claim.unit}",
                verdict,
            )
            for claim, verdicts in _judged(outcomes)
            for topology, verdict in verdicts.items()
        ),
        names=3,
    )


def _draw_losses(axes: Axes, title: str, outcomes: Sequence[Outcome], topology: Label) -> None:
    """Draw the own loss of every codec against the bits that it sends."""
    from gasloc_p2p.studies.plot import look

    axes.axhline(0, color="#333333", linewidth=1.2, label=f"{BASELINE}, 32 bits")
    ends = [-LINEAR_PERCENT, 1.0]
    for index, codec in enumerate(_compressed(outcomes)):
        bits = _compared(outcomes, BITS, "bits", topology, codec)
        loss = _compared(outcomes, OWN, "%", topology, codec)
        if bits is not None and loss is not None:
            colour, marker = look(index)
            width = loss.half_width or 0.0
            ends += [1.5 * (loss.mean - width), 1.5 * (loss.mean + width)]
            axes.errorbar(
                [bits.mean],
                [loss.mean],
                yerr=[width],
                label=str(codec),
                color=colour,
                marker=marker,
                capsize=4,
                linestyle="none",
                markersize=6.5,
            )
    axes.set_xscale("log", base=2)
    axes.set_xticks([4, 8, 16], ["4", "8", "16"])
    axes.set_xlim(3.5, 20)
    axes.set_yscale("symlog", linthresh=LINEAR_PERCENT)
    axes.set_yticks(TICKS_PERCENT, [f"{tick:g}" for tick in TICKS_PERCENT])
    axes.set_ylim(min(ends), max(ends))
    axes.set_xlabel("bits per parameter, everything counted")
    axes.set_ylabel(
        f"own loss compared with {BASELINE} (%)\nlogarithmic beyond {LINEAR_PERCENT:g} %"
    )
    axes.set_title(f"{title}; lower is better\nmean and 95 % interval over the seeds", loc="left")


def _draw_repairs(axes: Axes, outcomes: Sequence[Outcome]) -> None:
    """Draw the share of repaired blocks by round, in the mean over the seeds."""
    from gasloc_p2p.studies.plot import look

    for index, codec in enumerate(_compressed(outcomes)):
        for topology, style in zip(distinct(outcomes, TOPOLOGY), LINES, strict=False):
            runs = [run.repaired_shares for run in _runs(outcomes, topology, codec)]
            curves = [shares for shares in runs if shares]
            if curves:
                colour, _ = look(index)
                means = [100 * sum(shares) / len(shares) for shares in zip(*curves, strict=False)]
                label = f"{codec} repairs, {topology}"
                axes.plot(means, color=colour, linestyle=style, linewidth=1.2, label=label)
    axes.set_xlabel("round, closing rounds last")
    axes.set_ylabel("repaired blocks (%)")
    axes.set_ylim(bottom=0)
    axes.set_title("misunderstood and sent again\nmean over the seeds", loc="left")


def _compressed(outcomes: Sequence[Outcome]) -> list[Label]:
    return [codec for codec in distinct(outcomes, CODEC) if codec != BASELINE]
