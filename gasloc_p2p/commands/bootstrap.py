"""`gasloc bootstrap`: a node that helps others find each other and does not train."""

from __future__ import annotations

import asyncio

from gasloc_p2p.commands.arguments import read_addresses, remove_stale_file, write_text_file
from gasloc_p2p.commands.home import home_of, open_identity
from gasloc_p2p.commands.lifetime import Leave, run_until_asked
from gasloc_p2p.config import LoadedConfig
from gasloc_p2p.display import make_display
from gasloc_p2p.net.addresses import is_loopback
from gasloc_p2p.net.contacts import CONTACTS_FILE
from gasloc_p2p.net.supervised import SupervisedNetwork
from gasloc_p2p.node.events import Notice, Online


def bootstrap(loaded: LoadedConfig) -> None:
    """Serve as an entry point until asked to end; serves any number of runs at once.

    Raises:
        GaslocError: anything that a person has to mend first.
    """
    config = loaded.config
    display = make_display(
        "plain" if config.display.mode in ("auto", "live") else config.display.mode,
        title="bootstrap",
        peers=1,
        rounds=0,
    )

    remove_stale_file(config.node.address_file)

    async def main(leave: Leave) -> None:
        home = home_of(config, "bootstrap")
        identity = open_identity(config, home)
        net = config.net.model_copy(update={"bootstrap": read_addresses(config.net.bootstrap)})
        network = await SupervisedNetwork.create(
            identity, net, contacts_file=home / CONTACTS_FILE, warn=display.say
        )
        try:
            addresses = await network.addresses()
            display.observe(0, Online(peer_id=network.peer_id, addresses=addresses))
            if config.display.mode != "json":
                for address in addresses:
                    display.say(f"nodes start with: --set net.bootstrap={address}")
            if all(is_loopback(address) for address in addresses):
                display.observe(
                    0,
                    Notice(
                        text="all addresses are loopback: only this machine can reach them; "
                        "see net.listen and net.announce"
                    ),
                )
            if config.node.address_file:
                write_text_file(config.node.address_file, ",".join(addresses))
            async with asyncio.TaskGroup() as tasks:
                supervising = tasks.create_task(network.supervise())
                await leave.wait()
                supervising.cancel()
        finally:
            await network.aclose()
            identity.close()

    with display:
        run_until_asked(main, exit_with_stdin=config.node.exit_with_stdin)
