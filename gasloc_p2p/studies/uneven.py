"""Swarms in which one peer is slower than the others, measured in a round's compute.

What a link carries is derived: at the full rate one model takes `TRANSFER_SHARE` of the time of a
round's local steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from gasloc_p2p.config import Config
from gasloc_p2p.core.codecs import codec_named
from gasloc_p2p.simulate.collective import FP32_BYTES
from gasloc_p2p.simulate.links import links_of, ring_all_reduce_s
from gasloc_p2p.simulate.speeds import machines_of
from gasloc_p2p.studies.estimate import parameter_count

TRANSFER_SHARE: Final = 0.25
"""Of a round's compute, the time that one model takes from one peer to another at full rate."""

LINKS, SPEEDS = "simulate.links", "simulate.speeds"


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """What is uneven.

    Attributes:
        name: what people call it.
        bandwidth: the last peer's, both ways, as a share of the full rate of the others.
        speed: of the last peer's machine, as a share of that of the others.
        at_least: what is claimed of DiLoCo's time to a loss by GASLoC's; None for nothing.
    """

    name: str
    bandwidth: float = 1.0
    speed: float = 1.0
    at_least: float | None = None

    def settings(self, config: Config, peers: int) -> dict[str, Any]:
        """Return the links and speeds of `peers` peers.

        Args:
            config: their other settings.
            peers: how many.
        """
        full, slow = (f"{m:.12g}/{m:.12g}/0/0" for m in _rates_mbit(config, self.bandwidth))
        speeds = [] if self.speed == 1 else [f"0:{self.speed:g}:{peers - 1}"]
        return {LINKS: [*[full] * (peers - 1), slow], SPEEDS: speeds}


def compute_s(config: Config) -> float:
    """Return the virtual seconds of a round's local steps at the common speed."""
    return config.inner.local_steps * config.simulate.step_s


def model_bytes(config: Config) -> int:
    """Return the size of one model as the codec sends it."""
    elements = parameter_count(config.model.preset)
    layout = codec_named(config.gossip.codec).layout(elements, config.gossip.chunk_bytes)
    return layout.code_bytes + layout.scale_bytes


def _rates_mbit(config: Config, bandwidth: float) -> tuple[float, float]:
    """Return the full rate and `bandwidth` of it."""
    full_mbit = model_bytes(config) * 8e-6 / (TRANSFER_SHARE * compute_s(config))
    return full_mbit, bandwidth * full_mbit


def slowest_exchange_s(config: Config, peers: int) -> float:
    """Return the virtual seconds of an exchange over the slowest link.

    Links are full duplex and both models go at once, so it takes as long as one of them.
    """
    links = links_of(config.simulate.links, peers)
    return model_bytes(config) / min(link.upload_bytes_s for link in links)


def all_reduce_s(config: Config, peers: int) -> float:
    """Return the virtual seconds of one ring all-reduce of the parameters, in fp32."""
    payload_bytes = FP32_BYTES * parameter_count(config.model.preset)
    return ring_all_reduce_s(links_of(config.simulate.links, peers), payload_bytes)


def slowest_compute_s(config: Config, peers: int) -> float:
    """Return the virtual seconds of a round's local steps on the slowest machine."""
    machines = machines_of(config.simulate.speeds, peers)
    return compute_s(config) / min(machine.factor(0.0) for machine in machines)
