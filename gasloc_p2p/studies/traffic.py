"""What the edges of a swarm carried, round by round."""

from __future__ import annotations

from collections import Counter

from gasloc_p2p.config import Config
from gasloc_p2p.core.codecs import codec_named
from gasloc_p2p.core.outer import outer_rule
from gasloc_p2p.core.types import MIXED_KINDS
from gasloc_p2p.node.report import RoundReport


class Traffic:
    """Sums over the rounds of all peers; each edge counts once in each direction."""

    def __init__(self) -> None:
        self._sent_bytes = 0
        self._edges: Counter[int] = Counter()
        self._repaired: Counter[int] = Counter()

    def note(self, report: RoundReport) -> None:
        """Count one round of one peer."""
        self._sent_bytes += report.bytes_sent
        for edge in report.edges:
            if edge.kind in MIXED_KINDS:
                self._edges[report.round] += 1
                self._repaired[report.round] += edge.repaired_blocks

    def bits_per_parameter(self, parameters: int) -> float | None:
        """Return all bits that were sent by all parameters that were mixed; None without any."""
        edges = self._edges.total()
        return 8 * self._sent_bytes / (parameters * edges) if edges else None

    def repaired_shares(self, blocks: int | None) -> tuple[float, ...]:
        """Return the share of repaired blocks by round, of the rounds that had an edge.

        Args:
            blocks: of the vector that an edge carries; None when the codec repairs nothing.
        """
        if blocks is None:
            return ()
        rounds = sorted(self._edges)
        return tuple(self._repaired[t] / (self._edges[t] * blocks) for t in rounds)


def exchanged_blocks(config: Config, parameters: int) -> int | None:
    """Return the blocks of the vector that an edge carries; None when the codec repairs nothing."""
    codec, outer = codec_named(config.gossip.codec), config.outer
    if not codec.checked:
        return None
    vectors = outer_rule(outer.rule, lr=outer.lr, momentum=outer.momentum).vectors
    return codec.layout(vectors * parameters, config.gossip.chunk_bytes).all_blocks
