"""The generator of hostile input runs, finds what it is there for, and repeats it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gasloc_p2p.core.wire import ProtocolError
from tests.benchmarks import fuzz


def test_a_short_run_finds_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fuzz.fuzz(seconds=1.0, seed=5, folder=tmp_path) == 0
    assert "executions: " in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def crash(data: bytes) -> None:
    if len(data) > 8:
        raise ProtocolError("left through")


def hoard(data: bytes) -> None:
    assert len(bytes(fuzz.MAX_PEAK_BYTES + 1)) > len(data)


@pytest.mark.parametrize(
    ("read", "words"), [(crash, "ProtocolError: left through"), (hoard, "bytes at once")]
)
def test_a_failing_input_is_kept_and_named(
    read: Callable[[bytes], None],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = {"hello-twice": fuzz.Target(read=read, honest=[b"honest input"])}
    monkeypatch.setattr(fuzz, "targets", lambda: found)
    assert fuzz.fuzz(seconds=1.0, seed=5, folder=tmp_path) == 1
    (path,) = tmp_path.iterdir()
    said = capsys.readouterr().err
    assert said.startswith(f"{path}: ")
    assert words in said
    if read is crash:
        with pytest.raises(ProtocolError, match="left through"):
            fuzz.repeat(path)
    else:
        assert fuzz.repeat(path) == 0
