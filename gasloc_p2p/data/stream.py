"""A peer's own way through a data set, as tokens."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from blake3 import blake3

from gasloc_p2p.core.errors import DataError
from gasloc_p2p.core.types import PeerId
from gasloc_p2p.data.order import Place, is_held_out, shards_in_order
from gasloc_p2p.data.shards import Shards
from gasloc_p2p.data.shelf import Entry
from gasloc_p2p.data.tokens import Tokenizer, Tokens
from gasloc_p2p.data.units import Units

VALIDATION_UNITS = 256
"""Held-out documents are looked for in so many units at most."""


@dataclass(kw_only=True, slots=True)
class Stream:
    """What a peer trains on: documents, each followed by a separator, one unit after the other.

    Attributes:
        shards: the data set.
        units: reads them.
        tokenizer: turns them into tokens.
        held_out: share of the documents that nobody trains on.
        seed: the run's seed.
        peer_id: the peer that trains.
    """

    shards: Shards
    units: Units
    tokenizer: Tokenizer
    held_out: float
    seed: int
    peer_id: PeerId
    _order: tuple[int, Sequence[str]] = field(init=False, default=(-1, ()))

    def read(self, place: Place) -> Tokens | None:
        """Return the tokens of a unit; None when its shard has no such unit.

        Raises:
            DataError: it cannot be read.
        """
        documents = self.units.read(self._shard(place), place.unit)
        if documents is None:
            return None
        return self.tokenizer.encode(
            [text for text in documents if not is_held_out(text, self.held_out)]
        )

    def read_next(self, entries: Sequence[Entry]) -> tuple[Entry, Tokens]:
        """Return the unit that follows those of `entries`, with its tokens.

        Raises:
            DataError: it cannot be read, or there is nothing to train on anywhere.
        """
        place = Place(0, 0, 0)
        if entries:
            lap, turn, unit = entries[-1].place
            place = Place(lap, turn, unit + 1)
        while (tokens := self.read(place)) is None:
            place = Place(place.lap, place.turn + 1, 0)
            if place.turn == len(self.shards.names):
                self._refuse_nothing(place.lap, entries)
                place = Place(place.lap + 1, 0, 0)
        name = blake3(f"{place.unit} {self._shard(place)}".encode(errors="surrogateescape"))
        return Entry(place=place, name=name.hexdigest(length=8), tokens=len(tokens)), tokens

    def read_held_out(self, tokens: int) -> Tokens:
        """Return at least so many held-out tokens, if there are as many: the same at every peer.

        They are those of the first shards by name.

        Raises:
            DataError: a shard cannot be read.
        """
        parts: list[Tokens] = []
        for documents in itertools.islice(self.units.by_name(), VALIDATION_UNITS):
            kept = [text for text in documents if is_held_out(text, self.held_out)]
            parts.append(self.tokenizer.encode(kept))
            if sum(map(len, parts)) >= tokens:
                break
        self.units.close()
        return np.concatenate(parts) if parts else self.tokenizer.encode([])

    def _shard(self, place: Place) -> str:
        if self._order[0] != place.lap:
            names = shards_in_order(
                self.shards.names, seed=self.seed, peer_id=self.peer_id, lap=place.lap
            )
            self._order = (place.lap, names)
        return self._order[1][place.turn]

    def _refuse_nothing(self, lap: int, entries: Sequence[Entry]) -> None:
        if not any(entry.tokens for entry in reversed(entries) if entry.place.lap == lap):
            raise DataError(
                "There is no text to train on in any of the documents.",
                why="All of them are empty, or kept for validation.",
                fix="Point data.path at more text, or lower data.validation_fraction.",
            )
