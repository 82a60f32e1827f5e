"""Outer rules, topologies and codecs of one's own, from a file to a whole swarm."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from gasloc_p2p.commands.settings import check
from gasloc_p2p.config import Config, assignment_layer, load, to_toml
from gasloc_p2p.core.codecs import CODECS
from gasloc_p2p.core.errors import ConfigError, ManifestError, UnstableError
from gasloc_p2p.core.manifest import Manifest
from gasloc_p2p.core.outer import OUTER_RULES
from gasloc_p2p.core.topology import TOPOLOGIES
from gasloc_p2p.extensions import load_extensions
from gasloc_p2p.founding import check_outer, found, manifest_layer, require_node_rule
from gasloc_p2p.node.events import Event, RoundStarted
from gasloc_p2p.simulate.swarm import Simulation, simulate
from tests.sim.conftest import QUICK

RULE = """
from gasloc_p2p.core.outer import OuterRule, OuterState, register_outer_rule

@register_outer_rule
class HeavyBall(OuterRule):
    name = "NAME"

    def step(self, theta_start, theta_h, mixed, state):
        memory = self.momentum * state.memory + mixed - theta_start
        return theta_start + self.lr * memory, OuterState(memory=memory)
"""
TOPOLOGY = """
from gasloc_p2p.core.topology import register_topology

@register_topology("NAME", redrawn=True)
def star(peers, *, seed, round, may_pair):
    hub = peers[round % len(peers)]
    return [(hub, peer) for peer in peers]
"""
CODEC = """
import torch
from gasloc_p2p.core.codecs import CastCodec, register_codec

register_codec(CastCodec(name="NAME", dtype=torch.float16))
"""


def extension(folder: Path, text: str, name: str) -> Path:
    """Write a file that registers something as `name`; a name serves once per process."""
    file = folder / f"{name.replace('-', '_')}.py"
    file.write_text(text.replace("NAME", name))
    return file


def config_of(*assignments: str) -> Config:
    return load([assignment_layer([*QUICK, *assignments])]).config


def run(*assignments: str) -> tuple[Simulation, list[Event]]:
    events: list[Event] = []
    config = config_of("run.initial_peers=4", *assignments)
    simulation = simulate(config, peers=4, observe=lambda index, event: events.append(event))
    return simulation, events


def test_a_swarm_runs_on_a_persons_own_rule_topology_and_codec(tmp_path: Path) -> None:
    files = [
        extension(tmp_path, RULE, "ext-heavy-ball"),
        extension(tmp_path, TOPOLOGY, "ext-star"),
        extension(tmp_path, CODEC, "ext-fp16"),
    ]
    assert len(RULE.strip().splitlines()) <= 10, "a rule is ten lines"
    own = (
        f"node.extensions={','.join(map(str, files))}",
        "outer.rule=ext-heavy-ball",
        "outer.momentum=0.5",
        "gossip.topology=ext-star",
        "gossip.codec=ext-fp16",
    )
    simulation, events = run(*own)
    report = simulation.report
    assert report.averaged_val_loss is not None
    assert report.averaged_val_loss < report.initial_val_loss
    for event in events:
        if isinstance(event, RoundStarted):
            assert len(event.partners) in (1, 3), "a hub and its spokes"
    rounds = 8 + 5
    assert sum(peer.edges.applied for peer in report.peers) == 2 * 3 * rounds
    assert all(torch.isfinite(result.theta).all() for result in simulation.results)
    assert simulation.report.config["node"]["extensions"] == [str(file) for file in files]

    full, _ = run(*own, "gossip.codec=none")
    ratio = report.peers[0].bytes_sent / full.report.peers[0].bytes_sent
    assert ratio == pytest.approx(0.5, abs=0.01)
    other, _ = run(*own, "outer.rule=nesterov")
    assert not torch.equal(other.results[0].theta, simulation.results[0].theta)


def test_a_rule_that_does_the_same_as_a_built_in_one_gives_the_same_bits(tmp_path: Path) -> None:
    file = tmp_path / "twin.py"
    file.write_text(
        textwrap.dedent(
            """
            from __future__ import annotations
            from dataclasses import dataclass
            from typing import ClassVar
            from gasloc_p2p.core.outer import Nesterov, register_outer_rule

            @register_outer_rule
            @dataclass(frozen=True, kw_only=True, slots=True)
            class Twin(Nesterov):
                name: ClassVar[str] = "ext-twin"
                unused: float = 1.0
            """
        )
    )
    twin, _ = run(f"node.extensions={file}", "outer.rule=ext-twin")
    built_in, _ = run()
    for ours, theirs in zip(twin.results, built_in.results, strict=True):
        assert torch.equal(ours.theta, theirs.theta)


def test_a_rule_of_ones_own_is_checked_before_the_run(tmp_path: Path) -> None:
    file = extension(tmp_path, RULE, "ext-checked")
    with pytest.raises(UnstableError, match="'ext-checked'") as refusal:
        run(f"node.extensions={file}", "outer.rule=ext-checked", "outer.momentum=0.9")
    assert "outer.momentum to at most 0.806" in refusal.value.fix
    require_node_rule(config_of("outer.rule=ext-checked"))


def test_paths_may_be_written_in_several_ways_and_a_file_runs_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = extension(tmp_path, RULE, "ext-once")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "link.py").symlink_to(file)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path / "elsewhere")
    ways = [str(file), "../ext_once.py", "~/ext_once.py", "link.py", "../ext_once.py"]
    # A second run of the file would find its name taken.
    assert load_extensions(ways) == (str(file.resolve()),) * 5
    assert "ext-once" in OUTER_RULES
    loaded = load([assignment_layer(["node.extensions=../ext_once.py"])])
    assert loaded.config.node.extensions == (str(file.resolve()),)
    assert loaded.origins["node.extensions"] == "--set"


def test_files_of_one_name_in_two_folders_are_two_extensions(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        file = tmp_path / folder / "mine.py"
        file.write_text(RULE.replace("NAME", f"ext-folder-{folder}"))
        load_extensions([str(file)])
    assert "ext-folder-one" in OUTER_RULES
    assert "ext-folder-two" in OUTER_RULES


def test_a_module_is_named_with_dots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "ext_test_package"
    package.mkdir()
    (package / "__init__.py").touch()
    extension(package, TOPOLOGY, "ext-dotted")
    monkeypatch.syspath_prepend(str(tmp_path))
    for _ in range(2):
        assert load_extensions(["ext_test_package.ext_dotted"]) == ("ext_test_package.ext_dotted",)
    assert TOPOLOGIES.named("ext-dotted").redrawn


@pytest.mark.parametrize(
    ("text", "what", "why"),
    [
        ("x = 1\ny = (\n", "line 2", "SyntaxError"),
        ("x = 1\n\n1 / 0\n", "line 3", "ZeroDivisionError: division by zero"),
        ("import torch\n\ntorch.zeros(-1)\n", "line 3", "RuntimeError"),
        ("import ext_no_such_module\n", "line 1", "ModuleNotFoundError"),
        (RULE.replace("NAME", "nesterov"), "line 4", "built-in ones cannot be replaced"),
        (CODEC.replace("NAME", "Not A Name"), "line 5", "lower-case letters"),
        (RULE.replace("step", "stop").replace("NAME", "ext-stop"), "line 4", "in `step`"),
        (None, "", "No such file"),
    ],
)
def test_a_file_that_cannot_be_loaded_is_explained(
    text: str | None, what: str, why: str, tmp_path: Path
) -> None:
    file = tmp_path / "broken.py"
    if text is not None:
        file.write_text(text)
    modules = set(sys.modules)
    for _ in range(2):  # it is not taken for imported afterwards
        with pytest.raises(ConfigError) as refusal:
            load([assignment_layer([f"node.extensions={file}"])])
        assert f"{file}{', ' if what else ''}{what}" in refusal.value.what
        assert why in refusal.value.why
        assert refusal.value.fix
    assert not [name for name in set(sys.modules) - modules if "gasloc_extension" in name]


@pytest.mark.parametrize("name", ["ext_no_such_module", "ext_no.such", "./mine", "", "a b"])
def test_a_module_that_is_not_there_is_explained(name: str) -> None:
    with pytest.raises(ConfigError, match="the extension") as refusal:
        load_extensions([name])
    assert "node.extensions" in refusal.value.fix
    assert name in refusal.value.what


def test_a_child_process_elsewhere_understands_the_written_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `gasloc testnet` starts its nodes."""
    extension(tmp_path, RULE, "ext-child")
    monkeypatch.chdir(tmp_path)
    config = config_of("node.extensions=ext_child.py", "outer.rule=ext-child", "outer.momentum=0.5")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "founder.toml").write_text(to_toml(config, skip=("display",)))
    command = [sys.executable, "-m", "gasloc_p2p", "config", "check", "founder.toml"]
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    result = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=tmp_path / "elsewhere",
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )
    assert result.returncode == 0, result.stderr
    assert "all settings are accepted" in result.stdout


UNKNOWN = [
    ("outer.rule", "outer rule", OUTER_RULES.names[:7]),
    ("gossip.topology", "topology", TOPOLOGIES.names[:6]),
    ("gossip.codec", "codec", CODECS.names[:2]),
]


@pytest.mark.parametrize("force", ["true", "false"])
@pytest.mark.parametrize(("key", "kind", "known"), UNKNOWN, ids=[case[0] for case in UNKNOWN])
def test_an_unknown_name_is_refused_with_the_known_ones(
    key: str, kind: str, known: tuple[str, ...], force: str
) -> None:
    loaded = load([assignment_layer([f"{key}=mine", f"outer.force={force}"])])
    for refuse in (
        lambda: check_outer(loaded.config),
        lambda: found(loaded.config, now_s=0.0),
        lambda: check(loaded),
        lambda: simulate(loaded.config, peers=1, observe=lambda index, event: None),
    ):
        with pytest.raises(ConfigError, match=f"there is no {kind} 'mine'") as refusal:
            refuse()
        assert all(repr(name) in refusal.value.fix for name in known)
        assert "node.extensions" in refusal.value.why


def test_nodes_refuse_an_unknown_rule_too() -> None:
    with pytest.raises(ConfigError, match="no outer rule 'mine'"):
        require_node_rule(config_of("outer.rule=mine"))


@pytest.mark.parametrize("value", ["Mine", "a b", "", "x" * 33])
def test_a_malformed_name_is_refused_as_a_value(value: str) -> None:
    with pytest.raises(ConfigError, match="is not accepted"):
        config_of(f"outer.rule={value}")


@pytest.mark.parametrize(("key", "kind", "known"), UNKNOWN, ids=[case[0] for case in UNKNOWN])
def test_a_joiner_is_told_that_the_run_uses_something_of_the_founders_own(
    key: str, kind: str, known: tuple[str, ...]
) -> None:
    config = config_of(f"{key}=mine")
    manifest = Manifest(run_id=config.run.id, founded_s=0.0, sections=config.shared())
    with pytest.raises(ConfigError, match=f"the run uses the {kind} 'mine'") as refusal:
        manifest_layer(manifest)
    assert "node.extensions=FILE" in refusal.value.fix
    for name in known:
        config = config_of(f"{key}={name}")
        manifest = Manifest(run_id=config.run.id, founded_s=0.0, sections=config.shared())
        assert manifest_layer(manifest).values[key] == name


def test_a_malformed_name_in_a_manifest_is_refused_as_a_value() -> None:
    for bad in (7, "a b", None):
        sections = config_of().shared()
        sections["outer"]["rule"] = bad
        layer = manifest_layer(Manifest(run_id="test", founded_s=0.0, sections=sections))
        with pytest.raises(ConfigError, match=r"outer\.rule = .* is not accepted"):
            load([layer])


def test_a_run_never_tells_others_what_to_load(tmp_path: Path) -> None:
    file = extension(tmp_path, RULE, "ext-private")
    config = config_of(f"node.extensions={file}")
    assert "node" not in found(config, now_s=0.0).sections
    sections = {**config.shared(), "node": {"extensions": "evil.py"}}
    with pytest.raises(ManifestError, match="'node'"):
        manifest_layer(Manifest(run_id="test", founded_s=0.0, sections=sections))


def test_the_check_of_a_forced_rule_that_is_not_linear_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = RULE.replace("mixed - theta_start", "(mixed - theta_start).sign()")
    file = extension(tmp_path, text, "ext-signs")
    settings = [f"node.extensions={file}", "outer.rule=ext-signs"]
    with pytest.raises(ConfigError, match="cannot be computed") as refusal:
        check(load([assignment_layer(settings)]))
    assert "outer.force = true" in refusal.value.fix
    check(load([assignment_layer([*settings, "outer.force=true"])]))
    printed = capsys.readouterr().out
    assert "all settings are accepted" in printed
    assert "'ext-signs' cannot be computed" in printed


@pytest.mark.parametrize(
    ("topology", "words"), [("pairs", "the mean square disagreement"), ("exponential", "the dis")]
)
def test_the_check_names_the_quantity_of_its_figure(
    topology: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    check(load([assignment_layer([f"gossip.topology={topology}"])]))
    assert f"without gradients, {words}" in capsys.readouterr().out
