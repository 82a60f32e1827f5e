"""Which files of a data set make up its training text, as the `datasets` library finds them.

The library is given the names of the files as a file system of its own, so that it asks no hub,
keeps nothing on the disk and runs no code: what it says follows from one commit alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

from gasloc_p2p.core.errors import DataError

TRAINING = "train"
_ROOT = "reference://"


def find_files(names: Sequence[str], patterns: Sequence[str], *, folder: str = "") -> list[str]:
    """Return those of `names` that match a pattern, sorted.

    Args:
        names: the files of a data set.
        patterns: `*` stands for anything within a folder, `**` across folders.
        folder: patterns begin there; empty: at the root.

    Raises:
        DataError: a pattern points out of the data set.
    """
    from datasets.data_files import resolve_pattern

    found: set[str] = set()
    for pattern in patterns:
        _refuse_outside(pattern)
        try:
            found.update(resolve_pattern(pattern, _ROOT + folder, download_config=_only(names)))
        except FileNotFoundError:
            continue
    return sorted(name.removeprefix(_ROOT) for name in found)


def training_files(card: Any, names: Sequence[str], *, subset: str) -> list[str]:
    """Return the files of the training split of a subset, sorted; none if there is no such subset.

    Args:
        card: metadata of the data set, None when it has none.
        names: its files.
        subset: one of its configurations, or a folder; empty: the default one.

    Raises:
        DataError: nothing says which files are for training, or its card is not understood.
    """
    # It takes seconds to import, and only the first start with a data set of a hub needs it.
    from datasets.data_files import EmptyDatasetError, get_data_patterns, sanitize_patterns

    configurations, default = _configurations(card)
    if configurations and not (subset or default):
        raise DataError(
            "The data set has several subsets, and none is its default.",
            why=f"They are {', '.join(configurations)}.",
            fix="Name one of them: --set data.subset=NAME",
        )
    chosen = configurations.get(subset or default, {"data_dir": subset})
    folder = str(chosen.get("data_dir") or "").strip("/")
    _refuse_outside(folder)
    try:
        by_split = (
            sanitize_patterns(chosen["data_files"])
            if chosen.get("data_files") is not None
            else get_data_patterns(_ROOT + folder, download_config=_only(names))
        )
    except EmptyDatasetError:
        return []
    except ValueError as error:
        raise _unusable(error) from error
    splits = {str(split): patterns for split, patterns in by_split.items()}
    if TRAINING not in splits:
        raise DataError(
            f"The data set has no split {TRAINING!r}" + (f" in {subset!r}." if subset else "."),
            why=f"It has {', '.join(splits)}.",
            fix="Name the files to train on: --set data.files=PATTERN",
        )
    return find_files(names, [str(pattern) for pattern in splits[TRAINING]], folder=folder)


def subsets_of(card: Any) -> list[str]:
    """Return the names of the configurations of a data set.

    Raises:
        DataError: its card is not understood.
    """
    return list(_configurations(card)[0])


def _configurations(card: Any) -> tuple[dict[str, dict[str, Any]], str]:
    """Return the configurations by name, and the name of the default one, or an empty one."""
    from datasets.utils.metadata import MetadataConfigs

    try:
        found = MetadataConfigs.from_dataset_card_data(card or {})
        default = found.get_default_config_name()
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _unusable(error) from error
    named = {str(name): configuration for name, configuration in found.items()}
    return named, "" if default is None else str(default)


def _unusable(error: Exception) -> DataError:
    return DataError(
        "The data set does not say in a known way which files are for training.",
        why=str(error).strip().partition("\n")[0],
        fix="Name them: --set data.files=PATTERN",
    )


def _only(names: Sequence[str]) -> Any:
    """Let the library see these files and nothing else."""
    from datasets import DownloadConfig

    listing = {"fo": dict.fromkeys(names, ""), "skip_instance_cache": True}
    return DownloadConfig(storage_options={"reference": listing})


def _refuse_outside(pattern: str) -> None:
    # The library would follow addresses, and list folders of this machine.
    if ":" in pattern or pattern.startswith("/") or ".." in PurePosixPath(pattern).parts:
        raise DataError(
            f"{pattern!r} points out of the data set.",
            why="Patterns of files and folders begin at its root.",
            fix="Name files of the data set (data.files), or a subset without such a pattern.",
        )
