"""docs/benchmarks.md says what the results that are kept beside it say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec

from gasloc_p2p.studies.benchmarks import benchmarks_text
from gasloc_p2p.studies.catalogue import STUDIES
from gasloc_p2p.studies.cell import Outcome
from gasloc_p2p.studies.output import PLOT_FILE, TABLE_FILE, write_outputs
from gasloc_p2p.studies.record import RESULTS_FILE, read_results
from gasloc_p2p.studies.run import open_store

from .test_run import QUICK_MIX, planned
from .tiny import outcomes_of, setup_of

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_page_is_up_to_date() -> None:
    written = (DOCS / "benchmarks.md").read_text()
    assert written == benchmarks_text(DOCS / "benchmarks"), (
        "run python -m gasloc_p2p.studies.benchmarks docs/benchmarks"
    )


def test_kept_results_are_whole() -> None:
    """Every folder has all of its files, no failed cell, and a plot with a white background."""
    for name in STUDIES:
        folder = DOCS / "benchmarks" / name
        results = read_results(folder)
        if results is None:
            assert f"gasloc study {name} --out {name}" in benchmarks_text(DOCS / "benchmarks")
            continue
        assert results.request.study == name
        assert all(outcome.result is not None for outcome in results.cells)
        assert (folder / TABLE_FILE).is_file()
        assert "<svg" in (folder / PLOT_FILE).read_text()


def kept(folder: Path) -> None:
    """Leave results of a small topology study in `folder`."""
    setup = setup_of({})
    plan = planned(QUICK_MIX, setup)
    store = open_store(plan, folder)
    store.plan(plan.cells)
    for outcome in outcomes_of(QUICK_MIX, setup):
        store.add(outcome, running_s=61.0)
    write_outputs(folder, store.results())
    store.close()


def test_a_page_is_made_from_results(tmp_path: Path) -> None:
    folder = tmp_path / "benchmarks" / "topology"
    folder.mkdir(parents=True)
    kept(folder)
    page = benchmarks_text(tmp_path / "benchmarks")
    assert "## topology: Does gossip bring peers together" in page
    assert "](benchmarks/topology/plot.svg)" in page
    assert "    gasloc study x\n" in page
    assert "5 simulations in 61 s on " in page
    assert "| pairs | 4 |" in page
    assert "    gasloc study multi-step --out multi-step\n" in page
    assert "gasloc study topology --out" not in page
    module = "gasloc_p2p.studies.benchmarks"
    subprocess.run(
        [sys.executable, "-m", module, str(tmp_path / "benchmarks")], check=True, timeout=100
    )
    assert (tmp_path / "benchmarks.md").read_text() == page


def test_a_page_names_failures(tmp_path: Path) -> None:
    folder = tmp_path / "topology"
    folder.mkdir()
    kept(folder)
    results = read_results(folder)
    assert results is not None
    first, *others = results.cells
    broken = Outcome(key=first.key, cell=first.cell, error="it broke")
    changed = msgspec.structs.replace(results, cells=(broken, *others))
    (folder / RESULTS_FILE).write_bytes(msgspec.json.encode(changed))
    assert "**1 simulations failed" in benchmarks_text(tmp_path)
