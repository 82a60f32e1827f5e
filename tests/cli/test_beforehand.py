"""What a node can know to be wrong it says before it makes a folder, or tells anybody anything."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from gasloc_p2p.commands.beforehand import check_text
from gasloc_p2p.commands.learner import capped_out
from gasloc_p2p.commands.model import check_model
from gasloc_p2p.config import assignment_layer, load
from gasloc_p2p.core.errors import ConfigError, DataError, DeviceError, GaslocError
from gasloc_p2p.core.manifest import Invite
from gasloc_p2p.data.supply import DATA_FOLDER, LISTING_FILE
from gasloc_p2p.train.settings import DataConfig
from tests.cli.test_cli import assert_explained, gasloc
from tests.data.hub import MockHub
from tests.data.texts import documents, write_json_lines, write_parquet
from tests.train.tiny_models import change_config, write_model

OWN: Sequence[tuple[str, type[GaslocError], str]] = (
    ("data.path=/nowhere/text", DataError, "no text file or folder at /nowhere/text"),
    ("data.path=FOLDER/lines.jsonl", DataError, "no text field 'text'"),
    ("data.path=FOLDER/empty.jsonl", DataError, "no text to train on"),
    ("data.path=FOLDER/gone.parquet", DataError, "gone.parquet cannot be read"),
    ("data.tokenizer_file=/nowhere/tokenizer.json", DataError, "'/nowhere/tokenizer.json'"),
    ("data.tokenizer_file=FOLDER/lines.jsonl", DataError, "is no tokenizer"),
    ("device.kind=mps", DeviceError, "no such device"),
    ("device.model_folder=/nowhere/model", ConfigError, "no model in /nowhere/model"),
    ("node.home=FOLDER/lines.jsonl/home", ConfigError, "lines.jsonl is a file"),
    ("node.invite_file=FOLDER/lines.jsonl/invite", ConfigError, "--set node.invite_file=..."),
    ("net.listen=here", ConfigError, "net.listen"),
    ("net.bootstrap=@/nowhere/entry", ConfigError, "/nowhere/entry"),
)
SHARED: Sequence[tuple[str, type[GaslocError], str]] = (
    ("device.processes=9", ConfigError, "a step has 8 windows"),
    ("data.path=FOLDER/short.txt", DataError, "at least 65 are needed"),
    ("model.sequence_length=5000000", ConfigError, "model.sequence_length"),
    ("model.tokenizer=file", DataError, "data.tokenizer_file is not set"),
    ("inner.warmup_rounds=50", ConfigError, "too much for run.rounds = 32"),
    ("outer.momentum=0.99", GaslocError, "outer.momentum"),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "mine"
    write_json_lines(folder / "lines.jsonl", ["a", "b"], field="body")
    (folder / "short.txt").write_text("too short")
    (folder / "empty.jsonl").touch()
    return folder


def assert_nothing_made(
    command: Sequence[str], setting: str, kind: type[GaslocError], words: str, folder: Path
) -> None:
    user = folder.parent / "user"
    user.mkdir()
    setting = setting.replace("FOLDER", str(folder))
    result = gasloc(*command, "--set", setting, HOME=str(user))
    if kind is GaslocError:
        assert words in result.stderr
    else:
        assert_explained(result, kind, words)
    assert result.stdout == "", "no address, no invite"
    assert list(user.iterdir()) == [], "no folder of a run"


@pytest.mark.parametrize(
    ("setting", "kind", "words"), [*OWN, *SHARED], ids=lambda value: str(value)
)
def test_what_a_founder_cannot_use_is_named_before_it_founds(
    setting: str, kind: type[GaslocError], words: str, folder: Path
) -> None:
    assert_nothing_made(("start",), setting, kind, words, folder)


@pytest.mark.parametrize(("setting", "kind", "words"), OWN, ids=str)
def test_what_a_joiner_cannot_use_is_named_before_it_joins(
    setting: str, kind: type[GaslocError], words: str, folder: Path
) -> None:
    invite = Invite(run_id="r", bootstrap=("/ip4/127.0.0.1/tcp/1",), digest=bytes(32)).encode()
    assert_nothing_made(("join", invite), setting, kind, words, folder)


def test_a_model_that_does_not_fit_the_run_is_refused_before_it_is_built(tmp_path: Path) -> None:
    def check(*assignments: str, vocabulary: int = 256) -> None:
        check_model(load([assignment_layer(assignments)]).config, vocabulary=vocabulary)

    check("device.processes=8")
    with pytest.raises(ConfigError, match="a step has 2 windows"):
        check("device.processes=3", "inner.tokens_per_step=128")
    write_model(tmp_path, "llama")
    named = ("model.name=their/model", f"device.model_folder={tmp_path}")
    check(*named, vocabulary=300)
    for settings, words in (
        (("model.weights=existing",), "the tokenizer has 300 tokens, and their/model 256"),
        (("model.sequence_length=97",), "is too long for their/model"),
        (("inner.tokens_per_step=97",), "not a whole number of windows"),
        (("device.processes=9",), "a step has 8 windows"),
    ):
        with pytest.raises(ConfigError, match=words):
            check(*named, *settings, vocabulary=300)
    check(*named, "model.weights=existing")
    change_config(tmp_path, vocab_size=1000)
    with pytest.raises(ConfigError, match=r"are bytes, and their/model knows 1000 tokens"):
        check(*named, "model.weights=existing")
    check(*named, "model.weights=existing", "model.tokenizer=their/model")


def test_a_hub_is_asked_once_and_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_parquet(tmp_path / "source" / "0.parquet", documents(0))
    with MockHub(tmp_path / "source").served() as hub:
        places = f"{hub.endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", places)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.endpoint)
        home, there = tmp_path / "home", DataConfig(path=f"hub:{hub.name}")
        check_text(there, home)
        with pytest.raises(DataError, match="no text field 'body'"):
            check_text(there.model_copy(update={"text_field": "body"}), home)
        with pytest.raises(DataError, match="someone/others"):
            check_text(DataConfig(path="hub:someone/others"), home)
        hub.down = True
        check_text(there, home)
        asked = len(hub.asked)
        (home / DATA_FOLDER).mkdir(parents=True)
        (home / DATA_FOLDER / LISTING_FILE).touch()
        check_text(there, home)
        assert len(hub.asked) == asked, "what was there at the first start is waited for"


def test_a_cap_under_which_no_exchange_can_succeed_is_told() -> None:
    def told(*assignments: str) -> list[str]:
        return capped_out(load([assignment_layer(assignments)]).config, code_bytes=3_000_000)

    assert told() == told("net.upload_mbit=0.21") == []
    [slow] = told("net.upload_mbit=0.1", "net.download_mbit=5")
    assert "with net.upload_mbit = 0.1 one exchange takes 240 s (3.00 MB)" in slow
    assert "120 s at most (pace.edge_ceiling_s)" in slow
    assert told("net.download_mbit=0.1", "gossip.topology=none") == []
    by_clock = ("pace.mode=seconds", "pace.period_s=100", "net.download_mbit=0.1")
    [slow] = told(*by_clock)
    assert "220 s at most" in slow
    assert told(*by_clock, "pace.edge_ceiling_s=140") == []
