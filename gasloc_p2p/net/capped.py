"""The caps on what a node sends and receives, each shared by all of its streams."""

from __future__ import annotations

import asyncio
from typing import Final

from gasloc_p2p.core.throttle import TokenBucket
from gasloc_p2p.net.settings import NetConfig

BYTES_PER_MBIT: Final = 125_000
UNCAPPED_SLICE_BYTES: Final = 1 << 20


class Cap:
    """The cap of one direction.

    Args:
        mbit: megabits (10^6) per second; 0 for no cap.
    """

    def __init__(self, mbit: float = 0.0) -> None:
        self._bucket = TokenBucket(mbit * BYTES_PER_MBIT) if mbit else None

    @property
    def slice_bytes(self) -> int:
        """The most to charge for at once."""
        return UNCAPPED_SLICE_BYTES if self._bucket is None else self._bucket.slice_bytes

    def charge(self, size_bytes: int) -> float:
        """Charge for so many bytes and return when they may pass, as a time of the event loop."""
        if self._bucket is None:
            return 0.0
        now_s = asyncio.get_running_loop().time()
        return now_s + self._bucket.take(size_bytes, now_s)

    async def until(self, due_s: float) -> None:
        """Wait until a time that `charge` returned; not at all where there is no cap."""
        if self._bucket is not None:
            wait_s = due_s - asyncio.get_running_loop().time()
            if wait_s > 0:
                await asyncio.sleep(wait_s)


class Caps:
    """Both caps of a node.

    Attributes:
        upload, download: what all streams together may send and receive.
    """

    def __init__(self, config: NetConfig) -> None:
        self.upload: Final = Cap(config.upload_mbit)
        self.download: Final = Cap(config.download_mbit)
