"""Which run a node's home belongs to, and that the same command resumes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from gasloc_p2p.commands.home import RUN_FILE, found_or_resume, keep_manifest
from gasloc_p2p.config import LoadedConfig, assignment_layer, load
from gasloc_p2p.core.errors import ConfigError, DiskError
from tests.train.tiny_models import write_model


def settings(home: Path, *assignments: str) -> LoadedConfig:
    return load([assignment_layer([f"node.home={home}", *assignments])])


def test_the_same_settings_resume_the_run_of_the_home(tmp_path: Path) -> None:
    timed = ("run.id=first", "pace.mode=seconds")
    _, founded = found_or_resume(settings(tmp_path, *timed), now_s=100.0)
    keep_manifest(tmp_path, founded)
    _, again = found_or_resume(settings(tmp_path, *timed), now_s=9000.0)
    assert again == founded
    assert again.digest == founded.digest, "rounds are counted from the same moment"


def test_a_run_without_a_name_is_found_by_its_home(tmp_path: Path) -> None:
    config, founded = found_or_resume(settings(tmp_path), now_s=0.0)
    keep_manifest(tmp_path, founded)
    resumed, again = found_or_resume(settings(tmp_path), now_s=0.0)
    assert again == founded
    assert resumed.run.id == config.run.id == founded.run_id


def test_other_shared_settings_are_refused_and_the_first_one_is_named(tmp_path: Path) -> None:
    _, founded = found_or_resume(settings(tmp_path, "run.id=first"), now_s=0.0)
    keep_manifest(tmp_path, founded)
    with pytest.raises(ConfigError, match=r"run first, in which inner.lr is 0.002 and not 0.5"):
        found_or_resume(settings(tmp_path, "run.id=first", "inner.lr=0.5"), now_s=0.0)
    with pytest.raises(ConfigError, match=r"run first, in which run.id is 'first' and not 'other'"):
        found_or_resume(settings(tmp_path, "run.id=other"), now_s=0.0)
    found_or_resume(settings(tmp_path, "run.id=first", "node.threads=2"), now_s=0.0)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / RUN_FILE).write_text("{}")
    with pytest.raises(ConfigError, match="is not the manifest of a run"):
        found_or_resume(settings(tmp_path), now_s=0.0)


def test_a_home_without_room_is_explained(tmp_path: Path) -> None:
    _, founded = found_or_resume(settings(tmp_path, "run.id=first"), now_s=0.0)
    (tmp_path / f"{RUN_FILE}.partial").symlink_to("/dev/full")
    with pytest.raises(DiskError, match="cannot write") as caught:
        keep_manifest(tmp_path, founded)
    assert caught.value.why == "No space left on device"


def test_founding_fills_in_the_digest_of_a_named_model(tmp_path: Path) -> None:
    write_model(tmp_path / "model", "llama")
    own = ("model.name=their/model", f"device.model_folder={tmp_path / 'model'}")
    config, founded = found_or_resume(settings(tmp_path, *own), now_s=0.0)
    assert len(config.model.digest) == 64
    assert founded.sections["model"]["digest"] == config.model.digest
    assert str(tmp_path) not in founded.encode().decode(), "no paths"
    keep_manifest(tmp_path, founded)
    resumed, again = found_or_resume(settings(tmp_path, *own), now_s=0.0)
    assert again == founded
    assert resumed.model == config.model
    with pytest.raises(ConfigError, match=r"model.weights is 'fresh' and not 'existing'"):
        found_or_resume(settings(tmp_path, *own, "model.weights=existing"), now_s=0.0)
