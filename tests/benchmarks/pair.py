"""Two processes of `tests.benchmarks.exchanging`, on loopback or in network namespaces."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Final

import msgspec

from tests.benchmarks.exchanging import Measured, Plan

LOOPBACK: Final = ("/ip4/127.0.0.1/tcp/0", "/ip4/127.0.0.1/udp/0/quic-v1")
CHUNK_BYTES: Final = 1 << 20


def exchange_in_pair(
    codec: str,
    *,
    elements: int,
    exchanges: int,
    edges: int = 1,
    chunk_bytes: int = CHUNK_BYTES,
    listen: tuple[Sequence[str], Sequence[str]] = (LOOPBACK, LOOPBACK),
    inside: tuple[Sequence[str], Sequence[str]] = ((), ()),
) -> list[Measured]:
    """Let two processes exchange a vector, and return what each one measured.

    Args:
        codec: name of the codec.
        elements: fp32 parameters.
        exchanges: how many, one after the other.
        edges: how many exchanges at a time.
        chunk_bytes: wished size of a chunk of codes.
        listen: multiaddrs at which each listens.
        inside: what each command begins with, as `ip netns exec NAME`.
    """
    with ExitStack() as stack:
        ends: list[subprocess.Popen[str]] = []
        contact: tuple[str, ...] = ()
        for end in range(2):
            plan = Plan(
                end=end,
                listen=tuple(listen[end]),
                contact=contact,
                codec=codec,
                elements=elements,
                chunk_bytes=chunk_bytes,
                exchanges=exchanges,
                edges=edges,
            )
            process = stack.enter_context(
                subprocess.Popen(
                    [
                        *inside[end],
                        *(sys.executable, "-m", "tests.benchmarks.exchanging"),
                        msgspec.json.encode(plan).decode(),
                    ],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            stack.callback(process.kill)
            ends.append(process)
            contact = contact or tuple(json.loads(_line(process)))
        _line(ends[1])
        measured = [msgspec.json.decode(_line(process), type=Measured) for process in ends]
        for process in ends:
            process.communicate(timeout=30)
        return measured


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError("an end has ended before its time")
    return line
