"""`gasloc testnet`: a whole swarm of real processes on this machine, and its report."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import msgspec
import torch
from torch import Tensor

from gasloc_p2p.algorithms import require_on_nodes
from gasloc_p2p.commands.arguments import check_output_file, make_folder
from gasloc_p2p.commands.chaos import QUIET_ROUNDS, Chaos, Fault, plan_faults
from gasloc_p2p.commands.child import Child
from gasloc_p2p.commands.home import kept_manifest, require_same_run, with_kept_digest
from gasloc_p2p.commands.lifetime import INTERRUPTED_EXIT_CODE, Leave, run_until_asked
from gasloc_p2p.commands.model import with_model_here
from gasloc_p2p.commands.simulate import finish, solo_loss
from gasloc_p2p.config import SHARED_SECTIONS, Config, to_toml
from gasloc_p2p.core.errors import StartError
from gasloc_p2p.core.manifest import parse_invite
from gasloc_p2p.data.feed import Closing
from gasloc_p2p.data.overlap import overlap, units_trained_on
from gasloc_p2p.data.supply import DATA_FOLDER, is_streamed, load_text, open_text
from gasloc_p2p.display import Display, make_display
from gasloc_p2p.founding import check_outer, require_node_rule
from gasloc_p2p.net.identity import Identity
from gasloc_p2p.node.events import Invitation, Notice, Online
from gasloc_p2p.node.report import PeerReport, peer_report
from gasloc_p2p.node.result import REPORT_FILE, THETA_FILE, read_report, read_thetas
from gasloc_p2p.report import SwarmReport, swarm_report
from gasloc_p2p.train.data import load_corpus
from gasloc_p2p.train.learner import ON_THE_CPU, Learner, build_learner

E = TypeVar("E", Online, Invitation)

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
START_DEADLINE_S = 120.0


def run(
    config: Config,
    *,
    algorithm: str,
    peers: int,
    compare_solo: bool,
    report_path: Path | None,
    keep: Path | None,
    chaos_seed: int | None = None,
) -> int:
    """Run a bootstrap and `peers` nodes to the end of the run; return the exit code.

    The first peer founds the run and the others join it by its invite, as people would. Every
    process that was started is gone when this returns.

    Args:
        config: settings of every peer; round 0 waits for `run.initial_peers` of them.
        algorithm: the name under which `config` was loaded.
        peers: how many nodes.
        compare_solo: also train the same peers alone and report their mean loss.
        report_path: where the report goes, None for nowhere.
        keep: folder that keeps every node's identity, log, checkpoints and parameters, from which
            the same command goes on; None: a temporary one.
        chaos_seed: seed of the faults that befall the nodes; None for none.

    Raises:
        ConfigError: nodes do not run the algorithm or the outer rule.
        StartError: a process ended or stayed silent before the swarm was up.
    """
    require_on_nodes(algorithm)
    require_node_rule(config)
    check_outer(config)
    check_output_file(report_path)
    config = with_model_here(config)
    faults: Sequence[Fault] = ()
    if chaos_seed is not None:
        faults = plan_faults(chaos_seed, peers=peers, rounds=config.run.rounds)
    if keep is not None:
        make_folder(keep)
        kept = kept_manifest(home_in(keep, 0))
        if kept is not None:
            config = with_kept_digest(config, kept)
            require_same_run(config, kept, keep)
    if compare_solo:
        load_text(config.model, config.data)
    elif not is_streamed(config.data):
        load_corpus(config.data)
    display = make_display(
        config.display.mode,
        title=f"test swarm {config.run.id}: {peers} peers, {config.gossip.topology}",
        peers=peers,
        rounds=config.run.rounds,
    )
    with ExitStack() as stack:
        folder = keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gasloc-")))
        swarm = _Swarm(config, peers=peers, folder=folder.resolve(), display=display, faults=faults)
        began_s = time.monotonic()
        with display:
            run_until_asked(swarm.run, exit_with_stdin=config.node.exit_with_stdin)
        if swarm.interrupted:
            display.say("interrupted: every node has been ended")
            return INTERRUPTED_EXIT_CODE
        wall_s = time.monotonic() - began_s
        solo = None
        if compare_solo:
            display.say("training the same peers alone, for comparison")
            solo = solo_loss(config, peers=peers)
        report = _report(config, algorithm, swarm, wall_s, solo)
        finish(report, display, report_path)
        return _exit_code(swarm, display)


class _Swarm:
    """The processes of a test swarm and the folder that they write to."""

    def __init__(
        self,
        config: Config,
        *,
        peers: int,
        folder: Path,
        display: Display,
        faults: Sequence[Fault],
    ) -> None:
        self.interrupted = False
        self.run_digest = b""
        self.nodes: list[Child] = []
        self.chaos = Chaos(
            faults,
            until_round=config.run.rounds - QUIET_ROUNDS,
            pid_of=lambda index: self.nodes[index].pid,
            say=display.say,
        )
        self.identities = [Identity.derived(config.run.seed, index) for index in range(peers)]
        self._config = config
        self._display = display
        self._folder = folder

    def home(self, index: int) -> Path:
        """Return the home of a node."""
        return home_in(self._folder, index)

    async def run(self, leave: Leave) -> None:
        """Run the swarm to its end, or until `leave` is set."""
        async with asyncio.TaskGroup() as tasks:
            living = tasks.create_task(self._life())
            leaving = tasks.create_task(leave.wait())
            await asyncio.wait({living, leaving}, return_when=asyncio.FIRST_COMPLETED)
            self.interrupted = not living.done()
            living.cancel()
            leaving.cancel()

    async def _life(self) -> None:
        self._write_files()
        bootstrap = await self._start("bootstrap", "bootstrap", home=self._folder / "bootstrap")
        try:
            entry = (await self._first(bootstrap, Online)).addresses
            await self._life_of_nodes(json.dumps(entry))
        finally:
            await bootstrap.stop()

    async def _life_of_nodes(self, bootstrap: str) -> None:
        found = (
            *("start", "--config", str(self._folder / "founder.toml")),
            *("--set", f"net.bootstrap={bootstrap}"),
        )
        try:
            await self._start_node(found)
            invite = (await self._first(self.nodes[0], Invitation, index=0)).invite
            self.run_digest = parse_invite(invite).digest
            join = ("join", invite, "--config", str(self._folder / "joiner.toml"))
            for _ in self.identities[1:]:
                await self._start_node(join)
            async with asyncio.TaskGroup() as tasks:
                for index in range(len(self.nodes)):
                    tasks.create_task(self._follow(index, join if index else found))
        finally:
            async with asyncio.TaskGroup() as tasks:
                for node in self.nodes:
                    tasks.create_task(node.stop())

    async def _start_node(self, command: Sequence[str], *, again: int | None = None) -> None:
        """Start the next node, or one that has ended once more."""
        index = len(self.nodes) if again is None else again
        node = await self._start(f"peer-{index}", *command, home=self.home(index))
        self.nodes[index : index + 1] = [node]

    async def _start(self, name: str, *arguments: str, home: Path) -> Child:
        net = self._config.net
        own = (
            *(f"node.home={home}", f"net.listen={json.dumps(LOOPBACK)}"),
            *(f"net.upload_mbit={net.upload_mbit}", f"net.download_mbit={net.download_mbit}"),
        )
        local = [part for setting in own for part in ("--set", setting)]
        return await Child.start(name, (*arguments, *local), folder=self._folder)

    async def _first(self, child: Child, kind: type[E], *, index: int | None = None) -> E:
        """Return the first event of a kind; events before it are shown."""
        try:
            async with asyncio.timeout(START_DEADLINE_S):
                async for event in child.events():
                    if isinstance(event, kind):
                        return event
                    # What a founder says of its invite concerns nobody in a test swarm.
                    if index is not None and not isinstance(event, Notice):
                        self._display.observe(index, event)
        except TimeoutError:
            raise StartError(
                f"{child.name} was not up after {START_DEADLINE_S:.0f} s",
                why=child.last_words() or "it said nothing",
                fix="look at its log with --keep DIR; a very slow disk or machine can be a reason",
            ) from None
        await child.wait()
        raise StartError(
            f"{child.name} ended with exit code {child.exit_code} before the swarm was up",
            why=child.last_words() or "it said nothing",
            fix="mend what it says; --keep DIR keeps every log",
        )

    async def _follow(self, index: int, command: Sequence[str]) -> None:
        while True:
            node = self.nodes[index]
            async for event in node.events():
                self._display.observe(index, event)
                self.chaos.observe(index, event)
            exit_code = await node.wait()
            if not self.chaos.comes_back(index):
                break
            await self._start_node(command, again=index)
        if exit_code != 0:
            self._display.say(f"peer {index} ended with exit code {exit_code}")

    def _write_files(self) -> None:
        """Write the nodes' settings, and identities that a simulation derives alike."""
        self._folder.mkdir(parents=True, exist_ok=True)
        own = {"net", "display", "simulate"}
        (self._folder / "founder.toml").write_text(to_toml(self._config, skip=own))
        (self._folder / "joiner.toml").write_text(
            to_toml(self._config, skip=own.union(SHARED_SECTIONS))
        )
        for index, identity in enumerate(self.identities):
            home = self.home(index)
            home.mkdir(parents=True, exist_ok=True, mode=0o700)
            for stale in ("identity", REPORT_FILE, THETA_FILE):
                (home / stale).unlink(missing_ok=True)
            path = home / "identity"
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(identity.key_file())


def home_in(folder: Path, index: int) -> Path:
    """Return the home of the node with this index in the folder of a test swarm."""
    return folder / f"peer-{index}"


def _report(
    config: Config,
    algorithm: str,
    swarm: _Swarm,
    wall_s: float,
    solo: float | None,
) -> SwarmReport:
    torch.set_num_threads(config.node.threads)
    judge = _judge(config, swarm)
    thetas: list[Tensor] = []
    closing_thetas: list[Tensor] = []
    reports: list[PeerReport] = []
    for index, node in enumerate(swarm.nodes):
        reports.append(_peer_report(swarm, index, node.exit_code))
        left = read_thetas(swarm.home(index))
        if left is not None:
            thetas.append(left[0])
            closing_thetas.append(left[1])
    return swarm_report(
        algorithm=algorithm,
        run_digest=swarm.run_digest,
        config=config.model_dump(mode="json"),
        wall_s=wall_s,
        judge=judge,
        initial_theta=judge.theta(),
        peers=reports,
        thetas=thetas,
        closing_thetas=closing_thetas,
        solo_val_loss=solo,
        faults=swarm.chaos.reports,
        text_overlap=overlap(
            [
                units_trained_on(
                    swarm.home(index) / DATA_FOLDER,
                    sum(report.local_steps) * judge.tokens_per_step,
                )
                for index, report in enumerate(reports)
            ]
        ),
    )


def _judge(config: Config, swarm: _Swarm) -> Learner:
    """Return a learner with the held-out text of the first node."""
    peer_id = swarm.identities[0].peer_id
    text = open_text(
        config.model,
        config.data,
        folder=swarm.home(0) / DATA_FOLDER,
        seed=config.run.seed,
        peer_id=peer_id,
        say=lambda text: None,
        closing=Closing(),
    )
    return build_learner(
        config.model,
        config.data,
        config.inner,
        seed=config.run.seed,
        peer_id=peer_id,
        text=text,
        device=ON_THE_CPU.model_copy(update={"model_folder": config.device.model_folder}),
    )


def _peer_report(swarm: _Swarm, index: int, exit_code: int | None) -> PeerReport:
    """Read what a node wrote; a node that wrote nothing did no rounds that count."""
    status = -1 if exit_code is None else exit_code
    written = read_report(swarm.home(index))
    if written is None:
        return peer_report(
            peer_id=swarm.identities[index].peer_id,
            rounds=(),
            val_loss=None,
            theta_digest=None,
            exit_code=status,
        )
    return msgspec.structs.replace(written, exit_code=status)


def _exit_code(swarm: _Swarm, display: Display) -> int:
    failed = [node for node in swarm.nodes if node.exit_code != 0]
    for node in failed:
        display.say(f"{node.name} ended with exit code {node.exit_code}: {node.last_words()}")
    return 1 if failed else 0
