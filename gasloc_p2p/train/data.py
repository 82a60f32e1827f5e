"""Text as byte tokens, and which window of it a peer trains on next."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from gasloc_p2p.core.errors import DataError
from gasloc_p2p.core.types import BytesLike, PeerId
from gasloc_p2p.train.settings import DataConfig

CORPUS_LIMIT_BYTES = 2**30
"""Most text that a peer reads; it is held in memory, one byte a token."""

HELD_OUT_TEXT = 0.1
"""Share of a text that is kept for validation, unless it is set."""

DOCUMENT_SEPARATOR = b"\0"
"""Stands between files; text never holds it, so it is also what marks a file as binary."""

# Tests are more than half of a full installation, repetitive, and absent from slim ones.
_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})


@dataclass(frozen=True, kw_only=True, eq=False)
class Corpus:
    """A peer's own text.

    Attributes:
        train: uint8 [bytes], what windows are drawn from.
        validation: uint8 [bytes], from other files, or from the end of a single file.
        digest: 32-byte blake3 over both parts.
    """

    train: Tensor
    validation: Tensor
    digest: bytes

    @classmethod
    def from_bytes(cls, *, train: BytesLike, validation: BytesLike) -> Corpus:
        """Return a corpus of the given text."""
        hasher = blake3(len(train).to_bytes(8, "little"))
        hasher.update(train)
        hasher.update(validation)
        return cls(train=_tokens(train), validation=_tokens(validation), digest=hasher.digest())


def load_corpus(config: DataConfig, *, limit_bytes: int = CORPUS_LIMIT_BYTES) -> Corpus:
    """Read the text that `config` names and split it into training and validation text.

    Of the standard library all `*.py` outside site-packages and test folders are read (12 MB); of
    a folder all files in it and below that hold no zero byte, without hidden ones and links to
    folders. Files are taken in the order of their relative paths. Whole files go to validation, by
    a hash of the relative path; of a single file, the end does.

    Raises:
        DataError: the text is missing, unreadable, empty, binary, or larger than `limit_bytes`.
    """
    documents = _read_documents(config.path, limit_bytes)
    fraction = config.validation_fraction or HELD_OUT_TEXT
    if len(documents) == 1:
        (text,) = documents.values()
        end = len(text) - round(len(text) * fraction)
        return Corpus.from_bytes(train=text[:end], validation=text[end:])
    kept = _validation_paths(documents, fraction)
    return Corpus.from_bytes(
        train=DOCUMENT_SEPARATOR.join(documents[path] for path in documents if path not in kept),
        validation=DOCUMENT_SEPARATOR.join(documents[path] for path in documents if path in kept),
    )


@dataclass(kw_only=True, slots=True)
class SampleCursor:
    """Which windows a peer trains on; needs neither the roster nor any other peer.

    Sample k of peer p starts at byte PRF(seed, p, k) mod N of the training text, where N is the
    number of windows and PRF is keyed blake2b, 64 bits. Source: docs/design.md section 6.

    Attributes:
        seed: the run's seed.
        peer_id: the peer that trains.
        next_sample: k of the next window; all that a checkpoint has to keep.
    """

    seed: int
    peer_id: PeerId
    next_sample: int = 0
    _key: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        hasher = hashlib.blake2b(digest_size=32)
        for part in (str(self.seed).encode(), self.peer_id.encode()):
            hasher.update(len(part).to_bytes(8, "little") + part)
        self._key = hasher.digest()

    def batch(self, train: Tensor, *, batch_size: int, sequence_length: int) -> Tensor:
        """Return the next windows, int64 [batch_size, sequence_length + 1], and move past them.

        Raises:
            DataError: `train`, uint8 [bytes], is shorter than one window.
        """
        windows = count_windows(train, sequence_length, part="training")
        samples = range(self.next_sample, self.next_sample + batch_size)
        starts = torch.tensor([self._draw(sample) % windows for sample in samples])
        self.next_sample += batch_size
        return train[starts[:, None] + torch.arange(sequence_length + 1)].long()

    def _draw(self, sample: int) -> int:
        number = sample.to_bytes(8, "little")
        digest = hashlib.blake2b(number, key=self._key, digest_size=8).digest()
        return int.from_bytes(digest, "little")


def validation_windows(validation: Tensor, *, tokens: int, sequence_length: int) -> Tensor:
    """Return evenly spaced windows, int64 [windows, sequence_length + 1], of `validation`.

    They predict `tokens` tokens, rounded down to whole windows (at least one), or as many as there
    are without predicting one twice.

    Raises:
        DataError: `validation`, uint8 [bytes], is shorter than one window.
    """
    count_windows(validation, sequence_length, part="validation")
    predictable = len(validation) - 1
    windows = min(max(tokens // sequence_length, 1), predictable // sequence_length)
    return validation.unfold(0, sequence_length + 1, predictable // windows)[:windows].long()


def count_windows(text: Tensor, sequence_length: int, *, part: str) -> int:
    """Return how many windows of `sequence_length` tokens and the one after `text` holds.

    Raises:
        DataError: there is none; `part` names the text in the message.
    """
    windows = len(text) - sequence_length
    if windows < 1:
        raise DataError(
            f"The {part} text has {len(text)} bytes; at least {sequence_length + 1} are needed.",
            why=f"One window is {sequence_length} bytes and the byte after them.",
            fix="Point data.path at more text, or change data.validation_fraction.",
        )
    return windows


def _read_documents(path: str, limit_bytes: int) -> dict[str, bytes]:
    """Return the text of every file, by relative path and in its order."""
    try:
        root, names = _find_files(path)
        size = sum((root / name).stat().st_size for name in names)
        if size > limit_bytes:
            raise DataError(
                f"The text in {root} has {size} bytes; at most {limit_bytes} can be used.",
                why="A peer holds its text in memory.",
                fix="Point data.path at a part of it.",
            )
        texts = {name: (root / name).read_bytes() for name in names}
    except OSError as error:
        raise DataError(
            f"The text of {path or 'the Python standard library'} cannot be read.",
            why=str(error),
            fix="Make it readable, or point data.path at another file or folder.",
        ) from error
    documents = {name: text for name, text in texts.items() if text and b"\0" not in text}
    if not documents:
        raise DataError(
            f"There is no text in {Path(path).expanduser() if path else root}",
            why="Empty files and files with zero bytes (binary ones, UTF-16) do not count.",
            fix="Point data.path at a UTF-8 text file or a folder of them.",
        )
    return documents


def _find_files(path: str) -> tuple[Path, list[str]]:
    """Return a folder and the sorted relative paths of the files to read in it."""
    if not path:
        library = Path(sysconfig.get_paths()["stdlib"])
        return library, _files_below(library, suffix=".py", skip=_NOT_LIBRARY)
    chosen = Path(path).expanduser()
    if chosen.is_file():
        return chosen.parent, [chosen.name]
    if chosen.is_dir():
        return chosen, _files_below(chosen)
    raise DataError(
        f"There is no text file or folder at {chosen}.",
        why="data.path names the text that this peer trains on.",
        fix="Correct data.path, or leave it empty to train on Python's standard library source.",
    )


def _files_below(root: Path, *, suffix: str = "", skip: frozenset[str] = frozenset()) -> list[str]:
    def fail(error: OSError) -> None:
        raise error

    found: list[str] = []
    for folder, subfolders, names in os.walk(root, onerror=fail):
        subfolders[:] = [
            name for name in subfolders if not name.startswith(".") and name not in skip
        ]
        paths = (Path(folder, name) for name in names if not name.startswith("."))
        found += [
            path.relative_to(root).as_posix()
            for path in paths
            if path.name.endswith(suffix) and path.is_file()
        ]
    return sorted(found)


def _validation_paths(paths: Iterable[str], fraction: float) -> frozenset[str]:
    """Return the paths whose hash is below `fraction`, but neither none nor all of them."""
    ranks = {path: _path_rank(path) for path in paths}
    ranked = sorted(ranks, key=ranks.__getitem__)
    below = sum(rank < fraction for rank in ranks.values())
    return frozenset(ranked[: min(max(below, 1), len(ranked) - 1)])


def _path_rank(path: str) -> float:
    """Return a number in [0, 1) that depends on the path alone."""
    digest = blake3(path.encode(errors="surrogateescape")).digest(length=8)
    return int.from_bytes(digest, "little") / 2**64


def _tokens(text: BytesLike) -> Tensor:
    # The copy makes memory that torch may write to, and leaves the caller's alone.
    return torch.from_numpy(np.frombuffer(bytearray(text), dtype=np.uint8))
