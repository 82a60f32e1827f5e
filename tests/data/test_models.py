"""A model of a hub: what is fetched, what is waited for, and what is said of the rest."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants, snapshot_download

from gasloc_p2p.core.errors import DataError, DiskError
from gasloc_p2p.data.models import CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE, fetch_model
from gasloc_p2p.data.patience import ClosedError, Patience
from gasloc_p2p.train.model import model_of
from gasloc_p2p.train.parameters import ParameterView
from gasloc_p2p.train.settings import ModelConfig
from tests.data.hub import COMMIT, MockHub
from tests.train.tiny_models import write_model

FRESH = ModelConfig(name="their/model")
EXISTING = ModelConfig(name="their/model", weights="existing")


@dataclass
class Bench:
    """A hub with a model, an empty cache, and somebody who wants the model.

    Attributes:
        cache: where the library keeps models.
        said: what a person is told.
        pauses_s: how long it would have waited.
    """

    hub: MockHub
    cache: Path
    said: list[str] = field(default_factory=list)
    pauses_s: list[float] = field(default_factory=list)

    def fetch(self, model: ModelConfig = EXISTING) -> Path:
        patience = Patience(self.said.append, self._pause)
        return fetch_model(model, patience=patience, endpoint=self.hub.endpoint)

    def refused(self, model: ModelConfig = EXISTING) -> DataError:
        with pytest.raises(DataError) as raised:
            self.fetch(model)
        assert raised.value.why
        assert raised.value.fix
        assert self.said == []
        assert "connect" not in str(raised.value)
        return raised.value

    def _pause(self, seconds: float) -> None:
        if seconds:
            self.pauses_s.append(seconds)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    write_model(tmp_path / "model", "llama")
    (tmp_path / "model" / "README.md").write_text("a model")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with MockHub(tmp_path / "model", name="their/model").served() as hub:
        yield Bench(hub=hub, cache=tmp_path / "cache")


def same_files(folder: Path, bench: Bench, *names: str) -> bool:
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)
    return all(
        (folder / name).read_bytes() == (bench.hub.folder / name).read_bytes() for name in names
    )


def test_what_is_needed_is_fetched_once_and_transformers_finds_it(bench: Bench) -> None:
    assert same_files(bench.fetch(FRESH), bench, CONFIG_FILE)
    folder = bench.fetch()
    assert same_files(folder, bench, CONFIG_FILE, WEIGHTS_FILE)
    written = model_of(EXISTING, seed=0, folder=str(bench.hub.folder)).module
    module = model_of(EXISTING, seed=0, folder=str(folder)).module
    assert torch.equal(ParameterView(module).read(), ParameterView(written).read())
    found = snapshot_download("their/model", local_files_only=True)
    assert Path(found) == folder
    asked = len(bench.hub.asked)
    assert bench.fetch(EXISTING.model_copy(update={"revision": COMMIT})) == folder
    assert len(bench.hub.asked) == asked, "a commit never changes"
    assert bench.said == []


def test_weights_in_several_files_are_fetched(bench: Bench) -> None:
    parts = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    (bench.hub.folder / WEIGHTS_FILE).rename(bench.hub.folder / parts[0])
    (bench.hub.folder / parts[1]).write_bytes(b"more")
    index = {"weight_map": {"a": parts[0], "b": parts[1]}}
    (bench.hub.folder / INDEX_FILE).write_text(json.dumps(index))
    folder = bench.fetch()
    assert same_files(folder, bench, CONFIG_FILE, INDEX_FILE, *parts)
    (folder / parts[1]).unlink()
    assert same_files(bench.fetch(), bench, CONFIG_FILE, INDEX_FILE, *parts)


@pytest.mark.parametrize("name", ["../../outside", "/outside"])
def test_an_index_cannot_name_files_elsewhere(bench: Bench, name: str) -> None:
    (bench.hub.folder / WEIGHTS_FILE).unlink()
    (bench.hub.folder / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": name}}))
    assert "lie elsewhere" in bench.refused().why
    for revision in ("../../main", "/main"):
        bench.refused(FRESH.model_copy(update={"revision": revision}))


# Troubles that pass


def test_a_hub_out_of_order_is_waited_for_and_each_trouble_is_told_once(
    bench: Bench, capfd: pytest.CaptureFixture[str]
) -> None:
    bench.hub.listings.extend(["429", "429", "503"])
    bench.hub.script.extend(["503", "503", "ok", "cut", "429", "ok"])
    assert same_files(bench.fetch(), bench, CONFIG_FILE, WEIGHTS_FILE)
    where = f"the hub {bench.hub.endpoint}"
    assert bench.said == [
        f"{where} wants fewer requests (429); next try in 7 s",
        f"{where} is out of order (503); next try in 4 s",
        f"{where} is out of order (503) (2 times so far); next try in 1 s",
        f"the connection to {where} failed or was cut; to do without, name a copy on this disk "
        "with device.model_folder; next try in 1 s",
        f"{where} wants fewer requests (429) (2 times so far); next try in 7 s",
    ]
    assert len(bench.pauses_s) == 7
    assert capfd.readouterr() == ("", ""), "no lines of a library"


def test_an_interrupted_fetch_goes_on_where_it_ended(bench: Bench) -> None:
    folder = bench.cache / "models--their--model" / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    marked = b"not fetched again"
    (folder / f"{WEIGHTS_FILE}.partial").write_bytes(marked)
    weights = (bench.fetch() / WEIGHTS_FILE).read_bytes()
    whole = (bench.hub.folder / WEIGHTS_FILE).read_bytes()
    assert weights == marked + whole[len(marked) :]


def test_nobody_waits_for_a_hub_whose_model_is_here(bench: Bench) -> None:
    folder = bench.fetch()
    for trouble in ("503", "429", "gated"):
        bench.hub.listings.append(trouble)
        assert bench.fetch() == folder
    assert bench.pauses_s == []
    assert bench.said == [
        f"the hub does not hand out their/model; the copy in {folder} is used"
    ] * len(bench.said)
    assert len(bench.said) == 3


def test_who_leaves_does_not_wait(bench: Bench) -> None:
    bench.hub.down = True

    def pause(seconds: float) -> None:
        raise ClosedError

    patience = Patience(bench.said.append, pause)
    with pytest.raises(ClosedError):
        fetch_model(FRESH, patience=patience, endpoint=bench.hub.endpoint)


# Troubles that a person has to mend


@pytest.mark.parametrize(
    ("answer", "token", "what", "fix"),
    [
        ("gated", "", "is gated", "https://huggingface.co/their/model"),
        ("401", "", "no model their/model on the hub, or it is private", "slip in the name"),
        ("404", "", "no model their/model on the hub, or it is private", "slip in the name"),
        ("token", "hf_old", "with this machine's token", "hf auth login"),
        ("403", "hf_narrow", "with this machine's token", "may read it"),
    ],
)
def test_a_refusal_is_told_as_what_it_is(
    bench: Bench, answer: str, token: str, what: str, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    bench.hub.listings.append(answer)
    refused = bench.refused()
    assert what in refused.what
    assert fix in refused.fix


def test_a_wrong_name_or_revision_is_told(bench: Bench) -> None:
    absent = bench.refused(ModelConfig(name="their/modle"))
    assert "no model their/modle" in absent.what
    assert "404" in absent.why
    assert "is no name of a model" in bench.refused(ModelConfig(name="a/b/c")).what
    old = bench.refused(FRESH.model_copy(update={"revision": "old"}))
    assert "no such revision" in old.what
    assert "model.revision" in old.fix


def test_what_is_no_model_is_told(bench: Bench) -> None:
    (bench.hub.folder / WEIGHTS_FILE).rename(bench.hub.folder / "pytorch_model.bin")
    pickled = bench.refused()
    assert "no weights in safetensors files" in pickled.what
    assert "model.weights=fresh" in pickled.fix
    assert same_files(bench.fetch(FRESH), bench, CONFIG_FILE)
    (bench.hub.folder / CONFIG_FILE).unlink()
    assert "has no config.json" in bench.refused().why


def test_a_machine_told_to_stay_offline_is_told_so(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    refused = bench.refused()
    assert "HF_HUB_OFFLINE" in refused.why
    assert "device.model_folder" in refused.fix


def test_a_full_disk_is_told_as_one(bench: Bench) -> None:
    folder = bench.cache / "models--their--model" / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    (folder / f"{CONFIG_FILE}.partial").symlink_to("/dev/full")
    with pytest.raises(DiskError, match=f"cannot be kept in {folder}") as raised:
        bench.fetch()
    assert raised.value.why == "No space left on device"
    assert "HF_HOME" in raised.value.fix
