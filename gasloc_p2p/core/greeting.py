"""Whether the Hellos of two sides make an exchange."""

from __future__ import annotations

from gasloc_p2p.core.types import PeerId
from gasloc_p2p.core.wire import Hello, RefuseCode


def disagreement(ours: Hello, theirs: Hello, partner: PeerId) -> tuple[RefuseCode, str] | None:
    """Return why two Hellos do not make an exchange, or None when they do.

    Args:
        ours: this side's.
        theirs: the partner's.
        partner: its identity, proved by the stream.
    """
    oldest = max(ours.protocol_min, theirs.protocol_min)
    if oldest > min(ours.protocol_max, theirs.protocol_max):
        return RefuseCode.PROTOCOL, (
            f"expected protocol {ours.protocol_min} to {ours.protocol_max}, "
            f"got {theirs.protocol_min} to {theirs.protocol_max}"
        )
    checks: tuple[tuple[RefuseCode, str, str | bytes | int, str | bytes | int], ...] = (
        (RefuseCode.IDENTITY, "peer id", partner, theirs.peer_id),
        (RefuseCode.RUN, "run digest", ours.run_digest, theirs.run_digest),
        (RefuseCode.SCHEMA, "schema digest", ours.schema_digest, theirs.schema_digest),
        (RefuseCode.CODEC, "codec", ours.codec, theirs.codec),
        (RefuseCode.SIZE, "code_bytes", ours.code_bytes, theirs.code_bytes),
        (RefuseCode.SIZE, "chunk_bytes", ours.chunk_bytes, theirs.chunk_bytes),
        (RefuseCode.SIZE, "scale_bytes", ours.scale_bytes, theirs.scale_bytes),
        (RefuseCode.NOT_PARTNER, "round", ours.round, theirs.round),
    )
    for code, what, expected, got in checks:
        if got != expected:
            return code, f"expected {what} {_shown(expected)}, got {_shown(got)}"
    return None


def _shown(value: str | bytes | int) -> str:
    return value.hex()[:16] if isinstance(value, bytes) else str(value)
