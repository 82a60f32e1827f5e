"""`gasloc tokenizer`: make a tokenizer from the text that is configured."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gasloc_p2p.commands.options import ConfigFile, Debug, Set

if TYPE_CHECKING:
    from gasloc_p2p.config import Config

app = typer.Typer(no_args_is_help=True, help="Make tokenizers.")


@app.callback()
def _all() -> None:
    pass


@app.command("train")
def train(
    out: Annotated[Path, typer.Argument(help="The file to write.")],
    vocabulary: Annotated[int, typer.Option(min=257, max=2**20, help="Tokens to have.")] = 8192,
    megabytes: Annotated[int, typer.Option(min=1, help="Read so much text at most.")] = 100,
    config: ConfigFile = None,
    set_: Set = None,
    debug: Debug = False,
) -> None:
    """Train a byte-level BPE tokenizer on the text that data.path names, without held-out text.

    Give the file to every peer of the run: --set model.tokenizer=file --set
    data.tokenizer_file=FILE
    """
    from gasloc_p2p.commands.arguments import check_output_file, write_text_file
    from gasloc_p2p.config import assignment_layer, environment_layer, file_layer, load

    check_output_file(out)
    files = [file_layer(config)] if config is not None else []
    layers = [*files, environment_layer(os.environ), assignment_layer(set_ or ())]
    content = trained(load(layers).config, vocabulary=vocabulary, limit_bytes=megabytes << 20)
    write_text_file(str(out), content)
    print(f"wrote {out}; use it with --set model.tokenizer=file --set data.tokenizer_file={out}")


def trained(config: Config, *, vocabulary: int, limit_bytes: int) -> str:
    """Return the JSON of a tokenizer.

    Raises:
        DataError: there is no such text.
    """
    from gasloc_p2p.data.feed import Closing
    from gasloc_p2p.data.patience import Patience
    from gasloc_p2p.data.supply import training_documents
    from gasloc_p2p.data.tokens import train_tokenizer

    patience = Patience(lambda text: typer.echo(text, err=True), Closing().pause)
    with tempfile.TemporaryDirectory(prefix="gasloc-") as folder:
        documents = training_documents(
            config.data, folder=Path(folder), patience=patience, limit_bytes=limit_bytes
        )
        return train_tokenizer(documents, vocabulary=vocabulary)
