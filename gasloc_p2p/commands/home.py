"""Where a node keeps its identity, its run, its checkpoints and its results."""

from __future__ import annotations

from pathlib import Path

from blake3 import blake3

from gasloc_p2p.commands.arguments import make_folder, write_text_file
from gasloc_p2p.commands.model import with_model_here
from gasloc_p2p.config import Config, LoadedConfig
from gasloc_p2p.core.errors import ConfigError, DiskError, ManifestError
from gasloc_p2p.core.manifest import Manifest, parse_manifest
from gasloc_p2p.founding import found
from gasloc_p2p.net.identity import Identity
from gasloc_p2p.node.checkpoint import CheckpointStore
from gasloc_p2p.train.model import digest_of

RUN_FILE = "run.json"
CHECKPOINT_FOLDER = "checkpoints"


def home_of(config: Config, name: str) -> Path:
    """Return the home folder: `node.home`, or ~/.gasloc/NAME."""
    if config.node.home:
        return Path(config.node.home).expanduser()
    return Path.home() / ".gasloc" / name


def open_identity(config: Config, home: Path) -> Identity:
    """Load the node's identity, or make one; it is locked until it is closed.

    Raises:
        IdentityError: the file cannot be used, or another process uses it.
    """
    if config.net.identity:
        return Identity.load_or_create(Path(config.net.identity).expanduser())
    make_folder(home)
    return Identity.load_or_create(home / "identity")


def found_or_resume(loaded: LoadedConfig, *, now_s: float) -> tuple[Config, Manifest]:
    """Return the run that the home holds, if its settings are these, or found one.

    A run without a name takes that of the home, so that the same command resumes it.

    Raises:
        ConfigError: the home holds a run with other shared settings, or a setting is refused.
        DataError: the model cannot be had from the hub.
        UnstableError: peers would drift apart.
    """
    config = loaded.config
    kept = kept_manifest(home_of(config, config.run.id))
    if kept is None:
        config = _with_model_digest(config)
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


def _with_model_digest(config: Config) -> Config:
    """Return the configuration with what the founder alone fills in.

    Raises:
        ConfigError: the model cannot be read.
        DataError: it cannot be had from the hub.
    """
    if not config.model.name or config.model.digest:
        return config
    config = with_model_here(config)
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
                    fix="repeat those settings to resume it, or name another folder for this run",
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


def keep_manifest(home: Path, manifest: Manifest) -> None:
    """Write down which run the home belongs to, unless that is written there.

    Raises:
        ConfigError: there is a file that cannot be used.
        DiskError: it cannot be written, as on a full disk.
    """
    if kept_manifest(home) == manifest:
        return
    try:
        write_text_file(str(home / RUN_FILE), manifest.encode().decode())
    except OSError as error:
        raise DiskError(
            f"cannot write {home / RUN_FILE}",
            why=error.strerror or str(error),
            fix="make room there, or name another node.home",
        ) from None


def checkpoints_of(config: Config, home: Path) -> CheckpointStore:
    """Return the checkpoints that the home holds."""
    return CheckpointStore(home / CHECKPOINT_FOLDER, keep=config.checkpoint.keep)
