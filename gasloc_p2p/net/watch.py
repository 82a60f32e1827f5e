"""Signs that a p2pd, or the place that it listens at, is of no more use."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

from gasloc_p2p.core.errors import DaemonError
from gasloc_p2p.net.addresses import is_loopback
from gasloc_p2p.net.network import Libp2pNetwork

PROBE_PERIOD_S: Final = 5.0
PROBE_DEADLINE_S: Final = 5.0
PROBES_MISSED: Final = 3

_log = logging.getLogger(__name__)


async def until_unwell(network: Libp2pNetwork, *, suspect: asyncio.Event) -> str:
    """Wait until p2pd ends, falls silent, is suspect or is elsewhere, and say which."""
    async with asyncio.TaskGroup() as tasks:
        signs = [
            tasks.create_task(_until_exit(network)),
            tasks.create_task(_until_silent(network)),
            tasks.create_task(_until_moved(network)),
            tasks.create_task(_until_suspect(suspect)),
        ]
        done, _ = await asyncio.wait(signs, return_when=asyncio.FIRST_COMPLETED)
        for sign in signs:
            sign.cancel()
    return done.pop().result()


async def addresses_of(network: Libp2pNetwork) -> tuple[str, ...]:
    """Return the addresses of p2pd; () when it does not tell, or has none."""
    try:
        return await network.addresses()
    except DaemonError as error:
        _log.debug("p2pd does not tell its addresses: %r", error)
        return ()


async def _until_exit(network: Libp2pNetwork) -> str:
    return f"the libp2p daemon ended (exit code {await network.daemon.exited()})"


async def _until_silent(network: Libp2pNetwork) -> str:
    missed = 0
    while missed < PROBES_MISSED:
        if await network.is_well(deadline_s=PROBE_DEADLINE_S):
            missed = 0
            await asyncio.sleep(PROBE_PERIOD_S)
        else:
            missed += 1
    return "the libp2p daemon does not answer"


async def _until_moved(network: Libp2pNetwork) -> str:
    """Wait until this machine has none of its addresses any more, and others instead.

    All connections are dead then, which p2pd takes most of a minute to notice.
    """
    before = _beyond_loopback(await addresses_of(network))
    while True:
        await asyncio.sleep(PROBE_PERIOD_S)
        here = _beyond_loopback(await addresses_of(network))
        if before and here and before.isdisjoint(here):
            return "this machine's address has changed"
        before = here or before


async def _until_suspect(suspect: asyncio.Event) -> str:
    await suspect.wait()
    return "the libp2p daemon takes no requests"


def _beyond_loopback(addresses: Sequence[str]) -> frozenset[str]:
    return frozenset(address for address in addresses if not is_loopback(address))
