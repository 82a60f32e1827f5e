"""How a flat parameter vector travels (docs/design.md section 5).

Codecs are found by name in `CODECS`, where `register_codec` puts one's own. `none`, `bf16` and
`fp16` cast every element; `int8` and `int4` round blocks at random; `mod8` and `mod4` send what
remains modulo a power of two, and the partner completes it from its own vector.
"""

from __future__ import annotations

import torch

from gasloc_p2p.core.codecs.api import Codec, Coder, CodesError, Keys, Offer
from gasloc_p2p.core.codecs.backend import block_max_difference
from gasloc_p2p.core.codecs.block import BlockCodec
from gasloc_p2p.core.codecs.cast import CastCodec
from gasloc_p2p.core.codecs.direct import DirectCoder, DirectOffer
from gasloc_p2p.core.codecs.layout import Layout, cut
from gasloc_p2p.core.codecs.modular import ModularCodec
from gasloc_p2p.core.registry import Registry

__all__ = [
    "CODECS",
    "BlockCodec",
    "CastCodec",
    "Codec",
    "Coder",
    "CodesError",
    "DirectCoder",
    "DirectOffer",
    "Keys",
    "Layout",
    "ModularCodec",
    "Offer",
    "block_max_difference",
    "codec_named",
    "cut",
    "register_codec",
]

CODECS: Registry[Codec] = Registry("codec")
"""Every codec by name, the default first."""


def register_codec(codec: Codec) -> None:
    """Make `codec` known by its name.

    Raises:
        ConfigError: the name is malformed or taken.
    """
    CODECS.register(codec.name, codec)


def codec_named(name: str) -> Codec:
    """Return the codec with this name.

    Raises:
        ConfigError: there is no such codec.
    """
    return CODECS.named(name)


register_codec(CastCodec(name="none", dtype=torch.float32))
register_codec(CastCodec(name="bf16", dtype=torch.bfloat16))
register_codec(CastCodec(name="fp16", dtype=torch.float16))
register_codec(BlockCodec(name="int8", bits=8, block_elements=256))
register_codec(BlockCodec(name="int4", bits=4, block_elements=64))
register_codec(ModularCodec(name="mod8", bits=8, block_elements=128, reach=8.0))
register_codec(ModularCodec(name="mod4", bits=4, block_elements=64, reach=4.5))
