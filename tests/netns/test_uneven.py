"""One slow link among four nodes: its peer takes part, and edges between the others hold."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from gasloc_p2p.core.types import EdgeKind
from tests.netns import star as stars
from tests.netns.uneven import MODES, Mode, measure

pytestmark = [
    pytest.mark.p2p,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(stars.why_not()), reason=stars.why_not()),
]

LISTEN = (
    "import socket, sys; s = socket.create_server((sys.argv[1], 0)); "
    "print(s.getsockname()[1], flush=True); c, (host, _) = s.accept(); c.sendall(host.encode())"
)
DIAL = (
    "import socket, sys; c = socket.create_connection((sys.argv[1], int(sys.argv[2]))); "
    "print(c.recv(99).decode())"
)


def namespaces() -> str:
    """Return the names of all network namespaces."""
    return subprocess.run(
        ["ip", "netns", "list"], capture_output=True, text=True, check=True
    ).stdout


@pytest.mark.parametrize("mode", MODES, ids=[mode.name for mode in MODES])
async def test_a_peer_behind_a_slow_link_takes_part_and_fails_no_edge_of_others(
    mode: Mode, tmp_path: Path
) -> None:
    before = namespaces()
    measured = await measure(mode, tmp_path)
    assert namespaces() == before
    assert list(measured.exit_codes) == [0] * 4
    slow = measured.slow
    assert slow.mixed, "the slow peer exchanges"
    assert slow.steps > 0, "and trains"
    for node in measured.fast:
        among_fast = [edge for edge in node.edges if edge.partner != slow.peer_id]
        assert among_fast, "fast peers meet each other"
        assert {edge.kind for edge in among_fast} == {EdgeKind.APPLIED}
        # Whose link is busy with an earlier round declines.
        assert {edge.kind for edge in node.edges} <= {EdgeKind.APPLIED, EdgeKind.NOT_PARTNER}
    assert any(edge.partner == slow.peer_id for node in measured.fast for edge in node.mixed)


async def test_ends_reach_each_other_at_their_rates_and_everything_is_removed() -> None:
    before = namespaces()

    async def use_in_a_hurry() -> None:
        async with stars.star([10.0, 1.0]) as machines:
            await asyncio.to_thread(use, machines)
            raise InterruptedError

    with pytest.raises(InterruptedError):
        await use_in_a_hurry()
    assert namespaces() == before


def use(machines: stars.Star) -> None:
    for end, rate in ((0, "10Mbit"), (1, "1Mbit")):
        queues = ("tc", "qdisc", "show", "dev", "eth0")
        said = subprocess.check_output([*machines.inside(end), *queues], text=True)
        assert f" rate {rate} " in said
    listen = [*machines.inside(1), sys.executable, "-c", LISTEN, machines.address(1)]
    with subprocess.Popen(listen, stdout=subprocess.PIPE, text=True) as listening:
        assert listening.stdout is not None
        port = listening.stdout.readline().strip()
        dial = [*machines.inside(0), sys.executable, "-c", DIAL, machines.address(1), port]
        assert subprocess.check_output(dial, text=True).strip() == machines.address(0)
