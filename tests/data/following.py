"""A peer's samples of a data set, with every part real but the pauses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch
from torch import Tensor

from gasloc_p2p.data.feed import Closing, Feed
from gasloc_p2p.data.hub import Hub, HubShards
from gasloc_p2p.data.patience import Patience
from gasloc_p2p.data.shards import LocalShards, Shards
from gasloc_p2p.data.shelf import Shelf
from gasloc_p2p.data.stream import Stream
from gasloc_p2p.data.tokens import Bytes
from gasloc_p2p.data.units import Units
from tests.data.hub import MockHub

LENGTH = 64
WINDOWS = 3
LIMIT_BYTES = 1 << 20
HELD_OUT = 0.1


@dataclass
class Follower:
    """One process of a peer.

    Attributes:
        feed: its samples.
        said: what a person is told.
        pauses_s: how long it would have waited.
    """

    feed: Feed
    shelf: Shelf
    stream: Stream
    closing: Closing
    said: list[str]
    pauses_s: list[float]

    def windows(self, batches: int) -> list[Tensor]:
        return [self.feed.batch(WINDOWS) for _ in range(batches)]


@contextmanager
def following(
    source: MockHub | Path,
    folder: Path,
    *,
    peer_id: str = "a",
    seed: int = 1,
    length: int = LENGTH,
    limit_bytes: int = LIMIT_BYTES,
    held_out: float = HELD_OUT,
    field: str = "text",
    hold: Callable[[], None] = lambda: None,
) -> Iterator[Follower]:
    """Follow a data set from what `folder` keeps; `hold` is called in every pause."""
    closing = Closing()
    said: list[str] = []
    pauses_s: list[float] = []

    def pause(seconds: float) -> None:
        closing.pause(0)
        if seconds:
            pauses_s.append(seconds)
            if isinstance(source, MockHub):
                source.awake.set()
            hold()

    patience = Patience(said.append, pause)
    shards = shards_of(source, patience)
    stream = Stream(
        shards=shards,
        units=Units(shards, field, said.append),
        tokenizer=Bytes(),
        held_out=held_out,
        seed=seed,
        peer_id=peer_id,
    )
    shelf = Shelf(folder)
    feed = Feed(
        stream=stream,
        shelf=shelf,
        sequence_length=length,
        limit_bytes=limit_bytes,
        say=said.append,
        closing=closing,
        unsaid_s=0.0,
    )
    try:
        yield Follower(feed, shelf, stream, closing, said, pauses_s)
    finally:
        feed.close()


def shards_of(source: MockHub | Path, patience: Patience) -> Shards:
    if isinstance(source, Path):
        return LocalShards(source)
    ticks = count(step=31)
    hub = Hub(
        name=source.name,
        kind="dataset",
        patience=patience,
        endpoint=source.endpoint,
        # Time passes only while bytes dribble.
        clock=lambda: float(next(ticks)) if source.done[-1:] == ["dribble"] else 0.0,
    )
    return HubShards(hub=hub, listing=hub.list_documents(revision="main", subset="", files=()))


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))
