"""Does gossip bring peers together as fast as theory says?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gasloc_p2p.core.errors import ConfigError
from gasloc_p2p.core.stability import radius
from gasloc_p2p.studies.cell import Cell, MixCell, MixResult, Outcome
from gasloc_p2p.studies.comparison import distinct, matching
from gasloc_p2p.studies.statistics import Estimate, estimate
from gasloc_p2p.studies.study import Setup, Study, Summary, Table, check_also

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PLAIN = ("nesterov", 1.0, 0.0)
"""Rule, eta and gamma of a pure mix."""

ROUNDING = 1e-12
"""By how much theory may miss an interval that has no width but for rounding."""

RATE_TOLERANCE = 5e-4
"""How far a measured long-run rate may lie from theory; near a critical momentum the norm swings
slowly, and the rate needs some thousand rounds to settle."""


@dataclass(frozen=True, kw_only=True)
class TopologyStudy(Study):
    """Contraction of random graphs per round, and long-run rates of fixed ones.

    Attributes:
        contraction_rounds: independent rounds per seed and random graph.
        rate_rounds: length of the run on a fixed graph; a tenth of it where nothing is slow.
        fixed: name, topology, rule, eta and gamma of each long run.
        fixed_peers: peers of a fixed graph.
    """

    name: ClassVar[str] = "topology"
    question: ClassVar[str] = "Does gossip bring peers together as fast as theory says?"

    peers: tuple[int, ...] = (8, 16, 32)
    contraction_rounds: int = 300
    rate_rounds: int = 12_000
    fixed_peers: int = 64
    fixed: tuple[tuple[str, str, str, float, float], ...] = (
        ("no momentum", "cycle", *PLAIN),
        ("lookahead", "cycle", "lookahead", 1.0, 0.893),
        ("printed", "cycle", "printed", 1.0, 0.890),
        ("nesterov", "cycle", "nesterov", 0.7, 0.910),
        ("no momentum", "exponential", *PLAIN),
        ("no momentum", "complete", *PLAIN),
    )

    def cells(self, setup: Setup, stage: int, outcomes: Sequence[Outcome]) -> list[Cell]:
        """Return random graphs seed by seed, and the fixed ones once."""
        check_also(self, [], setup.also)
        _refuse_settings(self, setup)
        rule, lr, momentum = PLAIN
        random = [
            MixCell(
                labels={"kind": "random", "gossip.topology": topology, "peers": peers},
                peers=peers,
                seed=seed,
                topology=topology,
                rule=rule,
                lr=lr,
                momentum=momentum,
                rounds=self.contraction_rounds,
                fresh=True,
            )
            for seed in setup.evaluated
            for topology in ("pairs", "ring")
            for peers in setup.peers or self.peers
        ]
        fixed = [
            MixCell(
                labels={
                    "kind": "fixed",
                    "gossip.topology": topology,
                    "outer.rule": name,
                    "peers": self.fixed_peers,
                },
                peers=self.fixed_peers,
                seed=setup.first_seed,
                topology=topology,
                rule=rule,
                lr=lr,
                momentum=momentum,
                rounds=self.rate_rounds // (1 if topology == "cycle" else 10),
                fresh=False,
            )
            for name, topology, rule, lr, momentum in self.fixed
        ]
        return [*random, *fixed]

    def summary(self, outcomes: Sequence[Outcome]) -> Summary:
        """Return measured factors beside those of theory."""
        rows = _random_rows(outcomes)
        fixed = _fixed_rows(outcomes)
        return Summary(
            tables=(
                Table(
                    title="Random graphs: factor of Σ‖x − mean‖² per round",
                    columns=("Topology", "Peers", "Theory", "Measured", "Theory inside"),
                    rows=tuple(
                        (
                            row.topology,
                            str(row.peers),
                            f"{row.theory:.4f}",
                            _factor_text(row.measured),
                            "yes" if row.agrees else "no",
                        )
                        for row in rows
                    ),
                    names=1,
                ),
                Table(
                    title="Fixed graphs: factor of ‖x − mean‖ per round in the long run",
                    columns=("Topology", "Rule", "Peers", "lr", "Momentum", "Theory", "Measured"),
                    rows=tuple(
                        (
                            row.topology,
                            row.rule,
                            str(row.peers),
                            f"{row.lr:g}",
                            f"{row.momentum:g}",
                            f"{row.theory:.4f}",
                            _factor_text(row.measured),
                        )
                        for row in fixed
                    ),
                    names=2,
                ),
            ),
            verdicts=_verdicts(rows, fixed),
            reading=(
                "Random fp64 vectors are mixed with the graphs and the code of real rounds, and "
                "nothing is trained. On random graphs a pure mix (nesterov, lr 1, momentum 0) "
                "should shrink the squared distance to the mean, in expectation, by "
                "(n-2)/(2(n-1)) with pairs and (n-3)/(3(n-1)) with rings. ± is half of the "
                "two-sided 95 % t-interval over the seeds, each a mean over independent rounds; "
                "such an interval misses the true value once in twenty.",
                "On fixed graphs theory is the spectral radius of one round, from the eigenvalues "
                "of the graph's weights (docs/design.md section 2). The measured rate is that of "
                "the second half of one long run.",
            ),
        )

    def figure(self, outcomes: Sequence[Outcome]) -> Figure:
        """Draw measured factors over those of theory."""
        from gasloc_p2p.studies.plot import legend_outside, new_figure

        figure, panels = new_figure(self.question, 2, panel_size=(5.6, 4.4))
        _draw_random(panels[0], _random_rows(outcomes))
        _draw_fixed(panels[1], _fixed_rows(outcomes))
        legend_outside(figure, panels)
        return figure


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    """One factor, measured and in theory."""

    topology: str
    rule: str
    peers: int
    lr: float
    momentum: float
    theory: float
    measured: Estimate

    @property
    def agrees(self) -> bool:
        """Whether theory lies in the interval, or near the value that has none."""
        low, high = self.measured.low, self.measured.high
        if low is None or high is None:
            return abs(self.measured.mean - self.theory) <= RATE_TOLERANCE
        return low - ROUNDING <= self.theory <= high + ROUNDING


def expected_contraction(topology: str, peers: int) -> float:
    """Return the expected factor of sum ||x - mean||^2 in one round of a pure mix.

    Source: docs/design.md section 2.
    """
    size = {"pairs": 2, "ring": 3}[topology]
    return (peers - size) / (size * (peers - 1))


def _random_rows(outcomes: Sequence[Outcome]) -> list[_Row]:
    rows = []
    random = matching(outcomes, {"kind": "random"})
    for topology in distinct(random, "gossip.topology"):
        for peers in distinct(random, "peers"):
            row = _row(
                matching(random, {"gossip.topology": topology, "peers": peers}),
                theory=expected_contraction(str(topology), int(peers)),
            )
            rows += [row] if row is not None else []
    return rows


def _fixed_rows(outcomes: Sequence[Outcome]) -> list[_Row]:
    rows = []
    for outcome in matching(outcomes, {"kind": "fixed"}):
        cell = outcome.cell
        assert isinstance(cell, MixCell)
        theory = radius(cell.rule, cell.lr, cell.momentum, 1.0, cell.topology, cell.peers)
        row = _row([outcome], theory=theory)
        rows += [row] if row is not None else []
    return rows


def _verdicts(random: Sequence[_Row], fixed: Sequence[_Row]) -> tuple[str, ...]:
    texts = []
    if random:
        inside = sum(row.agrees for row in random)
        texts.append(
            "Random graphs contract as theory says: the 95 % interval contains theory's factor in "
            f"{inside} of {len(random)} cases."
        )
    if fixed:
        near = sum(row.agrees for row in fixed)
        texts.append(
            "Fixed graphs contract as theory says: measured and theoretical rates differ by at "
            f"most {RATE_TOLERANCE:g} in {near} of {len(fixed)} cases."
        )
    return tuple(texts)


def _row(outcomes: Sequence[Outcome], *, theory: float) -> _Row | None:
    factors = [
        outcome.result.factor for outcome in outcomes if isinstance(outcome.result, MixResult)
    ]
    measured = estimate(factors)
    if measured is None:
        return None
    cell = outcomes[0].cell
    assert isinstance(cell, MixCell)
    return _Row(
        topology=cell.topology,
        rule=str(cell.labels.get("outer.rule", cell.rule)),
        peers=cell.peers,
        lr=cell.lr,
        momentum=cell.momentum,
        theory=theory,
        measured=measured,
    )


def _factor_text(value: Estimate) -> str:
    width = "" if value.half_width is None else f" ± {value.half_width:.4f}"
    return f"{value.mean:.4f}{width}"


def _refuse_settings(study: Study, setup: Setup) -> None:
    """Refuse settings that would change nothing.

    Raises:
        ConfigError: there are any.
    """
    for key in setup.values:
        if key != "node.extensions":
            raise ConfigError(
                f"the study {study.name} does not use {key}",
                why="it mixes random vectors and trains nothing",
                fix="leave it away; study.seeds, study.jobs and run.seed can be set",
            )


def _draw_random(axes: Axes, rows: Sequence[_Row]) -> None:
    from gasloc_p2p.studies.plot import look

    for index, topology in enumerate(dict.fromkeys(row.topology for row in rows)):
        colour, marker = look(index)
        mine = [row for row in rows if row.topology == topology]
        places = range(len(mine))
        axes.plot(
            places,
            [row.theory for row in mine],
            "_",
            color="#333333",
            markersize=26,
            label="theory",
        )
        axes.errorbar(
            places,
            [row.measured.mean for row in mine],
            yerr=[row.measured.half_width or 0.0 for row in mine],
            label=f"random {topology}, measured",
            color=colour,
            marker=marker,
            capsize=4,
            linestyle="none",
        )
        axes.set_xticks(places, [str(row.peers) for row in mine])
    axes.set_xlabel("peers")
    axes.set_ylabel("factor of Σ‖x − mean‖² per round\nmean and 95 % interval over the seeds")
    axes.set_ylim(bottom=0)
    axes.set_title("random graphs; lower is faster", loc="left")


def _draw_fixed(axes: Axes, rows: Sequence[_Row]) -> None:
    from gasloc_p2p.studies.plot import look

    colour, marker = look(2)
    places = range(len(rows))
    axes.plot([row.theory for row in rows], places, "|", color="#333333", markersize=22)
    axes.plot(
        [row.measured.mean for row in rows],
        places,
        color=colour,
        marker=marker,
        linestyle="none",
        label="fixed graph, measured",
    )
    axes.set_yticks(places, [f"{row.topology}\n{row.rule}" for row in rows])
    axes.set_ylim(max(len(rows), 1) - 0.5, -0.5)
    axes.set_xlim(-0.05, 1.05)
    axes.set_xlabel("factor of ‖x − mean‖ per round in the long run")
    peers = ", ".join(str(peers) for peers in dict.fromkeys(row.peers for row in rows))
    axes.set_title(f"fixed graphs, {peers} peers; lower is faster", loc="left")
