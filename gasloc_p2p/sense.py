"""Settings that only show together whether they make sense: contradictions, and idle ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gasloc_p2p.config import Config, LoadedConfig, known_keys
from gasloc_p2p.core.errors import ConfigError
from gasloc_p2p.data.shards import HUB, holds_documents


def _always(config: Config) -> bool:
    return True


def _on_hub(config: Config) -> bool:
    return config.data.path.startswith(HUB)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Bound:
    """A setting that may not be above another one.

    Attributes:
        key, most: the two settings.
        why: what would become of the training.
        where: whether the two have anything to do with each other.
        equal: whether they may be the same.
    """

    key: str
    most: str
    why: str
    where: Callable[[Config], bool] = _always
    equal: bool = True


BOUNDS: Final = (
    _Bound(
        key="inner.warmup_rounds",
        most="run.rounds",
        why="the learning rate would rise until the run ends, and never reach inner.lr",
    ),
    _Bound(
        key="inner.decay_rounds",
        most="run.rounds",
        where=lambda config: config.inner.schedule == "wsd",
        why="the learning rate cannot fall for longer than the run lasts",
    ),
    _Bound(
        key="pace.edge_floor_s",
        most="pace.edge_ceiling_s",
        where=lambda config: config.pace.mode == "steps",
        why="a partner would have to be waited for longer than it is waited for at most",
    ),
    _Bound(
        key="pace.exchange_budget_s",
        most="pace.period_s",
        where=lambda config: config.pace.mode == "seconds" and not config.gossip.overlap,
        equal=False,
        why="the time for the exchange would leave none of a round for training",
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Use:
    """Settings that have an effect under one condition only.

    Attributes:
        keys: the settings.
        where: whether they have one.
        why: why they have none, to follow "since".
    """

    keys: Sequence[str]
    where: Callable[[Config], bool]
    why: str


USES: Final = (
    _Use(
        keys=("model.revision", "model.weights", "model.digest", "device.model_folder"),
        where=lambda config: bool(config.model.name),
        why="model.name is empty and the run trains a preset",
    ),
    _Use(
        keys=("model.preset",),
        where=lambda config: not config.model.name,
        why="model.name takes its place",
    ),
    _Use(
        keys=("model.tokenizer_digest",),
        where=lambda config: config.model.tokenizer != "bytes",
        why="the run's tokens are bytes (model.tokenizer)",
    ),
    _Use(
        keys=("data.tokenizer_file",),
        where=lambda config: config.model.tokenizer == "file",
        why="the run's tokens are not those of a file: model.tokenizer is not `file`",
    ),
    _Use(
        keys=("data.text_field", "data.buffer_mb"),
        where=lambda config: _on_hub(config) or holds_documents(config.data.path),
        why="the text is plain: it has no fields, and is held in memory",
    ),
    _Use(
        keys=("data.subset", "data.revision", "data.files"),
        where=_on_hub,
        why="data.path names no data set of a hub, as in hub:OWNER/NAME",
    ),
    _Use(
        keys=("inner.batch_size",),
        where=lambda config: not config.inner.tokens_per_step,
        why="inner.tokens_per_step says how much text a step takes",
    ),
    _Use(
        keys=("inner.decay_rounds",),
        where=lambda config: config.inner.schedule == "wsd",
        why="inner.schedule is not wsd",
    ),
    _Use(
        keys=("inner.min_lr_ratio",),
        where=lambda config: config.inner.schedule != "constant",
        why="inner.schedule is constant",
    ),
    _Use(
        keys=("inner.beta1",),
        where=lambda config: config.inner.optimizer != "adafactor",
        why="inner.optimizer is adafactor",
    ),
    _Use(
        keys=("inner.beta2",),
        where=lambda config: config.inner.optimizer not in ("adafactor", "sgd"),
        why="inner.optimizer has no second moment",
    ),
    _Use(
        keys=("outer.lr", "outer.momentum"),
        where=lambda config: config.outer.rule != "dadam",
        why="outer.rule is dadam, which takes no outer step",
    ),
    _Use(
        keys=("gossip.codec", "gossip.chunk_bytes", "gossip.overlap"),
        where=lambda config: config.gossip.topology != "none",
        why="gossip.topology is none and nobody exchanges",
    ),
    _Use(
        keys=("pace.period_s", "pace.start_delay_s", "pace.exchange_budget_s"),
        where=lambda config: config.pace.mode == "seconds",
        why="pace.mode is steps and rounds do not go by the clock",
    ),
    _Use(
        keys=(*("pace.adapt_steps", "pace.stride", "pace.edge_floor_s", "checkpoint.gather_s"),),
        where=lambda config: config.pace.mode == "steps",
        why="pace.mode is seconds and rounds go by the clock",
    ),
)
_CHOSEN: Final = ("file ", "environment", "--set", "option")
"""Sources by which a person chooses; what else there is comes from the run or the command."""


def require_sense(config: Config) -> None:
    """Refuse settings of a run that contradict each other.

    Raises:
        ConfigError: no training would come of them; both are named.
    """
    for bound in BOUNDS:
        value, most = _value(config, bound.key), _value(config, bound.most)
        if bound.where(config) and (value > most or (value == most and not bound.equal)):
            raise ConfigError(
                f"{bound.key} = {value:g} is too much for {bound.most} = {most:g}",
                why=bound.why,
                fix=f"set {bound.key} to {'at most' if bound.equal else 'less than'} {most:g}, or "
                f"{bound.most} to {'at least' if bound.equal else 'more than'} {value:g}",
            )


def idle_settings(loaded: LoadedConfig) -> list[str]:
    """Return a sentence about every setting that somebody chose and that has no effect.

    One with the value that it has anyway is passed over, since a file may hold all settings.
    """
    fields = known_keys()
    sentences = []
    for use in USES:
        for key in use.keys:
            origin = loaded.origins.get(key, "")
            value = _value(loaded.config, key)
            chosen = origin in _CHOSEN or origin.startswith(_CHOSEN[0])
            if chosen and value != fields[key].default and not use.where(loaded.config):
                shown = json.dumps(value, ensure_ascii=False)
                sentences.append(f"{key} = {shown} ({origin}) has no effect, since {use.why}")
    return sentences


def _value(config: Config, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)
