"""The model that a run names, on this disk before anything is built from it."""

from __future__ import annotations

import sys
from collections.abc import Callable

from gasloc_p2p.config import Config
from gasloc_p2p.data.feed import Closing
from gasloc_p2p.data.patience import Patience


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
