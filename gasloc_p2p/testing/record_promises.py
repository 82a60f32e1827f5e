"""What every network promises of the store in which peers find each other."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable
from typing import Final

from blake3 import blake3

from gasloc_p2p.core.records import (
    LEASE_ROUNDS,
    Reachability,
    Record,
    RecordError,
    open_record,
    sign_record,
)
from gasloc_p2p.core.substrate import Network, PeerUnreachableError, Stream
from gasloc_p2p.net.identity import Identity
from gasloc_p2p.testing.promise import Trial, checks_of, expect

_LIFETIME_S = 600.0


async def _records_are_found_by_everybody_and_outlast_later_ones_of_others(trial: Trial) -> None:
    networks = await trial.pair()
    run_id = "test-found"
    published: list[bytes] = []
    for network in networks:
        published.append(_record_of(network, run_id))
        assert await network.publish_record(published[-1], deadline_s=trial.wait_s)
        for reader in networks:
            assert await _records(reader, run_id, trial) == sorted(published)
    assert await _records(networks[0], "test-another-run", trial) == []


async def _the_newest_record_of_a_peer_wins(trial: Trial) -> None:
    networks = await trial.pair()
    run_id = "test-newest"
    writer = networks[1]
    for seq, expected in ((2, 2), (1, 2), (3, 3)):
        signed = _record_of(writer, run_id, seq=seq)
        accepted = await writer.publish_record(signed, deadline_s=trial.wait_s)
        assert accepted == (seq == expected), f"seq {seq}: {accepted}"
        for reader in networks:
            assert [_seq(found) for found in await _records(reader, run_id, trial)] == [expected]


async def _a_forged_record_is_not_accepted(trial: Trial) -> None:
    first, second = await trial.pair()
    run_id = "test-forged"
    genuine = _record_of(first, run_id)
    assert await first.publish_record(genuine, deadline_s=trial.wait_s)
    in_anothers_name = _record_of(first, run_id, seq=9, sign=second.sign)
    damaged = genuine[:-1] + bytes([genuine[-1] ^ 1])
    for forged in (in_anothers_name, damaged, genuine[:-1], b""):
        with contextlib.suppress(RecordError):
            assert not await second.publish_record(forged, deadline_s=trial.wait_s)
        for reader in (first, second):
            assert await _records(reader, run_id, trial) == [genuine]


async def _a_manifest_is_found_by_its_run_and_digest(trial: Trial) -> None:
    networks = await trial.pair()
    run_id = "test-manifest"
    manifest = _manifest_of(run_id, padding=60_000)
    digest = blake3(manifest).digest()
    for network in networks:
        assert await network.publish_manifest(run_id, manifest, deadline_s=trial.wait_s)
    for network in networks:
        for run, wanted, found in (
            (run_id, digest, manifest),
            (run_id, bytes(32), None),
            ("test-another-run", digest, None),
        ):
            assert await network.fetch_manifest(run, wanted, deadline_s=trial.wait_s) == found


async def _after_the_end_nothing_works_and_nothing_hangs(trial: Trial) -> None:
    first = await trial.start(0)
    leaver = await trial.start(2)
    run_id = "test-after-the-end"
    manifest = _manifest_of(run_id)

    async def hang_up(stream: Stream) -> None:
        await stream.aclose()

    await first.serve("gasloc/test-hang-up/1", hang_up)
    await leaver.serve("gasloc/test-hang-up/1", hang_up)
    deadline_s = trial.prompt_s / 4
    await leaver.aclose()
    await leaver.aclose()
    async with asyncio.timeout(6 * trial.prompt_s):
        await expect(
            PeerUnreachableError,
            leaver.open_stream(first.peer_id, "gasloc/test-hang-up/1", deadline_s=deadline_s),
        )
        await expect(
            (PeerUnreachableError, TimeoutError),
            first.open_stream(leaver.peer_id, "gasloc/test-hang-up/1", deadline_s=deadline_s),
        )
        signed = _record_of(leaver, run_id)
        assert not await leaver.publish_record(signed, deadline_s=deadline_s)
        assert not await leaver.fetch_records(run_id, deadline_s=deadline_s)
        assert not await leaver.publish_manifest(run_id, manifest, deadline_s=deadline_s)
        digest = blake3(manifest).digest()
        assert await leaver.fetch_manifest(run_id, digest, deadline_s=deadline_s) is None


def _record_of(
    network: Network,
    run_id: str,
    *,
    seq: int = 1,
    sign: Callable[[bytes], bytes] | None = None,
) -> bytes:
    """Return a record of `network`'s peer; a higher `seq` expires later."""
    record = Record(
        run_id=run_id,
        peer_id=network.peer_id,
        seq=seq,
        signed_round=0,
        first_round=0,
        lease_until=LEASE_ROUNDS,
        reachability=Reachability.PUBLIC,
        cycle_s=0.0,
        expires_at=time.time() + _LIFETIME_S + seq,
    )
    return sign_record(record, sign or network.sign)


def _seq(signed: bytes) -> int:
    return open_record(signed, verify=Identity.verify).seq


async def _records(network: Network, run_id: str, trial: Trial) -> list[bytes]:
    return sorted(await network.fetch_records(run_id, deadline_s=trial.wait_s))


def _manifest_of(run_id: str, padding: int = 0) -> bytes:
    return json.dumps({"run_id": run_id, "padding": "x" * padding}).encode()


RECORD_CHECKS: Final = checks_of(
    (
        _records_are_found_by_everybody_and_outlast_later_ones_of_others,
        _the_newest_record_of_a_peer_wins,
        _a_forged_record_is_not_accepted,
        _a_manifest_is_found_by_its_run_and_digest,
        _after_the_end_nothing_works_and_nothing_hangs,
    )
)
