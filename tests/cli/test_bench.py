"""`gasloc bench codec`: its figures, its two formats, and what it refuses."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from gasloc_p2p.bench.codec import CodecFigures, bench_codecs, measure_codec
from gasloc_p2p.bench.partners import DISTANCE, draw_partners
from gasloc_p2p.core.codecs import CODECS, codec_named
from gasloc_p2p.core.errors import ConfigError

from .test_cli import assert_explained, gasloc, gasloc_process

CHUNK_BYTES = 16_384
ELEMENTS = 100_001
EXTENSION = """
import torch
from gasloc_p2p.core.codecs import CastCodec, register_codec
register_codec(CastCodec(name="half", dtype=torch.float16))
"""


def figures_of(name: str) -> CodecFigures:
    sides = draw_partners(ELEMENTS)
    return measure_codec(codec_named(name), sides, chunk_bytes=CHUNK_BYTES, passes=1)


def test_partners_lie_as_they_are_said_to() -> None:
    one, other = draw_partners(2**20)
    assert torch.equal(one.x, draw_partners(2**20)[0].x)
    apart = (other.x - one.x).norm() / one.x.norm()
    assert float(apart) == pytest.approx(DISTANCE, rel=0.02)
    # What each knows is about as large as what it is used for, block by block.
    largest = torch.stack([(other.x - one.x).abs().view(-1, 64).amax(1), one.motion(64)])
    assert float(torch.corrcoef(largest.log())[0, 1]) > 0.9
    ratio = largest[1] / largest[0]
    assert 0.5 < float(ratio.median()) < 1


def test_every_codec_is_measured_in_its_turn() -> None:
    told: list[str] = []
    found = bench_codecs(chunk_bytes=CHUNK_BYTES, told=told.append, elements=2**14)
    assert [one.name for one in found.codecs] == list(CODECS.names) == told
    for one in found.codecs:
        assert min(one.encode_mb_s, one.decode_mb_s, one.bits_per_parameter) > 0
        assert math.isfinite(one.relative_error)


@pytest.mark.parametrize(
    ("name", "bits", "error"),
    [("none", (32, 32), (0, 1e-6)), ("bf16", (16, 16), (0.05, 0.2)), ("fp16", (16, 16), (0, 0.03))],
)
def test_bits_and_errors_are_those_of_the_numbers_that_are_sent(
    name: str, bits: tuple[float, float], error: tuple[float, float]
) -> None:
    found = figures_of(name)
    assert bits[0] <= found.bits_per_parameter <= bits[1]
    assert error[0] <= found.relative_error <= error[1]


@pytest.mark.parametrize(("name", "bits"), [("mod8", 8), ("mod4", 4)])
def test_repairs_are_counted_and_taken(name: str, bits: int) -> None:
    found = figures_of(name)
    assert bits < found.bits_per_parameter < bits + 1
    assert found.relative_error < 8 / 2**bits
    # One element far away widens the range of all blocks, and its own is repaired.
    one, other = draw_partners(ELEMENTS)
    other.x[5] += 1.0
    jumped = measure_codec(codec_named(name), (one, other), chunk_bytes=CHUNK_BYTES, passes=1)
    assert jumped.bits_per_parameter > bits


def test_json_has_the_names_that_are_documented(tmp_path: Path) -> None:
    (tmp_path / "half.py").write_text(EXTENSION)
    extension = f"node.extensions={tmp_path / 'half.py'}"
    result = gasloc_process("bench", "codec", "--format", "json", "--set", extension)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert set(found) == {"codecs", "machine"}
    names = [one["name"] for one in found["codecs"]]
    assert names == [*CODECS.names, "half"]
    for one in found["codecs"]:
        assert set(one) == set(CodecFigures.__struct_fields__)
    assert {"cpu", "cores", "torch"} <= set(found["machine"])
    assert result.stderr.splitlines() == [f"measuring {name}" for name in names]


def test_text_is_an_aligned_table() -> None:
    result = gasloc("bench", "codec", GASLOC_GOSSIP_CHUNK_BYTES="65536")
    assert result.returncode == 0, result.stderr
    head, *rows = result.stdout.partition("\n\n")[0].splitlines()
    assert head.split("  ")[0] == "codec"
    assert "encode (MB/s)" in head
    assert [row.split()[0] for row in rows] == list(CODECS.names)
    assert {len(row) for row in rows} == {len(head)}
    assert "Measured on " in result.stdout


@pytest.mark.parametrize("name", ["codec", "stream"])
def test_a_format_that_there_is_not_is_refused(name: str) -> None:
    result = gasloc("bench", name, "--format", "xml")
    assert result.returncode == 2
    assert "'xml' is not one of 'text', 'json'" in result.stderr
    assert "Traceback" not in result.stderr


def test_settings_are_checked() -> None:
    refused = gasloc("bench", "codec", "--set", "gossip.chunk_bytes=1")
    assert_explained(refused, ConfigError, "greater than or equal to 1024")
