"""Generated input for everything that reads bytes of a peer: no crash, and bounded memory.

    python -m tests.benchmarks.fuzz --seconds 600 --seed 1

Each input is random bytes, or an honest input with flips, cuts, repetitions, splices, huge
announced lengths, or damaged pieces whose digests are right. It fails when anything but the
documented exceptions comes out, or when memory grows beyond a limit; the input is then written to a
file, and

    python -m tests.benchmarks.fuzz --repeat fuzz-exchange-1-77.bin

runs that one alone.
"""

from __future__ import annotations

import argparse
import math
import random
import resource
import sys
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch

from gasloc_p2p.core.codecs import CODECS, Codec, Coder, CodesError, Keys, Layout, Offer
from gasloc_p2p.core.exchange import (
    ChunkArrived,
    Complete,
    Event,
    Exchange,
    Finished,
    RepairArrived,
)
from gasloc_p2p.core.records import Reachability, Record, RecordError, open_record, sign_record
from gasloc_p2p.core.wire import (
    MAX_HELLO_BYTES,
    FrameDecoder,
    FrameType,
    ProtocolError,
    pack_frame,
    pack_message,
    read_hello,
)
from tests.benchmarks.fuzz_inputs import Inputs
from tests.core.two_sides import CHECKED, PLAIN, A, B, hello, run, scales_of, sides

MAX_PEAK_BYTES = 4 * 1024 * 1024
"""Python's allocations within one input; inputs are below a megabyte."""
MAX_GROWTH_BYTES = 128 * 1024 * 1024
"""Growth of the process's peak memory after the first inputs of each kind."""
WARM_UP = 200
ELEMENTS = (0, 1, 2, 63, 64, 65, 300, 1000, 4097)
CHUNK_BYTES = 256


class FuzzError(Exception):
    """An input led to what no input may lead to."""


@dataclass(kw_only=True)
class Target:
    """One reader of bytes.

    Attributes:
        read: reads an input; raises nothing but what is documented, which it handles.
        honest: inputs to begin with.
    """

    read: Callable[[bytes], None]
    honest: list[bytes] = field(default_factory=list)


# What reads bytes


def read_frames(data: bytes) -> None:
    """Feed the decoder in pieces of a size that the first byte tells."""
    size = 1 + data[0] * 16 if data else 1
    decoder = FrameDecoder()
    try:
        for start in range(4, len(data), size):
            for _ in decoder.feed(data[start : start + size]):
                pass
    except ProtocolError:
        return


def read_greeting(data: bytes) -> None:
    try:
        read_hello(data)
    except ProtocolError:
        return


def read_record(data: bytes) -> None:
    try:
        open_record(data, verify=lambda peer, message, signature: len(signature) == 64)
    except RecordError:
        return


def read_stream(data: bytes) -> None:
    """Let one side of an exchange read a stream; the first four bytes say which and how."""
    setup, data = data[:4].ljust(4, b"\0"), data[4:]
    cut = CHECKED if setup[0] & 1 else PLAIN
    exchange = Exchange(
        hello=hello(A, cut, roster_digest=b"x" if setup[0] & 2 else b"y"),
        layout=cut,
        scales=scales_of(A, cut),
        partner=B,
        dialer=bool(setup[0] & 4),
    )
    size = 1 + setup[1] * 4
    ended = 0
    for number, start in enumerate(range(0, len(data), size)):
        if number == setup[3] and exchange.resumable:
            exchange.reconnect()
        speak(exchange)
        ended += answer(exchange, cut, exchange.receive(data[start : start + size]), setup[2])
    speak(exchange)
    ended += answer(exchange, cut, exchange.expire(), setup[2])
    if ended != 1:
        raise FuzzError(f"{ended} ends of one exchange")


def speak(exchange: Exchange) -> None:
    while exchange.next_to_send() is not None:
        pass


def answer(exchange: Exchange, cut: Layout, events: list[Event], opinion: int) -> int:
    """Do what a caller does; return how often the exchange ended."""
    ended = 0
    while events:
        event = events.pop(0)
        match event:
            case ChunkArrived():
                event.intact()
                bad = bytes([opinion & cut.everything(event.index)[0]]) if cut.checked else b""
                events += exchange.checked(event.index, bad)
            case RepairArrived():
                event.intact()
                whole = event.bad == cut.everything(event.index)
                events += exchange.repaired(event.index, whole or bool(opinion & 4))
            case Complete():
                events += exchange.accept()
            case Finished():
                ended += 1
    return ended


@dataclass(kw_only=True)
class CodecTarget:
    """Reads scales, codes and repairs of one codec."""

    codec: Codec

    def offer(self, elements: int, seed: int) -> Offer:
        x = torch.randn(elements, generator=torch.Generator().manual_seed(seed))
        keys = Keys(round=5, own=seed)
        return self.codec.offer(x, motion=None, keys=keys, chunk_bytes=CHUNK_BYTES)

    def read(self, data: bytes) -> None:
        setup, data = data[:3].ljust(3, b"\0"), data[3:]
        offer = self.offer(ELEMENTS[setup[0] % len(ELEMENTS)], seed=1)
        parts = split(data, offer.layout, exact=setup[1] < 224)
        try:
            self._take(offer.coder(next(parts)), offer.layout, parts, setup[2])
        except CodesError:
            return

    def _take(self, coder: Coder, layout: Layout, parts: Iterator[bytes], opinion: int) -> None:
        for index in range(layout.chunks):
            bad = coder.take(index, next(parts))
            if bad and not (layout.checked and layout.is_bitmap(index, bad)):
                raise FuzzError(f"{bad!r} is no bitmap of chunk {index}")
            if layout.checked and (bad or opinion & 1):
                bad = layout.everything(index) if opinion & 2 else bad or b"\1"
                bad = bad.ljust(layout.bitmap_bytes(index), b"\0")
                repair = next(parts)[: layout.repair_bytes(index, bad)]
                if not coder.take_repair(index, bad, repair):
                    whole = layout.everything(index)
                    coder.take_repair(index, whole, bytes(layout.repair_bytes(index, whole)))
        mixed = torch.zeros(layout.elements)
        distance = coder.square_distance()
        coder.add_difference(mixed, 0.5)
        if bool(torch.isfinite(mixed).all()) != math.isfinite(distance):
            raise FuzzError(f"a distance of {distance} hides what is mixed")

    def honest(self) -> list[bytes]:
        """Return what a partner would send of each size."""
        inputs = []
        for place, elements in enumerate(ELEMENTS):
            ours, theirs = self.offer(elements, seed=1), self.offer(elements, seed=2)
            coder = theirs.coder(ours.scales)
            data = bytearray(theirs.scales)
            for index in range(theirs.layout.chunks):
                data += coder.encode(index)
                if theirs.layout.checked:
                    data += coder.repair(index, theirs.layout.everything(index))
            inputs.append(bytes([place, 0, 3]) + bytes(data))
        return inputs


def split(data: bytes, layout: Layout, *, exact: bool) -> Iterator[bytes]:
    """Cut an input into scales, and the codes and a repair of each chunk, all of the right size."""
    sizes = [layout.scale_bytes]
    for index, size in enumerate(layout.code_sizes):
        sizes.append(size)
        if layout.checked:
            sizes.append(layout.repair_bytes(index, layout.everything(index)))
    for size in sizes:
        part, data = data[:size], data[size:]
        yield part.ljust(size, b"\x5a") if exact else part
    while True:
        yield b""


# Honest input


def targets() -> dict[str, Target]:
    """Return everything that reads bytes of a peer, by name."""
    # In pieces of 17 bytes, so that this side speaks in between.
    streams = [
        bytes([flags, 4, opinion, 255]) + words(cut, opinion, same_roster=bool(flags & 2))
        for flags, cut in ((4, PLAIN), (6, PLAIN), (5, CHECKED), (7, CHECKED))
        for opinion in (0, 1, 5)
    ]
    record = Record(
        run_id="run",
        peer_id=A,
        seq=3,
        signed_round=2,
        first_round=0,
        lease_until=5,
        reachability=Reachability.PUBLIC,
        cycle_s=1.5,
        expires_at=4000.0,
    )
    found = {
        "frames": Target(
            read=read_frames, honest=[b"\x40\0\0\0" + stream[4:] for stream in streams]
        ),
        "hello": Target(read=read_greeting, honest=[pack_message(hello(B)), nested_hello()]),
        "record": Target(read=read_record, honest=[sign_record(record, lambda message: bytes(64))]),
        "exchange": Target(read=read_stream, honest=streams),
    }
    for name in CODECS.names:
        codec = CodecTarget(codec=CODECS.named(name))
        found[f"codec-{name}"] = Target(read=codec.read, honest=codec.honest())
    return found


def nested_hello() -> bytes:
    """Return a Hello with a field that a later release might append, nested to the limit."""
    fields = msgspec.msgpack.encode(hello(B))
    deep = b"\x91" * (MAX_HELLO_BYTES - len(fields) - 1) + b"\x90"
    return pack_frame(FrameType.HELLO, bytes([fields[0] + 1]) + fields[1:] + deep)


def words(cut: Layout, opinion: int, *, same_roster: bool) -> bytes:
    """Return all that an honest partner says to a side whose caller has this opinion."""
    a, b = sides(cut, same_roster=same_roster)
    a.finding = b.finding = lambda index: bytes([opinion & cut.everything(index)[0]])
    a.matches = b.matches = lambda index: bool(opinion & 4)
    run(a, b)
    return b"".join(b.said)


# The run


def peak_rss_bytes() -> int:
    """Return the most memory that this process has held."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def fuzz(*, seconds: float, seed: int, folder: Path) -> int:
    """Run for a while; return the exit code."""
    found = targets()
    tracemalloc.start()
    try:
        return _fuzz(found, time.monotonic() + seconds, seed, folder)
    finally:
        tracemalloc.stop()


def _fuzz(found: dict[str, Target], ends_s: float, seed: int, folder: Path) -> int:
    draw = random.Random(seed)
    inputs = {name: Inputs(target.honest, draw) for name, target in found.items()}
    executions: Counter[str] = Counter()
    worst, floor = 0, 0
    while (number := executions.total()) <= WARM_UP or time.monotonic() < ends_s:
        if number == WARM_UP:
            floor = peak_rss_bytes()
        name = draw.choice(list(found))
        data = inputs[name].next()
        executions[name] += 1
        fault, peak = failure(found[name], data)
        worst = max(worst, peak)
        grown = peak_rss_bytes() - floor if floor else 0
        if not fault and (peak > MAX_PEAK_BYTES or grown > MAX_GROWTH_BYTES):
            fault = f"{peak} bytes at once, {grown} bytes more than at the beginning"
        if fault:
            path = folder / f"fuzz-{name}-{seed}-{number}.bin"
            path.write_bytes(data)
            print(f"{path}: {fault}", file=sys.stderr)
            return 1
    print(f"executions: {executions.total()}")
    for name in found:
        print(f"  {name}: {executions[name]}")
    print(f"peak of one input: {worst / 2**20:.2f} MiB of Python memory")
    print(f"growth of the process: {(peak_rss_bytes() - floor) / 2**20:.1f} MiB")
    return 0


def failure(target: Target, data: bytes) -> tuple[str, int]:
    """Return how an input fails, empty when it does not, and the bytes that Python held for it."""
    before = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    fault = ""
    try:
        target.read(data)
    except Exception as error:
        fault = f"{type(error).__name__}: {error}"
    return fault, tracemalloc.get_traced_memory()[1] - before


def repeat(path: Path) -> int:
    """Run one input again, with its traceback; return the exit code."""
    name = path.stem.removeprefix("fuzz-").rsplit("-", 2)[0]
    targets()[name].read(path.read_bytes())
    print(f"{path}: no failure")
    return 0


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path(), help="where a failing input is written")
    parser.add_argument("--repeat", type=Path, help="run this input alone")
    asked = parser.parse_args()
    if asked.repeat is not None:
        return repeat(asked.repeat)
    return fuzz(seconds=asked.seconds, seed=asked.seed, folder=asked.out)


if __name__ == "__main__":
    sys.exit(main())
