"""`gasloc bench`: how fast codecs and streams are on this machine."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import msgspec

from gasloc_p2p.config import Config
from gasloc_p2p.machine import Machine


def codec(config: Config, *, as_json: bool) -> None:
    """Measure every codec on one core, and print the figures."""
    from gasloc_p2p.bench.codec import bench_codecs
    from gasloc_p2p.core.codecs import CODECS
    from gasloc_p2p.trial import try_codec

    for name in CODECS.names:
        try_codec(CODECS.named(name))
    found = bench_codecs(
        chunk_bytes=config.gossip.chunk_bytes, told=lambda name: _say(f"measuring {name}")
    )
    if as_json:
        _print_json(found)
        return
    _print_table(
        ("codec", "encode (MB/s)", "decode and mix (MB/s)", "bits/parameter", "relative error"),
        [
            (
                one.name,
                f"{one.encode_mb_s:.0f}",
                f"{one.decode_mb_s:.0f}",
                f"{one.bits_per_parameter:.3f}",
                f"{one.relative_error:.1e}",
            )
            for one in found.codecs
        ],
    )
    _print_machine(found.machine, "on one core; MB are 10^6 bytes of fp32 parameters")


def stream(*, as_json: bool) -> None:
    """Measure streams between two processes, and print the figures."""
    from gasloc_p2p.bench.stream import bench_streams
    from gasloc_p2p.bench.transfer import Direction, Transport
    from gasloc_p2p.commands.lifetime import run_until_asked

    found = run_until_asked(lambda leave: bench_streams(told=_say))
    if as_json:
        _print_json(found)
        return
    rates = {(one.transport, one.direction): one.goodput_mb_s for one in found.streams}
    _print_table(
        ("direction", "TCP (MB/s)", "p2p (MB/s)", "p2p / TCP"),
        [
            (
                direction,
                f"{rates[Transport.TCP, direction]:.0f}",
                f"{rates[Transport.P2P, direction]:.0f}",
                f"{found.ratio[direction]:.2f}",
            )
            for direction in Direction
        ],
    )
    _print_machine(found.machine, "over loopback; MB are 10^6 bytes, in `both` of both directions")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _print_json(found: msgspec.Struct) -> None:
    print(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())


def _print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print text in columns: the first one aligned to the left, numbers to the right."""
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    for name, *numbers in (columns, *rows):
        aligned = [text.rjust(width) for text, width in zip(numbers, widths[1:], strict=True)]
        print("  ".join([name.ljust(widths[0]), *aligned]))


def _print_machine(machine: Machine, how: str) -> None:
    print(f"\nMeasured on {machine.sentence()}, {how}.")
