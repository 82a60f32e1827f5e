"""What a node is told about its place in the network; imports nothing heavy."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class NetConfig(BaseModel):
    """The `net` section of the configuration; this machine's own, never shared."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    listen: tuple[str, ...] = Field(
        default=("/ip4/0.0.0.0/tcp/0",),
        min_length=1,
        description="Multiaddrs to listen on, such as /ip4/0.0.0.0/tcp/4001 or "
        "/ip4/0.0.0.0/udp/4001/quic-v1. Port 0 takes any free port. TCP is advised: over QUIC p2pd "
        "can lose the last bytes of a stream, and an exchange its confirmation.",
    )
    announce: tuple[str, ...] = Field(
        default=(),
        description="Multiaddrs to tell others instead of the ones listened on, for a machine "
        "behind a router that forwards a port: /ip4/203.0.113.7/tcp/4001.",
    )
    bootstrap: tuple[str, ...] = Field(
        default=(),
        description="Multiaddrs of peers through which the swarm is joined, each ending in "
        "/p2p/ID. With none, this node waits to be joined.",
    )
    identity: str = Field(
        default="",
        description="File that holds this node's secret key. Default: in the node's home folder.",
    )
    join_attempts: int = Field(
        default=3,
        ge=1,
        le=100,
        description="Times that the bootstrap addresses are tried, with growing pauses.",
    )
    upload_mbit: float = Field(
        default=0.0,
        ge=0,
        le=1_000_000,
        allow_inf_nan=False,
        description="The most that this node sends to all peers together, exchanges and state "
        "transfers alike, in megabits per second. 0: no cap.",
    )
    download_mbit: float = Field(
        default=0.0,
        ge=0,
        le=1_000_000,
        allow_inf_nan=False,
        description="The most that this node takes from all peers together, in megabits per "
        "second. 0: no cap.",
    )
