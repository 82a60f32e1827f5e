"""Settings that contradict each other are refused; those without effect are told of, once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gasloc_p2p.config import Layer, LoadedConfig, assignment_layer, default_toml, file_layer, load
from gasloc_p2p.core.errors import ConfigError
from gasloc_p2p.founding import found
from gasloc_p2p.sense import USES, idle_settings, require_sense
from tests.cli.test_cli import FAST, assert_explained, gasloc


def settings(*assignments: str) -> LoadedConfig:
    return load([assignment_layer(assignments)])


@pytest.mark.parametrize(
    ("refused", "accepted", "words"),
    [
        (
            ("run.rounds=10", "inner.warmup_rounds=10.5"),
            ("run.rounds=10", "inner.warmup_rounds=10"),
            "inner.warmup_rounds = 10.5 is too much for run.rounds = 10",
        ),
        (
            ("inner.schedule=wsd", "inner.decay_rounds=33"),
            ("inner.schedule=cosine", "inner.decay_rounds=33"),
            "inner.decay_rounds = 33 is too much for run.rounds = 32",
        ),
        (
            ("pace.edge_floor_s=200",),
            ("pace.edge_floor_s=200", "pace.edge_ceiling_s=200"),
            "pace.edge_floor_s = 200 is too much for pace.edge_ceiling_s = 120",
        ),
        (
            ("pace.mode=seconds", "pace.period_s=5"),
            ("pace.mode=seconds", "pace.period_s=5", "gossip.overlap=true"),
            "pace.exchange_budget_s = 5 is too much for pace.period_s = 5",
        ),
    ],
)
def test_settings_that_leave_no_training_are_refused(
    refused: tuple[str, ...], accepted: tuple[str, ...], words: str
) -> None:
    require_sense(settings(*accepted).config)
    with pytest.raises(ConfigError, match=words):
        found(settings(*refused).config, now_s=0.0)


IDLE = {
    "model.revision": "v2",
    "model.weights": "existing",
    "model.digest": "a" * 64,
    "device.model_folder": "/model",
    "model.preset": "tiny",
    "model.tokenizer_digest": "b" * 64,
    "data.tokenizer_file": "tokenizer.json",
    "data.text_field": "body",
    "data.buffer_mb": 10,
    "data.subset": "sample",
    "data.revision": "v1",
    "data.files": ["a/*"],
    "inner.batch_size": 3,
    "inner.decay_rounds": 2.0,
    "inner.min_lr_ratio": 0.5,
    "inner.beta1": 0.5,
    "inner.beta2": 0.5,
    "outer.lr": 0.5,
    "outer.momentum": 0.5,
    "gossip.codec": "mod8",
    "gossip.chunk_bytes": 2048,
    "gossip.overlap": True,
    "pace.period_s": 30.0,
    "pace.start_delay_s": 1.0,
    "pace.exchange_budget_s": 1.0,
    "pace.adapt_steps": False,
    "pace.stride": False,
    "pace.edge_floor_s": 20.0,
    "checkpoint.gather_s": 1.0,
}
"""A value that is not the default one for every setting that may be idle."""
UNLESS = {
    "model.preset": ("model.name=their/model", "model.name=''"),
    "model.tokenizer_digest": ("model.tokenizer=bytes", "model.tokenizer=file"),
    "data.tokenizer_file": ("model.tokenizer=their/model", "model.tokenizer=file"),
    "data.text_field": ("data.path=a.txt", "data.path=a.jsonl"),
    "data.buffer_mb": ("data.path=a.txt", "data.path=hub:a/b"),
    "data": ("data.path=a.jsonl", "data.path=hub:a/b"),
    "inner.batch_size": ("inner.tokens_per_step=640", "inner.tokens_per_step=0"),
    "inner.decay_rounds": ("inner.schedule=cosine", "inner.schedule=wsd"),
    "inner.min_lr_ratio": ("inner.schedule=constant", "inner.schedule=wsd"),
    "inner.beta1": ("inner.optimizer=adafactor", "inner.optimizer=sgd"),
    "inner.beta2": ("inner.optimizer=sgd", "inner.optimizer=adamw"),
    "outer": ("outer.rule=dadam", "outer.rule=noloco"),
    "gossip": ("gossip.topology=none", "gossip.topology=ring"),
    "pace.period_s": ("pace.mode=steps", "pace.mode=seconds"),
    "pace.start_delay_s": ("pace.mode=steps", "pace.mode=seconds"),
    "pace.exchange_budget_s": ("pace.mode=steps", "pace.mode=seconds"),
    "model": ("model.name=''", "model.name=their/model"),
    "device": ("model.name=''", "model.name=their/model"),
    "pace": ("pace.mode=seconds", "pace.mode=steps"),
    "checkpoint": ("pace.mode=seconds", "pace.mode=steps"),
}
"""By setting or section: what makes it idle, and what gives it an effect."""


def test_every_setting_that_may_be_idle_is_tried() -> None:
    assert sorted(IDLE) == sorted(key for use in USES for key in use.keys)


@pytest.mark.parametrize("key", IDLE)
def test_a_setting_without_effect_is_told(key: str) -> None:
    idle, of_use = UNLESS.get(key) or UNLESS[key.partition(".")[0]]
    typed = f"{key}={json.dumps(IDLE[key])}"
    [sentence] = idle_settings(settings(idle, typed))
    assert sentence.startswith(f"{key} = ")
    assert "(--set) has no effect, since " in sentence
    assert idle_settings(settings(of_use, typed)) == []


def test_only_what_somebody_chose_is_told(tmp_path: Path) -> None:
    values = {"model.revision": "v2"}
    assert idle_settings(load([Layer(name="manifest", values=values)])) == []
    assert len(idle_settings(load([Layer(name="environment", values=values)]))) == 1
    file = tmp_path / "all.toml"
    lines = default_toml().splitlines()
    enabled = [line.removeprefix("# ") if " = " in line else line for line in lines]
    file.write_text("\n".join(line for line in enabled if not line.startswith("id =")))
    assert idle_settings(load([file_layer(file)])) == []


def test_a_command_tells_it_in_one_line_and_goes_on() -> None:
    result = gasloc("simulate", *FAST, "--set", "inner.decay_rounds=1")
    assert result.returncode == 0
    assert result.stderr == (
        "gasloc: inner.decay_rounds = 1.0 (--set) has no effect, since inner.schedule is not wsd\n"
    )


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("inner.foo", "the section inner has optimizer, lr, batch_size"),
        ("inner.foo", "no setting has a name like it"),
        ("inner.lrr", "did you mean 'inner.lr'?"),
        ("outer.lrr", "did you mean 'outer.lr'?"),
        ("inner.warmup", "did you mean 'inner.warmup_rounds'?"),
        ("inner.codec", "did you mean 'gossip.codec'?"),
        ("gosip.topology", "did you mean 'gossip.topology'?"),
        ("nonsense.foo", "the sections are run, model, data"),
        ("rounds", "did you mean 'run.rounds'?"),
    ],
)
def test_only_a_name_that_is_really_similar_is_proposed(key: str, words: str) -> None:
    result = gasloc("config", "show", "--set", f"{key}=1")
    assert_explained(result, ConfigError, words)
