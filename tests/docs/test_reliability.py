"""Every test that docs/reliability.md names exists, and every number is one of the field's."""

from __future__ import annotations

import ast
import re

import pytest

from tests.docs.test_docs import DOCS, ROOT, tables

ROWS = [
    row for table in tables((DOCS / "reliability.md").read_text()) for row in table if "#" in row
]


def test_the_table_is_in_order() -> None:
    numbers = [int(row["#"]) for row in ROWS]
    assert numbers == sorted(set(numbers))
    assert {row["Kind"] for row in ROWS} <= {"real", "simulated", "both"}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["#"])
def test_what_a_line_points_to_is_there(row: dict[str, str]) -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", row["What shows our answer"])
    assert named
    for path, name in named:
        tree = ast.parse((ROOT / path).read_text())
        functions = {
            node.name
            for node in tree.body
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        assert not name or name in functions, f"{path} has no {name}"
