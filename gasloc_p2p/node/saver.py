"""Writing checkpoints beside the training, and what is said when that does not work."""

from __future__ import annotations

import asyncio
from functools import partial

from gasloc_p2p.core.errors import CheckpointError, DiskError, GaslocError
from gasloc_p2p.core.substrate import Compute
from gasloc_p2p.node.checkpoint import Checkpoint, CheckpointStore, DamagedCheckpointError
from gasloc_p2p.node.events import Notice, Observer


class Saver:
    """Writes the newest checkpoint that it was offered, one at a time, while training goes on.

    Memory: at most two checkpoints, the one being written and the newest one after it, which is
    16 bytes a parameter each with AdamW and an outer rule.

    Args:
        store: where they are written.
        compute: its `aside` runs the writing.
        observe: told when writing fails and when it works again.
    """

    def __init__(self, store: CheckpointStore, compute: Compute, observe: Observer) -> None:
        self._store = store
        self._compute = compute
        self._observe = observe
        self._pending: Checkpoint | None = None
        self._newest: int | None = None
        self._saved: int | None = None
        self._failures = 0
        self._why = ""
        self._is_unfit = False
        self._abandoned = False
        self._ending = False
        self._offered = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    def offer(self, checkpoint: Checkpoint) -> None:
        """Have `checkpoint` written, in the place of an earlier one whose writing has not begun."""
        self._pending = checkpoint
        self._newest = checkpoint.progress.round
        self._idle.clear()
        self._offered.set()

    async def run(self) -> None:
        """Write what is offered until cancelled; a node runs this beside its rounds."""
        rounds = await self._compute.aside(self._store.rounds)
        self._saved = rounds[0] if rounds else None
        while True:
            await self._offered.wait()
            self._offered.clear()
            while self._pending is not None:
                await self._write_pending(self._pending)
            self._idle.set()

    async def finish(self, checkpoint: Checkpoint | None, *, deadline_s: float) -> bool:
        """Write what is pending, or `checkpoint` in its place, while `run` still runs.

        Returns:
            Whether the newest checkpoint that was offered is on the disk. If the deadline has
            passed, its writing is given up and the one before it stays, which is said.
        """
        self._ending = True
        if checkpoint is not None:
            self.offer(checkpoint)
        try:
            async with asyncio.timeout(deadline_s):
                await self._idle.wait()
        except TimeoutError:
            self._abandoned = True
            self._pending = None
            self._say(
                f"the checkpoint of round {self._newest} could not be written within "
                f"{deadline_s:g} s; {self._what_stays()}"
            )
            return False
        return not self._failures

    def failure(self) -> GaslocError | None:
        """Return what to tell at the end if the newest checkpoint could not be written."""
        if not self._failures:
            return None
        what = f"the state after {self._newest} rounds could not be saved"
        stays = "there is none before it"
        if self._saved is not None:
            stays = f"the checkpoint of round {self._saved} stays"
        why = f"{self._why}; {stays}"
        then = "begins anew" if self._saved is None else "goes on from the one that stays"
        again = f"give the same command again: it {then}"
        if self._is_unfit:
            return CheckpointError(what, why=why, fix=again)
        return DiskError(what, why=why, fix=f"make room, or the folder writable, then {again}")

    async def _write_pending(self, checkpoint: Checkpoint) -> None:
        # A checkpoint that is written must not be held by anything: it is large.
        self._pending = None
        round = checkpoint.progress.round
        why = await self._compute.aside(partial(self._attempt, checkpoint))
        if self._abandoned:
            return
        self._why = why
        if not why:
            self._saved = round
            if self._failures:
                self._say(f"checkpoints can be written again; that of round {round} is saved")
            self._failures = 0
            return
        self._failures += 1
        # The first time, the second, the fourth, and so on; of the last one `failure` tells.
        if not self._ending and self._failures & (self._failures - 1) == 0:
            often = f" ({self._failures} in a row)" if self._failures > 1 else ""
            self._say(
                f"the checkpoint of round {round} could not be written{often}: {why}; "
                f"{self._what_stays()}, training goes on, and the next one is tried when it is due"
            )

    def _attempt(self, checkpoint: Checkpoint) -> str:
        """Write `checkpoint`; return why it could not be, or nothing."""
        try:
            self._store.write(checkpoint, abandoned=lambda: self._abandoned)
        except OSError as error:
            self._is_unfit = False
            return error.strerror or str(error)
        except DamagedCheckpointError as error:
            self._is_unfit = True
            return str(error)
        return ""

    def _what_stays(self) -> str:
        return (
            "there is no other one" if self._saved is None else f"that of round {self._saved} stays"
        )

    def _say(self, text: str) -> None:
        self._observe(Notice(text=text))
