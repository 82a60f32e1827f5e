"""The model that a run names, on this disk before anything is built from it."""

from __future__ import annotations

import sys
from collections.abc import Callable

from gasloc_p2p.config import Config
from gasloc_p2p.core.errors import ConfigError
from gasloc_p2p.data.feed import Closing
from gasloc_p2p.data.patience import Patience
from gasloc_p2p.train.model import length_of, windows_per_step


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr)


def with_model_here(
    config: Config, *, say: Callable[[str], None] = _to_stderr, closing: Closing | None = None
) -> Config:
    """Return the settings with the folder of the model, fetched from the hub unless it is here.

    Takes as long as the hub does.

    Args:
        config: the settings; those of a preset stay as they are.
        say: told of troubles, and of what is fetched.
        closing: ends all waiting.

    Raises:
        DataError: the model cannot be had.
        DiskError: there is no room for it.
        ClosedError: `closing` was closed.
    """
    if not config.model.name or config.device.model_folder:
        return config
    # The hub's library takes a while to import, which presets do without.
    from gasloc_p2p.data.models import fetch_model

    patience = Patience(say, (closing or Closing()).pause)
    folder = fetch_model(config.model, patience=patience)
    device = config.device.model_copy(update={"model_folder": str(folder)})
    return config.model_copy(update={"device": device})


def check_model(config: Config, *, vocabulary: int = 0) -> None:
    """Refuse a model that does not fit the tokenizer, the windows or the processes of this node.

    One that is still to be fetched from a hub is passed over.

    Args:
        config: all settings of the node.
        vocabulary: tokens of the run's tokenizer; 0: not known yet.

    Raises:
        ConfigError: it does not, or it cannot be had.
    """
    device = config.device
    if config.model.name and not device.model_folder:
        return
    length = length_of(config.model, vocabulary=vocabulary, folder=device.model_folder)
    require_windows(device.processes, windows_per_step(config.inner, length))


def require_windows(processes: int, windows: int) -> None:
    """Refuse more processes than a step has windows.

    Raises:
        ConfigError: there are too many.
    """
    if processes > windows:
        raise ConfigError(
            f"device.processes = {processes}, but a step has {windows} windows",
            why="each process takes at least one window of every step",
            fix=f"set device.processes to at most {windows}",
        )
