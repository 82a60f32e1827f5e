"""The configuration: defaults, then a TOML file, then `GASLOC_*`, then `--set`.

Each layer overrides the one before it, and the origin of every value is kept, so that
`gasloc config show` can say where it came from.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from gasloc_p2p.core.errors import ConfigError
from gasloc_p2p.extensions import load_extensions
from gasloc_p2p.net.settings import NetConfig
from gasloc_p2p.settings import (
    CheckpointConfig,
    DisplayConfig,
    GossipConfig,
    NodeConfig,
    OuterConfig,
    PaceConfig,
    RunConfig,
    SimulateConfig,
    StudyConfig,
)
from gasloc_p2p.train.settings import DataConfig, DeviceConfig, InnerConfig, ModelConfig

ENV_PREFIX = "GASLOC_"
LIKE = 0.6
"""Names that are less alike, of 1, are not proposed for one another."""
SHARED_SECTIONS = ("run", "model", "inner", "outer", "gossip", "pace")
"""Sections that every peer of a run has in common; they make up the manifest."""


class Config(BaseModel):
    """Everything that a node can be told; frozen, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: RunConfig = Field(default_factory=RunConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    inner: InnerConfig = Field(default_factory=InnerConfig)
    device: DeviceConfig = Field(default_factory=DeviceConfig)
    outer: OuterConfig = Field(default_factory=OuterConfig)
    gossip: GossipConfig = Field(default_factory=GossipConfig)
    pace: PaceConfig = Field(default_factory=PaceConfig)
    net: NetConfig = Field(default_factory=NetConfig)
    node: NodeConfig = Field(default_factory=NodeConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    simulate: SimulateConfig = Field(default_factory=SimulateConfig)
    study: StudyConfig = Field(default_factory=StudyConfig)
    display: DisplayConfig = Field(default_factory=DisplayConfig)

    def shared(self) -> dict[str, dict[str, Any]]:
        """Return the sections that go into the run's manifest, as plain values."""
        return self.model_dump(mode="json", include=set(SHARED_SECTIONS))


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedConfig:
    """A configuration and where each of its values came from.

    Attributes:
        config: the validated values.
        origins: `section.key` to "file NAME", "environment", "--set", "manifest" or "option";
            keys that are absent hold their default.
    """

    config: Config
    origins: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """One source of values: `section.key` to value, with the name of the source."""

    name: str
    values: Mapping[str, Any]


def known_keys() -> dict[str, Any]:
    """Return every `section.key` with the pydantic field that describes it."""
    return {
        f"{section}.{key}": field
        for section, outer in Config.model_fields.items()
        for key, field in _section_fields(outer.annotation).items()
    }


def _section_fields(annotation: object) -> Mapping[str, Any]:
    assert isinstance(annotation, type)
    assert issubclass(annotation, BaseModel)
    return annotation.model_fields


def file_layer(path: Path) -> Layer:
    """Read a TOML file.

    Raises:
        ConfigError: it is missing, unreadable, not TOML, or has values outside a section.
    """
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"cannot read the configuration file {path}",
            why=error.strerror or str(error),
            fix="name an existing TOML file; `gasloc config init FILE` writes a commented one",
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} is not valid TOML", why=str(error), fix="mend the line that is named"
        ) from None
    values: dict[str, Any] = {}
    for section, table in tables.items():
        if not isinstance(table, dict):
            raise ConfigError(
                f"{path} sets {section!r} outside a section",
                why="every setting lives in a section, such as [run]",
                fix=f"move it under one of: {', '.join(Config.model_fields)}",
            )
        values.update({f"{section}.{key}": value for key, value in table.items()})
    return Layer(name=f"file {path}", values=values)


def environment_layer(environ: Mapping[str, str]) -> Layer:
    """Collect `GASLOC_SECTION_KEY` variables; the first word is the section."""
    values = {
        name.removeprefix(ENV_PREFIX).lower().replace("_", ".", 1): _literal(text)
        for name, text in environ.items()
        if name.startswith(ENV_PREFIX)
    }
    return Layer(name="environment", values=values)


def assignment_layer(assignments: Sequence[str]) -> Layer:
    """Parse `--set section.key=value` arguments.

    Raises:
        ConfigError: an argument has no `=`.
    """
    values: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals:
            raise ConfigError(
                f"--set {assignment!r} has no value",
                why="the form is --set section.key=value",
                fix=f"for example: --set {key or 'inner.lr'}=0.001",
            )
        values[key.strip()] = _literal(text)
    return Layer(name="--set", values=values)


def _literal(text: str) -> Any:
    """Read a value as TOML where it is TOML, and as plain text otherwise."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def load(layers: Sequence[Layer]) -> LoadedConfig:
    """Merge `layers`, later ones winning, validate the result, and load its extensions.

    Paths in `node.extensions` come out absolute, so that the result means the same everywhere.

    Raises:
        ConfigError: a key is unknown (the nearest known one is named), a value is not accepted or
            would change nothing, or an extension cannot be loaded.
    """
    fields = known_keys()
    merged: dict[str, dict[str, Any]] = {}
    origins: dict[str, str] = {}
    for layer in layers:
        for key, value in layer.values.items():
            if key not in fields:
                raise _unknown_key(key, layer.name)
            section, _, name = key.partition(".")
            merged.setdefault(section, {})[name] = _as_list(fields[key], value)
            origins[key] = layer.name
    try:
        config = Config.model_validate(merged)
    except ValidationError as error:
        raise _refused_value(error.errors()[0], origins) from None
    _require_use(config, origins)
    extensions = load_extensions(config.node.extensions)
    node = config.node.model_copy(update={"extensions": extensions})
    return LoadedConfig(config=config.model_copy(update={"node": node}), origins=origins)


def _require_use(config: Config, origins: Mapping[str, str]) -> None:
    """Refuse what was typed and has no effect; files may hold all settings, as a manifest does."""
    pace, origin = config.pace, origins.get("pace.stride")
    if pace.stride and not pace.adapt_steps and origin in ("--set", "environment"):
        raise ConfigError(
            f"pace.stride = true has no effect ({origin})",
            why="how many rounds a peer skips follows from its speed and from that of the others, "
            "and pace.adapt_steps is false",
            fix="set pace.adapt_steps=true as well, or leave pace.stride out",
        )


def _as_list(field: Any, value: Any) -> Any:
    """Accept `a,b` or a single value wherever a list is wanted, as people type it."""
    if isinstance(field.default, tuple) and isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return [value] if isinstance(field.default, tuple) and isinstance(value, int) else value


def _unknown_key(key: str, source: str) -> ConfigError:
    section = key.partition(".")[0]
    near = _most_like(key)
    variable = f", {ENV_PREFIX}{key.replace('.', '_').upper()}" if source == "environment" else ""
    there = ""
    if near is None and section in Config.model_fields:
        keys = _section_fields(Config.model_fields[section].annotation)
        there = f"the section {section} has {', '.join(keys)}; "
    elif near is None:
        there = f"the sections are {', '.join(Config.model_fields)}; "
    return ConfigError(
        f"unknown setting {key!r} ({source}{variable})",
        why=f"did you mean {near!r}?" if near else "no setting has a name like it",
        fix=f"{there}`gasloc config show` lists every setting with its meaning",
    )


def _most_like(key: str) -> str | None:
    """Return the setting whose name is most like that in `key`, or None if none really is."""
    section, _, name = key.rpartition(".")

    def likeness(known: str) -> tuple[float, float]:
        there, _, other = known.partition(".")
        return _ratio(name, other), _ratio(section, there)

    best = max(known_keys(), key=likeness)
    return best if likeness(best)[0] >= LIKE else None


def _ratio(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


def _refused_value(detail: ErrorDetails, origins: Mapping[str, str]) -> ConfigError:
    key = ".".join(str(part) for part in detail["loc"][:2])
    field = known_keys().get(key)
    is_boolean = detail["type"].startswith("bool")
    advice = "set it to true or to false" if is_boolean else "set it to a value that it can have"
    meaning = f"What it means: {field.description}" if field is not None else ""
    return ConfigError(
        f"{key} = {detail['input']!r} is not accepted ({origins.get(key, 'default')})",
        why="it is neither true nor false" if is_boolean else detail["msg"],
        fix=f"{advice}. {meaning}",
    )


def default_toml() -> str:
    """Return a TOML file that holds every default with its meaning, commented out."""
    lines = [
        "# gasloc configuration. Every line below shows a default: remove the leading '#' to",
        "# change it. Order of precedence: this file, GASLOC_SECTION_KEY variables, --set.",
    ]
    for section, outer in Config.model_fields.items():
        lines += ["", f"[{section}]"]
        for key, field in _section_fields(outer.annotation).items():
            lines.append(f"# {field.description}")
            default = "" if field.default_factory is not None else field.default
            lines.append(f"# {key} = {json.dumps(default)}")
    return "\n".join(lines) + "\n"


def to_toml(config: Config, *, skip: Iterable[str] = ()) -> str:
    """Return `config` as TOML, without the sections in `skip`."""
    left_out = set(skip)
    tables = config.model_dump(mode="json")
    return tables_to_toml({name: tables[name] for name in tables if name not in left_out})


def tables_to_toml(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Return sections of settings as TOML."""
    lines: list[str] = []
    for section, table in tables.items():
        lines.append(f"[{section}]")
        # JSON would escape some characters as two halves of a pair, which is no TOML.
        lines += [f"{key} = {json.dumps(table[key], ensure_ascii=False)}" for key in table]
    return "\n".join(lines) + "\n"
