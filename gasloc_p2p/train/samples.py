"""What a peer trains on, window by window, in an order of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from gasloc_p2p.core.types import PeerId
from gasloc_p2p.train.data import Corpus, SampleCursor, count_windows, validation_windows


class Samples(Protocol):
    """A peer's windows of tokens, in an order that follows from the run's seed and its identity.

    Attributes:
        next_sample: the number of the next window; all that a checkpoint has to keep.
    """

    next_sample: int

    def batch(self, windows: int) -> Tensor:
        """Return the next windows, int64 [windows, sequence_length + 1], and move past them.

        Raises:
            DataError: they cannot be had.
        """
        ...


@dataclass(kw_only=True, slots=True)
class TextSamples:
    """Windows at random places of a text in memory.

    Attributes:
        text: uint8 [bytes].
        cursor: which windows.
        sequence_length: tokens that a window predicts.

    Raises:
        DataError: the text is shorter than one window.
    """

    text: Tensor
    cursor: SampleCursor
    sequence_length: int

    def __post_init__(self) -> None:
        count_windows(self.text, self.sequence_length, part="training")

    @property
    def next_sample(self) -> int:
        """The number of the next window."""
        return self.cursor.next_sample

    @next_sample.setter
    def next_sample(self, sample: int) -> None:
        self.cursor.next_sample = sample

    def batch(self, windows: int) -> Tensor:
        """Return the next windows, int64 [windows, sequence_length + 1], and move past them."""
        return self.cursor.batch(
            self.text, batch_size=windows, sequence_length=self.sequence_length
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Supply:
    """What a learner trains on and is tried on.

    Attributes:
        samples: the peer's own.
        validation: the held-out windows, int64 [windows, sequence_length + 1].
    """

    samples: Samples
    validation: Tensor


class Text(Protocol):
    """A text as tokens, before anybody knows how long the windows of it will be.

    Attributes:
        vocabulary: all tokens are below it.
    """

    @property
    def vocabulary(self) -> int: ...

    def supply(self, sequence_length: int) -> Supply:
        """Return its windows, which predict `sequence_length` tokens each.

        Raises:
            DataError: the text is too small.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class TextInMemory:
    """A text in memory.

    Attributes:
        corpus: the text.
        seed: the run's seed.
        peer_id: the peer that trains.
        validation_tokens: tokens that one validation loss is measured on.
        vocabulary: all tokens are below it.
    """

    corpus: Corpus
    seed: int
    peer_id: PeerId
    validation_tokens: int
    vocabulary: int = 256

    def supply(self, sequence_length: int) -> Supply:
        """Return its windows.

        Raises:
            DataError: the text is too small.
        """
        return Supply(
            samples=TextSamples(
                text=self.corpus.train,
                cursor=SampleCursor(seed=self.seed, peer_id=self.peer_id),
                sequence_length=sequence_length,
            ),
            validation=validation_windows(
                self.corpus.validation,
                tokens=self.validation_tokens,
                sequence_length=sequence_length,
            ),
        )
