"""From a configuration to what a run is made of: manifest, pace, checks before the start."""

from __future__ import annotations

from gasloc_p2p.config import SHARED_SECTIONS, Config, Layer
from gasloc_p2p.core.errors import ConfigError, ManifestError
from gasloc_p2p.core.manifest import Manifest
from gasloc_p2p.core.pace import Pace, SecondsPace, StepsPace
from gasloc_p2p.core.stability import check_stability

NODE_RULES = ("nesterov", "local", "dadam", "noloco")


def found(config: Config, *, now_s: float) -> Manifest:
    """Write down what every peer of a run with this configuration shares.

    Args:
        config: the founder's configuration.
        now_s: unix seconds; in pace `seconds`, round 0 begins `pace.start_delay_s` later.

    Raises:
        UnstableError: peers would drift apart with this outer step and topology.
    """
    check_outer(config)
    founded_s = now_s + config.pace.start_delay_s if config.pace.mode == "seconds" else 0.0
    return Manifest(run_id=config.run.id, founded_s=founded_s, sections=config.shared())


def check_outer(config: Config) -> None:
    """Refuse an outer step that diverges, unless `outer.force` is set.

    Raises:
        UnstableError: the radius is above 1; the message names stable values.
    """
    outer = config.outer
    if not outer.force:
        check_stability(outer.rule, outer.lr, outer.momentum, outer.alpha, config.gossip.topology)


def require_node_rule(config: Config) -> None:
    """Refuse a rule that only the simulator runs.

    Raises:
        ConfigError: the rule is there for comparison only.
    """
    if config.outer.rule not in NODE_RULES:
        raise ConfigError(
            f"outer.rule = {config.outer.rule!r} runs in the simulator only",
            why="it is there for comparison; peers on a network run the rules that pay",
            fix=f"use one of {', '.join(NODE_RULES)}, or `gasloc simulate`",
        )


def manifest_layer(manifest: Manifest) -> Layer:
    """Return a run's shared settings as a configuration layer.

    Raises:
        ManifestError: it has sections that are not shared in this version, or names two runs.
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
    return Layer(name="manifest", values=values)


def pace_of(config: Config, manifest: Manifest) -> Pace:
    """Return the run's pace."""
    if config.pace.mode == "seconds":
        return SecondsPace(
            t0_s=manifest.founded_s,
            period_s=config.pace.period_s,
            rounds=config.run.rounds,
            closing_rounds=config.run.closing_rounds,
            exchange_budget_s=config.pace.exchange_budget_s,
        )
    return StepsPace(
        local_steps=config.inner.local_steps,
        rounds=config.run.rounds,
        closing_rounds=config.run.closing_rounds,
    )
