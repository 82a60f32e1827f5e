"""How far a peer knows to have moved."""

from __future__ import annotations

import torch

from gasloc_p2p.core.codecs import codec_named
from gasloc_p2p.node.drift import Drift

MOD4 = codec_named("mod4")
BLOCK = MOD4.block_elements
ELEMENTS = 3 * BLOCK + 5


def test_motion_is_that_of_the_local_steps_and_half_of_the_last_outer_step() -> None:
    drift = Drift(MOD4, elements=ELEMENTS)
    zeros, moved = torch.zeros(ELEMENTS), torch.zeros(ELEMENTS)
    moved[-1] = -3.0
    drift.note_step(zeros, moved)
    motion = drift.motion(zeros, torch.ones(ELEMENTS), vectors=1)
    assert motion is not None
    assert motion.tolist() == [1.0, 1.0, 1.0, 2.5]


def test_several_vectors_move_together() -> None:
    elements = BLOCK + BLOCK // 2
    drift = Drift(MOD4, elements=elements)
    moved = torch.zeros(elements)
    moved[0] = 4.0
    motion = drift.motion(torch.zeros(elements), moved, vectors=2)
    assert motion is not None
    assert motion.tolist() == [4.0, 4.0, 4.0], "a block of zeros shares its place with one of 4"


def test_a_codec_that_does_not_ask_costs_nothing() -> None:
    drift = Drift(codec_named("int8"), elements=ELEMENTS)
    drift.note_step(torch.zeros(ELEMENTS), torch.ones(ELEMENTS))
    assert drift.motion(torch.zeros(ELEMENTS), torch.ones(ELEMENTS), vectors=1) is None
    assert drift.stepped.numel() == 0


def test_it_is_restored_unless_it_is_of_another_codec() -> None:
    drift, other = (Drift(MOD4, elements=ELEMENTS) for _ in range(2))
    drift.note_step(torch.zeros(ELEMENTS), torch.ones(ELEMENTS))
    other.restore(drift.stepped)
    assert torch.equal(other.stepped, drift.stepped)
    for useless in (None, torch.zeros(3)):
        other.restore(useless)
        assert torch.equal(other.stepped, drift.stepped)
