"""The files of a model on a hub, in the hub's own cache, where transformers looks for them too."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from pathlib import Path
from typing import BinaryIO, Final

from huggingface_hub import constants
from huggingface_hub.file_download import REGEX_COMMIT_HASH, repo_folder_name

from gasloc_p2p.core.errors import DataError, DiskError
from gasloc_p2p.data.hub import Hub
from gasloc_p2p.data.patience import AGAIN_S, Patience
from gasloc_p2p.data.refusal import require_name
from gasloc_p2p.train.settings import ModelConfig

CONFIG_FILE: Final = "config.json"
WEIGHTS_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
"""Names the files of weights that do not lie in one."""
PIECE_BYTES: Final = 16 << 20
WORTH_TELLING_BYTES: Final = 20 << 20
"""A smaller file is here before anybody wonders."""
MORE_ROOM: Final = "make room there, or set HF_HOME to a folder on another disk"
WITHOUT: Final = "name a copy on this disk with device.model_folder"


class _NoAnswerError(Exception):
    """The hub would have to be waited for."""


def fetch_model(model: ModelConfig, *, patience: Patience, endpoint: str | None = None) -> Path:
    """Return a folder with a model's configuration and, to go on with existing ones, its weights.

    What is in the cache is not fetched again. A branch is looked up at every call, unless the hub
    does not answer and a copy is there. What was cut off goes on at the byte where it ended.

    Args:
        model: the settings that name it.
        patience: how troubles of the hub are told and endured.
        endpoint: address of the hub; None: that of the library, which HF_ENDPOINT sets.

    Raises:
        DataError: it is not there, not accessible, or has no weights in safetensors files.
        DiskError: there is no room for it.
        ClosedError: nobody wants it any more.
    """
    require_name(model.name, kind="model")
    if ".." in Path(model.revision).parts or Path(model.revision).is_absolute():
        raise _unusable(model, "is no name of one")
    cache = Path(constants.HF_HUB_CACHE).expanduser()
    cache /= repo_folder_name(repo_id=model.name, repo_type="model")
    kept = _kept(model, cache)
    if kept is not None and REGEX_COMMIT_HASH.fullmatch(model.revision):
        return kept
    hub = Hub(name=model.name, kind="model", patience=patience, endpoint=endpoint, without=WITHOUT)
    if kept is None:
        return _fetched(hub, model, cache)
    # With a copy at hand nobody has to wait.
    hub.patience = Patience(lambda text: None, _give_up)
    try:
        return _fetched(hub, model, cache)
    except (_NoAnswerError, DataError, DiskError):
        patience.say(f"the hub does not hand out {model.name}; the copy in {kept} is used")
        return kept


def _give_up(seconds: float) -> None:
    if seconds:
        raise _NoAnswerError


def _kept(model: ModelConfig, cache: Path) -> Path | None:
    """Return the folder of a whole copy of what the settings name, if there is one."""
    commit = model.revision
    try:
        if not REGEX_COMMIT_HASH.fullmatch(commit):
            commit = (cache / "refs" / commit).read_text(encoding="utf-8").strip()
        folder = cache / "snapshots" / commit
        names = {CONFIG_FILE, *_weight_files(model, folder)}
    except (OSError, ValueError):
        return None
    return folder if all((folder / name).is_file() for name in names) else None


def _weight_files(model: ModelConfig, folder: Path) -> set[str]:
    """Return the names of the files of existing weights, if the index of them is in `folder`.

    Raises:
        ValueError: the index is none.
    """
    if model.weights == "fresh":
        return set()
    if not (folder / INDEX_FILE).is_file():
        return {WEIGHTS_FILE}
    index = json.loads((folder / INDEX_FILE).read_text(encoding="utf-8"))
    try:
        names = set(index["weight_map"].values())
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError("it has no weight_map") from error
    # They become paths on this disk.
    if not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise ValueError("it names files that lie elsewhere")
    return {INDEX_FILE, *names}


def _fetched(hub: Hub, model: ModelConfig, cache: Path) -> Path:
    listing = hub.list_files(revision=model.revision)
    if not REGEX_COMMIT_HASH.fullmatch(listing.commit):
        raise _unusable(model, f"has the odd commit {listing.commit!r}")
    folder = cache / "snapshots" / listing.commit
    first = [CONFIG_FILE]
    if model.weights == "existing" and WEIGHTS_FILE not in listing.names:
        first.append(INDEX_FILE)
    _require(first, listing.names, model)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in first:
            _fetch_file(hub, name, listing.commit, folder)
        try:
            weights = sorted(_weight_files(model, folder) - {INDEX_FILE})
        except ValueError as error:
            raise _unusable(model, f"has a {INDEX_FILE} that is damaged: {error}") from error
        _require(weights, listing.names, model)
        for name in weights:
            _fetch_file(hub, name, listing.commit, folder)
        if model.revision != listing.commit:
            branch = cache / "refs" / model.revision
            branch.parent.mkdir(parents=True, exist_ok=True)
            branch.write_text(listing.commit, encoding="utf-8")
    except OSError as error:
        raise DiskError(
            f"the model {model.name} cannot be kept in {folder}",
            why=error.strerror or str(error),
            fix=MORE_ROOM,
        ) from error
    return folder


def _require(names: list[str], there: tuple[str, ...], model: ModelConfig) -> None:
    for name in names:
        if name in there:
            continue
        if name == CONFIG_FILE:
            raise _unusable(model, f"has no {CONFIG_FILE}")
        raise DataError(
            f"{model.name} has no weights in safetensors files.",
            why=f"There is no {name}. Weights in other forms may hold programs, which are never "
            "run.",
            fix="Name a model that has them, or set model.weights=fresh to train it from scratch.",
        )


def _unusable(model: ModelConfig, why: str) -> DataError:
    return DataError(
        f"What the hub has as {model.name} is no model of transformers.",
        why=f"Its revision {model.revision} {why}.",
        fix="See what its page says, and correct model.name or model.revision.",
    )


def _fetch_file(hub: Hub, name: str, commit: str, folder: Path) -> None:
    """Have a file in `folder`; what was received before is not asked for again.

    Raises:
        OSError: it cannot be kept.
    """
    target = folder / name
    if target.is_file():
        return
    partial = folder / f"{name}.partial"
    with partial.open("ab") as out:
        while not _lock(out):
            hub.patience.endure(f"another process of this machine is fetching {name}")
        if target.is_file():
            return
        with hub.open(name, revision=commit) as source:
            _copy(hub, name, source, out)
        out.flush()
        os.fsync(out.fileno())
        partial.replace(target)


def _lock(file: BinaryIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _copy(hub: Hub, name: str, source: BinaryIO, out: BinaryIO) -> None:
    size, done = source.seek(0, os.SEEK_END), out.seek(0, os.SEEK_END)
    if done > size:
        done = out.truncate(0)
    free = shutil.disk_usage(out.name).free
    if size - done > free:
        raise DiskError(
            f"there is no room for the model {hub.name} in {Path(out.name).parent}",
            why=f"{name} needs {_mb(size - done)}, and the disk has {_mb(free)}",
            fix=MORE_ROOM,
        )
    source.seek(done)
    told_s = hub.clock()
    if size - done > WORTH_TELLING_BYTES:
        hub.patience.say(f"fetching {name} of {hub.name} from the hub: {_mb(size - done)}")
    while piece := source.read(PIECE_BYTES):
        out.write(piece)
        done += len(piece)
        if hub.clock() - told_s >= AGAIN_S and done < size:
            told_s = hub.clock()
            hub.patience.say(f"{done / size:.0%} of {name} are here")


def _mb(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.1f} MB"
