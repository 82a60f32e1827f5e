"""From text to tokens: bytes, or a tokenizer in the format of the `tokenizers` library.

What is a token decides what a model is, so that all peers of a run have the same tokenizer: its
digest is in the run's manifest.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from gasloc_p2p.core.errors import DataError

Tokens = NDArray[Any]
"""Token numbers, [n], of the smallest unsigned type that holds the vocabulary."""

END_OF_TEXT: Final = "<|endoftext|>"
_ENDS: Final = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|im_end|>", "[SEP]")


class Tokenizer(Protocol):
    """Turns documents into tokens.

    Attributes:
        vocabulary: tokens are below it.
        digest: 32 bytes in hex of what it does; empty for bytes.
    """

    @property
    def vocabulary(self) -> int: ...

    @property
    def digest(self) -> str: ...

    def encode(self, documents: Sequence[bytes]) -> Tokens:
        """Return the tokens of documents (UTF-8), each followed by the separator."""
        ...


class Bytes:
    """Every byte is a token, and byte 0 ends a document."""

    vocabulary = 256
    digest = ""

    def encode(self, documents: Sequence[bytes]) -> Tokens:
        """Return the bytes of documents, uint8, each followed by byte 0."""
        joined = b"".join(document + b"\0" for document in documents)
        return np.frombuffer(joined, dtype=np.uint8)


class Pieces:
    """A tokenizer from its JSON.

    Args:
        file: the JSON, as `tokenizer.json` of a model on the hub has it.
        source: its name, for messages.

    Raises:
        DataError: it is no tokenizer, or has no token that ends a text.
    """

    def __init__(self, file: bytes, *, source: str) -> None:
        # The library takes a moment to import, and bytes do without it.
        from tokenizers import Tokenizer as Pieced

        try:
            content = json.loads(file)
            self._pieced = Pieced.from_str(json.dumps(content))
        except Exception as error:  # the library raises plain Exception for whatever is wrong
            raise DataError(
                f"{source} is no tokenizer.",
                why=str(error),
                fix="Name a tokenizer.json of the `tokenizers` library, or make one: "
                "`gasloc tokenizer train FILE`",
            ) from error
        self._pieced.no_truncation()
        self._pieced.no_padding()
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        self.digest = blake3(canonical.encode("utf-8", "surrogatepass")).hexdigest()
        numbers = self._pieced.get_vocab(with_added_tokens=True)
        self.vocabulary = max(numbers.values(), default=0) + 1
        ends = [numbers[end] for end in _ENDS if end in numbers]
        if not ends:
            raise DataError(
                f"{source} has no token that ends a text.",
                why=f"It has none of {', '.join(_ENDS)}, so documents would run into each other.",
                fix=f"Add {END_OF_TEXT} to it as a special token, or use another tokenizer.",
            )
        self._end = ends[0]
        self.end_of_text = next(end for end in _ENDS if end in numbers)
        self._dtype = np.dtype("<u2") if self.vocabulary <= 2**16 else np.dtype("<u4")

    def encode(self, documents: Sequence[bytes]) -> Tokens:
        """Return the tokens of documents, uint16 or uint32, each followed by the end of text."""
        parts: list[Tokens] = []
        for document in documents:
            text = document.decode("utf-8", "replace")
            # Unlike `encode`, this lets other threads go on, such as that of the event loop.
            (encoded,) = self._pieced.encode_batch_fast([text], add_special_tokens=False)
            parts.append(np.array([*encoded.ids, self._end], dtype=self._dtype))
        return np.concatenate(parts) if parts else np.empty(0, dtype=self._dtype)

    def to_json(self) -> str:
        """Return it in the format of the `tokenizers` library."""
        return str(self._pieced.to_str())

    def text_bytes(self, tokens: Tokens) -> int:
        """Return how many bytes of text `tokens` stand for."""
        return len(self._pieced.decode(tokens.tolist(), skip_special_tokens=True).encode())


def read_tokenizer(path: str) -> bytes:
    """Return the JSON of a tokenizer.

    Raises:
        DataError: there is none.
    """
    try:
        return Path(path).expanduser().read_bytes()
    except OSError as error:
        raise DataError(
            f"The tokenizer {path!r} cannot be read.",
            why=error.strerror or str(error),
            fix="Point data.tokenizer_file at the tokenizer.json that the founder of the run uses.",
        ) from error


def train_tokenizer(documents: Iterable[bytes], *, vocabulary: int) -> str:
    """Return the JSON of a byte-level BPE tokenizer, trained on `documents`; it has no unknowns."""
    from tokenizers import Tokenizer as Pieced
    from tokenizers import decoders, models, pre_tokenizers, trainers

    pieced = Pieced(models.BPE())
    pieced.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pieced.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    pieced.train_from_iterator((text.decode("utf-8", "replace") for text in documents), trainer)
    return str(pieced.to_str())
