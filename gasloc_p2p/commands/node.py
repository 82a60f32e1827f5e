"""`gasloc start` and `gasloc join`: one node on the real network."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from types import TracebackType

import torch

from gasloc_p2p.commands.arguments import (
    read_addresses,
    read_argument,
    remove_stale_file,
    write_text_file,
)
from gasloc_p2p.commands.beforehand import check_own, check_start
from gasloc_p2p.commands.compute import ThreadCompute, WallClock
from gasloc_p2p.commands.home import (
    checkpoints_of,
    found_or_resume,
    hold_home,
    home_of,
    keep_run,
    open_identity,
)
from gasloc_p2p.commands.learner import learner_of, training_of
from gasloc_p2p.commands.lifetime import Leave, run_until_asked
from gasloc_p2p.commands.model import check_model
from gasloc_p2p.commands.settings import tell_idle
from gasloc_p2p.commands.text import open_text, with_tokenizer_digest
from gasloc_p2p.config import SHARED_SECTIONS, Config, Layer, LoadedConfig, load
from gasloc_p2p.core.errors import ConfigError, DiskError, ManifestError
from gasloc_p2p.core.manifest import (
    MAX_ADDRESSES,
    Invite,
    Manifest,
    parse_invite,
    parse_manifest,
)
from gasloc_p2p.data.feed import Closing, Feed
from gasloc_p2p.display import make_display
from gasloc_p2p.founding import manifest_layer, pace_of, require_node_rule
from gasloc_p2p.net.addresses import is_loopback
from gasloc_p2p.net.contacts import CONTACTS_FILE
from gasloc_p2p.net.identity import Identity
from gasloc_p2p.net.supervised import SupervisedNetwork
from gasloc_p2p.node.events import Event, Invitation, Notice, Observer, Online
from gasloc_p2p.node.node import Node

MANIFEST_ATTEMPTS = 5
MANIFEST_DEADLINE_S = 5.0
MANIFEST_PAUSE_S = 1.0
TEXT_DEADLINE_S = 2.0
"""Threads that read text end at once, unless a hub keeps them waiting."""


def start(loaded: LoadedConfig) -> None:
    """Found a run and train in it until it ends or the node is asked to leave.

    Raises:
        GaslocError: anything that a person has to mend first.
    """
    require_node_rule(loaded.config)
    check_start(loaded.config)
    tell_idle(loaded)
    loaded, vocabulary = with_tokenizer_digest(loaded)
    check_model(loaded.config, vocabulary=vocabulary)
    config, manifest = found_or_resume(loaded, now_s=time.time(), vocabulary=vocabulary)
    bootstrap = read_addresses(config.net.bootstrap)
    config = _with_bootstrap(config, bootstrap)
    # Where a hub's model lies on this disk is no choice of a person's.
    own = config.model_copy(update={"device": loaded.config.device})
    # Whoever is in the home also owns the invite's file.
    hold_home(home_of(config, config.run.id))()
    open_identity(config, home_of(config, config.run.id)).close()
    remove_stale_file(config.node.invite_file)
    compute = ThreadCompute()

    async def main(leave: Leave) -> None:
        display = make_display(
            config.display.mode, title=f"run {config.run.id}", peers=1, rounds=config.run.rounds
        )
        with display:
            observe = _only_peer(display.observe)
            async with _Online(config, bootstrap=bootstrap, observe=observe) as network:
                invite = Invite(
                    run_id=config.run.id,
                    bootstrap=invite_addresses(await network.addresses(), bootstrap),
                    digest=manifest.digest,
                )
                _warn_of_loopback(invite, observe)
                home = home_of(config, config.run.id)
                await asyncio.to_thread(keep_run, home, manifest, own)
                # Reading a large model takes longer than those who join are ready to wait.
                await network.publish_manifest(
                    invite.run_id, manifest.encode(), deadline_s=MANIFEST_DEADLINE_S
                )
                observe(Invitation(invite=invite.encode()))
                if "run.id" not in loaded.origins:
                    where = config.node.home or config.run.id
                    observe(Notice(text=f"to resume this run later: gasloc resume {where}"))
                if config.node.invite_file:
                    write_text_file(config.node.invite_file, invite.encode())
                await _train(config, own, manifest, network, compute, observe, leave)

    run_until_asked(main, exit_with_stdin=config.node.exit_with_stdin)
    compute.end_process()


def join(invite_text: str, layers: Sequence[Layer]) -> None:
    """Join the run that an invite names and train in it.

    Args:
        invite_text: an invite, or @FILE to read it from a file.
        layers: this machine's own settings; shared ones come from the run's manifest.

    Raises:
        GaslocError: anything that a person has to mend first.
    """
    invite = parse_invite(read_argument(invite_text))
    own = load(_local_only(layers)).config
    check_own(own, home_of(own, invite.run_id))
    compute = ThreadCompute()

    async def main(leave: Leave) -> None:
        # Until the manifest is here, nobody knows how many rounds a live table would have.
        early = make_display(
            "json" if own.display.mode == "json" else "plain", title="", peers=1, rounds=0
        )
        early.say(f"joining run {invite.run_id}")
        bootstrap = tuple(dict.fromkeys(invite.bootstrap + read_addresses(own.net.bootstrap)))
        online = _Online(
            own,
            bootstrap=bootstrap,
            observe=lambda event: None if isinstance(event, Online) else early.observe(0, event),
            run_id=invite.run_id,
        )
        async with online as network:
            manifest = await _fetch_manifest(network, invite)
            loaded = load([manifest_layer(manifest), *layers])
            config = _with_bootstrap(loaded.config, bootstrap)
            require_node_rule(config)
            await asyncio.to_thread(check_model, config)
            tell_idle(loaded)
            display = make_display(
                config.display.mode,
                title=f"run {config.run.id}",
                peers=1,
                rounds=config.run.rounds,
            )
            with display:
                online.observe = _only_peer(display.observe)
                display.observe(
                    0, Online(peer_id=network.peer_id, addresses=await network.addresses())
                )
                observe = _only_peer(display.observe)
                await _train(config, config, manifest, network, compute, observe, leave)

    run_until_asked(main, exit_with_stdin=own.node.exit_with_stdin)
    compute.end_process()


def _with_bootstrap(config: Config, addresses: tuple[str, ...]) -> Config:
    net = config.net.model_copy(update={"bootstrap": addresses})
    return config.model_copy(update={"net": net})


def _only_peer(observe: Callable[[int, Event], None]) -> Observer:
    return lambda event: observe(0, event)


def _local_only(layers: Sequence[Layer]) -> Sequence[Layer]:
    """Refuse shared settings, which only the founder of a run chooses."""
    for layer in layers:
        for key in layer.values:
            if key.partition(".")[0] in SHARED_SECTIONS:
                raise ConfigError(
                    f"{key} cannot be set when joining ({layer.name})",
                    why="every peer of a run shares it; it comes with the run's manifest",
                    fix="remove it, or found a run of your own with `gasloc start`",
                )
    return layers


class _Online:
    """The node's network, from identity to close, as an async context manager.

    It is supervised for as long as it is entered: what is inside ends with a `DaemonError` when
    p2pd cannot be brought back.

    Attributes:
        observe: told that the node is online, and later what supervision has to say.
    """

    def __init__(
        self,
        config: Config,
        *,
        bootstrap: tuple[str, ...],
        observe: Observer,
        run_id: str = "",
    ) -> None:
        self._config = config
        self._bootstrap = bootstrap
        self._home = home_of(config, run_id or config.run.id)
        self._undo = AsyncExitStack()
        self.observe = observe

    async def __aenter__(self) -> SupervisedNetwork:
        async with AsyncExitStack() as undo:
            undo.callback(hold_home(self._home))
            identity = open_identity(self._config, self._home)
            undo.callback(identity.close)
            network = await SupervisedNetwork.create(
                identity,
                self._config.net.model_copy(update={"bootstrap": self._bootstrap}),
                contacts_file=self._home / CONTACTS_FILE,
                warn=lambda text: self.observe(Notice(text=text)),
            )
            undo.push_async_callback(network.aclose)
            self.observe(Online(peer_id=network.peer_id, addresses=await network.addresses()))
            tasks = await undo.enter_async_context(asyncio.TaskGroup())
            undo.callback(tasks.create_task(network.supervise()).cancel)
            self._undo = undo.pop_all()
        return network

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        return await self._undo.__aexit__(kind, error, trace)


def invite_addresses(own: Sequence[str], bootstrap: Sequence[str]) -> tuple[str, ...]:
    """Choose the addresses of an invite: those that others can reach first, no more than fit."""
    every = dict.fromkeys((*bootstrap, *own))
    return tuple(sorted(every, key=is_loopback))[:MAX_ADDRESSES]


def _warn_of_loopback(invite: Invite, observe: Observer) -> None:
    if all(is_loopback(address) for address in invite.bootstrap):
        observe(
            Notice(
                text="the invite names loopback addresses only, so it works on this machine "
                "alone; for others: --set net.listen=/ip4/0.0.0.0/tcp/PORT and, behind a router "
                "that forwards PORT, --set net.announce=/ip4/PUBLIC-ADDRESS/tcp/PORT"
            )
        )


async def _fetch_manifest(network: SupervisedNetwork, invite: Invite) -> Manifest:
    for attempt in range(MANIFEST_ATTEMPTS):
        if attempt:
            await asyncio.sleep(MANIFEST_PAUSE_S)
        data = await network.fetch_manifest(
            invite.run_id, invite.digest, deadline_s=MANIFEST_DEADLINE_S
        )
        if data is not None:
            return parse_manifest(data, invite.digest)
    raise ManifestError(
        f"nobody in the swarm has the manifest of run {invite.run_id}",
        why="the bootstrap answered, but no peer of this run is there, or the run is over",
        fix="ask the founder whether the run is still on, and for a fresh invite",
    )


async def _train(
    config: Config,
    own: Config,
    manifest: Manifest,
    network: SupervisedNetwork,
    compute: ThreadCompute,
    observe: Observer,
    leave: Leave,
) -> None:
    torch.set_num_threads(config.node.threads)
    home = home_of(config, config.run.id)
    closing = Closing()
    loop = asyncio.get_running_loop()

    def notice(text: str) -> None:
        loop.call_soon_threadsafe(observe, Notice(text=text))

    try:
        config, text = await open_text(
            config, home=home, peer_id=network.peer_id, observe=observe, closing=closing
        )
        async with learner_of(config, text, network.peer_id, compute, notice) as learner:
            # A home is that of a run only once its text and its model are fit for it.
            await compute.aside(lambda: keep_run(home, manifest, own))
            if isinstance(learner.samples, Feed):
                compute.wait_for_text(partial(learner.samples.ready, learner.windows))
            observe(training_of(config, learner))
            node = Node(
                config=config,
                manifest=manifest,
                network=network,
                clock=WallClock(),
                compute=compute,
                learner=learner,
                pace=pace_of(config, manifest),
                verify=Identity.verify,
                observe=observe,
                checkpoints=checkpoints_of(config, home),
            )
            result = await node.run(leave)
        try:
            written = await compute.aside(lambda: result.write(home))
        except DiskError as error:
            raise result.unsaved or error from error
        if not written:
            observe(Notice(text=f"it left before its first round; the results in {home} stay"))
        elif config.display.mode != "json":
            observe(Notice(text=f"results: {home}"))
        if result.unsaved is not None:
            raise result.unsaved
    finally:
        closing.close()
        compute.close()
        await asyncio.to_thread(closing.join, deadline_s=TEXT_DEADLINE_S)
