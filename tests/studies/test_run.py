"""Running a study: processes, results that are kept, failures, resuming."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gasloc_p2p.config import Layer, load
from gasloc_p2p.core.errors import ConfigError
from gasloc_p2p.studies.cell import MixCell, Outcome, SwarmCell, cell_key
from gasloc_p2p.studies.estimate import (
    cost,
    duration_text,
    parameter_count,
    train_flops,
    train_tokens,
)
from gasloc_p2p.studies.multi_step import MultiStep
from gasloc_p2p.studies.output import write_outputs
from gasloc_p2p.studies.pool import CellProcess
from gasloc_p2p.studies.progress import PlainProgress, Tally
from gasloc_p2p.studies.record import RESULTS_FILE, Store, read_results
from gasloc_p2p.studies.run import QUICK, Plan, make_plan, open_store, run_study
from gasloc_p2p.studies.study import Setup, Study, parse_also
from gasloc_p2p.studies.topology import PLAIN, TopologyStudy
from gasloc_p2p.train.model import PRESETS, build_model
from gasloc_p2p.train.settings import PresetName

from .tiny import SHORT, setup_of

QUICK_MIX = TopologyStudy(
    peers=(4,),
    contraction_rounds=5,
    rate_rounds=10,
    fixed_peers=4,
    fixed=(("no momentum", "complete", *PLAIN),),
)

BRITTLE = """
from pathlib import Path
from gasloc_p2p.core.errors import ConfigError
from gasloc_p2p.core.outer import OuterRule, register_outer_rule

class Base(OuterRule):
    def step(self, theta_start, theta_h, mixed, state):
        print("words of an extension")
        in_a_round = len(mixed) > 100
        if in_a_round and not (Path(__file__).parent / "mended").exists():
            self.fail()
        return mixed, state

@register_outer_rule
class Raises(Base):
    name = "raises"
    def fail(self):
        raise ConfigError("this rule is not ready", why="it is a test", fix="mend it")

@register_outer_rule
class Breaks(Base):
    name = "breaks"
    def fail(self):
        raise ZeroDivisionError("a defect")
"""


def planned(study: Study, setup: Setup, **study_settings: Any) -> Plan:
    layers = [*setup.layers, Layer(name="--set", values=study_settings)]
    return make_plan(
        study, setup, scale=QUICK, command="gasloc study x", config=load(layers).config
    )


async def run(plan: Plan, folder: Path) -> tuple[list[Outcome], list[str]]:
    """Run a plan in `folder`; return what is known then and what was said."""
    said: list[str] = []
    store = open_store(plan, folder)
    try:
        await run_study(plan, store, PlainProgress(write=said.append))
        return store.outcomes(), said
    finally:
        store.close()


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def test_results_are_kept_and_finished_cells_do_not_run_again(tmp_path: Path) -> None:
    plan = planned(QUICK_MIX, setup_of({}), **{"study.jobs": 2})
    outcomes, said = await run(plan, tmp_path)
    assert [outcome.cell for outcome in outcomes] == list(plan.cells)
    assert said[0].startswith("5 simulations, about ")
    assert sum("simulations done" in line for line in said) == 5
    first = (tmp_path / RESULTS_FILE).read_bytes()

    outcomes, said = await run(plan, tmp_path)
    assert said == ["all 5 simulations are there already"]
    assert (tmp_path / RESULTS_FILE).read_bytes() == first

    more = planned(QUICK_MIX, setup_of({}, seeds=3))
    outcomes, said = await run(more, tmp_path)
    assert said[0].startswith("2 simulations (5 of 7 are there already), about ")
    assert [outcome.cell for outcome in outcomes] == list(more.cells)
    assert files_in(tmp_path) == [RESULTS_FILE]


async def test_cells_that_fail_are_recorded_and_tried_again(tmp_path: Path) -> None:
    """One rule ends its cell with an error in words, one ends the whole process."""
    (tmp_path / "brittle.py").write_text(BRITTLE)
    out = tmp_path / "out"
    out.mkdir()
    setup = setup_of(
        {**SHORT, "node.extensions": [str(tmp_path / "brittle.py")]},
        seeds=1,
        also=parse_also(
            [
                "first=outer.rule=raises,outer.force=true",
                "second=outer.rule=breaks,outer.force=true",
            ]
        ),
    )
    plan = planned(MultiStep(peers=(2,)), setup, **{"study.jobs": 1})
    outcomes, said = await run(plan, out)
    failed = {
        outcome.cell.labels["algorithm"]: outcome for outcome in outcomes if not outcome.result
    }
    assert list(failed) == ["first", "second"]
    assert failed["first"].error == "this rule is not ready\nwhy: it is a test\nfix: mend it"
    assert "exit code 1: ZeroDivisionError: a defect" in (failed["second"].error or "")
    assert "Traceback" in (failed["second"].error or "")
    assert any("failed: this rule is not ready" in line for line in said)
    assert len(outcomes) == 7
    results = read_results(out)
    assert results is not None
    write_outputs(out, results)
    assert "2 simulations failed" in (out / "table.md").read_text()

    (tmp_path / "mended").touch()
    outcomes, said = await run(plan, out)
    assert said[0].startswith("2 simulations (5 of 7 are there already), about ")
    assert all(outcome.result is not None for outcome in outcomes)


def asked(folder: Path, study: Study, setup: Setup) -> Store:
    return open_store(planned(study, setup), folder)


@pytest.fixture
def started(tmp_path: Path) -> Path:
    """Return a folder with one result of QUICK_MIX with two seeds."""
    plan = planned(QUICK_MIX, setup_of({}))
    store = open_store(plan, tmp_path)
    store.plan(plan.cells)
    cell = plan.cells[0]
    store.add(Outcome(key=cell_key(cell), cell=cell, error="none"), running_s=1.0)
    store.close()
    return tmp_path


@pytest.mark.parametrize(
    ("study", "setup", "words"),
    [
        (MultiStep(peers=(2,)), setup_of(SHORT), "another study"),
        (QUICK_MIX, setup_of({}, first_seed=7), "another first seed"),
        (QUICK_MIX, setup_of({}, seeds=1), "2 seeds, and study.seeds is 1"),
    ],
)
def test_a_folder_holds_results_that_belong_together(
    started: Path, study: Study, setup: Setup, words: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        asked(started, study, setup)
    assert words in raised.value.what
    assert raised.value.why
    assert "another folder" in raised.value.fix


def test_other_settings_are_refused(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("some text " * 200)
    out = tmp_path / "out"
    out.mkdir()

    def store(values: dict[str, Any] | None = None, also: Sequence[str] = ()) -> Store:
        settings = {**SHORT, "data.path": str(text), **(values or {})}
        return asked(out, MultiStep(peers=(2,)), setup_of(settings, also=parse_also(also)))

    first = store()
    cell = MultiStep(peers=(2,)).cells(setup_of(SHORT), 0, [])[0]
    first.add(Outcome(key=cell_key(cell), cell=cell, error="none"), running_s=1.0)
    first.close()
    with pytest.raises(ConfigError, match="set of settings"):
        store({"inner.lr": 0.5})
    with pytest.raises(ConfigError, match="set of --also"):
        store(also=["mine=outer.lr=0.6"])
    store().close()
    text.write_text("other text " * 200)
    with pytest.raises(ConfigError, match="another text"):
        store()


def test_one_process_at_a_time_works_on_a_folder(started: Path) -> None:
    held = asked(started, QUICK_MIX, setup_of({}))
    with pytest.raises(ConfigError, match="is in use"):
        asked(started, QUICK_MIX, setup_of({}))
    held.close()
    asked(started, QUICK_MIX, setup_of({})).close()


def test_results_of_something_else_are_refused(tmp_path: Path) -> None:
    (tmp_path / RESULTS_FILE).write_text("{}")
    with pytest.raises(ConfigError, match="cannot read"):
        asked(tmp_path, QUICK_MIX, setup_of({}))


def test_results_name_neither_the_host_nor_paths(started: Path) -> None:
    results = read_results(started)
    assert results is not None
    assert results.machine.cores >= 1
    assert results.machine.memory_gib > 0
    assert results.started.endswith("+00:00")
    assert str(started) not in (started / RESULTS_FILE).read_text()


def test_a_key_follows_the_whole_definition() -> None:
    cell = QUICK_MIX.cells(setup_of({}), 0, [])[0]
    assert isinstance(cell, MixCell)
    changed = [
        msgspec.structs.replace(cell, seed=9),
        msgspec.structs.replace(cell, momentum=0.1),
        msgspec.structs.replace(cell, labels={**cell.labels, "x": 1}),
    ]
    assert len({cell_key(other) for other in [cell, *changed]}) == 4
    reordered = msgspec.structs.replace(cell, labels=dict(reversed(cell.labels.items())))
    assert cell_key(reordered) == cell_key(cell)


async def test_a_process_that_is_killed_is_a_failure_and_not_a_hang() -> None:
    process = await CellProcess.start()
    cell = TopologyStudy().cells(setup_of({}), 0, [])[-2]

    def kill(rounds: int) -> None:
        os.kill(process.pid, signal.SIGKILL)

    result, error = await process.run(cell, kill)
    assert result is None
    assert error is not None
    assert "exit code -9" in error
    assert process.ended
    await process.close()


@pytest.mark.parametrize("preset", ["nano", "tiny"])
def test_parameters_are_counted_as_they_are(preset: PresetName) -> None:
    model = build_model(preset, seed=0)
    assert parameter_count(preset) == sum(p.numel() for p in model.parameters())


def test_parameters_of_the_full_models() -> None:
    assert parameter_count("134m") == pytest.approx(134e6, rel=0.05)
    assert parameter_count("551m") == pytest.approx(551e6, rel=0.05)


def test_floating_point_operations() -> None:
    """2 peers, 2 rounds of 1 step, 1 window of 64 bytes: 256 tokens."""
    cell = MultiStep(peers=(2,)).cells(setup_of(SHORT), 0, [])[0]
    assert isinstance(cell, SwarmCell)
    assert PRESETS["nano"].sequence_length == 64
    assert train_tokens(cell) == 256
    assert train_flops(cell) == 6 * 256 * parameter_count("nano")
    # Four models are tried on 64 tokens each, a forward pass being a third of a step.
    assert cost(cell) == 6 * (256 + 4 * 64 / 3) * parameter_count("nano")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (89, "89 s"), (600, "10 min"), (7200, "2.0 h"), (86400 * 3000, "3,000 days")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


def test_time_left_follows_the_measured_speed() -> None:
    """Four cells of 20 units each; calibrated at 10 units a second, measured at 2."""
    now_s = 0.0
    cells = QUICK_MIX.cells(setup_of({}), 0, [])[:4]
    assert [cost(cell) for cell in cells] == [20.0] * 4
    tally = Tally(cells=4, waiting=cells, rate=10.0, now_s=lambda: now_s)
    assert tally.left_s == pytest.approx(8.0)
    tally.rounds(cells[0], 0)
    now_s = 10.0
    tally.finish(Outcome(key="", cell=cells[0], error="none"))
    assert tally.left_s == pytest.approx(30.0)
    assert tally.headline() == ("0 of 4 simulations done, 1 failed; 10 s gone, about 30 s left")
