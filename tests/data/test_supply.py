"""From settings to samples."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from typer.testing import CliRunner

from gasloc_p2p.cli import app
from gasloc_p2p.core.errors import DataError
from gasloc_p2p.data import supply as supply_module
from gasloc_p2p.data.feed import Closing, Feed
from gasloc_p2p.data.overlap import overlap, units_trained_on
from gasloc_p2p.data.supply import load_text, open_text
from gasloc_p2p.data.tokens import END_OF_TEXT, Bytes, Pieces, Tokens, train_tokenizer
from gasloc_p2p.train.learner import build_learner
from gasloc_p2p.train.samples import Supply, Text
from gasloc_p2p.train.settings import DataConfig, InnerConfig, ModelConfig
from tests.data.hub import COMMIT, MockHub
from tests.data.texts import SHARDS, documents, write_parquet, write_usual

LENGTH = 16


@pytest.fixture(scope="module")
def tokenizer() -> str:
    texts = [text.encode() for shard in range(SHARDS) for text in documents(shard)]
    return train_tokenizer(texts, vocabulary=300)


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MockHub]:
    write_usual(tmp_path / "source")
    with MockHub(tmp_path / "source").served() as served:
        places = f"{served.endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", places)
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", served.endpoint)
        yield served


def opened(
    folder: Path, data: DataConfig, model: ModelConfig | None = None, *, peer_id: str = "a"
) -> tuple[Supply, list[str]]:
    text, said = text_of(folder, data, model, peer_id=peer_id)
    return text.supply(LENGTH), said


def text_of(
    folder: Path, data: DataConfig, model: ModelConfig | None = None, *, peer_id: str = "a"
) -> tuple[Text, list[str]]:
    said: list[str] = []
    closing = Closing()
    text = open_text(
        model or ModelConfig(),
        data,
        folder=folder,
        seed=1,
        peer_id=peer_id,
        say=said.append,
        closing=closing,
    )
    return text, said


def drawn(supply: Supply, batches: int = 4) -> torch.Tensor:
    found = torch.cat([supply.samples.batch(2) for _ in range(batches)])
    if isinstance(supply.samples, Feed):
        supply.samples.close()
    return found


def hub_data(served: MockHub, **changes: object) -> DataConfig:
    values = {"path": f"hub:{served.name}", "validation_tokens": 64, "validation_fraction": 0.2}
    return DataConfig.model_validate(values | changes)


def test_a_hub_is_asked_once_and_not_needed_for_a_restart(served: MockHub, tmp_path: Path) -> None:
    first, _ = opened(tmp_path / "home", hub_data(served))
    expected = drawn(first)
    listings = [path for path in served.asked if path.startswith("/api/datasets/")]
    assert len(listings) == 1
    assert all(COMMIT in path for path in served.asked if "/resolve/" in path)
    served.down = True
    again, _ = opened(tmp_path / "home", hub_data(served))
    assert torch.equal(drawn(again), expected)
    assert torch.equal(again.validation, first.validation)


def test_peers_are_tried_on_the_same_text_wherever_it_lies(served: MockHub, tmp_path: Path) -> None:
    hub, _ = opened(tmp_path / "one", hub_data(served))
    local, _ = opened(tmp_path / "two", hub_data(served, path=str(served.folder)), peer_id="b")
    assert torch.equal(hub.validation, local.validation)
    assert not torch.equal(drawn(hub), drawn(local))


def test_the_same_files_may_be_named_from_another_folder(
    served: MockHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(served.folder)
    here = hub_data(served, path="data/part-1.parquet")
    drawn(opened(tmp_path / "home", here)[0])
    there = hub_data(served, path=str(served.folder / "data" / "part-1.parquet"))
    _, said = opened(tmp_path / "home", there)
    assert not any("begins anew" in text for text in said)


def test_other_settings_begin_the_stream_anew(served: MockHub, tmp_path: Path) -> None:
    drawn(opened(tmp_path / "home", hub_data(served))[0])
    data = hub_data(served, path=str(served.folder / "data" / "part-1.parquet"))
    supply, said = opened(tmp_path / "home", data)
    assert any("begins anew" in text for text in said)
    fresh, said = opened(tmp_path / "fresh", data)
    assert torch.equal(drawn(supply), drawn(fresh))
    assert not said


def test_the_text_of_a_dataset_must_be_enough(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", ["only one"])
    with pytest.raises(DataError, match="validation text"):
        opened(tmp_path / "home", DataConfig(path=str(tmp_path / "a.parquet")))


def test_a_home_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", documents(0))
    (tmp_path / "home").write_text("a file")
    with pytest.raises(DataError, match="cannot be used for text"):
        opened(tmp_path / "home", DataConfig(path=str(tmp_path / "a.parquet")))


@pytest.mark.parametrize("streamed", [True, False])
def test_a_tokenizer_of_one_s_own(tmp_path: Path, tokenizer: str, streamed: bool) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text(tokenizer)
    write_usual(tmp_path / "source")
    (tmp_path / "text").mkdir()
    for shard in range(SHARDS):
        (tmp_path / "text" / f"{shard}.txt").write_text("".join(documents(shard)))
    data = DataConfig(
        path=str(tmp_path / ("source" if streamed else "text")),
        tokenizer_file=str(file),
        validation_tokens=64,
        validation_fraction=0.2,
    )
    text, said = text_of(tmp_path / "home", data, ModelConfig(tokenizer="file"))
    assert text.vocabulary == 300
    assert any("bytes of the held-out text" in told for told in said)
    tokens = drawn(text.supply(LENGTH))
    assert 255 < int(tokens.max()) < 300
    learner = build_learner(
        ModelConfig(tokenizer="file"), data, InnerConfig(), seed=1, peer_id="a", text=text
    )
    assert learner.validation_loss() == pytest.approx(torch.log(torch.tensor(300.0)), abs=1.0)


def test_a_text_is_tokenised_once(
    tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, source, home = tmp_path / "tokenizer.json", tmp_path / "text.txt", tmp_path / "home"
    file.write_text(tokenizer)
    source.write_text("".join(documents(0)))
    data = DataConfig(path=str(source), tokenizer_file=str(file), validation_tokens=64)
    encoded: list[int] = []
    encode = Pieces.encode

    def counted(pieces: Pieces, texts: Sequence[bytes]) -> Tokens:
        encoded.append(len(texts))
        return encode(pieces, texts)

    monkeypatch.setattr(Pieces, "encode", counted)
    model = ModelConfig(tokenizer="file")
    first = drawn(opened(home, data, model)[0])
    assert len(encoded) == 2
    assert torch.equal(drawn(opened(home, data, model)[0]), first)
    assert len(encoded) == 2
    (home / "text-train").write_bytes(b"torn")
    assert torch.equal(drawn(opened(home, data, model)[0]), first)
    source.write_text("".join(documents(1)))
    assert not torch.equal(drawn(opened(home, data, model)[0]), first)
    assert len(encoded) == 6
    supply, said = opened(file, data, model)
    assert any("could not be kept" in told for told in said)
    assert len(drawn(supply)) == len(first)


@pytest.mark.parametrize("digest", ["", "0" * 64])
def test_a_tokenizer_file_that_is_not_set_is_asked_for(tmp_path: Path, digest: str) -> None:
    write_parquet(tmp_path / "a.parquet", documents(0))
    model = ModelConfig(tokenizer="file", tokenizer_digest=digest)
    with pytest.raises(DataError, match=r"data\.tokenizer_file is not set") as raised:
        opened(tmp_path / "home", DataConfig(path=str(tmp_path / "a.parquet")), model)
    assert "--set data.tokenizer_file=FILE" in raised.value.fix


@pytest.mark.parametrize(("where", "most_mb"), [("local", 1), ("local", 5000), ("hub", 2)])
def test_little_is_read_ahead_of_files_on_this_machine(
    served: MockHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, most_mb: int
) -> None:
    monkeypatch.setattr(supply_module, "LOCAL_BUFFER_MB", 1)
    path = str(served.folder) if where == "local" else f"hub:{served.name}"
    data = hub_data(served, path=path, buffer_mb=most_mb)
    limits: list[int] = []

    class Noted(Feed):
        def __init__(self, **settings: Any) -> None:
            limits.append(settings["limit_bytes"])
            super().__init__(**settings)

    monkeypatch.setattr(supply_module, "Feed", Noted)
    drawn(opened(tmp_path / "home", data)[0])
    assert limits == [(1 if where == "local" else most_mb) << 20]


def test_another_tokenizer_than_the_run_s_is_refused(tmp_path: Path, tokenizer: str) -> None:
    file = tmp_path / "mine.json"
    # The same tokenizer, written another way.
    file.write_text(json.dumps(json.loads(tokenizer), indent=3))
    digest = Pieces(tokenizer.encode(), source="x").digest
    write_parquet(tmp_path / "a.parquet", documents(0, 200))
    data = DataConfig(
        path=str(tmp_path / "a.parquet"), tokenizer_file=str(file), validation_tokens=64
    )
    opened(tmp_path / "home", data, ModelConfig(tokenizer="file", tokenizer_digest=digest))
    with pytest.raises(DataError, match=r"mine.json is not the one") as raised:
        opened(tmp_path / "home", data, ModelConfig(tokenizer="file", tokenizer_digest="0" * 64))
    assert digest[:12] in raised.value.why


def test_a_tokenizer_of_the_hub_is_kept_for_a_restart(
    served: MockHub, tmp_path: Path, tokenizer: str
) -> None:
    (served.folder / "tokenizer.json").write_text(tokenizer)
    digest = Pieces(tokenizer.encode(), source="x").digest
    data = hub_data(served, path=str(served.folder))
    model = ModelConfig(tokenizer=served.name, tokenizer_digest=digest)
    assert text_of(tmp_path / "home", data, model)[0].vocabulary == 300
    served.down = True
    assert text_of(tmp_path / "home", data, model)[0].vocabulary == 300


@pytest.mark.parametrize(
    ("content", "words"),
    [("nonsense", "is no tokenizer"), ("{}", "is no tokenizer"), ("END", "no token that ends")],
)
def test_what_is_no_tokenizer_is_refused(tokenizer: str, content: str, words: str) -> None:
    if content == "END":
        content = tokenizer.replace(END_OF_TEXT, "<other>")
    with pytest.raises(DataError, match=words):
        Pieces(content.encode(), source="mine.json")


def test_tokens_stand_for_the_text(tokenizer: str) -> None:
    pieces = Pieces(tokenizer.encode(), source="x")
    texts = [text.encode() for text in documents(1)]
    tokens = pieces.encode(texts)
    assert pieces.text_bytes(tokens) == sum(map(len, texts))
    assert len(tokens) < sum(map(len, texts))
    assert tokens.dtype.itemsize == 2
    assert Bytes().encode(texts).tobytes() == b"".join(text + b"\0" for text in texts)
    assert not len(pieces.encode([]))


def test_other_threads_go_on_while_a_long_document_becomes_tokens(tokenizer: str) -> None:
    pieces = Pieces(tokenizer.encode(), source="x")
    text = " ".join(documents(0)).encode() * 200
    thread = threading.Thread(target=pieces.encode, args=([text],))
    thread.start()
    turns = 0
    while thread.is_alive():
        turns += 1
        time.sleep(0)
    thread.join()
    # A call that keeps the interpreter to itself leaves a handful.
    assert turns > 200


def test_simulations_refuse_documents(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", ["one"])
    for model, path in ((ModelConfig(), str(tmp_path)), (ModelConfig(tokenizer="file"), "")):
        with pytest.raises(DataError, match="bytes of a text in memory"):
            load_text(model, DataConfig(path=path))


def test_overlap_is_that_of_the_units_that_were_trained_on(served: MockHub, tmp_path: Path) -> None:
    for peer_id in ("a", "b"):
        drawn(opened(tmp_path / peer_id, hub_data(served), peer_id=peer_id)[0], batches=300)
    few = [units_trained_on(tmp_path / peer_id, 4 * 2 * LENGTH) for peer_id in ("a", "b")]
    assert [len(units) for units in few] == [1, 1]
    every = [units_trained_on(tmp_path / peer_id, 10**9) for peer_id in ("a", "b")]
    assert overlap(few) == float(few[0] == few[1])
    assert overlap(every) == 1.0
    assert overlap([frozenset("abc"), frozenset("bcde"), frozenset("x")]) == pytest.approx(2 / 9)
    assert overlap([frozenset("a"), frozenset()]) is None


def test_a_tokenizer_is_trained_on_documents_that_are_not_held_out(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", documents(0))
    out = tmp_path / "tokenizer.json"
    arguments = ["tokenizer", "train", "--vocabulary", "280", str(out)]
    result = CliRunner().invoke(app, [*arguments, "--set", f"data.path={tmp_path}"])
    assert result.exit_code == 0, result.output
    assert "model.tokenizer=file" in result.output
    assert Pieces(out.read_bytes(), source="x").vocabulary == 280
