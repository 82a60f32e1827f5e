"""A token bucket: how long to wait so that a rate is kept."""

from __future__ import annotations

from typing import Final

BURST_S: Final = 0.05
MIN_SLICE_BYTES: Final = 4 * 1024
MAX_SLICE_BYTES: Final = 64 * 1024


class TokenBucket:
    """Bytes that may pass at a steady rate, first come, first served.

    Whoever takes bytes has them for sure, but may have to wait until they are due; who comes later
    waits for those before. In any stretch of time at most the rate times its length falls due, and
    `burst_bytes` on top. While there is always somebody who waits, nothing of the rate is lost.

    Args:
        bytes_per_s: the rate; above 0.
    """

    def __init__(self, bytes_per_s: float) -> None:
        slice_bytes = min(max(int(bytes_per_s * BURST_S), MIN_SLICE_BYTES), MAX_SLICE_BYTES)
        self.slice_bytes: Final = slice_bytes
        """The most to take at once, so that all who take in turn have equal shares."""
        self.burst_bytes: Final = max(bytes_per_s * BURST_S, float(slice_bytes))
        self._bytes_per_s = bytes_per_s
        self._paid_until_s = -float("inf")

    def take(self, size_bytes: int, now_s: float) -> float:
        """Take `size_bytes` and return the seconds from `now_s` until they may pass.

        `now_s` is of any clock that does not go backwards.
        """
        full_s = now_s - self.burst_bytes / self._bytes_per_s
        self._paid_until_s = max(self._paid_until_s, full_s) + size_bytes / self._bytes_per_s
        return max(0.0, self._paid_until_s - now_s)
