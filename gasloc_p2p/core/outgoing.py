"""What one side of an exchange has to say, most urgent first, and what it has said already."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

from gasloc_p2p.core.codecs.layout import Layout
from gasloc_p2p.core.repairs import Repairs
from gasloc_p2p.core.types import BytesLike
from gasloc_p2p.core.wire import (
    MAX_RECORD_BYTES,
    MAX_RECORDS,
    MAX_RECORDS_BYTES,
    PIECE_OVERHEAD_BYTES,
    SCALES_BYTES,
    FrameType,
    ProtocolError,
    Records,
    pack_piece,
)

Parts: TypeAlias = tuple[BytesLike, ...]
"""One frame, to be written part by part."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """A frame to send next whose data the caller makes: a chunk, or a repair of one.

    Attributes:
        kind: CHUNK or REPAIR.
        index: of the chunk.
        bad: bitmap of the blocks to repair; empty for a chunk.
        size: bytes of the data.
        key: of this side's digests; see `wire.piece_key`.
    """

    kind: FrameType
    index: int
    bad: bytes = b""
    size: int
    key: bytes = field(repr=False)

    @property
    def frame_bytes(self) -> int:
        """Bytes of the whole frame."""
        return PIECE_OVERHEAD_BYTES + self.size

    def frame(self, data: BytesLike) -> Parts:
        """Return the frame in parts, `data` itself among them; hashes, so call it off the loop.

        Raises:
            ValueError: `data` has another size than the layout says.
        """
        if len(data) != self.size:
            name = f"{self.kind.name.lower()} {self.index}"
            raise ValueError(f"{len(data)} bytes of {name}, expected {self.size}")
        return pack_piece(self.kind, self.index, data, key=self.key)


class Outgoing:
    """The frames of one side behind its Hello, each of them said once, and again if it was lost.

    Said are first the frames with `open_with`, then Checks, Repairs, chunks, and last those with
    `close_with`.

    Args:
        layout: how the vector is cut.
        repairs: which Checks and Repairs are due.
        key: of this side's digests; see `wire.piece_key`.
    """

    def __init__(self, layout: Layout, repairs: Repairs, key: bytes) -> None:
        self._layout = layout
        self._repairs = repairs
        self._key = key
        self._opening: deque[Parts] = deque()
        self._closing: deque[Callable[[], bytes]] = deque()
        self._said: list[Parts | Cut] = []
        self._said_again = 0
        self._chunks = 0
        self._closed = 0
        self._may_cut = False

    @property
    def chunks(self) -> int:
        """Number of chunks that were given out."""
        return self._chunks

    @property
    def all_chunks_said(self) -> bool:
        """Whether every chunk was given out."""
        return self._chunks == self._layout.chunks

    @property
    def ready_said(self) -> bool:
        """Whether the first frame of `close_with` was given out."""
        return self._closed > 0

    def open_with(self, *parts: BytesLike) -> None:
        """Say one frame before all others."""
        self._opening.append(parts)

    def open_with_scales(self, scales: BytesLike) -> None:
        """Say the scales behind what was said to open."""
        whole = memoryview(scales)
        for index, start in enumerate(range(0, len(whole), SCALES_BYTES)):
            part = whole[start : start + SCALES_BYTES]
            self._opening.append(pack_piece(FrameType.SCALES, index, part, key=self._key))

    def start_chunks(self) -> None:
        """Give out chunks from here on."""
        self._may_cut = True

    def close_with(self, make: Callable[[], bytes]) -> None:
        """Say one frame when everything else has been said; it is made then."""
        self._closing.append(make)

    def resume(self, received: int) -> None:
        """Go on behind the first `received` frames, after the stream broke.

        Raises:
            ProtocolError: so many were never said.
        """
        if received > len(self._said):
            raise ProtocolError(f"{received} frames received, and {len(self._said)} were sent")
        self._said_again = received

    def next_item(self) -> Parts | Cut | None:
        """Return the next frame, which counts as said; None when there is none at present."""
        if self._said_again < len(self._said):
            item: Parts | Cut | None = self._said[self._said_again]
        else:
            item = self._fresh()
            if item is not None:
                self._said.append(item)
        self._said_again += item is not None
        return item

    def _fresh(self) -> Parts | Cut | None:
        if self._opening:
            return self._opening.popleft()
        if (check := self._repairs.next_check()) is not None:
            index, bad = check
            return pack_piece(FrameType.CHECK, index, bad, key=self._key)
        if (repair := self._repairs.next_repair()) is not None:
            index, bad = repair
            return self._cut(FrameType.REPAIR, index, self._layout.repair_bytes(index, bad), bad)
        if not self.all_chunks_said:
            if not self._may_cut:
                return None
            index, self._chunks = self._chunks, self._chunks + 1
            return self._cut(FrameType.CHUNK, index, self._layout.code_sizes[index])
        if self._closing:
            self._closed += 1
            return (self._closing.popleft()(),)
        return None

    def _cut(self, kind: FrameType, index: int, size: int, bad: bytes = b"") -> Cut:
        return Cut(kind=kind, index=index, bad=bad, size=size, key=self._key)


def records_that_fit(records: Iterable[bytes]) -> Records:
    """Return the first of `records` that one frame may carry, without those that are too large."""
    chosen: list[bytes] = []
    # Three bytes is the longest head of a record of this size, and eight hold the frame's own.
    room = MAX_RECORDS_BYTES - 8
    for record in records:
        if not 0 < len(record) <= MAX_RECORD_BYTES:
            continue
        room -= len(record) + 3
        if room < 0 or len(chosen) == MAX_RECORDS:
            break
        chosen.append(record)
    return Records(records=tuple(chosen))
