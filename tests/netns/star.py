"""Machines around a switch, each in a network namespace behind a link of its own; Linux, as root.

    async with star([50.0, 50.0, 5.0]) as machines:
        dial = ("nc", machines.address(2), "4001")
        await asyncio.create_subprocess_exec(*machines.inside(0), *dial)

The switch is a namespace with a bridge, which a process can be in as well, without a limit. A link
has the same rate in both directions, which the kernel's token bucket keeps. A process of its own
makes all of that and removes it when the block is left, however that happens, and also when this
process is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

NETWORK: Final = "10.78.0"
LEAST_BURST_BYTES: Final = 16_000
BURST_S: Final = 0.005
"""The bucket holds what passes between two ticks of the kernel's clock."""
QUEUE_MS: Final = 100
STOP_S: Final = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Star:
    """A switch and the machines around it.

    Attributes:
        switch: name of the switch's namespace.
        ends: names of the machines' namespaces.
    """

    switch: str
    ends: tuple[str, ...]

    def shape(self, end: int, mbit: float) -> None:
        """Give the link of an end another rate, in megabits per second."""
        _shape(self.switch, self.ends[end], end, mbit)

    def inside(self, end: int | None) -> tuple[str, ...]:
        """Return what to put before a command that is to run at an end; None: in the switch."""
        return ("ip", "netns", "exec", self.switch if end is None else self.ends[end])

    def address(self, end: int | None) -> str:
        """Return the IPv4 address of an end, or of the switch."""
        return f"{NETWORK}.1" if end is None else _address(end)


def why_not() -> str:
    """Say why there can be no such star here; empty when there can."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    missing = [command for command in ("ip", "tc") if shutil.which(command) is None]
    return f"iproute2 is missing: {', '.join(missing)}" if missing else ""


@contextlib.asynccontextmanager
async def star(mbit: Sequence[float]) -> AsyncIterator[Star]:
    """Build a star, and take it down again.

    Args:
        mbit: rate of each machine's link in megabits (10^6) per second, Ethernet headers included.
    """
    name = f"gasloc-{os.getpid()}"
    builder = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.netns.star", name, *(str(rate) for rate in mbit)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        # So that Ctrl-C reaches only those who are in it.
        start_new_session=True,
    )
    assert builder.stdin is not None
    assert builder.stdout is not None
    try:
        if await builder.stdout.readline() != b"ready\n":
            raise RuntimeError("the network namespaces could not be made")
        yield Star(switch=f"{name}-switch", ends=tuple(_ends(name, len(mbit))))
    finally:
        builder.stdin.close()
        async with asyncio.timeout(STOP_S):
            await builder.wait()


def _ends(name: str, count: int) -> list[str]:
    return [f"{name}-{index}" for index in range(count)]


def _address(end: int) -> str:
    return f"{NETWORK}.{end + 2}"


@contextlib.contextmanager
def _namespace(name: str) -> Iterator[None]:
    _do("ip", "netns", "add", name)
    try:
        _do("ip", "-n", name, "link", "set", "lo", "up")
        yield
    finally:
        _do("ip", "netns", "delete", name)


def _build_switch(switch: str) -> None:
    _do("ip", "-n", switch, "link", "add", "bridge", "type", "bridge", "forward_delay", "0")
    _do("ip", "-n", switch, "addr", "add", f"{NETWORK}.1/24", "dev", "bridge")
    _do("ip", "-n", switch, "link", "set", "bridge", "up")


def _connect(switch: str, name: str, end: int, mbit: float) -> None:
    port = f"port{end}"
    other_side = ("type", "veth", "peer", "name", "eth0", "netns", name)
    _do("ip", "-n", switch, "link", "add", port, *other_side)
    _do("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
    _do("ip", "-n", name, "addr", "add", f"{_address(end)}/24", "dev", "eth0")
    _do("ip", "-n", name, "link", "set", "eth0", "up")
    _shape(switch, name, end, mbit)


def _shape(switch: str, name: str, end: int, mbit: float) -> None:
    burst_bytes = max(LEAST_BURST_BYTES, round(mbit * 125_000 * BURST_S))
    bucket = ("rate", f"{mbit * 1e6:.0f}bit", "burst", f"{burst_bytes}", "latency", f"{QUEUE_MS}ms")
    for namespace, device in ((switch, f"port{end}"), (name, "eth0")):
        _do("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "tbf", *bucket)


def _do(*command: str) -> None:
    subprocess.run(command, check=True)


def main() -> None:
    """Be the builder: make a star with this name and these rates until standard input closes."""
    name, *rates = sys.argv[1:]
    switch = f"{name}-switch"
    with contextlib.ExitStack() as undo:
        undo.enter_context(_namespace(switch))
        _build_switch(switch)
        for end, namespace in enumerate(_ends(name, len(rates))):
            undo.enter_context(_namespace(namespace))
            _connect(switch, namespace, end, float(rates[end]))
        print("ready", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
