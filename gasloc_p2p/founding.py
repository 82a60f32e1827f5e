"""From a configuration to what a run is made of: manifest, pace, checks before the start."""

from __future__ import annotations

from typing import Any

from gasloc_p2p.config import SHARED_SECTIONS, Config, Layer
from gasloc_p2p.core.codecs import CODECS
from gasloc_p2p.core.errors import ConfigError, ManifestError
from gasloc_p2p.core.manifest import Manifest
from gasloc_p2p.core.outer import OUTER_RULES, outer_rule
from gasloc_p2p.core.pace import Pace, SecondsPace, StepsPace
from gasloc_p2p.core.registry import Registry, is_name
from gasloc_p2p.core.stability import check_stability
from gasloc_p2p.core.topology import TOPOLOGIES
from gasloc_p2p.sense import require_sense
from gasloc_p2p.train.model import preset_length, windows_per_step
from gasloc_p2p.train.optimizers import INNER_OPTIMIZERS
from gasloc_p2p.trial import try_codec, try_inner_optimizer, try_rule, try_topology


def found(config: Config, *, now_s: float) -> Manifest:
    """Write down what every peer of a run with this configuration shares.

    Args:
        config: the founder's configuration.
        now_s: unix seconds; in pace `seconds`, round 0 begins `pace.start_delay_s` later.

    Raises:
        ConfigError: no outer rule, topology or codec has the name that is set, a step is not a
            whole number of windows, or settings contradict each other.
        UnstableError: peers would drift apart with this outer step and topology.
    """
    check_outer(config)
    if not config.model.name:
        windows_per_step(config.inner, preset_length(config.model))
    founded_s = now_s + config.pace.start_delay_s if config.pace.mode == "seconds" else 0.0
    return Manifest(run_id=config.run.id, founded_s=founded_s, sections=config.shared())


def check_outer(config: Config) -> None:
    """Refuse contradictions, unknown names, what does not work, and an outer step that diverges.

    The last one is let through with `outer.force`.

    Raises:
        ConfigError: settings contradict each other; no outer rule, topology, codec or inner
            optimizer has the name that is set, one of them does not work, or the stability of the
            rule cannot be computed.
        UnstableError: the radius is above 1; the message names stable values.
    """
    require_sense(config)
    outer, topology = config.outer, config.gossip.topology
    try_rule(outer_rule(outer.rule, lr=outer.lr, momentum=outer.momentum))
    try_topology(topology)
    try_codec(CODECS.named(config.gossip.codec))
    try_inner_optimizer(config.inner)
    if not outer.force:
        check_stability(outer.rule, outer.lr, outer.momentum, outer.alpha, topology)


def require_node_rule(config: Config) -> None:
    """Refuse a rule that only the simulator runs.

    Raises:
        ConfigError: the rule is there for comparison only, or there is none of this name.
    """
    if not OUTER_RULES.named(config.outer.rule).on_nodes:
        runs = [name for name in OUTER_RULES.names if OUTER_RULES.named(name).on_nodes]
        raise ConfigError(
            f"outer.rule = {config.outer.rule!r} runs in the simulator only",
            why="it is there for comparison; peers on a network run the rules that pay",
            fix=f"use one of {', '.join(runs)}, or `gasloc simulate`",
        )


def manifest_layer(manifest: Manifest) -> Layer:
    """Return a run's shared settings as a configuration layer.

    Raises:
        ManifestError: it has sections that are not shared in this version, or names two runs.
        ConfigError: the run uses an outer rule, topology or codec that this machine lacks.
    """
    foreign = sorted(set(manifest.sections) - set(SHARED_SECTIONS))
    if foreign:
        raise ManifestError(
            f"the run's manifest has a section {foreign[0]!r} that no run shares",
            why="it was founded by another version, or was made to change this machine's settings",
            fix="do not join this run, or update gasloc-p2p if you trust the founder",
        )
    if manifest.sections.get("run", {}).get("id") != manifest.run_id:
        raise ManifestError(
            f"the run's manifest is not that of run {manifest.run_id}",
            why="its settings name another run",
            fix="do not join this run",
        )
    values = {
        f"{section}.{key}": value
        for section, table in manifest.sections.items()
        for key, value in table.items()
    }
    _require_here(OUTER_RULES, values.get("outer.rule"))
    _require_here(TOPOLOGIES, values.get("gossip.topology"))
    _require_here(INNER_OPTIMIZERS, values.get("inner.optimizer"))
    _require_here(CODECS, values.get("gossip.codec"))
    return Layer(name="manifest", values=values)


def _require_here(registry: Registry[Any], name: object) -> None:
    """Refuse a name that a run uses and this machine lacks; a malformed one is refused later."""
    if isinstance(name, str) and is_name(name) and name not in registry:
        raise ConfigError(
            f"the run uses the {registry.kind} {name!r}, which this machine does not have",
            why="it is the founder's own, or that of another version of gasloc-p2p",
            fix="ask the founder for the file that registers it and, if you trust its author, join "
            "with --set node.extensions=FILE",
        )


def pace_of(config: Config, manifest: Manifest) -> Pace:
    """Return the run's pace."""
    if config.pace.mode == "seconds":
        return SecondsPace(
            t0_s=manifest.founded_s,
            period_s=config.pace.period_s,
            rounds=config.run.rounds,
            closing_rounds=config.run.closing_rounds,
            exchange_budget_s=config.pace.exchange_budget_s,
            overlap=config.gossip.overlap,
        )
    return StepsPace(
        rounds=config.run.rounds,
        closing_rounds=config.run.closing_rounds,
    )
