"""Links of simulated peers: named conditions, partitions, and what an all-reduce costs on them.

A peer hangs on the backbone by its link; the backbone itself has room for everybody. A path
between two peers is their two links, one after the other.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from types import MappingProxyType
from typing import Final

from gasloc_p2p.core.errors import ConfigError

SEGMENT_BYTES: Final = 1460
MIN_RTT_S: Final = 0.001
"""Floor of the round-trip time in the loss limit: no host answers a segment faster."""

MIN_MBIT: Final = 0.001
MAX_LATENCY_S: Final = 2.0
"""Above it a node would give up on every request to its record store, and wait for ever."""

_BYTES_PER_MBIT: Final = 1e6 / 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """What connects one peer to the backbone.

    Attributes:
        upload_mbit: Mbit/s towards the backbone; 0 for no limit.
        download_mbit: Mbit/s from the backbone; 0 for no limit.
        latency_s: seconds one way between the peer and the backbone.
        loss: share of packets that are lost on the link, in [0, 1).
    """

    upload_mbit: float
    download_mbit: float
    latency_s: float
    loss: float

    @property
    def upload_bytes_s(self) -> float:
        """Bytes per second towards the backbone; infinite without a limit."""
        return self.upload_mbit * _BYTES_PER_MBIT or math.inf

    @property
    def download_bytes_s(self) -> float:
        """Bytes per second from the backbone; infinite without a limit."""
        return self.download_mbit * _BYTES_PER_MBIT or math.inf


def _link(upload_mbit: float, download_mbit: float, latency_s: float, loss: float) -> Link:
    return Link(
        upload_mbit=upload_mbit, download_mbit=download_mbit, latency_s=latency_s, loss=loss
    )


LINKS: Final[Mapping[str, Link]] = MappingProxyType(
    {
        "ideal": _link(0, 0, 0, 0),
        "datacenter": _link(10_000, 10_000, 0.0002, 0),
        "lan": _link(1000, 1000, 0.0005, 0),
        "fibre": _link(500, 1000, 0.005, 0.00001),
        "cable": _link(20, 200, 0.01, 0.0001),
        "dsl": _link(10, 50, 0.015, 0.0002),
        "mobile": _link(10, 40, 0.03, 0.001),
    }
)
"""Conditions by name. They are definitions, in round figures, not measurements."""

IDEAL: Final = LINKS["ideal"]


def path_latency_s(a: Link, b: Link) -> float:
    """Return the seconds one way between two peers."""
    return a.latency_s + b.latency_s


def stream_bytes_s(a: Link, b: Link) -> float:
    """Return the most that one reliable stream carries between two peers, whatever their rates.

    Nothing that is lost is lost for good, but every loss slows the sender down: bytes per second
    are MSS / RTT x sqrt(3/2) / sqrt(loss), infinite without loss (Mathis, Semke, Mahdavi and Ott,
    "The macroscopic behavior of the TCP congestion avoidance algorithm", 1997).
    """
    loss = 1 - (1 - a.loss) * (1 - b.loss)
    if loss == 0:
        return math.inf
    rtt_s = max(MIN_RTT_S, 2 * path_latency_s(a, b))
    return SEGMENT_BYTES / rtt_s * math.sqrt(1.5 / loss)


def parse_link(text: str) -> Link:
    """Return the link that `text` names, or describes as UP/DOWN/LATENCY/LOSS.

    Raises:
        ConfigError: it does neither, or a figure is out of range.
    """
    if text in LINKS:
        return LINKS[text]
    try:
        upload_mbit, download_mbit, latency_s, loss = (float(part) for part in text.split("/"))
    except ValueError:
        raise _link_error(text, "it is neither a name nor four numbers") from None
    for mbit in (upload_mbit, download_mbit):
        if not (mbit == 0 or MIN_MBIT <= mbit < math.inf):
            why = f"a rate is 0, for no limit, or at least {MIN_MBIT:g} Mbit/s and finite"
            raise _link_error(text, why)
    if not 0 <= latency_s <= MAX_LATENCY_S:
        raise _link_error(text, f"the latency is between 0 and {MAX_LATENCY_S:g} seconds one way")
    if not 0 <= loss < 1:
        raise _link_error(text, "the loss is a share of packets, at least 0 and below 1")
    return _link(upload_mbit, download_mbit, latency_s, loss)


def _link_error(text: str, why: str) -> ConfigError:
    return ConfigError(
        f"simulate.links: {text!r} is not a link",
        why=why,
        fix=f"use one of {', '.join(LINKS)}, or UPLOAD_MBIT/DOWNLOAD_MBIT/LATENCY_S/LOSS, "
        "as in 20/100/0.02/0.001",
    )


def links_of(texts: Sequence[str], peers: int) -> tuple[Link, ...]:
    """Return a link for each of `peers` peers, given out in turn; ideal ones if there are none.

    Raises:
        ConfigError: a text is not a link.
    """
    links = [parse_link(text) for text in texts] or [IDEAL]
    return tuple(links[index % len(links)] for index in range(peers))


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """A time in which some peers reach each other but nobody else, and nobody else them.

    Attributes:
        from_s: virtual second at which it begins.
        until_s: virtual second at which it has healed; finite and above `from_s`.
        peers: indices of the peers on one side.
    """

    from_s: float
    until_s: float
    peers: frozenset[int]

    def is_active(self, at_s: float) -> bool:
        """Whether it has begun and not healed."""
        return self.from_s <= at_s < self.until_s

    def separates(self, a: int, b: int) -> bool:
        """Whether the peers with indices a and b are on different sides."""
        return (a in self.peers) != (b in self.peers)


_PARTITION: Final = re.compile(
    r"([0-9]{1,12}(?:\.[0-9]{1,9})?)-([0-9]{1,12}(?:\.[0-9]{1,9})?):([0-9]{1,9}(?:\+[0-9]{1,9})*)"
)


def parse_partition(text: str) -> Partition:
    """Return the partition that FROM_S-UNTIL_S:PEERS describes, as in 60-120:0+1+2.

    Raises:
        ConfigError: it is malformed, or lasts no time.
    """
    match = _PARTITION.fullmatch(text)
    if match is None:
        raise _partition_error(text, "it is not two times in seconds and indices of peers")
    from_s, until_s = float(match[1]), float(match[2])
    if from_s >= until_s:
        raise _partition_error(text, "it ends before it has begun")
    peers = frozenset(int(index) for index in match[3].split("+"))
    return Partition(from_s=from_s, until_s=until_s, peers=peers)


def check_partitions(partitions: Iterable[Partition], peers: int) -> None:
    """Refuse partitions that name peers which a swarm of `peers` does not have.

    Raises:
        ConfigError: an index is not below `peers`.
    """
    for partition in partitions:
        index = max(partition.peers)
        if index >= peers:
            raise ConfigError(
                f"simulate.partitions: there is no peer {index}",
                why=f"the swarm has {peers} peers, and they are counted from 0",
                fix=f"use indices up to {peers - 1}, or start more peers",
            )


def _partition_error(text: str, why: str) -> ConfigError:
    return ConfigError(
        f"simulate.partitions: {text!r} is not a partition",
        why=why,
        fix="use FROM_S-UNTIL_S:PEERS, as in 60-120:0+1+2",
    )


def connected_from_s(partitions: Iterable[Partition], a: int, b: int, at_s: float) -> float:
    """Return the first moment from `at_s` on at which peers a and b reach each other."""
    cuts = sorted((p.from_s, p.until_s) for p in partitions if p.separates(a, b))
    for from_s, until_s in cuts:
        if from_s <= at_s < until_s:
            at_s = until_s
    return at_s


def ring_all_reduce_s(links: Sequence[Link], payload_bytes: float) -> float:
    """Return the seconds of one bandwidth-optimal ring all-reduce among n peers.

        2 (n - 1) (payload_bytes / (n rate) + latency)

    In each of 2 (n - 1) steps every peer sends one n-th of the payload to the next one in the
    ring and receives as much, and no peer begins a step before the last one is over. So `rate`,
    in bytes per second, is the least of all upload and download rates and of the loss limits of
    all paths (`stream_bytes_s`), and `latency` that of the longest path, in whatever order the
    ring is. A single peer needs no time. Source: Patarasuk and Yuan, "Bandwidth optimal
    all-reduce algorithms for clusters of workstations", 2009.

    Args:
        links: the peers' links.
        payload_bytes: size of what is averaged, at each peer.
    """
    n = len(links)
    if n <= 1:
        return 0.0
    # Two peers of a kind show every path that more of them could have.
    kinds = [link for link, count in Counter(links).items() for _ in range(min(count, 2))]
    paths = list(combinations(kinds, 2))
    rate_bytes_s = min(
        *(link.upload_bytes_s for link in kinds),
        *(link.download_bytes_s for link in kinds),
        *(stream_bytes_s(a, b) for a, b in paths),
    )
    latency_s = max(path_latency_s(a, b) for a, b in paths)
    return 2 * (n - 1) * (payload_bytes / n / rate_bytes_s + latency_s)
