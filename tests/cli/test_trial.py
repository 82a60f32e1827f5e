"""Mistakes in one's own rule, topology or codec end in a message that says whose they are."""

from __future__ import annotations

import textwrap
from dataclasses import fields
from pathlib import Path

import pytest
from torch import Tensor

from gasloc_p2p.commands.failure import UNEXPECTED_EXIT_CODE, explain
from gasloc_p2p.config import Config, assignment_layer, load
from gasloc_p2p.core.codecs import CODECS, Keys, ModularCodec
from gasloc_p2p.core.codecs.completion import ModularCoder
from gasloc_p2p.core.codecs.modular import ModularOffer
from gasloc_p2p.core.errors import ConfigError
from gasloc_p2p.core.outer import OUTER_RULES, outer_rule
from gasloc_p2p.core.topology import TOPOLOGIES
from gasloc_p2p.core.types import BytesLike
from gasloc_p2p.founding import check_outer
from gasloc_p2p.simulate.swarm import simulate
from gasloc_p2p.trial import try_codec, try_rule, try_topology
from tests.sim.conftest import QUICK

RULE = """
import torch
from gasloc_p2p.core.outer import OuterRule, OuterState, register_outer_rule

@register_outer_rule
class Own(OuterRule):
    name = "NAME"

    def step(self, theta_start, theta_h, mixed, state):
        BODY
"""
TOPOLOGY = """
from gasloc_p2p.core.topology import register_topology

@register_topology("NAME")
def own(peers, *, seed, round, may_pair):
    BODY
"""
CODEC = """
import torch
from gasloc_p2p.core.codecs import CastCodec, DirectCoder, register_codec

class Coder(DirectCoder):
    def encode(self, index):
        return self.x[self.layout.span(index)].half().numpy().tobytes()

    def difference(self, index, codes):
        theirs = torch.frombuffer(bytearray(codes), dtype=torch.float16).float()
        return theirs - self.x[self.layout.span(index)].half().float()

class WideCoder(Coder):
    def encode(self, index):
        return self.x[self.layout.span(index)].numpy().tobytes()

class BiasedCoder(Coder):
    def difference(self, index, codes):
        return super().difference(index, codes) + 1

class FarCoder(Coder):
    def square_distance(self):
        return float("inf")

class Offer:
    coder_class = Coder
    scales = b""

    def __init__(self, codec, x):
        self.layout = CastCodec.layout(codec, len(x), 256)
        self.x = x

    def coder(self, partner_scales):
        return self.coder_class(self.x, self.layout)

class Wide(Offer):
    coder_class = WideCoder

class Biased(Offer):
    coder_class = BiasedCoder

class Far(Offer):
    coder_class = FarCoder

class Scaled(Offer):
    scales = b"!"

class Own(CastCodec):
    BODY

register_codec(Own(name="NAME", dtype=torch.float16))
"""


def config_with(folder: Path, program: str, name: str, body: str, *assignments: str) -> Config:
    file = folder / f"{name}.py"
    file.write_text(program.replace("NAME", name).replace("BODY", body))
    layer = assignment_layer([*QUICK, f"node.extensions={file}", *assignments])
    return load([layer]).config


@pytest.mark.parametrize("name", OUTER_RULES.names[:7])
def test_built_in_rules_pass(name: str) -> None:
    try_rule(outer_rule(name, lr=0.7, momentum=0.9))


@pytest.mark.parametrize("name", TOPOLOGIES.names[:6])
def test_built_in_topologies_pass(name: str) -> None:
    try_topology(name)


@pytest.mark.parametrize("name", CODECS.names[:7])
def test_built_in_codecs_pass(name: str) -> None:
    try_codec(CODECS.named(name))


@pytest.mark.parametrize(
    ("name", "body", "words"),
    [
        ("trial-raises", "raise RuntimeError('oh')", r"raises\.py, line 10\).*RuntimeError: oh"),
        ("no-tuple", "return mixed", "`step` must return the parameters and an OuterState"),
        ("no-state", "return mixed, state.memory", "must be an OuterState"),
        ("double", "return mixed.double(), state", "`step` must be of torch.float32"),
        ("list", "return [0.0], state", "`step` must be of torch.float32.*not list"),
        ("short", "return mixed[:2], state", r"`step` has shape \[2\], expected \[5\]"),
        ("memory", "return mixed, OuterState(memory=mixed[:1])", r"`memory` has shape \[1\]"),
        ("infinite", "return mixed / 0, state", "`step` has values that are not finite"),
        ("norm", "return mixed / mixed.norm(), state", "depends on other parameters"),
        ("in-place", "return theta_start.sub_(mixed), state", "changes one of the tensors"),
    ],
)
def test_a_rule_that_does_not_work(tmp_path: Path, name: str, body: str, words: str) -> None:
    config = config_with(tmp_path, RULE, name, body, f"outer.rule={name}", "outer.force=true")
    with pytest.raises(ConfigError, match=f"(?s)outer rule '{name}' does not work.*{words}"):
        check_outer(config)


@pytest.mark.parametrize(
    ("name", "body", "words"),
    [
        ("nothing", "return None", "TypeError"),
        ("triples", "return [(a, a, a) for a in peers]", "ValueError"),
        ("beyond", "return [(peers[0], peers[1])]", r"beyond\.py, line 6\).*IndexError"),
    ],
)
def test_a_topology_that_does_not_work(tmp_path: Path, name: str, body: str, words: str) -> None:
    config = config_with(tmp_path, TOPOLOGY, name, body, f"gossip.topology={name}")
    with pytest.raises(ConfigError, match=f"(?s)topology '{name}' does not work.*{words}"):
        check_outer(config)


@pytest.mark.parametrize(
    ("name", "body", "words"),
    [
        ("fat", "offer = lambda self, x, **more: Offer(self, x[1:])", "`layout` says"),
        ("deaf", "def offer(self, x, **more): raise KeyError('x')", "KeyError"),
        ("wide", "def offer(self, x, **more): return Wide(self, x)", "`encode` made 512 bytes"),
        ("biased", "def offer(self, x, **more): return Biased(self, x)", "by the same amount"),
        ("far", "def offer(self, x, **more): return Far(self, x)", "`square_distance` is not"),
        ("scaled", "def offer(self, x, **more): return Scaled(self, x)", "`scales` made 1 bytes"),
    ],
)
def test_a_codec_that_does_not_work(tmp_path: Path, name: str, body: str, words: str) -> None:
    config = config_with(tmp_path, CODEC, name, body, f"gossip.codec={name}")
    with pytest.raises(ConfigError, match=f"(?s)codec '{name}' does not work.*{words}"):
        check_outer(config)


def test_a_codec_that_refuses_repairs() -> None:
    class Refusing(ModularCoder):
        def take_repair(self, index: int, bad: BytesLike, repair: BytesLike) -> bool:
            return False

    class RefusingOffer(ModularOffer):
        def coder(self, partner_scales: BytesLike) -> ModularCoder:
            coder = super().coder(partner_scales)
            coder.__class__ = Refusing
            return coder

    class Own(ModularCodec):
        def offer(
            self,
            x: Tensor,
            *,
            motion: Tensor | None,
            keys: Keys,
            chunk_bytes: int,
        ) -> ModularOffer:
            offer = ModularCodec.offer(self, x, motion=motion, keys=keys, chunk_bytes=chunk_bytes)
            return RefusingOffer(**{f.name: getattr(offer, f.name) for f in fields(offer)})

    with pytest.raises(ConfigError, match=r"(?s)codec 'own' does not work.*`take_repair`"):
        try_codec(Own(name="own", bits=4, block_elements=64, reach=4.5))


def test_what_fails_in_a_round_names_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = "return [][0] if len(mixed) > 5 else (mixed, state)"
    config = config_with(tmp_path, RULE, "late", body, "outer.rule=late", "outer.force=true")
    with pytest.raises(ExceptionGroup) as raised:
        simulate(config, peers=1, observe=lambda index, event: None)
    assert explain(raised.value) == UNEXPECTED_EXIT_CODE
    said = capsys.readouterr().err
    assert "late.py, line 10 failed" in said
    assert "IndexError" in said
    assert "defect" not in said


def test_leaving_is_no_way_out_of_an_extension(tmp_path: Path) -> None:
    file = tmp_path / "leaves.py"
    file.write_text(textwrap.dedent("import sys\nsys.exit(3)\n"))
    with pytest.raises(ConfigError, match=r"leaves\.py, line 2"):
        load([assignment_layer([f"node.extensions={file}"])])
