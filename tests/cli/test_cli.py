"""The command line as a person meets it: help, errors, settings."""

from __future__ import annotations

import io
import os
import socket
import subprocess
import sys
import tomllib
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import torch

from gasloc_p2p.cli import main
from gasloc_p2p.core.errors import (
    ConfigError,
    DataError,
    GaslocError,
    IdentityError,
    InviteError,
    PortInUseError,
    UnstableError,
)
from gasloc_p2p.core.manifest import Invite
from gasloc_p2p.net.identity import Identity

COMMANDS = ("testnet", "simulate", "study", "start", "join", "bootstrap", "config", "bench")
FAST = ("--rounds", "1", "--local-steps", "1", "--set", "data.validation_tokens=64")


def clean_environment() -> dict[str, str]:
    """Return the environment without settings of this project."""
    return {k: v for k, v in os.environ.items() if not k.startswith("GASLOC_")}


def gasloc(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a `gasloc` command to its end in this process, which has imported torch already."""
    out, err, threads = io.StringIO(), io.StringIO(), torch.get_num_threads()
    kept = dict(os.environ)
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["gasloc", *arguments])
        os.environ.clear()
        os.environ.update(clean_environment(), **environment)
        try:
            main()
            code: object = 0
        except SystemExit as ending:
            code = ending.code
        finally:
            os.environ.clear()
            os.environ.update(kept)
            torch.set_num_threads(threads)
    assert isinstance(code, int)
    return subprocess.CompletedProcess(list(arguments), code, out.getvalue(), err.getvalue())


def gasloc_process(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a `gasloc` command to its end in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "gasloc_p2p", *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**clean_environment(), **environment},
    )


def assert_explained(
    result: subprocess.CompletedProcess[str], kind: type[GaslocError], *words: str
) -> None:
    """Check for one clear error: what, why, fix, code; and no traceback."""
    assert result.returncode == kind.exit_code, result.stderr
    lines = result.stderr.splitlines()
    assert lines[0].startswith("gasloc: ")
    assert any(line.startswith("  why: ") for line in lines)
    assert any(line.startswith("  fix: ") for line in lines)
    assert kind.code in lines[-1]
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr


def test_help_imports_neither_torch_nor_hivemind() -> None:
    program = (
        "import sys\n"
        "from gasloc_p2p.cli import app\n"
        "try:\n"
        "    app(['--help'])\n"
        "except SystemExit:\n"
        "    pass\n"
        "heavy = {'torch', 'hivemind', 'transformers', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'imports {heavy}' if heavy else 0)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    for command in COMMANDS:
        assert command in result.stdout
    assert len(result.stdout.splitlines()) <= 24, "the help fits a screen"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str) -> None:
    result = gasloc(command, "--help")
    assert result.returncode == 0
    assert len(result.stdout) > 200


def test_the_version_is_shown() -> None:
    result = gasloc_process("--version")
    assert result.returncode == 0
    assert result.stdout.strip() == "gasloc 0.1.0"


def test_an_unknown_setting_names_the_nearest_one() -> None:
    assert_explained(gasloc("simulate", "--set", "inner.lrr=1"), ConfigError, "'inner.lr'")
    assert_explained(
        gasloc("simulate", GASLOC_GOSSIP_TOPOLOGI="ring"), ConfigError, "'gossip.topology'"
    )


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("inner.lr=-1", "greater than 0"),
        ("gossip.topology=star", "'pairs'"),
        ("run.rounds=many", "valid integer"),
        ("run.id=a b", "pattern"),
        ("inner.lr", "section.key=value"),
        ("gossip.overlap=perhaps", "fix: set it to true or to false. What it means: "),
    ],
)
def test_a_refused_value_says_what_is_accepted(setting: str, words: str) -> None:
    assert_explained(gasloc("simulate", "--set", setting), ConfigError, words)


def test_a_stride_without_adaptive_steps_is_refused_where_it_is_typed(tmp_path: Path) -> None:
    typed = ("--set", "pace.stride=true", "--set", "pace.adapt_steps=false")
    assert_explained(gasloc("config", "show", *typed), ConfigError, "pace.adapt_steps=true")
    file = tmp_path / "gasloc.toml"
    file.write_text("[pace]\nstride = true\nadapt_steps = false\n")
    assert gasloc("config", "show", "--config", str(file)).returncode == 0


def test_an_unstable_outer_step_is_refused_with_values_that_work() -> None:
    result = gasloc("simulate", *FAST, "--set", "outer.momentum=0.99")
    assert_explained(result, UnstableError)
    forced = gasloc("simulate", *FAST, "--set", "outer.momentum=0.99", "--set", "outer.force=true")
    assert forced.returncode == 0, forced.stderr


def test_a_swarm_of_nodes_cannot_run_ddp() -> None:
    refused = gasloc_process("testnet", "--algorithm", "ddp", "--peers", "2")
    assert_explained(refused, ConfigError, "--algorithm ddp", "gasloc simulate")


def test_rules_for_comparison_run_in_the_simulator_only() -> None:
    rule = ("--set", "outer.rule=lookahead", "--set", "outer.momentum=0.5")
    assert gasloc("simulate", *FAST, *rule).returncode == 0
    assert_explained(gasloc("testnet", *FAST, *rule), ConfigError, "simulator only")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("hello", "not an invite"),
        ("gasloc1-AAAA", "cut or mistyped"),
        ("@/nowhere/invite", "/nowhere/invite"),
    ],
)
def test_a_bad_invite_is_explained(text: str, words: str) -> None:
    kind = ConfigError if text.startswith("@") else InviteError
    assert_explained(gasloc("join", text), kind, words)


def test_a_joiner_cannot_change_what_the_run_shares() -> None:
    invite = Invite(run_id="r", bootstrap=("/ip4/127.0.0.1/tcp/1",), digest=bytes(32)).encode()
    result = gasloc("join", invite, "--set", "outer.lr=0.1")
    assert_explained(result, ConfigError, "outer.lr", "manifest")


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = gasloc(
            "bootstrap",
            *("--set", f"net.listen=/ip4/127.0.0.1/tcp/{port}"),
            *("--set", f"node.home={tmp_path}"),
        )
    assert_explained(result, PortInUseError, str(port))


def test_an_identity_in_use_is_named(tmp_path: Path) -> None:
    file = tmp_path / "identity"
    held = Identity.load_or_create(file)
    try:
        result = gasloc_process("bootstrap", "--set", f"net.identity={file}")
    finally:
        held.close()
    assert_explained(result, IdentityError, str(file), "in use")


@pytest.mark.parametrize(
    ("option", "path", "words"),
    [
        ("--report", "missing/report.json", "there is no folder"),
        ("--report", ".", "it is a folder"),
        ("--keep", "file", "cannot use the folder"),
    ],
)
def test_a_place_for_results_is_checked_before_the_run(
    option: str, path: str, words: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    for command in ("simulate", "testnet"):
        result = gasloc(command, option, str(tmp_path / path))
        assert_explained(result, ConfigError, words)
        assert "round" not in result.stdout


def test_text_that_is_none_is_named_before_anything_starts(tmp_path: Path) -> None:
    file = tmp_path / "image.bin"
    file.write_bytes(bytes(10_000))
    for command in ("simulate", "testnet"):
        result = gasloc(command, "--set", f"data.path={file}")
        assert_explained(result, DataError, "image.bin")
        assert result.stdout == ""


def test_a_reader_that_has_seen_enough_is_no_defect() -> None:
    command = f"{sys.executable} -m gasloc_p2p simulate {' '.join(FAST)} | head -1"
    result = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 141
    assert result.stderr == ""


def test_settings_come_from_file_environment_and_options_in_this_order(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[run]\nrounds = 3\nseed = 3\n[inner]\nlr = 0.003\n")
    result = gasloc_process(
        *("config", "show", "--config", str(file), "--set", "run.rounds=5"), GASLOC_RUN_SEED="4"
    )
    assert "rounds = 5  (--set)" in result.stdout
    assert "seed = 4  (environment)" in result.stdout
    assert f"lr = 0.003  (file {file})" in result.stdout
    assert "momentum = 0.9  (default)" in result.stdout


def test_the_default_file_is_valid_and_holds_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "gasloc.toml"
    assert gasloc("config", "init", str(file)).returncode == 0
    assert gasloc("config", "check", str(file)).returncode == 0
    assert_explained(gasloc("config", "init", str(file)), ConfigError, "there already")
    enabled = "\n".join(
        line.removeprefix("# ") if " = " in line else line for line in file.read_text().splitlines()
    )
    assert set(tomllib.loads(enabled)) >= {"run", "inner", "outer", "gossip", "net"}


@pytest.mark.parametrize(
    ("text", "words"),
    [("[run", "not valid TOML"), ("rounds = 3", "outside a section"), (None, "cannot read")],
)
def test_a_bad_file_is_explained(text: str | None, words: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.toml"
    if text is not None:
        file.write_text(text)
    assert_explained(gasloc("config", "check", str(file)), ConfigError, words)
