"""What can be known before a node makes, tells or takes anything."""

from __future__ import annotations

import tempfile
from pathlib import Path

from gasloc_p2p.commands.arguments import check_place, read_addresses
from gasloc_p2p.commands.home import home_of, kept_manifest
from gasloc_p2p.commands.ranks import loopback
from gasloc_p2p.config import Config
from gasloc_p2p.core.errors import DataError
from gasloc_p2p.data.patience import ClosedError, Patience
from gasloc_p2p.data.shards import HUB
from gasloc_p2p.data.supply import DATA_FOLDER, LISTING_FILE, is_streamed, training_documents
from gasloc_p2p.data.tokens import Pieces, read_tokenizer
from gasloc_p2p.founding import check_outer
from gasloc_p2p.net.addresses import check_addresses
from gasloc_p2p.train.data import count_windows, load_corpus
from gasloc_p2p.train.device import require_device
from gasloc_p2p.train.model import (
    preset_length,
    require_model_folder,
)
from gasloc_p2p.train.settings import DataConfig


def check_own(config: Config, home: Path, *, window_bytes: int = 0) -> None:
    """Look at all that this machine's own settings name; make nothing.

    Args:
        config: the settings; those that are shared may be missing.
        home: the node's home, which need not be there.
        window_bytes: bytes of text in a window, where a token is a byte; 0: not known.

    Raises:
        ConfigError: an address, a folder or a file that a setting names cannot be used.
        DataError: nothing can be trained on, or there is no such tokenizer.
        DeviceError: the device is not there.
    """
    net = config.net.model_copy(update={"bootstrap": read_addresses(config.net.bootstrap)})
    check_addresses(net)
    require_device(config.device, processes=config.device.processes)
    if config.device.processes > 1:
        loopback()
    require_model_folder(config.device.model_folder)
    check_place(home, "node.home")
    if config.node.invite_file:
        check_place(Path(config.node.invite_file).expanduser().parent, "node.invite_file")
    if config.data.tokenizer_file:
        Pieces(read_tokenizer(config.data.tokenizer_file), source=config.data.tokenizer_file)
    check_text(config.data, home, window_bytes=window_bytes)


def check_start(config: Config) -> None:
    """Look at all that the settings of a run that is founded or resumed name; make nothing.

    Raises:
        ConfigError, DataError, DeviceError: see `check_own`.
        ConfigError, UnstableError: see `check_outer`, for a run that is founded.
    """
    home = home_of(config, config.run.id)
    check_place(home, "node.home")
    if kept_manifest(home) is None:
        check_outer(config)
    check_own(config, home, window_bytes=window_bytes_of(config))


def check_text(data: DataConfig, home: Path, *, window_bytes: int = 0) -> None:
    """Read what has to be read to know that there is text; a hub that is out is passed over.

    Raises:
        DataError: `data.path` names none, or documents without such a field.
    """
    if not is_streamed(data):
        corpus = load_corpus(data) if data.path else None
        if corpus is not None and window_bytes:
            count_windows(corpus.train, window_bytes, part="training")
            count_windows(corpus.validation, window_bytes, part="validation")
        return
    if data.path.startswith(HUB) and (home / DATA_FOLDER / LISTING_FILE).exists():
        # It was there when this node started first, and may be out by now.
        return
    patience = Patience(lambda text: None, _give_up)
    with tempfile.TemporaryDirectory(prefix="gasloc-") as folder:
        documents = training_documents(data, folder=Path(folder), patience=patience, limit_bytes=1)
        try:
            found = next(documents, None)
        except ClosedError:
            return
        finally:
            documents.close()
    if found is None:
        raise DataError(
            f"There is no text to train on in {data.path}.",
            why=f"No document there has text under {data.text_field!r}, or all are held out for "
            "validation.",
            fix="See what the files hold, or name others: --set data.path=FILE",
        )


def _give_up(pause_s: float) -> None:
    """Wait for nothing: the node itself has the patience for a hub that is out."""
    if pause_s:
        raise ClosedError


def window_bytes_of(config: Config) -> int:
    """Return the bytes of text in a window, or 0 where a token is no byte or a model not known."""
    if config.model.name or config.model.tokenizer != "bytes":
        return 0
    return preset_length(config.model)
