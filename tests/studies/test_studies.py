"""Every study from small real runs: its cells, its table, its plot."""

from __future__ import annotations

import functools
import xml.etree.ElementTree as ET

import pytest

from gasloc_p2p.config import Layer
from gasloc_p2p.core.errors import ConfigError, UnstableError
from gasloc_p2p.studies.catalogue import STUDIES as CATALOGUE
from gasloc_p2p.studies.catalogue import study_named
from gasloc_p2p.studies.cell import MixCell, MixResult, Outcome, SwarmCell, SwarmResult
from gasloc_p2p.studies.format import markdown
from gasloc_p2p.studies.multi_step import MultiStep
from gasloc_p2p.studies.outer_sensitivity import OuterSensitivity
from gasloc_p2p.studies.plot import png, svg
from gasloc_p2p.studies.poison import PoisonStudy
from gasloc_p2p.studies.single_step import OUTER, SingleStep, best_choice
from gasloc_p2p.studies.study import Setup, Study, Variant, cell_config, parse_also
from gasloc_p2p.studies.topology import TopologyStudy, expected_contraction

from .tiny import FAST, SHORT, STUDIES, outcomes_of, setup_of, texts

every_study = pytest.mark.parametrize(
    # Those of one study share its runs, and so a process.
    "name",
    [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in STUDIES],
)


@functools.cache
def ran(name: str) -> tuple[Study, tuple[Outcome, ...]]:
    study, settings = STUDIES[name]
    return study, tuple(outcomes_of(study, setup_of(settings)))


def test_every_study_is_tried_here() -> None:
    assert list(STUDIES) == list(CATALOGUE)


@every_study
def test_every_cell_has_a_result(name: str) -> None:
    _, outcomes = ran(name)
    assert all(outcome.result is not None for outcome in outcomes)
    assert len({outcome.key for outcome in outcomes}) == len(outcomes)


@every_study
def test_the_table_is_whole_and_is_markdown(name: str) -> None:
    study, outcomes = ran(name)
    summary = study.summary(outcomes)
    for table in summary.tables:
        assert table.rows
        assert all(len(row) == len(table.columns) for row in table.rows)
    text = markdown(summary)
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == sum(2 + len(table.rows) for table in summary.tables)
    for verdict in summary.verdicts:
        assert f"- {verdict}" in text


@every_study
def test_partial_results_have_a_table_and_a_plot(name: str) -> None:
    study, outcomes = ran(name)
    for part in (outcomes[:1], outcomes[: len(outcomes) // 2]):
        assert markdown(study.summary(part))
        assert svg(lambda part=part: study.figure(part), study.question)  # type: ignore[misc]  # a default binds the loop's value


@every_study
def test_the_plot_is_the_same_every_time_and_is_svg(name: str) -> None:
    study, outcomes = ran(name)
    first, second = (svg(lambda: study.figure(outcomes), study.question) for _ in range(2))
    assert first == second
    root = ET.fromstring(first)
    assert root.tag.endswith("svg")
    assert study.question.encode() in first
    assert b"<dc:date>" not in first
    assert png(lambda: study.figure(outcomes)).startswith(b"\x89PNG")


def test_losses_are_those_of_the_runs() -> None:
    study, outcomes = ran("multi-step")
    (table,) = study.summary(outcomes).tables
    baseline, ring = (
        [
            outcome.result.averaged_val_loss
            for outcome in outcomes
            if isinstance(outcome.result, SwarmResult)
            and outcome.cell.labels["algorithm"] == label
            and outcome.cell.peers == 3
        ]
        for label in ("DiLoCo", "GASLoC 2-peer")
    )
    pairs = [(a, b) for a, b in zip(ring, baseline, strict=True) if a and b]
    percent = sum(100 * (a - b) / b for a, b in pairs) / 2
    row = next(row for row in table.rows if row[:2] == ("GASLoC 2-peer", "3"))
    assert row[2].startswith(f"{sum(a for a, _ in pairs) / 2:.4f} ± ")
    assert row[3].startswith(f"{percent:+z.2f} ± ")


def test_algorithms_start_alike_and_are_paired() -> None:
    """A ring of three is complete, so 2-peer and DiLoCo are one algorithm there."""
    _, outcomes = ran("multi-step")
    found = {
        (outcome.cell.labels["algorithm"], outcome.cell.seed): outcome.result
        for outcome in outcomes
        if outcome.cell.peers == 3
    }
    for seed in (0, 1):
        one, other = found["DiLoCo", seed], found["GASLoC 2-peer", seed]
        assert isinstance(one, SwarmResult)
        assert isinstance(other, SwarmResult)
        assert one.initial_val_loss == other.initial_val_loss
        assert one.averaged_val_loss == pytest.approx(other.averaged_val_loss, rel=1e-5)


def test_seeds_come_one_after_the_other() -> None:
    cells = MultiStep(peers=(2,)).cells(setup_of(SHORT, seeds=3, first_seed=5), 0, [])
    seeds = [cell.seed for cell in cells]
    assert seeds == sorted(seeds)
    assert set(seeds) == {5, 6, 7}
    assert {cell_config(cell).run.seed for cell in cells if isinstance(cell, SwarmCell)} == {
        5,
        6,
        7,
    }


def test_the_rate_is_chosen_on_a_seed_that_is_not_compared() -> None:
    study, outcomes = ran("single-step")
    tuning = [outcome for outcome in outcomes if outcome.cell.labels["stage"] == "tuning"]
    compared = [outcome for outcome in outcomes if outcome.cell.labels["stage"] == "evaluation"]
    assert {outcome.cell.seed for outcome in tuning} == {1000}
    assert {outcome.cell.seed for outcome in compared} == {0, 1}
    for outcome in compared:
        label = outcome.cell.labels["algorithm"]
        losses = {
            (trial.cell.labels["inner.lr"], trial.cell.labels.get(OUTER)): (
                trial.result.averaged_val_loss
            )
            for trial in tuning
            if isinstance(trial.result, SwarmResult) and trial.cell.labels["algorithm"] == label
        }
        assert isinstance(outcome.cell, SwarmCell)
        config = cell_config(outcome.cell)
        chosen = losses[config.inner.lr, outcome.cell.labels.get(OUTER)]
        assert chosen == min(loss for loss in losses.values() if loss is not None)
        assert (config.outer.lr == 1.0) == (OUTER in outcome.cell.labels)
        assert config.inner.local_steps == 1
    assert best_choice([], {"algorithm": "DDP", "peers": 2, "model": "nano"}) is None
    assert any("last one that was tried" in text for text in study.summary(outcomes).verdicts)


def test_stages_know_their_number_of_cells_beforehand() -> None:
    study, settings = STUDIES["single-step"]
    known = [study.cells(setup_of(settings), stage, []) for stage in range(2)]
    _, outcomes = ran("single-step")
    assert sum(map(len, known)) == len(outcomes)


def test_local_steps_share_their_total_and_their_warm_up() -> None:
    _, outcomes = ran("local-steps")
    for outcome in outcomes:
        assert isinstance(outcome.cell, SwarmCell)
        config = cell_config(outcome.cell)
        assert config.run.rounds * config.inner.local_steps == 2
        assert config.inner.warmup_rounds * config.inner.local_steps == pytest.approx(0.1)


def test_a_run_that_diverges_is_a_result() -> None:
    study, outcomes = ran("outer-sensitivity")
    wild = [
        outcome.result
        for outcome in outcomes
        if outcome.cell.labels["outer.lr"] == 10.0 and outcome.cell.labels["outer.momentum"] == 0.95
    ]
    assert wild
    assert all(isinstance(result, SwarmResult) and result.diverged for result in wild)
    summary = study.summary(outcomes)
    assert "diverged †" in texts(summary.tables[0].rows)


def test_a_loss_that_is_no_number_counts_as_diverged() -> None:
    def result(loss: float | None) -> SwarmResult:
        return SwarmResult(
            initial_val_loss=5.0,
            averaged_val_loss=loss,
            own_val_loss=loss,
            consensus_distance=None,
            closing_consensus_distance=None,
            bytes_sent=0,
            simulated_s=None,
            wall_s=0.0,
        )

    assert result(None).diverged
    assert result(5.1).diverged
    assert not result(5.0).diverged
    assert not result(4.9).diverged


def test_without_an_attacker_the_guard_makes_no_difference() -> None:
    study, outcomes = ran("poison")
    (table,) = study.summary(outcomes).tables
    rows = {row[:2]: row[2:] for row in table.rows}
    assert list(rows) == [(a, g) for a in ("none", "random", "stale") for g in ("on", "off")]
    assert rows["none", "on"][0] == rows["none", "off"][0]
    assert rows["none", "off"][1] == "+0.00 ± 0.00 %"
    assert rows["random", "on"][0] != rows["random", "off"][0]


@pytest.mark.parametrize(
    ("topology", "peers", "expected"),
    [("pairs", 8, 0.4286), ("pairs", 32, 0.4839), ("ring", 16, 0.2889), ("ring", 32, 0.3118)],
)
def test_theory_of_random_graphs(topology: str, peers: int, expected: float) -> None:
    assert expected_contraction(topology, peers) == pytest.approx(expected, abs=5e-5)


def test_gossip_contracts_as_theory_says() -> None:
    """A cycle of eight: (1 + 2 cos(2 pi / 8)) / 3 = .8047; the complete graph agrees at once."""
    _, outcomes = ran("topology")
    factors = {
        str(outcome.cell.labels["gossip.topology"]): outcome.result.factor
        for outcome in outcomes
        if isinstance(outcome.result, MixResult) and outcome.cell.labels["kind"] == "fixed"
    }
    assert factors["cycle"] == pytest.approx(0.80474, abs=1e-4)
    assert factors["complete"] < 1e-12
    pairs = [
        outcome.result.factor
        for outcome in outcomes
        if isinstance(outcome.result, MixResult)
        and outcome.cell.labels["gossip.topology"] == "pairs"
    ]
    assert sum(pairs) / len(pairs) == pytest.approx(expected_contraction("pairs", 4), rel=0.05)


def test_the_long_runs_have_the_settings_of_the_published_figures() -> None:
    cells = [cell for cell in TopologyStudy().cells(Setup(), 0, []) if isinstance(cell, MixCell)]
    cycles = {
        (cell.rule, cell.lr, cell.momentum)
        for cell in cells
        if cell.topology == "cycle" and cell.peers == 64 and not cell.fresh
    }
    assert cycles == {
        ("nesterov", 1.0, 0.0),
        ("lookahead", 1.0, 0.893),
        ("printed", 1.0, 0.890),
        ("nesterov", 0.7, 0.910),
    }


def test_settings_win_over_defaults() -> None:
    cell, *_ = MultiStep(peers=(2,)).cells(setup_of({"run.rounds": 7}), 0, [])
    assert isinstance(cell, SwarmCell)
    config = cell_config(cell)
    assert (config.run.rounds, config.inner.local_steps, config.inner.batch_size) == (7, 30, 4)


@pytest.mark.parametrize(
    ("study", "key", "value", "words"),
    [
        (MultiStep(), "gossip.topology", "ring", "algorithms of multi-step differ"),
        (MultiStep(), "outer.rule", "local", "algorithms of multi-step differ"),
        (MultiStep(), "run.initial_peers", 3, "sets itself"),
        (SingleStep(), "inner.lr", 0.1, "sets itself"),
        (STUDIES["local-steps"][0], "run.rounds", 3, "sets itself"),
        (OuterSensitivity(), "outer.momentum", 0.1, "sets itself"),
        (PoisonStudy(), "gossip.guard", False, "sets itself"),
        (TopologyStudy(), "inner.lr", 0.1, "does not use"),
        (MultiStep(), "inner.lrr", 0.1, "unknown setting"),
    ],
)
def test_what_a_study_sets_is_left_to_it(study: Study, key: str, value: object, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        study.cells(setup_of({key: value}), 0, [])
    assert words in raised.value.what
    assert raised.value.fix


def test_a_rule_for_all_runs_where_no_algorithm_is_compared() -> None:
    cells = OuterSensitivity().cells(setup_of({"outer.rule": "local"}), 0, [])
    assert all(
        cell_config(cell).outer.rule == "local" for cell in cells if isinstance(cell, SwarmCell)
    )


@pytest.mark.parametrize("name", ["multi-step", "single-step", "local-steps"])
def test_an_algorithm_of_ones_own_is_a_row(name: str) -> None:
    study, settings = STUDIES[name]
    # In single-step the built-in GASLoC tries several outer steps; others have their own.
    like = "DDP" if name == "single-step" else "GASLoC 1-peer"
    also = parse_also(["mine=outer.rule=local, gossip.topology=cycle"])
    setup = setup_of(settings, also=also)
    found = [
        cell
        for stage in range(study.stage_count)
        for cell in study.cells(setup, stage, [])
        if cell.labels["algorithm"] == "mine"
    ]
    others = [
        cell
        for stage in range(study.stage_count)
        for cell in study.cells(setup, stage, [])
        if cell.labels["algorithm"] == like
    ]
    assert len(found) == len(others)
    for cell in found:
        assert isinstance(cell, SwarmCell)
        config = cell_config(cell)
        assert (config.outer.rule, config.gossip.topology) == ("local", "cycle")


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["mine"], "cannot be read"),
        (["=outer.lr=1"], "cannot be read"),
        (["mine=outer.lr"], "cannot be read"),
        (["mine=outer.lr=1", "mine=outer.lr=2"], "twice"),
    ],
)
def test_also_that_makes_no_sense(texts: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_also(texts)


def test_also_beside_a_study() -> None:
    taken = (Variant(label="DDP", settings={"outer.lr": 0.5}),)
    with pytest.raises(ConfigError, match="has the name of"):
        SingleStep().cells(setup_of(FAST, also=taken), 0, [])
    with pytest.raises(ConfigError, match="cannot be used"):
        OuterSensitivity().cells(setup_of({}, also=taken), 0, [])
    unstable = (Variant(label="mine", settings={"outer.momentum": 0.99}),)
    with pytest.raises(UnstableError):
        MultiStep().cells(setup_of({}, also=unstable), 0, [])


def test_own_algorithms_win_over_settings_for_all() -> None:
    also = (Variant(label="mine", settings={"outer.lr": 0.5}),)
    cells = MultiStep(peers=(2,)).cells(setup_of({"outer.lr": 0.6}, also=also), 0, [])
    lrs = {
        cell.labels["algorithm"]: cell_config(cell).outer.lr
        for cell in cells
        if isinstance(cell, SwarmCell)
    }
    assert (lrs["mine"], lrs["DiLoCo"]) == (0.5, 0.6)


def test_settings_of_the_command_are_not_part_of_a_cell() -> None:
    layers = (Layer(name="--set", values={"study.jobs": 3, "display.mode": "plain"}),)
    for cell in MultiStep(peers=(2,)).cells(Setup(layers=layers), 0, []):
        assert isinstance(cell, SwarmCell)
        assert not [key for key in cell.settings if key.startswith(("study.", "display."))]


@pytest.mark.parametrize("name", [name for name, scales in CATALOGUE.items() if scales.full])
def test_full_scale_is_the_same_study_with_larger_models(name: str) -> None:
    quick, full = study_named(name), study_named(name, full=True)
    assert type(quick) is type(full)
    cells = [
        cell
        for stage in range(full.stage_count)
        for cell in full.cells(Setup(), stage, [])
        if isinstance(cell, SwarmCell)
    ]
    assert {cell.labels["model"] for cell in cells} == {"134m", "551m"}
    assert all(cell.peers <= 16 for cell in cells if cell.labels["model"] == "551m")
    labels = {cell.labels["algorithm"] for cell in cells}
    small = (cell for cell in quick.cells(Setup(), 0, []) if isinstance(cell, SwarmCell))
    assert labels == {cell.labels["algorithm"] for cell in small}
    for cell in cells:
        config = cell_config(cell)
        assert config.inner.batch_size == 64
        assert config.simulate.engine == "batched"
    with pytest.raises(ConfigError, match=r"model\.preset"):
        full.cells(setup_of({"model.preset": "nano"}), 0, [])


def test_a_study_without_training_has_no_full_scale() -> None:
    with pytest.raises(ConfigError, match="no full scale"):
        study_named("topology", full=True)


def test_an_unknown_study_names_the_known_ones() -> None:
    with pytest.raises(ConfigError) as raised:
        study_named("multistep")
    assert "multi-step" in raised.value.fix
