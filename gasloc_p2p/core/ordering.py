"""How the bytes of one direction are spread over the lanes of a bonded stream and put in order.

Each lane carries numbered segments: number (8 bytes, big-endian), length (4 bytes) and then the
bytes. The numbers count all segments of the direction from 0, and each goes on whichever lane has
room.

A reader takes up to `WINDOW_SEGMENTS` segments from the next one due; one beyond that stays in its
lane. No deadlock can come of that: a lane carries its segments in the order of their numbers, so
those ahead of the one due are older still, and have been taken.
"""

from __future__ import annotations

import struct
from typing import Final

HEADER: Final = struct.Struct(">QI")
SEGMENT_BYTES: Final = 32 * 1024
WINDOW_SEGMENTS: Final = 512
"""16 MiB."""


class OrderError(Exception):
    """What no honest peer sends."""


class Order:
    """The receiving end of a direction: segments in any order go in, bytes in order come out."""

    def __init__(self) -> None:
        self._due = 0
        self._held: dict[int, bytes] = {}
        self._rest = b""

    def fits(self, number: int) -> bool:
        """Whether the segment may be added; it has to wait in its lane otherwise."""
        return number < self._due + WINDOW_SEGMENTS

    def add(self, number: int, data: bytes) -> None:
        """Add a segment that fits.

        Raises:
            OrderError: it was there before.
        """
        if number < self._due or number in self._held:
            raise OrderError(f"segment {number} comes twice")
        self._held[number] = data

    def take(self, max_bytes: int) -> bytes:
        """Return the next 1 to `max_bytes` bytes, or b"" if they have not been added yet."""
        if not self._rest and self._due in self._held:
            self._rest = self._held.pop(self._due)
            self._due += 1
        data, self._rest = self._rest[:max_bytes], self._rest[max_bytes:]
        return data


class Arrivals:
    """The receiving end of one lane, which holds a segment that has begun to arrive.

    Args:
        order: where whole segments go.
    """

    def __init__(self, order: Order) -> None:
        self._order = order
        self._header = b""
        self._number = 0
        self._left_bytes = 0
        self._pieces: list[bytes] = []

    @property
    def wanted_bytes(self) -> int:
        """The most bytes to read; 0 while the segment does not fit."""
        if not self._left_bytes:
            return HEADER.size - len(self._header)
        return self._left_bytes if self._order.fits(self._number) else 0

    def take(self, data: bytes) -> None:
        """Take 1 to `wanted_bytes` bytes.

        Raises:
            OrderError: the segment is empty or too long, or was there before.
        """
        if not self._left_bytes:
            self._header += data
            if len(self._header) == HEADER.size:
                self._number, self._left_bytes = HEADER.unpack(self._header)
                self._header = b""
                if not 0 < self._left_bytes <= SEGMENT_BYTES:
                    raise OrderError(f"a segment of {self._left_bytes} bytes is announced")
            return
        self._pieces.append(data)
        self._left_bytes -= len(data)
        if not self._left_bytes:
            pieces, self._pieces = self._pieces, []
            self._order.add(self._number, b"".join(pieces))
