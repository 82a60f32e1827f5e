"""Inputs for `tests.benchmarks.fuzz`: noise, and honest input with damage of many kinds."""

from __future__ import annotations

import random

from gasloc_p2p.core.wire import PIECES, FrameType, Head, pack_frame, pack_head, pack_piece
from tests.core.two_sides import B, key

MAX_INPUT_BYTES = 256 * 1024
LENGTHS = (0, 1, 2**16, 2**24, 2**26, 2**31, 2**32 - 1)


class Inputs:
    """Draws inputs: a few of them noise, all others honest ones that are damaged."""

    def __init__(self, honest: list[bytes], draw: random.Random) -> None:
        self._honest = honest
        self._draw = draw
        self._changes = (
            self.flip,
            self.cut,
            self.repeat,
            self.splice,
            self.noise,
            self.length,
            self.reseal,
        )

    def next(self) -> bytes:
        draw = self._draw
        if draw.random() < 0.05:
            return draw.randbytes(draw.choice((3, 8, 40, 200, 5000)))
        data = draw.choice(self._honest)
        for _ in range(draw.choice((0, 1, 1, 1, 2, 3, 8))):
            data = draw.choice(self._changes)(data)[:MAX_INPUT_BYTES]
        return data

    def place(self, data: bytes) -> int:
        return self._draw.randrange(len(data) + 1)

    def flip(self, data: bytes) -> bytes:
        changed = bytearray(data or b"\0")
        changed[self._draw.randrange(len(changed))] ^= 1 << self._draw.randrange(8)
        return bytes(changed)

    def cut(self, data: bytes) -> bytes:
        first, last = sorted((self.place(data), self.place(data)))
        return data[:first] + data[last:] if self._draw.random() < 0.5 else data[:last]

    def repeat(self, data: bytes) -> bytes:
        first, last = sorted((self.place(data), self.place(data)))
        return data[:last] + data[first:last] * self._draw.choice((1, 1, 2, 50)) + data[last:]

    def splice(self, data: bytes) -> bytes:
        other = self._draw.choice(self._honest)
        return data[: self.place(data)] + other[self.place(other) :]

    def noise(self, data: bytes) -> bytes:
        at = self.place(data)
        return data[:at] + self._draw.randbytes(self._draw.choice((1, 4, 16))) + data[at:]

    def length(self, data: bytes) -> bytes:
        """Announce any length of any type."""
        draw = self._draw
        kind, size = draw.choice(list(FrameType)), draw.choice(LENGTHS)
        if kind in PIECES and size > 24:
            head = Head(type=kind, size=size - 24, index=draw.randrange(4), digest=bytes(16))
            return self._at_a_frame(data, pack_head(head))
        return self._at_a_frame(data, bytes([kind]) + size.to_bytes(4, "little"))

    def reseal(self, data: bytes) -> bytes:
        """Put in, or in place of an honest one, a frame whose digest is right."""
        draw = self._draw
        kind = draw.choice(list(FrameType))
        body = draw.randbytes(draw.choice((0, 0, 1, 1, 2, 3, 4, 12, 16)))
        if draw.random() < 0.5:
            body = bytes(len(body))
        if kind in PIECES:
            frame = b"".join(pack_piece(kind, draw.randrange(4), body, key=key(B)))
        else:
            frame = pack_frame(kind, body)
        return self._at_a_frame(data, frame)

    def _at_a_frame(self, data: bytes, frame: bytes) -> bytes:
        """Put a frame where one begins in what is a stream behind four bytes."""
        places = [4]
        while (at := places[-1]) + 5 <= len(data) and len(places) < 40:
            places.append(at + 5 + int.from_bytes(data[at + 1 : at + 5], "little"))
        at = self._draw.choice(places)
        behind = self._draw.choice((at, at + len(frame)))
        return data[:at] + frame + data[behind:]
