"""Which run a node's home belongs to, and that the same command resumes it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gasloc_p2p.commands.home import (
    RUN_FILE,
    found_or_resume,
    hold_home,
    home_layers,
    keep_manifest,
    keep_run,
)
from gasloc_p2p.commands.resume import home_of_run
from gasloc_p2p.config import LoadedConfig, assignment_layer, load
from gasloc_p2p.core.errors import ConfigError, DiskError, IdentityError
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


def test_two_nodes_are_never_in_one_home(tmp_path: Path) -> None:
    home = tmp_path / "home"
    leave = hold_home(home)
    with pytest.raises(IdentityError, match="another node runs in") as caught:
        hold_home(home)
    assert "--set node.home=FOLDER" in caught.value.fix
    leave()
    hold_home(home)()


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


def test_the_settings_of_its_own_are_kept_and_stronger_ones_win(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    home = tmp_path / "home"
    loaded = load(
        [
            assignment_layer(
                [
                    *(f"node.home={home}", "run.id=first", "run.rounds=7", "data.path=my 猫🙂.txt"),
                    *("net.listen=/ip4/127.0.0.1/tcp/0", "node.threads=2", "node.invite_file=i"),
                    *("data.tokenizer_file=~/t.json", "net.upload_mbit=1e-05"),
                ]
            )
        ]
    )
    config, manifest = found_or_resume(loaded, now_s=0.0)
    keep_run(home, manifest, config)
    kept = load(home_layers(home, [])).config
    assert kept.run == config.run
    assert kept.data.path == str(tmp_path / "my 猫🙂.txt")
    assert kept.data.tokenizer_file == str(Path.home() / "t.json")
    assert kept.net == config.net
    assert kept.node.threads == 2
    assert kept.node.invite_file == kept.node.home == ""
    stronger = assignment_layer(["node.threads=3"])
    assert load(home_layers(home, [stronger])).config.node.threads == 3
    with pytest.raises(ConfigError, match="is not the home of a node"):
        home_layers(tmp_path, [])


def test_the_only_run_is_resumed_and_of_several_one_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="there is no run to resume"):
        home_of_run("")

    def keep(name: str, home: Path) -> Path:
        config, manifest = found_or_resume(settings(home, f"run.id={name}"), now_s=0.0)
        keep_run(home, manifest, config)
        return home

    first = keep("first", tmp_path / ".gasloc" / "first")
    elsewhere = keep("third", tmp_path / "elsewhere")
    assert home_of_run("") == home_of_run("first") == first
    os.utime(first / RUN_FILE, (0, 0))
    second = keep("second", tmp_path / ".gasloc" / "second")
    with pytest.raises(ConfigError, match="2 runs could be resumed") as caught:
        home_of_run("")
    assert "second, first" in caught.value.why
    assert caught.value.fix == "name one: gasloc resume second"
    assert home_of_run("second") == second
    assert home_of_run(str(elsewhere)) == elsewhere
    with pytest.raises(ConfigError, match="there is no run fourth to resume") as caught:
        home_of_run("fourth")
    assert "second, first" in caught.value.why
