"""docs/benchmarks.md, made from the results that are kept under docs/benchmarks.

`python -m gasloc_p2p.studies.benchmarks docs/benchmarks` writes the page again.
"""

from __future__ import annotations

import sys
from pathlib import Path

from gasloc_p2p.studies.catalogue import STUDIES
from gasloc_p2p.studies.output import PLOT_FILE, results_text, study_of
from gasloc_p2p.studies.record import Results, read_results, write_atomically

HEAD = """# Benchmarks

This page is generated from the results that are kept beside it; do not edit it. Each study is one
command. Its folder holds every cell, setting and result (`results.json`), the table and the plot.
"""


def benchmarks_text(folder: Path) -> str:
    """Return the page about the studies whose results lie in the folders of `folder`.

    Sections that other benchmarks wrote, as Markdown files in `folder`, follow.

    Raises:
        ConfigError: a results.json cannot be read.
    """
    kept = {
        place.name: results
        for place in sorted(folder.glob("*"))
        if place.is_dir() and (results := read_results(place)) is not None
    }
    sections = [
        _section(place, results, folder.name)
        for name in STUDIES
        for place, results in kept.items()
        if results.request.study == name
    ]
    missing = sorted(set(STUDIES) - {results.request.study for results in kept.values()})
    if missing:
        lines = "\n".join(f"    gasloc study {name} --out {name}" for name in missing)
        sections.append(f"## Not run yet\n\nNo results are kept of\n\n{lines}\n")
    sections += [page.read_text() for page in sorted(folder.glob("*.md"))]
    return "\n".join([HEAD, *sections])


def _section(place: str, results: Results, folder: str) -> str:
    question = study_of(results).question
    plot = f"![{question}]({folder}/{place}/{PLOT_FILE})"
    return f"## {place}: {question}\n\n{plot}\n\n{results_text(results)}"


def main() -> None:
    """Write the page beside the folder that is named."""
    if len(sys.argv) != 2:
        sys.exit("usage: python -m gasloc_p2p.studies.benchmarks docs/benchmarks")
    folder = Path(sys.argv[1])
    write_atomically(folder.with_name("benchmarks.md"), benchmarks_text(folder).encode())


if __name__ == "__main__":
    main()
