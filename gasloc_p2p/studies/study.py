"""What a study is: a question, the cells that answer it, a table and a plot."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from gasloc_p2p.algorithms import ALGORITHMS, load_algorithm
from gasloc_p2p.config import Config, Layer, assignment_layer
from gasloc_p2p.core.errors import ConfigError, GaslocError
from gasloc_p2p.founding import check_outer
from gasloc_p2p.studies.cell import Cell, Label, Outcome, SwarmCell

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COMMAND_KEYS = ("study.", "display.", "node.exit_with_stdin", "run.seed")
"""How settings begin that are the command's own: none changes a result, the first seed apart."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One algorithm of a comparison: a row of its table, a line of its plot.

    Attributes:
        label: what people call it.
        algorithm: name in `ALGORITHMS`.
        settings: what makes it this variant, by `section.key`.
    """

    label: str
    algorithm: str = "gasloc"
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """What a person asked for.

    Attributes:
        layers: their settings, weakest first.
        seeds: how many seeds to evaluate.
        first_seed: the first one; the others follow it.
        peers: swarm sizes to run; those of the study when empty.
        also: algorithms of their own to compare.
    """

    layers: Sequence[Layer] = ()
    seeds: int = 3
    peers: tuple[int, ...] = ()
    first_seed: int = 0
    also: tuple[Variant, ...] = ()

    @property
    def evaluated(self) -> range:
        """The seeds on which results are compared."""
        return range(self.first_seed, self.first_seed + self.seeds)

    @property
    def values(self) -> dict[str, Any]:
        """The person's settings that bear on results."""
        return {
            key: value
            for layer in self.layers
            for key, value in layer.values.items()
            if not key.startswith(COMMAND_KEYS)
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """A table as text; the first `names` columns are left-aligned, the others are numbers."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    names: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """What a study found.

    Attributes:
        tables: the figures; those of partial results may have no rows.
        verdicts: one sentence per claim.
        reading: how to read the tables and when a claim holds, one paragraph each.
    """

    tables: tuple[Table, ...]
    verdicts: tuple[str, ...]
    reading: tuple[str, ...]

    @property
    def filled_tables(self) -> tuple[Table, ...]:
        """The tables that have rows."""
        return tuple(table for table in self.tables if table.rows)


@dataclass(frozen=True, kw_only=True)
class Study(ABC):
    """A named experiment at one scale.

    Attributes:
        name: what `gasloc study` calls it.
        question: what it answers, also the title of its plot.
        stage_count: in how many steps its cells become known.
        takes_variants: whether a person can add an algorithm with `--also`.
        models: presets to run, each by itself; empty: the one that the settings name.
        most_peers: largest swarm of a preset, where one GPU holds no more.
        peers: swarm sizes.
        defaults: settings that a person may change.
    """

    name: ClassVar[str]
    question: ClassVar[str]
    stage_count: ClassVar[int] = 1
    takes_variants: ClassVar[bool] = False

    models: tuple[str, ...] = ()
    most_peers: Mapping[str, int] = field(default_factory=dict)
    peers: tuple[int, ...] = (8,)
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @abstractmethod
    def cells(self, setup: Setup, stage: int, outcomes: Sequence[Outcome]) -> list[Cell]:
        """Return the cells of one stage, ordered by seed.

        Args:
            setup: what was asked for.
            stage: from 0.
            outcomes: of the earlier stages; without them the number and the cost of the cells are
                right, but not what depends on results.
        """

    @abstractmethod
    def summary(self, outcomes: Sequence[Outcome]) -> Summary:
        """Return what these outcomes, which may be part of all, say."""

    @abstractmethod
    def figure(self, outcomes: Sequence[Outcome]) -> Figure:
        """Draw these outcomes, which may be part of all."""

    def swarm_cells(
        self,
        setup: Setup,
        variant: Variant,
        *,
        peers: int,
        seed: int,
        labels: Mapping[str, Label] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> list[SwarmCell]:
        """Return the swarm of a variant, once per model.

        Args:
            setup: what was asked for; its settings win over `defaults` and over nothing else.
            variant: the algorithm.
            peers: how many.
            seed: the run's seed.
            labels: beside the variant's, the model's and the number of peers.
            settings: what the study varies, by `section.key`.

        Raises:
            ConfigError: a person changes what the study varies, or a value is not accepted.
            UnstableError: peers would drift apart.
        """
        varied = {**(settings or {}), "run.initial_peers": peers, "run.seed": seed}
        # A person's own algorithm may change what they set for all.
        compared = {} if variant in setup.also else dict(variant.settings)
        reserved = {**compared, **ALGORITHMS[variant.algorithm].fixed}
        cells: list[SwarmCell] = []
        for model in self.models or (None,):
            if model is not None and peers > self.most_peers.get(model, peers):
                continue
            axes = varied if model is None else {**varied, "model.preset": model}
            self._check_axes(variant.settings, axes, f"--also {variant.label}")
            for layer in setup.layers:
                # run.seed is the first one.
                self._check_axes(layer.values, axes.keys() - {"run.seed"}, layer.name)
                self._check_compared(layer, reserved)
            merged = {**self.defaults, **setup.values, **variant.settings, **axes}
            cell = SwarmCell(
                labels={"algorithm": variant.label, "peers": peers, **(labels or {})},
                algorithm=variant.algorithm,
                peers=peers,
                seed=seed,
                settings={"run.id": "study", **merged},
            )
            config = cell_config(cell)
            try:
                check_outer(config)
            except GaslocError as error:
                raise type(error)(
                    f"{variant.label}: {error.what}", why=error.why, fix=error.fix
                ) from None
            cell.labels["model"] = config.model.preset
            cells.append(cell)
        return cells

    def _check_axes(self, values: Iterable[str], axes: Container[str], source: str) -> None:
        """Refuse settings that the study gives every cell itself.

        Raises:
            ConfigError: `values`, from `source`, has one of `axes`.
        """
        for key in values:
            if key in axes:
                raise ConfigError(
                    f"{source} sets {key}, which the study {self.name} sets itself",
                    why="it is what the study varies",
                    fix=f"leave {key} alone, or run `gasloc simulate` with it",
                )

    def _check_compared(self, layer: Layer, reserved: Container[str]) -> None:
        """Refuse settings in which the study's algorithms differ.

        Raises:
            ConfigError: the layer has one that is `reserved` for an algorithm.
        """
        for key, value in layer.values.items():
            if key in reserved:
                alone = f"leave {key} alone"
                raise ConfigError(
                    f"{layer.name} sets {key}, in which the algorithms of {self.name} differ",
                    why="they would no longer be what the table calls them",
                    fix=f"{alone}, or add an algorithm with it: --also 'mine={key}={value}'"
                    if self.takes_variants
                    else alone,
                )


def cell_config(cell: SwarmCell) -> Config:
    """Return the configuration of a swarm.

    Raises:
        ConfigError: a value is not accepted.
    """
    return load_algorithm(cell.algorithm, [Layer(name="study", values=cell.settings)]).config


def parse_also(texts: Sequence[str]) -> tuple[Variant, ...]:
    """Read `--also NAME=SECTION.KEY=VALUE,...` arguments.

    Raises:
        ConfigError: one has no name or no settings, or two have the same name.
    """
    found: dict[str, Variant] = {}
    for text in texts:
        label, equals, assignments = text.partition("=")
        parts = [part.strip() for part in assignments.split(",") if part.strip()]
        if not (equals and label.strip() and parts and all("=" in part for part in parts)):
            raise ConfigError(
                f"--also {text!r} cannot be read",
                why="the form is --also NAME=SECTION.KEY=VALUE,SECTION.KEY=VALUE",
                fix="for example: --also 'mine=outer.rule=local,gossip.topology=ring'",
            )
        if label.strip() in found:
            raise ConfigError(
                f"--also names {label.strip()!r} twice", fix="give each algorithm its own name"
            )
        found[label.strip()] = Variant(label=label.strip(), settings=assignment_layer(parts).values)
    return tuple(found.values())


def check_also(study: Study, labels: Sequence[str], also: Sequence[Variant]) -> None:
    """Check that a person's algorithms can stand beside those of a study.

    Raises:
        ConfigError: the study compares no algorithms, or a name is taken.
    """
    for variant in also:
        if not study.takes_variants:
            raise ConfigError(
                f"--also {variant.label} cannot be used with the study {study.name}",
                why="it does not compare algorithms",
                fix="leave it away, or change the settings of all runs with --set",
            )
        if variant.label in labels:
            raise ConfigError(
                f"--also {variant.label!r} has the name of an algorithm of {study.name}",
                why="their results could not be told apart",
                fix="choose another name",
            )
