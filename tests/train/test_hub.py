from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gasloc_p2p.core.errors import ConfigError
from gasloc_p2p.train.data import Corpus
from gasloc_p2p.train.learner import Learner, build_learner
from gasloc_p2p.train.model import digest_of, model_of
from gasloc_p2p.train.parameters import ParameterView
from gasloc_p2p.train.settings import DataConfig, DeviceConfig, InnerConfig, ModelConfig
from tests.train.tiny_models import CONFIGS, change_config, write_model

TEXT = "".join(f"def square_{n}():\n    return {n * n}\n" for n in range(900)).encode()
CORPUS = Corpus.from_bytes(train=TEXT[:-4000], validation=TEXT[-4000:])
FRESH = ModelConfig(name="their/model")
EXISTING = ModelConfig(name="their/model", weights="existing")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


every_kind = pytest.mark.parametrize("kind", CONFIGS)


def learner(folder: Path, model: ModelConfig = FRESH, *, seed: int = 3) -> Learner:
    return build_learner(
        model,
        DataConfig(validation_tokens=1024),
        InnerConfig(batch_size=2, lr=1e-2),
        seed=seed,
        peer_id="a",
        corpus=CORPUS,
        device=DeviceConfig(kind="cpu", model_folder=str(folder)),
    )


@every_kind
def test_a_fresh_model_of_any_architecture_learns(kind: str, tmp_path: Path) -> None:
    write_model(tmp_path, kind)
    trained = learner(tmp_path)
    before = trained.validation_loss()
    for _ in range(12):
        trained.step(1e-2)
    assert trained.validation_loss() < 0.8 * before


@every_kind
def test_fresh_parameters_follow_from_the_seed_alone(kind: str, tmp_path: Path) -> None:
    write_model(tmp_path, kind)
    torch.manual_seed(1)
    first, second, other = (learner(tmp_path, seed=seed).theta() for seed in (3, 3, 4))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


@every_kind
def test_fresh_matrices_have_the_architectures_deviation(kind: str, tmp_path: Path) -> None:
    write_model(tmp_path, kind)
    module = model_of(FRESH, seed=3, folder=str(tmp_path)).module
    for name, parameter in module.named_parameters():
        if parameter.dim() >= 2:
            assert parameter.std().item() == pytest.approx(0.05, rel=0.1), name
        else:
            assert sorted(set(parameter.tolist())) == [0.0 if name.endswith("bias") else 1.0], name


@every_kind
def test_nothing_is_drawn_at_random_while_training(kind: str, tmp_path: Path) -> None:
    write_model(tmp_path, kind)
    one, other = learner(tmp_path), learner(tmp_path)
    for seed, each in enumerate((one, other)):
        torch.manual_seed(seed)
        each.step(1e-2)
    assert torch.equal(one.theta(), other.theta())


@every_kind
def test_existing_weights_are_those_of_the_files(kind: str, tmp_path: Path) -> None:
    written = write_model(tmp_path, kind)
    module = model_of(EXISTING, seed=3, folder=str(tmp_path)).module
    assert torch.equal(ParameterView(module).read(), ParameterView(written).read())
    tied = CONFIGS[kind].tie_word_embeddings
    assert ("lm_head.weight" in ParameterView(module).schema.names) == (not tied)


def test_bf16_weights_become_fp32_parameters(tmp_path: Path) -> None:
    written = write_model(tmp_path, "qwen2", dtype=torch.bfloat16)
    trained = learner(tmp_path, EXISTING)
    assert {p.dtype for p in trained.parameters_view._parameters} == {torch.float32}
    start = trained.theta()
    assert torch.equal(start, ParameterView(written).read())
    trained.step(1e-6)
    moved = trained.theta() - start
    assert 0 < moved.abs().max() < 1e-5, "a step too small for bf16"


def test_a_tokenizer_sets_the_vocabulary_of_fresh_weights_only(tmp_path: Path) -> None:
    write_model(tmp_path, "llama")
    module = model_of(FRESH, seed=0, vocabulary=300, folder=str(tmp_path)).module
    assert module(input_ids=torch.tensor([[299]])).logits.shape == (1, 1, 300)
    with pytest.raises(ConfigError, match="tokenizer has 300 tokens, and their/model 256"):
        model_of(EXISTING, seed=0, vocabulary=300, folder=str(tmp_path))


def test_sequence_length_is_bounded_by_the_model(tmp_path: Path) -> None:
    write_model(tmp_path, "llama")

    def length(wanted: int) -> int:
        model = FRESH.model_copy(update={"sequence_length": wanted})
        return model_of(model, seed=0, folder=str(tmp_path)).sequence_length

    assert [length(0), length(40)] == [96, 40]
    with pytest.raises(ConfigError, match="too long for their/model"):
        length(97)
    change_config(tmp_path, max_position_embeddings=32768)
    assert length(0) == 1024


# What peers must share


def test_the_digest_covers_the_architecture_and_existing_weights(tmp_path: Path) -> None:
    write_model(tmp_path / "a", "llama")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    change_config(tmp_path / "b", transformers_version="0.1")
    shutil.copytree(tmp_path / "a", tmp_path / "turned")
    change_config(tmp_path / "turned", rms_norm_eps=0.5)
    shutil.copytree(tmp_path / "a", tmp_path / "moved")
    model = write_model(tmp_path / "moved", "llama")
    with torch.no_grad():
        model.model.norm.weight += 1
    model.save_pretrained(tmp_path / "moved")

    def digests(model: ModelConfig) -> list[str]:
        return [
            digest_of(model, folder=str(tmp_path / name)) for name in ("a", "b", "turned", "moved")
        ]

    a, b, turned, moved = digests(EXISTING)
    assert a == b
    assert len({a, turned, moved}) == 3
    a, b, turned, moved = digests(FRESH)
    assert a == b == moved != turned
    assert digest_of(ModelConfig()) == ""


def test_another_model_than_the_runs_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path, "llama")
    digest = digest_of(EXISTING, folder=str(tmp_path))
    run = EXISTING.model_copy(update={"digest": digest})
    assert model_of(run, seed=0, folder=str(tmp_path)).sequence_length == 96
    change_config(tmp_path, rms_norm_eps=0.5)
    with pytest.raises(ConfigError, match="is not the model of the run"):
        model_of(run, seed=0, folder=str(tmp_path))


# What is refused


def refused(folder: Path, model: ModelConfig = FRESH) -> ConfigError:
    with pytest.raises(ConfigError) as raised:
        model_of(model, seed=0, folder=str(folder))
    assert raised.value.why
    assert raised.value.fix
    return raised.value


def test_code_that_comes_with_a_model_is_never_run(tmp_path: Path) -> None:
    write_model(tmp_path, "llama")
    ran = tmp_path / "ran"
    (tmp_path / "theirs.py").write_text(f"open({str(ran)!r}, 'w')\n")
    auto_map = {"AutoConfig": "theirs.Config", "AutoModelForCausalLM": "theirs.Model"}
    change_config(tmp_path, model_type="theirs", auto_map=auto_map)
    assert "needs code of its own" in refused(tmp_path).what
    assert "needs code of its own" in refused(tmp_path, EXISTING).what
    # An architecture that transformers knows too is that of transformers.
    change_config(tmp_path, model_type="llama", auto_map=auto_map)
    model_of(EXISTING, seed=0, folder=str(tmp_path))
    assert not ran.exists()


def test_what_is_no_causal_language_model_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path, "llama")
    change_config(tmp_path, model_type="no-such-thing")
    assert "does not know the architecture" in refused(tmp_path).what
    change_config(tmp_path, model_type="vit")
    assert "no causal language model" in refused(tmp_path).what
    bert = {"model_type": "bert", "hidden_size": 32, "num_attention_heads": 4}
    change_config(tmp_path, **bert, num_hidden_layers=1, intermediate_size=32)
    assert "no causal language model" in refused(tmp_path).what, "it looks ahead"


def test_weights_that_are_missing_are_refused(tmp_path: Path) -> None:
    assert "there is no model in" in refused(tmp_path).what
    model = write_model(tmp_path, "llama")
    model.model.save_pretrained(tmp_path)
    assert "does not hold all weights" in refused(tmp_path, EXISTING).what
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    assert "cannot be read" in refused(tmp_path, EXISTING).what, "no pickles"
