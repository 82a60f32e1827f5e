"""The sections of the configuration that belong to no single component below `node/`."""

from __future__ import annotations

import secrets
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from gasloc_p2p.core.registry import NAME_PATTERN


class Section(BaseModel):
    """A frozen group of settings that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class RunConfig(Section):
    """What run this is; shared by every peer through the manifest."""

    id: str = Field(
        default_factory=lambda: f"run-{secrets.token_hex(4)}",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$",
        description="Name of the run. Peers of different runs never mix. Default: random.",
    )
    seed: int = Field(
        default=0,
        ge=0,
        lt=2**63,
        description="Seed of the initial parameters, of the pairings and of every peer's samples.",
    )
    rounds: int = Field(default=32, ge=1, lt=2**31, description="Training rounds in the run.")
    initial_peers: int = Field(
        default=1,
        ge=1,
        le=10_000,
        description="With pace.mode steps: round 0 begins when so many peers are there.",
    )
    closing_rounds: int = Field(
        default=5,
        ge=0,
        le=100,
        description="Gossip rounds without training at the end, which bring peers to one model.",
    )


class OuterConfig(Section):
    """The outer step that each peer applies to its own parameters."""

    rule: str = Field(
        default="nesterov",
        pattern=NAME_PATTERN,
        description="Outer rule: nesterov, local, dadam, noloco, or one of your own "
        "(node.extensions). lookahead, post-mix and printed run in the simulator only.",
    )
    lr: float = Field(default=0.7, gt=0, le=10, description="Outer learning rate, eta.")
    momentum: float = Field(default=0.9, ge=0, lt=1, description="Outer momentum, gamma.")
    alpha: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Share of the mix that is taken; below 1 it is relaxed.",
    )
    force: bool = Field(
        default=False, description="Run even if the stability check says that peers drift apart."
    )


class GossipConfig(Section):
    """Who exchanges with whom, and in what form."""

    topology: str = Field(
        default="pairs",
        pattern=NAME_PATTERN,
        description="pairs: random pairs. ring: random ring. complete: everybody with everybody. "
        "cycle: a fixed ring. exponential: a fixed ring with links 2, 4, 8, ... places on. none: "
        "no exchange, each peer trains alone. Or one of your own (node.extensions).",
    )
    codec: str = Field(
        default="none",
        pattern=NAME_PATTERN,
        description="How parameters are encoded: none is fp32; bf16 and fp16 are half of that, "
        "int8 and int4 a quarter and an eighth; mod8 and mod4 are as small and far more exact, "
        "since they use that partners are close (docs/design.md, section 5). Or one of your own "
        "(node.extensions).",
    )
    guard: bool = Field(
        default=True,
        description="Differences to partners that are far longer than usual are clipped, and who "
        "repeats offences is left out for a while (docs/trust.md).",
    )
    overlap: bool = Field(
        default=False,
        description="Exchange under the inner steps of the next round, and take the outer step "
        "between two of them once everything is there (docs/design.md, section 2).",
    )
    chunk_bytes: int = Field(
        default=1_048_576,
        ge=1024,
        le=4_194_304,
        description="Bytes of codes under one digest on the wire, about; a stream that broke goes "
        "on with the first such chunk that did not arrive.",
    )


class PaceConfig(Section):
    """When a round begins and ends."""

    mode: Literal["steps", "seconds"] = Field(
        default="steps",
        description="steps: local steps, about inner.local_steps of them, then wait for the "
        "partner. seconds: rounds begin by the clock, with as many steps as fit.",
    )
    adapt_steps: bool = Field(
        default=True,
        description="With pace.mode steps: a peer that is slower or faster than most does so many "
        "steps more or less than inner.local_steps that its rounds last as long as theirs.",
    )
    stride: bool = Field(
        default=True,
        description="With pace.adapt_steps: a peer whose exchange and one step take longer than a "
        "round of the others takes part in every second, third, ... round only.",
    )
    period_s: float = Field(
        default=60.0, ge=0.5, le=86_400, description="Length of a round, with pace.mode seconds."
    )
    start_delay_s: float = Field(
        default=30.0,
        ge=0,
        le=86_400,
        description="With pace.mode seconds: round 0 begins this long after the run was founded.",
    )
    exchange_budget_s: float = Field(
        default=5.0,
        gt=0,
        le=3600,
        description="With pace.mode seconds: training stops so long before the end of a round; "
        "with gossip.overlap in the last one only.",
    )
    edge_floor_s: float = Field(
        default=10.0,
        gt=0,
        le=3600,
        description="With pace.mode steps: a partner is waited for at least this long.",
    )
    edge_ceiling_s: float = Field(
        default=120.0,
        gt=0,
        le=86_400,
        description="With pace.mode steps: a partner is waited for at most this long. With "
        "seconds: an exchange for which nobody waits may last so long beyond its round.",
    )


class NodeConfig(Section):
    """This machine's own choices; never shared."""

    home: str = Field(
        default="",
        description="Folder of this node's identity and results. Default: ~/.gasloc/RUN.",
    )
    threads: int = Field(
        default=1, ge=1, le=1024, description="CPU threads that torch may use in this process."
    )
    exit_with_stdin: bool = Field(
        default=False,
        description="Leave when standard input closes; for a parent process that may not leave "
        "nodes behind.",
    )
    address_file: str = Field(
        default="",
        description="`gasloc bootstrap` writes its addresses into this file, for "
        "net.bootstrap=@FILE.",
    )
    extensions: tuple[str, ...] = Field(
        default=(),
        description="Python files or modules of your own to load first; they may register outer "
        "rules, topologies, codecs and inner optimizers (docs/tutorial-research.md).",
    )
    invite_file: str = Field(
        default="",
        description="`gasloc start` writes its invite into this file, for `gasloc join @FILE`.",
    )
    validate_every_rounds: int = Field(
        default=4,
        ge=0,
        description="Try the own parameters on the held-out text every so many rounds; 0: at the "
        "end only.",
    )


class CheckpointConfig(Section):
    """How often this node saves its state, and how much it keeps; never shared."""

    every_rounds: int = Field(
        default=4,
        ge=0,
        lt=2**31,
        description="Save the state every so many rounds, beside the training; a crash loses the "
        "rounds since. 0: only when leaving.",
    )
    keep: int = Field(
        default=3,
        ge=1,
        le=100,
        description="Checkpoints to keep, the newest ones; each takes about 16 bytes a parameter "
        "on the disk. With more than one there is another to go back to if the newest is damaged.",
    )
    gather_s: float = Field(
        default=30.0,
        ge=0,
        le=3600,
        description="With pace.mode steps: after a restart, wait so long for the peers that were "
        "there, to go on from one round together; not at all when they are found running.",
    )


class SimulateConfig(Section):
    """The virtual machines and links of `gasloc simulate`; never shared."""

    engine: Literal["exact", "batched"] = Field(
        default="exact",
        description="exact: every peer computes as a real node does, bit for bit. batched: many "
        "peers' steps at once, on a GPU where there is one, equal within rounding.",
    )
    step_s: float = Field(
        default=0.02, gt=0, le=3600, description="Virtual seconds that one inner step takes."
    )
    speeds: tuple[str, ...] = Field(
        default=(),
        description="Peers of another speed: FROM_S:FACTOR:PEERS, as in 60:0.2:0+1+2; from that "
        "virtual second on their inner steps take simulate.step_s / FACTOR.",
    )
    links: tuple[str, ...] = Field(
        default=("ideal",),
        description="The peers' links, given out in turn: names of conditions (docs/simulator.md) "
        "or UPLOAD_MBIT/DOWNLOAD_MBIT/LATENCY_S/LOSS, as in 20/100/0.02/0.001.",
    )
    partitions: tuple[str, ...] = Field(
        default=(),
        description="When peers are cut off from all others: FROM_S-UNTIL_S:PEERS, as in "
        "60-120:0+1+2.",
    )
    poison: Literal["none", "random", "scaled", "flipped", "stale"] = Field(
        default="none",
        description="What the last peer sends instead of its parameters: random numbers as large "
        "as they are, ten times them, their negative, or the initial ones. Losses and distances "
        "are those of the others.",
    )


class DisplayConfig(Section):
    """What is written to the terminal."""

    mode: Literal["auto", "live", "plain", "json"] = Field(
        default="auto",
        description="auto: live in a terminal, plain lines when piped. json: one event a line.",
    )


class StudyConfig(Section):
    """How `gasloc study` runs its simulations; never shared."""

    seeds: int = Field(
        default=3,
        ge=1,
        le=1000,
        description="Seeds that every algorithm of a study is run with; intervals need at least 2.",
    )
    peers: tuple[Annotated[int, Field(ge=1, le=10_000)], ...] = Field(
        default=(), description="Swarm sizes to run; by default those of the study."
    )
    jobs: int = Field(
        default=0,
        ge=0,
        le=1024,
        description="Simulations that run at the same time, each in a process; 0: one per CPU.",
    )
