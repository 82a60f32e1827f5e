"""Where a node keeps its identity, its run, its checkpoints and its results."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from blake3 import blake3

from gasloc_p2p.commands.arguments import make_folder, write_text_file
from gasloc_p2p.commands.model import check_model, with_model_here
from gasloc_p2p.config import Config, Layer, LoadedConfig, file_layer, load, tables_to_toml
from gasloc_p2p.core.errors import ConfigError, DiskError, IdentityError, ManifestError
from gasloc_p2p.core.manifest import Manifest, parse_manifest
from gasloc_p2p.data.shards import HUB
from gasloc_p2p.founding import found, manifest_layer
from gasloc_p2p.net.identity import Identity
from gasloc_p2p.node.checkpoint import CheckpointStore
from gasloc_p2p.train.model import digest_of

RUN_FILE = "run.json"
OWN_FILE = "own.toml"
OWN_SECTIONS = ("data", "device", "net", "node", "checkpoint")
OF_ONE_START = ("home", "exit_with_stdin", "address_file", "invite_file")
"""Keys of `node` that say nothing of the next start."""
PATHS = (
    ("data", "path"),
    ("data", "tokenizer_file"),
    ("device", "model_folder"),
    ("net", "identity"),
)
CHECKPOINT_FOLDER = "checkpoints"


def home_of(config: Config, name: str) -> Path:
    """Return the home folder: `node.home`, or ~/.gasloc/NAME."""
    if config.node.home:
        return Path(config.node.home).expanduser()
    return Path.home() / ".gasloc" / name


def hold_home(home: Path) -> Callable[[], None]:
    """Keep other nodes out of a home, which is made if need be; return what lets them in again.

    Raises:
        IdentityError: another node is in it.
    """
    make_folder(home)
    descriptor = os.open(home, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise IdentityError(
            f"another node runs in {home}",
            why="two of them would overwrite each other's checkpoints and results",
            fix="end that one, or give this one a home of its own with --set node.home=FOLDER",
        ) from None
    except OSError:
        # Some network file systems know no locks; the identity has one of its own.
        pass
    return partial(os.close, descriptor)


def open_identity(config: Config, home: Path) -> Identity:
    """Load the node's identity, or make one; it is locked until it is closed.

    Raises:
        IdentityError: the file cannot be used, or another process uses it.
    """
    if config.net.identity:
        return Identity.load_or_create(Path(config.net.identity).expanduser())
    make_folder(home)
    return Identity.load_or_create(home / "identity")


def found_or_resume(
    loaded: LoadedConfig, *, now_s: float, vocabulary: int = 0
) -> tuple[Config, Manifest]:
    """Return the run that the home holds, if its settings are these, or found one.

    A run without a name takes that of the home, so that the same command resumes it.

    Args:
        loaded: the node's settings.
        now_s: unix seconds.
        vocabulary: tokens of the run's tokenizer, which a model must have; 0: not known.

    Raises:
        ConfigError: the home holds a run with other shared settings, or a setting is refused.
        DataError: the model cannot be had from the hub.
        UnstableError: peers would drift apart.
    """
    config = loaded.config
    kept = kept_manifest(home_of(config, config.run.id))
    if kept is None:
        config = _with_model_digest(config, vocabulary)
        return config, found(config, now_s=now_s)
    if "run.id" not in loaded.origins:
        run = config.run.model_copy(update={"id": kept.run_id})
        config = config.model_copy(update={"run": run})
    if not config.model.digest:
        digest = kept.sections.get("model", {}).get("digest", "")
        model = config.model.model_copy(update={"digest": digest})
        config = config.model_copy(update={"model": model})
    require_same_run(config, kept, home_of(config, config.run.id))
    return config, kept


def _with_model_digest(config: Config, vocabulary: int) -> Config:
    """Return the configuration with what the founder alone fills in.

    Raises:
        ConfigError: the model cannot be read.
        DataError: it cannot be had from the hub.
    """
    if not config.model.name or config.model.digest:
        return config
    config = with_model_here(config)
    check_model(config, vocabulary=vocabulary)
    digest = digest_of(config.model, folder=config.device.model_folder)
    model = config.model.model_copy(update={"digest": digest})
    return config.model_copy(update={"model": model})


def require_same_run(config: Config, kept: Manifest, home: Path) -> None:
    """Refuse to go on with a run under settings that it was not founded with.

    Raises:
        ConfigError: a shared setting differs; it is named.
    """
    wanted = Manifest(run_id=config.run.id, founded_s=0.0, sections=config.shared())
    for section, values in wanted.sections.items():
        for key, value in values.items():
            there = kept.sections.get(section, {}).get(key)
            if there != value:
                raise ConfigError(
                    f"{home} holds run {kept.run_id}, in which {section}.{key} is {there!r} and "
                    f"not {value!r}",
                    why="a run goes on with the settings that it was founded with",
                    fix="leave out what differs, or name another folder for another run",
                )


def with_kept_digest(config: Config, kept: Manifest) -> Config:
    """Fill in the digest of the tokenizer with which a run was founded, unless one is set."""
    digest = kept.sections.get("model", {}).get("tokenizer_digest", "")
    if config.model.tokenizer_digest:
        return config
    model = config.model.model_copy(update={"tokenizer_digest": digest})
    return config.model_copy(update={"model": model})


def kept_manifest(home: Path) -> Manifest | None:
    """Return the manifest of the run that the home holds; None when it holds none.

    Raises:
        ConfigError: the file cannot be used.
    """
    file = home / RUN_FILE
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(
            f"cannot read {file}",
            why=error.strerror or str(error),
            fix="make it readable, or name another node.home",
        ) from None
    try:
        return parse_manifest(data, blake3(data).digest())
    except ManifestError as error:
        raise ConfigError(
            f"{file} is not the manifest of a run",
            why=error.why,
            fix="remove it to found the run anew, or name another node.home",
        ) from None


def keep_run(home: Path, manifest: Manifest, config: Config) -> None:
    """Write down which run the home belongs to, and the node's own settings in it.

    Raises:
        ConfigError: there is a file that cannot be used.
        DiskError: it cannot be written, as on a full disk.
    """
    _keep(home / OWN_FILE, _own_settings(config))
    keep_manifest(home, manifest)


def keep_manifest(home: Path, manifest: Manifest) -> None:
    """Write down which run the home belongs to, unless that is written there.

    Raises:
        ConfigError: there is a file that cannot be used.
        DiskError: it cannot be written, as on a full disk.
    """
    if kept_manifest(home) != manifest:
        _keep(home / RUN_FILE, manifest.encode().decode())


def _keep(file: Path, text: str) -> None:
    try:
        write_text_file(str(file), text)
    except OSError as error:
        raise DiskError(
            f"cannot write {file}",
            why=error.strerror or str(error),
            fix="make room there, or name another node.home",
        ) from None


def _own_settings(config: Config) -> str:
    """Return as TOML what a node was told beside the run's settings; none of it is secret."""
    tables = config.model_dump(mode="json", include=set(OWN_SECTIONS), exclude_defaults=True)
    for key in OF_ONE_START:
        tables.get("node", {}).pop(key, None)
    for section, key in PATHS:
        name = tables.get(section, {}).get(key)
        if name and not name.startswith(HUB):
            tables[section][key] = str(Path(name).expanduser().absolute())
    return (
        "# This machine's own settings in this run, as the node was started last; `gasloc export`\n"
        "# and `gasloc resume` begin with them.\n" + tables_to_toml(tables)
    )


def home_layers(home: Path, layers: Sequence[Layer]) -> list[Layer]:
    """Return the run's settings, the node's own ones in it, and over them `layers`.

    Raises:
        ConfigError: the home holds no run, or what it holds cannot be used.
    """
    manifest = kept_manifest(home)
    if manifest is None:
        raise ConfigError(
            f"{home} is not the home of a node",
            why=f"it has no file {RUN_FILE}",
            fix="name the folder that `gasloc start` and `gasloc join` call the results' folder",
        )
    file = home / OWN_FILE
    own = [*([file_layer(file)] if file.exists() else []), *layers]
    # The run may use what an extension registers, which this loads.
    load(own)
    return [manifest_layer(manifest), *own]


def homes() -> list[Path]:
    """Return the homes below ~/.gasloc that hold a run, the newest first."""
    files = (Path.home() / ".gasloc").glob(f"*/{RUN_FILE}")
    return [file.parent for file in sorted(files, key=lambda file: -file.stat().st_mtime)]


def checkpoints_of(config: Config, home: Path) -> CheckpointStore:
    """Return the checkpoints that the home holds."""
    return CheckpointStore(home / CHECKPOINT_FOLDER, keep=config.checkpoint.keep)
