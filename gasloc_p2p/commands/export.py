"""`gasloc export`: one checkpoint as a model that transformers reads."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from gasloc_p2p.commands.home import (
    RUN_FILE,
    checkpoints_of,
    home_layers,
    homes,
    kept_manifest,
)
from gasloc_p2p.commands.model import with_model_here
from gasloc_p2p.config import Layer, load
from gasloc_p2p.core.errors import CheckpointError, ConfigError
from gasloc_p2p.core.manifest import Manifest
from gasloc_p2p.data.feed import Closing
from gasloc_p2p.data.patience import Patience
from gasloc_p2p.data.supply import DATA_FOLDER, load_tokenizer
from gasloc_p2p.data.tokens import Pieces
from gasloc_p2p.node.checkpoint import CheckpointStore, DamagedCheckpointError
from gasloc_p2p.train.export import export_model, export_tokenizer
from gasloc_p2p.train.model import model_of


def export(source: Path, folder: Path, layers: Sequence[Layer]) -> None:
    """Write the model of a checkpoint into a folder.

    Args:
        source: the home of a node, whose newest checkpoint is taken, or one checkpoint in it; or
            the name of a run below ~/.gasloc.
        folder: where to; empty, or not there yet.
        layers: this machine's own settings, where they are not those that the node was started
            with.

    Raises:
        CheckpointError: there is no checkpoint, or it cannot be used.
        DataError: the run's tokenizer or model is not there.
        ConfigError: `source` belongs to no run, or `folder` is in use.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(
            f"{folder} is there already",
            why="what it holds would be mixed up with the model",
            fix="name a folder that is empty or not there yet",
        )
    if not source.exists():
        source = next((home for home in homes() if Path(home.name) == source), source)
    home, manifest = _home_of(source)
    config = load(home_layers(home, layers)).config
    store = checkpoints_of(config, home)
    at = _round_of(source, home, store)
    try:
        checkpoint = store.read(at)
    except DamagedCheckpointError as damage:
        raise CheckpointError(
            f"the checkpoint of round {at} in {home} is damaged",
            why=str(damage),
            fix=f"name another one in {home / 'checkpoints'}",
        ) from None
    tokenizer = load_tokenizer(
        config.model,
        config.data,
        folder=home / DATA_FOLDER,
        patience=Patience(lambda text: print(text, file=sys.stderr), Closing().pause),
    )
    built = model_of(
        config.model,
        seed=config.run.seed,
        vocabulary=tokenizer.vocabulary,
        folder=with_model_here(config).device.model_folder,
    )
    export_model(built.module, checkpoint.theta, checkpoint.progress.schema_digest, folder)
    if isinstance(tokenizer, Pieces):
        export_tokenizer(tokenizer.to_json(), tokenizer.end_of_text, folder)
    print(f"wrote the model of run {manifest.run_id}, checkpoint of round {at}, to {folder}")


def _home_of(source: Path) -> tuple[Path, Manifest]:
    """Return the home that `source` is or lies in, and the manifest of its run."""
    for home in (source, source.resolve().parent.parent):
        manifest = kept_manifest(home) if home.is_dir() else None
        if manifest is not None:
            return home, manifest
    raise ConfigError(
        f"{source} is neither the home of a node nor a checkpoint in one",
        why=f"a home has a file {RUN_FILE}, and checkpoints in its folder `checkpoints`",
        fix="name the folder that `gasloc start` and `gasloc join` call the results' folder, such "
        "as ~/.gasloc/RUN",
    )


def _round_of(source: Path, home: Path, store: CheckpointStore) -> int:
    """Return the round of the checkpoint that is meant."""
    rounds = store.rounds()
    if source != home:
        digits = source.resolve().name.removeprefix("round-")
        rounds = tuple(round for round in rounds if digits.isdecimal() and round == int(digits))
    if not rounds:
        raise CheckpointError(
            f"there is no checkpoint in {source}",
            why="a node writes one every checkpoint.every_rounds rounds, and when it leaves",
            fix=f"look what {home / 'checkpoints'} holds",
        )
    return rounds[0]
