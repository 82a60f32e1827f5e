"""p2pd's messages: protobuf behind its length, over sockets that turn into streams afterwards."""

from __future__ import annotations

from typing import Any, Final

from gasloc_p2p.net.sockets import LocalSocket

_LENGTH_BITS: Final = 21
"""Messages here have a few hundred bytes; the lengths of 2 MiB and above are not even read."""


async def send_message(connection: LocalSocket, message: Any) -> None:
    """Send a protobuf message.

    Raises:
        ConnectionError: p2pd is gone.
    """
    body = message.SerializeToString()
    rest = memoryview(_varint(len(body)) + body)
    while len(rest):
        rest = rest[await connection.send_some(rest) :]


async def receive_message(connection: LocalSocket, message: Any) -> None:
    """Receive a protobuf message into `message`, and not a byte of what follows it.

    Raises:
        EOFError: p2pd is gone.
        ValueError: it announces a message of 2 MiB or more.
    """
    size_bytes = 0
    for shift in range(0, _LENGTH_BITS, 7):
        [byte] = await connection.receive_exactly(1)
        size_bytes |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
    else:
        raise ValueError("p2pd announces a message that is far too long")
    message.ParseFromString(await connection.receive_exactly(size_bytes))


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number >= 0x80:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)
