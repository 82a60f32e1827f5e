"""What a hub answers, and what is made of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from datasets import load_dataset_builder

from gasloc_p2p.core.errors import DataError
from gasloc_p2p.data.hub import Hub
from gasloc_p2p.data.patience import LONGEST_PAUSE_S, ClosedError, Patience
from tests.data.following import following
from tests.data.hub import COMMIT, MockHub
from tests.data.texts import write_parquet, write_usual

PARTS = tuple(f"data/part-{i}.parquet" for i in range(3))
CONFIGS = [
    {
        "config_name": "default",
        "data_files": [
            {"split": "train", "path": "data/*"},
            {"split": "test", "path": "data/test/*"},
        ],
    },
    {"config_name": "sample-10BT", "data_files": [{"split": "train", "path": ["sample/10BT/*"]}]},
    {"config_name": "plain", "data_files": "sample/**"},
]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[MockHub]:
    write_usual(tmp_path / "source")
    write_parquet(tmp_path / "source" / "sample" / "10BT" / "x.parquet", ["small"])
    write_parquet(tmp_path / "source" / "data" / "test" / "y.parquet", ["test"])
    (tmp_path / "source" / "README.md").write_text("texts")
    (tmp_path / "source" / "more.json").write_text('{"text": "more"}')
    with MockHub(tmp_path / "source", card={"configs": CONFIGS}).served() as served:
        yield served


def hub_of(served: MockHub, **changes: str) -> Hub:
    return Hub(
        name=changes.get("name", served.name),
        kind=changes.get("kind", "dataset"),
        patience=Patience(list[str]().append, lambda seconds: None),
        endpoint=served.endpoint,
    )


@pytest.mark.parametrize(
    ("subset", "files", "names"),
    [
        ("", (), PARTS),
        ("sample-10BT", (), ("sample/10BT/x.parquet",)),
        ("plain", (), ("sample/10BT/x.parquet",)),
        ("sample", (), ("sample/10BT/x.parquet",)),
        ("", ("data/*-[12].parquet",), PARTS[1:]),
        ("", ("**/*.parquet",), (*PARTS, "data/test/y.parquet", "sample/10BT/x.parquet")),
        ("", ("more.json",), ("more.json",)),
    ],
)
def test_which_files_are_read(
    served: MockHub, subset: str, files: tuple[str, ...], names: tuple[str, ...]
) -> None:
    found = hub_of(served).list_documents(revision="main", subset=subset, files=files)
    assert found.names == names
    assert found.commit == COMMIT


@pytest.mark.parametrize(
    ("folder", "kept"),
    [
        ("data/train-0000{}-of-00002.parquet", "data/validation-00000-of-00001.parquet"),
        ("train/{}.jsonl", "validation/0.jsonl"),
        ("texts/train_{}.jsonl.gz", "texts/val_0.jsonl.gz"),
        ("anything/{}.parquet", "README.md"),
    ],
)
def test_without_a_card_names_tell_what_is_for_training(
    tmp_path: Path, folder: str, kept: str
) -> None:
    names = [folder.format(number) for number in range(2)]
    for name in (*names, kept):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    with MockHub(tmp_path).served() as served:
        found = hub_of(served).list_documents(revision="main", subset="", files=())
    assert list(found.names) == names


@pytest.mark.parametrize("subset", ["", "sample-10BT", "plain"])
def test_a_subset_is_what_the_library_itself_would_load(
    served: MockHub, tmp_path: Path, subset: str
) -> None:
    card = f"---\n{json.dumps(served.card)}\n---\n"
    (served.folder / "README.md").write_text(card)
    builder = load_dataset_builder(str(served.folder), subset or None, cache_dir=str(tmp_path))
    found = hub_of(served).list_documents(revision="main", subset=subset, files=())
    loaded = [Path(name).relative_to(served.folder) for name in builder.config.data_files["train"]]
    assert list(found.names) == sorted(name.as_posix() for name in loaded)


def test_a_subset_that_is_not_there_is_refused_with_those_that_are(served: MockHub) -> None:
    with pytest.raises(DataError, match="in its subset 'absent'") as raised:
        hub_of(served).list_documents(revision="main", subset="absent", files=())
    assert "default, sample-10BT, plain" in raised.value.why


@pytest.mark.parametrize(
    ("configs", "subset", "what", "why"),
    [
        ([], "", "no split 'train'", "test"),
        (CONFIGS[1:], "", "none is its default", "sample-10BT, plain"),
        ([{"config_name": "a", "data_files": 5}], "", "in a known way", "data_files"),
        (["a"], "", "in a known way", ""),
        (
            [{"config_name": "a", "data_files": [{"split": "train", "path": "*"}] * 2}],
            "",
            "in a known way",
            "duplicated",
        ),
        ([{"config_name": 1}, {"config_name": 2}], "", "none is its default", "1, 2"),
        ([{"config_name": "a", "data_files": "/etc/*"}], "", "'/etc/\\*' points out", ""),
        ([{"config_name": "a", "data_files": "http://x/*.parquet"}], "a", "points out", ""),
        ([{"config_name": "a", "data_dir": "../.."}], "", "points out", ""),
    ],
)
def test_what_is_unclear_or_elsewhere_is_not_read(
    served: MockHub, configs: list[object], subset: str, what: str, why: str
) -> None:
    served.card = {"configs": configs}
    with pytest.raises(DataError, match=what) as raised:
        hub_of(served).list_documents(revision="main", subset=subset, files=())
    assert why in raised.value.why
    assert len(served.asked) == 1


def test_no_program_of_a_data_set_is_run(served: MockHub) -> None:
    (served.folder / "texts.py").write_text("raise SystemExit")
    with pytest.raises(DataError, match=r"program of its own, texts\.py"):
        hub_of(served).list_documents(revision="main", subset="", files=())
    found = hub_of(served).list_documents(revision="main", subset="", files=PARTS)
    assert found.names == PARTS


def test_what_waiting_cannot_mend_is_said(served: MockHub) -> None:
    for served.coded in (True, False):
        absent = hub_of(served, name="nobody/nothing")
        with pytest.raises(DataError, match="no data set nobody/nothing") as raised:
            absent.list_documents(revision="main", subset="", files=())
        assert "private" in raised.value.what
    with pytest.raises(DataError, match="'a/b/c' is no name"):
        hub_of(served, name="a/b/c").list_documents(revision="main", subset="", files=())
    with pytest.raises(DataError, match="no such revision"):
        hub_of(served).list_documents(revision="old", subset="", files=())
    served.script.append("gated")
    with pytest.raises(DataError, match="is gated") as raised:
        hub_of(served).open(PARTS[0], revision=COMMIT)
    assert f"huggingface.co/datasets/{served.name}" in raised.value.fix
    assert "HF_TOKEN" in raised.value.fix
    served.script.append("missing")
    with pytest.raises(DataError, match="does not hand out a file"):
        hub_of(served).open(PARTS[0], revision=COMMIT)
    served.script.extend(["ok", "whole"])
    with hub_of(served).open(PARTS[0], revision=COMMIT) as file:
        file.seek(10)
        with pytest.raises(DataError, match="cannot be read in parts"):
            file.read(10)


def test_a_shard_that_is_gone_ends_the_training_once_the_buffer_is_empty(
    served: MockHub, tmp_path: Path
) -> None:
    with following(served, tmp_path / "home") as peer:
        peer.windows(2)
        served.script.extend(["missing"] * 100)
        with pytest.raises(DataError, match="does not hand out a file"):
            peer.windows(100)


def test_files_are_read_from_any_place(served: MockHub) -> None:
    data = (served.folder / PARTS[0]).read_bytes()
    hub = hub_of(served)
    served.script.extend(["429", "ok", "cut", "503", "ok"])
    assert hub.read_whole(PARTS[0], revision=COMMIT) == data
    with hub.open(PARTS[0], revision=COMMIT) as file:
        file.seek(-8, 2)
        assert file.read() == data[-8:]
        assert file.seek(5) == 5
        file.seek(2, 1)
        assert file.read(4) == data[7:11]


def test_another_host_hands_out_the_files(served: MockHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    data = (served.folder / PARTS[0]).read_bytes()
    with MockHub(served.folder).served() as cdn:
        served.cdn = cdn.endpoint
        cdn.script.extend(["ok", "cut", "503", "ok"])
        with hub_of(served).open(PARTS[0], revision=COMMIT) as file:
            file.seek(3)
            assert file.read() == data[3:]
    assert cdn.done == ["ok", "cut", "503", "ok"]
    assert served.done == []
    assert set(served.tokens) == {"Bearer hf_secret"}
    assert set(cdn.tokens) == {None}
    assert all("signed=1" in path for path in cdn.asked)


def test_a_data_set_that_was_renamed_is_found(
    served: MockHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    served.renamed = "someone/before"
    hub = hub_of(served, name=served.renamed)
    assert hub.list_documents(revision="main", subset="", files=()).names == PARTS
    served.script.extend(["cut", "ok"])
    assert hub.read_whole(PARTS[0], revision=COMMIT) == (served.folder / PARTS[0]).read_bytes()
    assert set(served.tokens) == {"Bearer hf_secret"}


def test_pauses_double_up_to_a_minute_and_heed_the_hub() -> None:
    pauses: list[float] = []
    said: list[str] = []
    patience = Patience(said.append, pauses.append)
    for _ in range(8):
        patience.endure("out")
    assert pauses == [1, 2, 4, 8, 16, 32, LONGEST_PAUSE_S, LONGEST_PAUSE_S]
    patience.relax()
    patience.endure("asked", asked_s=90)
    assert pauses[-2:] == [60, 30]
    for _ in range(7):
        patience.relax()
        patience.endure("cut")
    assert said == [
        "out; next try in 1 s",
        "asked; next try in 90 s",
        "cut; next try in 1 s",
        "cut (2 times so far); next try in 1 s",
        "cut (4 times so far); next try in 1 s",
    ]


def test_a_trouble_that_lasts_is_told_every_minute() -> None:
    now_s = 1000.0
    said: list[str] = []

    def pause(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    patience = Patience(said.append, pause, lambda: now_s)
    for _ in range(8):
        patience.endure("out")
    assert said == [
        "out; next try in 1 s",
        "out; 63 s without success so far, next try in 60 s",
        "out; 123 s without success so far, next try in 60 s",
    ]
    patience.relax()
    said.clear()
    patience.endure("asked", asked_s=150)
    patience.endure("asked", asked_s=150)
    assert [words.rpartition(", ")[0] for words in said[1:]] == [
        f"asked; {tried} s without success so far" for tried in (60, 120, 210, 270)
    ]
    assert "next try in 90 s" in said[1]
    assert now_s == 1183 + 300
    # Short troubles, minutes apart, are told less and less often.
    said.clear()
    for _ in range(4):
        patience.relax()
        pause(500)
        patience.endure("cut")
    assert len(said) == 3


def test_a_dead_hub_is_named_with_its_address(served: MockHub) -> None:
    said: list[str] = []
    closed = ClosedError()

    def pause(seconds: float) -> None:
        raise closed

    nobody = "http://127.0.0.1:9"
    for endpoint, words in ((served.endpoint, "out of order"), (nobody, "cannot be reached")):
        hub = hub_of(served)
        hub.endpoint, hub.patience = endpoint, Patience(said.append, pause)
        served.down = True
        with pytest.raises(ClosedError):
            hub.list_documents(revision="main", subset="", files=())
        assert endpoint in said[-1]
        assert words in said[-1]


def test_a_closed_feed_ends_its_pause(served: MockHub, tmp_path: Path) -> None:
    with following(served, tmp_path / "home") as peer:
        served.down = True
        peer.closing.close()
        with pytest.raises(ClosedError):
            peer.feed.batch(1)
