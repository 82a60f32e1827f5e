"""A checkpoint goes to transformers and on from there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from gasloc_p2p.commands.export import export
from gasloc_p2p.commands.home import checkpoints_of, found_or_resume, keep_manifest, keep_run
from gasloc_p2p.commands.text import with_tokenizer_digest
from gasloc_p2p.config import Config, assignment_layer, load
from gasloc_p2p.core.errors import CheckpointError, ConfigError
from gasloc_p2p.core.manifest import Manifest
from gasloc_p2p.core.substrate import ModelState
from gasloc_p2p.data.tokens import END_OF_TEXT, Pieces, train_tokenizer
from gasloc_p2p.founding import found
from gasloc_p2p.node.checkpoint import Checkpoint, Progress
from gasloc_p2p.train.data import Corpus, validation_windows
from gasloc_p2p.train.export import export_tokenizer
from gasloc_p2p.train.learner import Learner, build_learner
from gasloc_p2p.train.model import model_of
from gasloc_p2p.train.parameters import ParameterView
from tests.train.tiny_models import write_model

LR = 2e-3
TEXT = "".join(f"def square_{n}():\n    return {n * n}\n" for n in range(900)).encode()
CORPUS = Corpus.from_bytes(train=TEXT[:-4000], validation=TEXT[-4000:])
CONFIG = Config.model_validate(
    {"run": {"id": "mine", "seed": 3}, "data": {"validation_tokens": 1024}}
)


def learner() -> Learner:
    return build_learner(
        CONFIG.model, CONFIG.data, CONFIG.inner, seed=3, peer_id="a", corpus=CORPUS
    )


def loss_of(model: Any, tokens: Tensor) -> Tensor:
    logits = model(input_ids=tokens[:, :-1]).logits
    return cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def progress(manifest: Manifest, schema_digest: bytes, round: int, next_sample: int) -> Progress:
    return Progress(
        run_id="mine",
        run_digest=manifest.digest,
        schema_digest=schema_digest,
        peer_id="a",
        round=round,
        next_sample=next_sample,
        warmup_steps_left=0,
        written_unix_s=0.0,
    )


@pytest.fixture
def trained() -> Learner:
    trained = learner()
    for _ in range(6):
        trained.step(LR)
    return trained


@pytest.fixture
def home(trained: Learner, tmp_path: Path) -> Path:
    """The home of a node with checkpoints after rounds 1 and 2; the second one is `trained`."""
    home = tmp_path / "home"
    manifest = found(CONFIG, now_s=0.0)
    home.mkdir()
    keep_manifest(home, manifest)
    state = trained.state()
    for round, theta in ((1, learner().theta()), (2, trained.theta())):
        checkpoints_of(CONFIG, home).write(
            Checkpoint(
                progress=progress(manifest, trained.schema_digest, round, state.next_sample),
                theta=theta,
                memory=torch.zeros_like(theta),
                model=state,
            )
        )
    return home


def test_a_tokenizer_goes_with_it(tmp_path: Path) -> None:
    made = train_tokenizer([TEXT], vocabulary=300)
    export_tokenizer(made, END_OF_TEXT, tmp_path)
    read = AutoTokenizer.from_pretrained(tmp_path)
    ours = Pieces(made.encode(), source="made").encode([TEXT[:400]]).tolist()
    assert [*read.encode(TEXT[:400].decode()), read.eos_token_id] == ours
    assert read.decode(ours[:-1]) == TEXT[:400].decode()


def test_transformers_finds_the_same_loss(home: Path, trained: Learner, tmp_path: Path) -> None:
    export(home, tmp_path / "out", [])
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    windows = validation_windows(CORPUS.validation, tokens=1024, sequence_length=64)
    with torch.no_grad():
        assert loss_of(model, windows).item() == pytest.approx(trained.validation_loss(), abs=1e-6)
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_training_goes_on_there_with_the_same_losses(
    home: Path, trained: Learner, tmp_path: Path
) -> None:
    export(home, tmp_path / "out", [])
    saved = checkpoints_of(CONFIG, home).read(2)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    again = Learner(
        model.float(),
        learner().samples,
        validation_windows(CORPUS.validation, tokens=1024, sequence_length=64),
        CONFIG.inner,
    )
    again.restore(saved.model)
    assert [again.step(LR) for _ in range(3)] == pytest.approx(
        [float(trained.step(LR)) for _ in range(3)], abs=1e-6
    )
    bare = Learner(
        AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32),
        learner().samples,
        validation_windows(CORPUS.validation, tokens=1024, sequence_length=64),
        CONFIG.inner,
    )
    bare.samples.next_sample = saved.model.next_sample
    bare.step(LR)
    bare.step(LR)
    assert not torch.equal(bare.theta(), again.theta()), "the moments matter"


def test_one_checkpoint_can_be_named(home: Path, tmp_path: Path) -> None:
    export(home / "checkpoints" / "round-00000001", tmp_path / "out", [])
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(model.model.embed_tokens.weight.flatten(), learner().theta()[: 256 * 64])


def test_what_cannot_be_exported_is_refused(home: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither the home of a node nor a checkpoint"):
        export(tmp_path / "nothing", tmp_path / "out", [])
    with pytest.raises(ConfigError, match="is there already"):
        export(home, home, [])
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
        export(home / "checkpoints" / "round-00000009", tmp_path / "out", [])
    (damaged,) = (home / "checkpoints" / "round-00000002").glob("*.safetensors")
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"round 2 .* is damaged"):
        export(home, tmp_path / "out", [])
    assert not (tmp_path / "out").exists()


def test_a_model_and_a_tokenizer_of_this_disk_are_found_again(tmp_path: Path) -> None:
    write_model(tmp_path / "model", "llama")
    (tmp_path / "tokenizer.json").write_text(train_tokenizer([TEXT], vocabulary=300))
    own = (
        *("run.id=mine", "model.name=our/model", "model.tokenizer=file"),
        f"device.model_folder={tmp_path / 'model'}",
        f"data.tokenizer_file={tmp_path / 'tokenizer.json'}",
    )
    loaded, vocabulary = with_tokenizer_digest(
        load([assignment_layer([f"node.home={tmp_path / 'a'}", *own])])
    )
    config, manifest = found_or_resume(loaded, now_s=0.0)
    keep_run(tmp_path / "a", manifest, config)
    built = model_of(config.model, seed=0, vocabulary=vocabulary, folder=str(tmp_path / "model"))
    view = ParameterView(built.module)
    theta = view.read()
    checkpoints_of(config, tmp_path / "a").write(
        Checkpoint(
            progress=progress(manifest, view.schema.digest, 1, 0),
            theta=theta,
            memory=torch.zeros_like(theta),
            model=ModelState(tensors={}, next_sample=0, warmup_steps_left=0),
        )
    )
    export(tmp_path / "a", tmp_path / "out", [])
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    elsewhere = assignment_layer(["device.model_folder=/nowhere"])
    with pytest.raises(ConfigError, match="no model in /nowhere"):
        export(tmp_path / "a", tmp_path / "other", [elsewhere])
