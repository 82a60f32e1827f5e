"""An emulated link between two network namespaces: a rate, a delay and a queue; Linux, as root.

    async with emulated_link(mbit=100, rtt_ms=100) as link:
        await asyncio.create_subprocess_exec(*link.inside(0), "ping", "-c1", link.addresses[1])

Each namespace has a TAP device, and a process of its own carries frames between the two. Frames
are the kernel's large ones (segmentation offload), which cost less CPU time than single packets;
the rate counts them as the packets that they would be on a wire. Both namespaces are
gone when the block is left, however that happens, and also when this process is killed.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import ctypes
import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

DEVICE: Final = "eth0"
NETWORK: Final = "10.77.0.0/24"
ADDRESSES: Final = ("10.77.0.1", "10.77.0.2")
LARGEST_FRAME_BYTES: Final = 3_100
"""Two packets. Larger ones cost less CPU time, but are dropped as a whole, and a link that drops a
dozen packets in a row is slower than a real one."""
TICK_S: Final = 0.0005
FRAMES_PER_TURN: Final = 64
STOP_S: Final = 10.0

# linux/if_tun.h, linux/virtio_net.h and linux/sched.h
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4, _TUN_F_USO4, _TUN_F_USO6 = 0x01, 0x02, 0x20, 0x40
_VNET_HEADER: Final = struct.Struct("<BBHHHH")
_ETHERNET_BYTES, _IP_BYTES, _UDP_BYTES = 14, 20, 8
_TCP: Final = 6
_CLONE_NEWNET: Final = 0x40000000


@dataclass(frozen=True, kw_only=True, slots=True)
class EmulatedLink:
    """Two namespaces with a link between them.

    Attributes:
        namespaces: their names.
        addresses: the IPv4 address of each.
    """

    namespaces: tuple[str, str]
    addresses: tuple[str, str]

    def inside(self, end: int) -> tuple[str, ...]:
        """Return what to put before a command that is to run at one end of the link, 0 or 1."""
        return ("ip", "netns", "exec", self.namespaces[end])


@contextlib.asynccontextmanager
async def emulated_link(
    *,
    mbit: float,
    rtt_ms: float,
    queue_ms: float = 200.0,
    congestion: str = "",
) -> AsyncIterator[EmulatedLink]:
    """Build a link, and take it down again.

    Args:
        mbit: rate of each direction in megabits (10^6) per second, Ethernet headers included.
        rtt_ms: round trip time in milliseconds, half of it each way.
        queue_ms: what the sender's router holds before it drops, in milliseconds at the rate.
        congestion: TCP's congestion control at both ends, such as cubic; "" leaves it as it is.
    """
    namespaces = (f"gasloc-{os.getpid()}-0", f"gasloc-{os.getpid()}-1")
    wire = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "tests.benchmarks.tapnet", *namespaces),
        *(str(number) for number in (mbit, rtt_ms, queue_ms)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        # So that Ctrl-C reaches only those who use the link.
        start_new_session=True,
    )
    assert wire.stdin is not None
    assert wire.stdout is not None
    try:
        if await wire.stdout.readline() != b"ready\n":
            raise RuntimeError("the emulated link could not be built (Linux, as root)")
        link = EmulatedLink(namespaces=namespaces, addresses=ADDRESSES)
        if congestion:
            for name in namespaces:
                route = ("route", "change", NETWORK, "dev", DEVICE, "congctl", congestion)
                await asyncio.to_thread(_do, "ip", "-n", name, *route)
        yield link
    finally:
        wire.stdin.close()
        async with asyncio.timeout(STOP_S):
            said = await wire.stdout.read()
            await wire.wait()
        print(said.decode().strip(), file=sys.stderr)


class Direction:
    """One direction of the link: a queue that drains at the rate, and then the way itself.

    Args:
        source, target: the TAP devices.
        bytes_per_s: the rate.
        delay_s: time on the way.
        queue_s: time that a frame may have to wait for those before it, else it is dropped.
    """

    def __init__(
        self, source: int, target: int, *, bytes_per_s: float, delay_s: float, queue_s: float
    ) -> None:
        self.source: Final = source
        self.frames = self.dropped = 0
        self._target = target
        self._bytes_per_s = bytes_per_s
        self._delay_s = delay_s
        self._queue_s = queue_s
        self._free_s = 0.0
        self._flying: collections.deque[tuple[float, bytes]] = collections.deque()

    def take(self) -> None:
        """Take what the source sends."""
        for _ in range(FRAMES_PER_TURN):
            try:
                frame = os.read(self.source, 1 << 17)
            except BlockingIOError:
                return
            now_s = time.monotonic()
            begin_s = max(now_s, self._free_s)
            self.frames += 1
            if begin_s - now_s > self._queue_s:
                self.dropped += 1
                continue
            self._free_s = begin_s + wire_bytes(frame) / self._bytes_per_s
            self._flying.append((self._free_s + self._delay_s, frame))

    def deliver(self) -> None:
        """Hand over what has arrived."""
        now_s = time.monotonic()
        while self._flying and self._flying[0][0] <= now_s:
            _, frame = self._flying.popleft()
            try:
                os.write(self._target, frame)
            except OSError:
                self.dropped += 1

    @property
    def next_s(self) -> float:
        """When the next frame arrives, as a monotonic time; infinity without one."""
        return self._flying[0][0] if self._flying else float("inf")


def wire_bytes(frame: bytes) -> int:
    """Return the bytes of the packets that a frame of the kernel's stands for."""
    _, kind, _, segment_bytes, _, _ = _VNET_HEADER.unpack_from(frame)
    size_bytes = len(frame) - _VNET_HEADER.size
    if not kind or not segment_bytes:
        return size_bytes
    ip = _VNET_HEADER.size + _ETHERNET_BYTES
    transport_bytes = (frame[ip + _IP_BYTES + 12] >> 4) * 4 if frame[ip + 9] == _TCP else _UDP_BYTES
    headers_bytes = _ETHERNET_BYTES + _IP_BYTES + transport_bytes
    segments: int = -(-(size_bytes - headers_bytes) // segment_bytes)
    return size_bytes + (segments - 1) * headers_bytes


def carry(directions: Sequence[Direction], until_readable: int) -> None:
    """Carry frames until a file becomes readable."""
    by_source = {direction.source: direction for direction in directions}
    watched = [*by_source, until_readable]
    while True:
        wait_s = min(direction.next_s for direction in directions) - time.monotonic()
        readable, _, _ = select.select(watched, (), (), min(max(wait_s, TICK_S), 1.0))
        if until_readable in readable:
            return
        for source in readable:
            by_source[source].take()
        for direction in directions:
            direction.deliver()


@contextlib.contextmanager
def namespace(name: str, address: str) -> Iterator[int]:
    """Make a namespace with a TAP device, and yield the device's file."""
    _do("ip", "netns", "add", name)
    try:
        with _tap(name) as device:
            inside = ("ip", "-n", name)
            _do(*inside, "addr", "add", f"{address}/24", "dev", DEVICE)
            limits = ("gso_max_size", str(LARGEST_FRAME_BYTES), "txqueuelen", "1000")
            _do(*inside, "link", "set", DEVICE, *limits, "up")
            _do(*inside, "link", "set", "lo", "up")
            yield device
    finally:
        _do("ip", "netns", "delete", name)


@contextlib.contextmanager
def _tap(namespace_name: str) -> Iterator[int]:
    libc = ctypes.CDLL(None, use_errno=True)
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    away = os.open(Path("/run/netns") / namespace_name, os.O_RDONLY)
    try:
        if libc.setns(away, _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns")
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        flags = _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH14x", DEVICE.encode(), flags))
        for offload in (_TUN_F_TSO4 | _TUN_F_USO4 | _TUN_F_USO6, _TUN_F_TSO4, 0):
            # Older kernels know fewer of them.
            with contextlib.suppress(OSError):
                fcntl.ioctl(device, _TUNSETOFFLOAD, _TUN_F_CSUM | offload)
                break
    finally:
        libc.setns(home, _CLONE_NEWNET)
        os.close(home)
        os.close(away)
    try:
        yield device
    finally:
        os.close(device)


def _do(*command: str) -> None:
    subprocess.run(command, check=True)


def main() -> None:
    """Be the link between two namespaces until standard input closes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs=2)
    for number in ("mbit", "rtt_ms", "queue_ms"):
        parser.add_argument(number, type=float)
    given = parser.parse_args()
    # A link does not wait for processors.
    os.nice(-10)
    with contextlib.ExitStack() as undo:
        devices = [
            undo.enter_context(namespace(name, address))
            for name, address in zip(given.names, ADDRESSES, strict=True)
        ]
        directions = [
            Direction(
                source,
                target,
                bytes_per_s=given.mbit * 125_000,
                delay_s=given.rtt_ms / 2000,
                queue_s=given.queue_ms / 1000,
            )
            for source, target in (devices, reversed(devices))
        ]
        print("ready", flush=True)
        began_s, began_cpu_s = time.monotonic(), time.process_time()
        carry(directions, until_readable=sys.stdin.fileno())
        share = (time.process_time() - began_cpu_s) / (time.monotonic() - began_s)
    print(
        f"link: {sum(d.frames for d in directions)} frames, "
        f"{sum(d.dropped for d in directions)} dropped, "
        f"{100 * share:.0f} % of a core"
    )


if __name__ == "__main__":
    main()
