from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaForCausalLM

from gasloc_p2p.core.errors import ConfigError
from gasloc_p2p.train.model import PRESETS, build_model, model_of, preset_config, preset_length
from gasloc_p2p.train.parameters import ParameterView, theta_digest
from gasloc_p2p.train.settings import ModelConfig, PresetName


@pytest.mark.parametrize(("preset", "elements"), [("nano", 100_000), ("tiny", 1_000_000)])
def test_presets_have_their_size(preset: PresetName, elements: int) -> None:
    schema = ParameterView(build_model(preset, seed=0)).schema
    assert schema.elements == pytest.approx(elements, rel=0.1)
    assert not any("lm_head" in name for name in schema.names), "embeddings are tied"
    assert not any("bias" in name for name in schema.names)


@pytest.mark.parametrize(("preset", "elements"), [("134m", 134_374_400), ("551m", 550_866_432)])
def test_large_presets_have_the_papers_sizes(preset: PresetName, elements: int) -> None:
    assert elements / 1e6 == pytest.approx(float(preset[:-1]), rel=0.005)
    size = PRESETS[preset]
    config = preset_config(preset, vocabulary=256, sequence_length=size.sequence_length)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == elements


def test_windows_and_vocabulary_may_be_others() -> None:
    built = model_of(ModelConfig(sequence_length=32), seed=0, vocabulary=300)
    assert built.sequence_length == 32
    tokens = torch.tensor([[299]])
    assert built.module(input_ids=tokens).logits.shape == (1, 1, 300)
    with pytest.raises(ConfigError, match="does not work here"):
        preset_length(ModelConfig(name="their/model"))


@pytest.mark.parametrize("preset", ["nano", "tiny"])
def test_logits_are_causal(preset: PresetName) -> None:
    model = build_model(preset, seed=0)
    view = ParameterView(model)
    view.write(view.read() + 0.02 * torch.randn(view.schema.elements))
    length = PRESETS[preset].sequence_length
    tokens = torch.arange(length)[None] % 256
    changed = tokens.clone()
    changed[0, length // 2] = 255
    with torch.no_grad():
        logits, other = (model(input_ids=ids).logits for ids in (tokens, changed))
    assert logits.shape == (1, length, 256)
    assert torch.equal(logits[:, : length // 2], other[:, : length // 2])
    assert not torch.equal(logits[:, -1], other[:, -1])


def test_initial_parameters_are_the_same_on_every_machine() -> None:
    flat = ParameterView(build_model("nano", seed=7)).read()
    assert theta_digest(flat) == "88d8a6408cf336ca47df6ab5c11021a58369d1277aaf83878cd2aa921b561a8a"


def test_initial_parameters_depend_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    first = ParameterView(build_model("nano", seed=7)).read()
    torch.manual_seed(2)
    state = torch.get_rng_state()
    second = ParameterView(build_model("nano", seed=7)).read()
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(first, ParameterView(build_model("nano", seed=8)).read())


def test_initial_matrices_differ_and_have_their_deviation() -> None:
    named = dict(build_model("tiny", seed=7).named_parameters())
    queries = [value for name, value in named.items() if name.endswith("q_proj.weight")]
    assert queries[0].std().item() == pytest.approx(128**-0.5, rel=0.02)
    assert abs(queries[0].mean().item()) < 0.05 * 128**-0.5
    assert not torch.equal(queries[0], queries[1])
    assert named["model.embed_tokens.weight"].std().item() == pytest.approx(0.02, rel=0.02)


def test_imports_stay_light() -> None:
    program = """
import sys
import gasloc_p2p.train.settings
assert "torch" not in sys.modules
import gasloc_p2p.train.learner
assert "transformers" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
