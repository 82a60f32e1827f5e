"""The store in which simulated peers find each other, one for each side of a partition."""

from __future__ import annotations

import bisect
from collections.abc import Iterable

from blake3 import blake3

from gasloc_p2p.core.records import Record
from gasloc_p2p.core.types import PeerId
from gasloc_p2p.simulate.links import Partition


class Store:
    """Each peer's newest record, and manifests by their digest."""

    def __init__(self) -> None:
        self._records: dict[tuple[str, PeerId], tuple[float, bytes]] = {}
        self._manifests: dict[tuple[str, bytes], bytes] = {}

    @classmethod
    def merged(cls, stores: Iterable[Store]) -> Store:
        """Return a store with all that is in `stores`, of each peer the newest record."""
        merged = cls()
        for store in stores:
            for key, (expires_at, signed) in store._records.items():
                merged._keep(key, expires_at, signed)
            merged._manifests |= store._manifests
        return merged

    def put_record(self, record: Record, signed: bytes) -> bool:
        """Replace a peer's record unless the old one expires as late, as the real store does.

        Args:
            record: what `signed` says.
            signed: its wire form.

        Returns:
            Whether the record was taken.
        """
        return self._keep((record.run_id, record.peer_id), record.expires_at, signed)

    def _keep(self, key: tuple[str, PeerId], expires_at: float, signed: bytes) -> bool:
        known = self._records.get(key)
        if known is not None and expires_at <= known[0]:
            return False
        self._records[key] = (expires_at, signed)
        return True

    def records(self, run_id: str) -> list[bytes]:
        """Return all records of a run."""
        return [signed for (run, _), (_, signed) in self._records.items() if run == run_id]

    def put_manifest(self, run_id: str, manifest: bytes) -> None:
        """Store a manifest under its digest."""
        self._manifests[run_id, blake3(manifest).digest()] = manifest

    def manifest(self, run_id: str, digest: bytes) -> bytes | None:
        """Return the manifest with this digest."""
        return self._manifests.get((run_id, digest))


class SplitStore:
    """The store as every peer finds it while partitions come and go.

    Each side goes on from what was there when it was cut off; what sides hold comes together
    when they do.

    Args:
        partitions: of the peers.
    """

    def __init__(self, partitions: Iterable[Partition]) -> None:
        self._partitions: list[Partition] = []
        self._changes_s: list[float] = []
        self._stores: dict[int, Store] = {}
        for partition in partitions:
            self.add(partition)

    def add(self, partition: Partition) -> None:
        """Take account of a partition that begins no earlier than the last call of `at`."""
        self._partitions.append(partition)
        for moment_s in (partition.from_s, partition.until_s):
            bisect.insort(self._changes_s, moment_s)

    def at(self, index: int, now_s: float) -> Store:
        """Return the store of a peer's side.

        Args:
            index: of the peer.
            now_s: virtual seconds, no earlier than at the last call.
        """
        while self._changes_s and self._changes_s[0] <= now_s:
            self._regroup(self._changes_s.pop(0))
        if index not in self._stores:
            side = self._side(index, now_s)
            fellows = (s for i, s in self._stores.items() if self._side(i, now_s) == side)
            self._stores[index] = next(fellows, None) or Store()
        return self._stores[index]

    def _regroup(self, at_s: float) -> None:
        before: dict[tuple[bool, ...], list[Store]] = {}
        for index, store in self._stores.items():
            stores = before.setdefault(self._side(index, at_s), [])
            if store not in stores:
                stores.append(store)
        after = {side: Store.merged(stores) for side, stores in before.items()}
        self._stores = {index: after[self._side(index, at_s)] for index in self._stores}

    def _side(self, index: int, at_s: float) -> tuple[bool, ...]:
        """Return what the peers that reach each other have in common."""
        return tuple(index in p.peers for p in self._partitions if p.is_active(at_s))
