"""A few numbers of a vector, from two of which their distance follows without the vectors.

A count sketch with one row: every element is added with a random sign to one of `BUCKETS` sums, so
the squared distance of two sketches is that of the vectors on average, within a part of
sqrt(2 / BUCKETS). Source: Charikar, Chen and Farach-Colton, "Finding frequent items in data
streams", 2002.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from gasloc_p2p.core.codecs.arrays import Floats

BUCKETS: Final = 256
ROWS: Final = 64
SKETCH_BYTES: Final = 4 * BUCKETS
_CONTEXT: Final = "gasloc_p2p codecs sketch of a vector"


def sketch(x: Tensor, key: int) -> Floats:
    """Return the sketch of a flat fp32 vector, fp32 [BUCKETS].

    Element e is in bucket e modulo `BUCKETS`. Its sign is a product of two random ones that depend
    on the key alone: that of its place in a turn of `ROWS` rows of buckets, and that of its row.
    Sums that are not finite are told as zeros.

    Args:
        x: the vector.
        key: of the round, 64 bits; the same at all peers.
    """
    turn = ROWS * BUCKETS
    turns = -(-x.numel() // turn)
    signs = _signs(key, turn + turns * ROWS)
    of_rows = signs[turn:].view(turns, ROWS, 1)
    sums = torch.zeros(ROWS, BUCKETS)
    for index in range(turns):
        part = x[index * turn : (index + 1) * turn]
        if part.numel() < turn:
            part = torch.nn.functional.pad(part, (0, turn - part.numel()))
        sums.addcmul_(part.view(ROWS, BUCKETS), of_rows[index])
    told = (sums * signs[:turn].view(ROWS, BUCKETS)).sum(dim=0).nan_to_num_(0.0, 0.0, 0.0)
    return np.asarray(told.numpy(), dtype=np.float32)


def distance(own: Floats, theirs: Floats) -> float:
    """Return the distance that two sketches tell; every machine and both sides get the same."""
    return math.sqrt(math.fsum(np.square(own.astype(np.float64) - theirs).tolist()))


def _signs(key: int, count: int) -> Tensor:
    """Return random signs, fp32 [count]."""
    seed = blake3(key.to_bytes(8, "little"), derive_key_context=_CONTEXT)
    bits = np.frombuffer(seed.digest(length=-(-count // 8)), dtype=np.uint8)
    return torch.from_numpy(np.unpackbits(bits, count=count)).to(torch.float32).mul_(2).sub_(1)
