"""Messages and blocks of a state transfer over a stream; deadlines are the caller's."""

from __future__ import annotations

from gasloc_p2p.core.substrate import Stream
from gasloc_p2p.core.transfer import LENGTH_BYTES, message_bytes


async def read_message(stream: Stream, *, limit_bytes: int) -> bytes:
    """Return the body of the next message.

    Raises:
        TransferError: it is above `limit_bytes`; nothing is allocated for it.
        ConnectionError: the other end is gone.
    """
    head = bytearray(LENGTH_BYTES)
    await read_into(stream, memoryview(head))
    body = bytearray(message_bytes(head, limit_bytes=limit_bytes))
    await read_into(stream, memoryview(body))
    return bytes(body)


async def read_into(stream: Stream, block: memoryview) -> None:
    """Fill `block` with the next bytes of the stream.

    Raises:
        ConnectionError: the other end is gone before that.
    """
    filled = 0
    while filled < len(block):
        piece = await stream.read(len(block) - filled)
        if not piece:
            raise ConnectionError("the other end went away")
        block[filled : filled + len(piece)] = piece
        filled += len(piece)
