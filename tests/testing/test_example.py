"""The example in docs/testing.md runs as it is written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "testing.md"


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    example = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)[0]
    exec(compile(example, str(PAGE), "exec"), {})
    told = capsys.readouterr().out
    assert told.count("finished") == 6
    assert told.count("killed") == 1
