"""What a node trains on, had from a hub beside everything else that it does."""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress
from pathlib import Path

from gasloc_p2p.commands.home import home_of, kept_manifest, with_kept_digest
from gasloc_p2p.commands.model import with_model_here
from gasloc_p2p.config import Config, LoadedConfig
from gasloc_p2p.core.types import PeerId
from gasloc_p2p.data.feed import Closing
from gasloc_p2p.data.patience import Patience
from gasloc_p2p.data.supply import DATA_FOLDER, load_tokenizer
from gasloc_p2p.data.supply import open_text as open_here
from gasloc_p2p.data.tokens import Bytes
from gasloc_p2p.node.events import Notice, Observer
from gasloc_p2p.train.samples import Text


def with_tokenizer_digest(loaded: LoadedConfig) -> tuple[LoadedConfig, int]:
    """Write the digest of the tokenizer into the settings of a run that is founded or resumed.

    Returns:
        The settings, and how many tokens the tokenizer has.

    Raises:
        ConfigError: the home holds a run that cannot be read.
        DataError: the tokenizer is missing, or not the run's.
    """
    config = loaded.config
    if config.model.tokenizer == "bytes":
        return loaded, Bytes.vocabulary
    home = home_of(config, config.run.id)
    kept = kept_manifest(home)
    if kept is not None:
        config = with_kept_digest(config, kept)
    tokenizer = load_tokenizer(
        config.model,
        config.data,
        folder=home / DATA_FOLDER,
        patience=Patience(lambda text: print(text, file=sys.stderr), Closing().pause),
    )
    model = config.model.model_copy(update={"tokenizer_digest": tokenizer.digest})
    config = config.model_copy(update={"model": model})
    return LoadedConfig(config=config, origins=loaded.origins), tokenizer.vocabulary


async def open_text(
    config: Config, *, home: Path, peer_id: PeerId, observe: Observer, closing: Closing
) -> tuple[Config, Text]:
    """Open what `config` names, and have its model here; a hub that is out of order is waited for.

    It goes on in a thread of its own until `closing` is closed, which may well outlive this call
    when it is cancelled: such a thread never holds up the end of the process.

    Returns:
        The settings with the folder of the model, and the text.

    Raises:
        DataError: there is no such text or model.
    """
    loop = asyncio.get_running_loop()
    opened: asyncio.Future[tuple[Config, Text]] = loop.create_future()

    def say(text: str) -> None:
        # The loop may have ended before this thread.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(observe, Notice(text=text))

    def settle(found: tuple[Config, Text] | None, error: BaseException | None) -> None:
        if opened.cancelled():
            return
        if found is not None:
            opened.set_result(found)
        elif error is not None:
            opened.set_exception(error)

    def work() -> None:
        found, failure = None, None
        try:
            whole = with_model_here(config, say=say, closing=closing)
            text = open_here(
                config.model,
                config.data,
                folder=home / DATA_FOLDER,
                seed=config.run.seed,
                peer_id=peer_id,
                say=say,
                closing=closing,
            )
            found = whole, text
        except BaseException as error:  # it is raised where the text is waited for
            failure = error
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, found, failure)

    closing.start(work, name="opening the text")
    return await opened
