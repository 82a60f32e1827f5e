"""From the settings to what a node trains on and is tried on."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from blake3 import blake3

from gasloc_p2p.core.errors import DataError
from gasloc_p2p.core.types import PeerId
from gasloc_p2p.data.feed import Closing, Feed
from gasloc_p2p.data.hub import Hub, HubListing, HubShards
from gasloc_p2p.data.order import is_held_out
from gasloc_p2p.data.patience import Patience
from gasloc_p2p.data.shards import HUB, LocalShards, Shards, holds_documents
from gasloc_p2p.data.shelf import Shelf
from gasloc_p2p.data.stream import Stream
from gasloc_p2p.data.tokens import Bytes, Pieces, Tokenizer, Tokens, read_tokenizer
from gasloc_p2p.data.units import Units
from gasloc_p2p.train.data import Corpus, load_corpus, validation_windows
from gasloc_p2p.train.samples import Supply, Text, TextInMemory
from gasloc_p2p.train.settings import DataConfig, ModelConfig

DATA_FOLDER = "data"
LISTING_FILE = "listing"
STREAM_FILE = "stream"
TRAIN_FILE = "text-train"
VALIDATION_FILE = "text-validation"
TOKENIZER_FILE = "tokenizer.json"
LOCAL_BUFFER_MB = 16
"""Most that is read ahead of files on this machine, which are never out."""
HELD_OUT_DOCUMENTS = 0.01
"""Share of the documents of a stream that are kept for validation, unless it is set."""


class _Asked(msgspec.Struct, frozen=True, kw_only=True):
    """A data set of a hub as a person named it."""

    name: str
    revision: str
    subset: str
    files: tuple[str, ...]


class _Kept(msgspec.Struct, frozen=True, kw_only=True):
    """What a hub answered when it was asked first; later starts read the same commit."""

    asked: _Asked
    listing: HubListing


def is_streamed(data: DataConfig) -> bool:
    """Whether what `data.path` names is read as a stream of documents, not as a text in memory."""
    return data.path.startswith(HUB) or holds_documents(data.path)


def load_text(model: ModelConfig, data: DataConfig) -> Corpus:
    """Return a text of bytes in memory, for what trains many peers on one.

    Raises:
        DataError: the settings ask for documents or another tokenizer, or the text cannot be used.
    """
    if is_streamed(data) or model.tokenizer != "bytes":
        raise DataError(
            "Simulations train on the bytes of a text in memory.",
            why="data.path names documents or a hub, or model.tokenizer is not bytes.",
            fix="Point data.path at a text file or folder, or use `gasloc testnet`.",
        )
    return load_corpus(data)


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamedText:
    """Documents that are read ahead while a node trains.

    Attributes:
        stream, shelf: where samples come from, and where they wait.
        held_out: held-out tokens.
        data: the settings.
        say: told of troubles.
        closing: ends the thread that reads ahead.
    """

    stream: Stream
    shelf: Shelf
    held_out: Tokens
    data: DataConfig
    say: Callable[[str], None]
    closing: Closing

    @property
    def vocabulary(self) -> int:
        """All tokens are below it."""
        return self.stream.tokenizer.vocabulary

    def supply(self, sequence_length: int) -> Supply:
        """Return its windows.

        Raises:
            DataError: there is too little held-out text.
        """
        local = self.stream.shards.local
        buffer_mb = min(self.data.buffer_mb, LOCAL_BUFFER_MB) if local else self.data.buffer_mb
        return Supply(
            samples=Feed(
                stream=self.stream,
                shelf=self.shelf,
                sequence_length=sequence_length,
                limit_bytes=buffer_mb << 20,
                say=self.say,
                closing=self.closing,
            ),
            validation=validation_windows(
                torch.from_numpy(self.held_out.astype("int64")),
                tokens=self.data.validation_tokens,
                sequence_length=sequence_length,
            ),
        )


def open_text(
    model: ModelConfig,
    data: DataConfig,
    *,
    folder: Path,
    seed: int,
    peer_id: PeerId,
    say: Callable[[str], None],
    closing: Closing,
) -> Text:
    """Open what a node trains on. Takes as long as the hub does; `closing` ends it.

    Args:
        model, data: the settings.
        folder: of the node, for the index, the buffer, and what else comes from a hub.
        seed: the run's seed.
        peer_id: the peer that trains.
        say: told of troubles; called from any thread.
        closing: ends all waiting.

    Raises:
        DataError: the text or the tokenizer is missing, not accessible, or not the run's.
        ClosedError: `closing` was closed.
    """
    patience = Patience(say, closing.pause)
    tokenizer = load_tokenizer(model, data, folder=folder, patience=patience)
    if not is_streamed(data):
        corpus = _tokenised(load_corpus(data), tokenizer, folder, say)
        _say_bytes_a_token(tokenizer, corpus.validation[: data.validation_tokens].numpy(), say)
        return TextInMemory(
            corpus=corpus,
            seed=seed,
            peer_id=peer_id,
            validation_tokens=data.validation_tokens,
            vocabulary=tokenizer.vocabulary,
        )
    try:
        shelf = Shelf(folder)
        stream = _open_stream(
            data, shelf=shelf, tokenizer=tokenizer, seed=seed, peer_id=peer_id, patience=patience
        )
        held_out = _held_out(stream, shelf, data.validation_tokens + 1)
    except OSError as error:
        raise DataError(
            f"The folder {folder} cannot be used for text.",
            why=error.strerror or str(error),
            fix="Make room there, or name another node.home.",
        ) from error
    _say_bytes_a_token(tokenizer, held_out, say)
    return StreamedText(
        stream=stream, shelf=shelf, held_out=held_out, data=data, say=say, closing=closing
    )


def load_tokenizer(
    model: ModelConfig, data: DataConfig, *, folder: Path, patience: Patience
) -> Tokenizer:
    """Return the tokenizer of the run.

    Raises:
        DataError: it is not there, or not the one with which the run was founded.
        ClosedError: nobody waits for it any more.
    """
    if model.tokenizer == "bytes":
        return Bytes()
    if model.tokenizer == "file":
        source = data.tokenizer_file
        if not source:
            raise DataError(
                "This run has a tokenizer of its own, and data.tokenizer_file is not set.",
                why="model.tokenizer is `file`: its tokens are those of a file that every peer "
                "has, and this one does not know where it lies.",
                fix="Name the tokenizer.json that the founder uses: --set data.tokenizer_file=FILE "
                "(a founder makes one with `gasloc tokenizer train FILE`).",
            )
        tokenizer = Pieces(read_tokenizer(source), source=source)
    else:
        source = model.tokenizer
        tokenizer = _hub_tokenizer(model, folder / TOKENIZER_FILE, patience)
    if model.tokenizer_digest and tokenizer.digest != model.tokenizer_digest:
        raise DataError(
            f"The tokenizer {source} is not the one with which this run was founded.",
            why=f"Its digest begins with {tokenizer.digest[:12]}, and the run's with "
            f"{model.tokenizer_digest[:12]}.",
            fix="Ask the founder for the tokenizer.json of the run and name it: "
            "--set data.tokenizer_file=FILE",
        )
    return tokenizer


def _tokenised(
    corpus: Corpus, tokenizer: Tokenizer, folder: Path, say: Callable[[str], None]
) -> Corpus:
    """Return a text of bytes as tokens of another kind, documents apart.

    They are kept in the folder, since a tokenizer takes seconds for every ten megabytes.
    """
    if isinstance(tokenizer, Bytes):
        return corpus
    digest = blake3(corpus.digest + tokenizer.digest.encode())
    train, validation = _kept_tokens(corpus, tokenizer, folder, digest.hexdigest().encode(), say)
    return Corpus(
        train=torch.from_numpy(train.astype("int32")),
        validation=torch.from_numpy(validation.astype("int32")),
        digest=digest.digest(),
    )


def _kept_tokens(
    corpus: Corpus, tokenizer: Tokenizer, folder: Path, digest: bytes, say: Callable[[str], None]
) -> tuple[Tokens, Tokens]:
    """Return the tokens of training and validation text, from the folder if they are there."""

    def tokens_of(text: torch.Tensor) -> Tokens:
        return tokenizer.encode(text.numpy().tobytes().split(b"\0"))

    made: list[Tokens] = []
    try:
        shelf = Shelf(folder)
        if shelf.read_text(STREAM_FILE) == digest:
            kept = shelf.load(TRAIN_FILE), shelf.load(VALIDATION_FILE)
            if kept[0] is not None and kept[1] is not None:
                return kept[0], kept[1]
        made = [tokens_of(corpus.train), tokens_of(corpus.validation)]
        shelf.clear(but=(LISTING_FILE, TOKENIZER_FILE))
        shelf.write_text(STREAM_FILE, digest)
        shelf.put(TRAIN_FILE, made[0])
        shelf.put(VALIDATION_FILE, made[1])
    except OSError as error:
        say(f"the tokens of the text could not be kept ({error.strerror or error})")
    train, validation = made or (tokens_of(corpus.train), tokens_of(corpus.validation))
    return train, validation


def training_documents(
    data: DataConfig, *, folder: Path, patience: Patience, limit_bytes: int
) -> Generator[bytes]:
    """Yield documents to train on, in the order of their names, until there is enough.

    Raises:
        DataError: there are none.
    """
    if is_streamed(data):
        shards = open_shards(data, shelf=Shelf(folder), patience=patience)
        held_out = data.validation_fraction or HELD_OUT_DOCUMENTS
        units = Units(shards, data.text_field, patience.say).by_name()
        documents: Iterator[bytes] = (
            text for unit in units for text in unit if not is_held_out(text, held_out)
        )
    else:
        corpus = load_corpus(data)
        documents = iter(corpus.train.numpy().tobytes().split(b"\0"))
    for document in documents:
        yield document
        limit_bytes -= len(document)
        if limit_bytes <= 0:
            return


def open_shards(data: DataConfig, *, shelf: Shelf, patience: Patience) -> Shards:
    """Return the files that `data.path` names.

    What a hub answered is kept, so that the run goes on with the same files after a restart, even
    while the hub is out of reach.

    Raises:
        DataError: there are none, or they are not accessible.
        OSError: the answer cannot be kept.
    """
    if not data.path.startswith(HUB):
        return LocalShards(Path(data.path).expanduser())
    asked = _Asked(
        name=data.path.removeprefix(HUB),
        revision=data.revision,
        subset=data.subset,
        files=data.files,
    )
    hub = Hub(name=asked.name, kind="dataset", patience=patience)
    try:
        kept = msgspec.json.decode(shelf.read_text(LISTING_FILE), type=_Kept)
    except msgspec.DecodeError:
        kept = None
    if kept is None or kept.asked != asked:
        listing = hub.list_documents(
            revision=asked.revision, subset=asked.subset, files=asked.files
        )
        kept = _Kept(asked=asked, listing=listing)
        shelf.write_text(LISTING_FILE, msgspec.json.encode(kept))
    return HubShards(hub=hub, listing=kept.listing)


def _open_stream(
    data: DataConfig,
    *,
    shelf: Shelf,
    tokenizer: Tokenizer,
    seed: int,
    peer_id: PeerId,
    patience: Patience,
) -> Stream:
    """Open the stream, and empty the shelf if it holds that of other settings."""
    shards = open_shards(data, shelf=shelf, patience=patience)
    held_out = data.validation_fraction or HELD_OUT_DOCUMENTS
    # The same files may be named from another folder the next time.
    place = str(Path(data.path).expanduser().resolve()) if shards.local else data.path
    decides = [place, data.text_field, held_out, tokenizer.digest, seed, peer_id]
    identity = json.dumps([*decides, shards.version, *shards.names]).encode()
    digest = blake3(identity).hexdigest().encode()
    if shelf.read_text(STREAM_FILE) != digest:
        if shelf.entries:
            patience.say("the text or its settings have changed: its stream begins anew")
        shelf.clear(but=(LISTING_FILE, TOKENIZER_FILE))
        shelf.write_text(STREAM_FILE, digest)
    return Stream(
        shards=shards,
        units=Units(shards, data.text_field, patience.say),
        tokenizer=tokenizer,
        held_out=held_out,
        seed=seed,
        peer_id=peer_id,
    )


def _held_out(stream: Stream, shelf: Shelf, tokens: int) -> Tokens:
    """Return held-out tokens, which are kept, so that a later start needs no hub."""
    name = f"validation-{tokens}"
    found = shelf.load(name)
    if found is None:
        found = stream.read_held_out(tokens)
        shelf.put(name, found)
    return found


def _hub_tokenizer(model: ModelConfig, kept: Path, patience: Patience) -> Pieces:
    """Fetch a tokenizer, unless the one of the run is here."""
    if model.tokenizer_digest and kept.exists():
        found = Pieces(read_tokenizer(str(kept)), source=str(kept))
        if found.digest == model.tokenizer_digest:
            return found
    hub = Hub(name=model.tokenizer, kind="model", patience=patience)
    content = hub.read_whole(TOKENIZER_FILE, revision="main")
    tokenizer = Pieces(content, source=model.tokenizer)
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_bytes(content)
    except OSError as error:
        patience.say(f"the tokenizer could not be kept ({error.strerror})")
    return tokenizer


def _say_bytes_a_token(tokenizer: Tokenizer, tokens: Tokens, say: Callable[[str], None]) -> None:
    """Say what a loss in nats a token means, unless a token is a byte."""
    if isinstance(tokenizer, Pieces) and len(tokens):
        ratio = tokenizer.text_bytes(tokens) / len(tokens)
        say(
            f"a token is {ratio:.2f} bytes of the held-out text; bits per byte are the loss times "
            f"{1 / (math.log(2) * max(ratio, 1e-9)):.3f}"
        )
