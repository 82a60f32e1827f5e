"""Checkpoints, from which a node goes on exactly where it was; no crash leaves it without one.

    round-00000012/
        tensors.safetensors   theta, the outer rule's memory, the moments of the inner optimizer
        progress.json         all the rest, the size and digest of the other file, its own digest

A checkpoint is written beside the others under a hidden name, flushed to the disk, and renamed.
Nothing is unpickled, and nothing is taken over that does not pass its digests and checks.
Source: docs/design.md section 6.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import msgspec
import torch
from torch import Tensor

from gasloc_p2p.core.errors import CheckpointError
from gasloc_p2p.core.guard import GuardState
from gasloc_p2p.core.substrate import ModelState
from gasloc_p2p.core.types import PeerId
from gasloc_p2p.core.vectors import is_finite
from gasloc_p2p.node.disk import lacking, needless, require_room
from gasloc_p2p.node.report import RoundReport
from gasloc_p2p.node.sealed import (
    DTYPE_NAMES,
    DamagedFileError,
    read_sealed,
    sync_folder,
    write_sealed,
)

FORMAT: Final = 1
"""Version of what is written here; a node refuses checkpoints of another one."""
SPARE_BYTES: Final = 1 << 20
"""Room beyond the tensors that a checkpoint is taken to need: headers, folders, whole blocks."""

_PLACE = re.compile(r"round-(\d{8,})(?:\.old)?")
_OLD = ".old"
_WRITING = ".writing-"
_REMOVING = ".removing-"
_DAMAGED = "damaged-"
_MODEL = "model."
"""Prefix of the tensors of a `ModelState` among those of a checkpoint."""


class DamagedCheckpointError(Exception):
    """A checkpoint is not whole, or not fit to be written; the message says why in a phrase."""


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """All of a checkpoint but its tensors. A field that is added later needs a default.

    Attributes:
        run_id, run_digest: the run, and the digest of its manifest.
        schema_digest: what theta holds; `LocalModel.schema_digest`.
        peer_id: whose checkpoint it is.
        round: the next round to run; theta is that of its start.
        next_sample, warmup_steps_left: those of the `ModelState` beside this.
        written_unix_s: when it was made, seconds since the Unix epoch.
        companions: the roster of that round.
        unconfirmed: rounds that were mixed without hearing whether the partner did, by partner.
        guard: what is remembered of others' conduct, and of how far apart peers usually are.
        reports: the rounds so far.
        trained_val_loss: validation loss after the last training round; None before its end.
        format: version of the checkpoint's format.
    """

    run_id: str
    run_digest: bytes
    schema_digest: bytes
    peer_id: PeerId
    round: int
    next_sample: int
    warmup_steps_left: int
    written_unix_s: float
    companions: tuple[PeerId, ...] = ()
    unconfirmed: dict[PeerId, tuple[int, ...]] = {}
    guard: GuardState = GuardState()
    reports: tuple[RoundReport, ...] = ()
    trained_val_loss: float | None = None
    format: int = FORMAT


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Checkpoint:
    """A node's state at the start of a round. Its tensors may not change while it is written.

    Attributes:
        progress: all but the tensors.
        theta: parameters, fp32 [P].
        memory: what the outer rule remembers, fp32 [P].
        model: state of the inner optimizer and of the data cursor.
        trained_theta: parameters after the last training round, fp32 [P]; None before its end.
        stepped: how far the last outer step went, fp32 [blocks], for codecs that ask for it.
    """

    progress: Progress
    theta: Tensor
    memory: Tensor
    model: ModelState
    trained_theta: Tensor | None = None
    stepped: Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What a search for the newest checkpoint came to.

    Attributes:
        checkpoint: the newest whole one; None when there is none.
        problems: one sentence for each damaged one that was passed over.
    """

    checkpoint: Checkpoint | None
    problems: tuple[str, ...]


class CheckpointStore:
    """The checkpoints of one node in a folder of their own.

    One process uses it, one call at a time. All calls block on files.

    Args:
        folder: where they are; made when the first one is written.
        keep: how many are kept, the newest ones; at least 1.
    """

    def __init__(self, folder: Path, *, keep: int) -> None:
        self._folder = folder
        self._keep = keep

    def rounds(self) -> tuple[int, ...]:
        """Return the rounds of which there is a checkpoint, newest first; it may be damaged.

        Raises:
            CheckpointError: the folder may not be read.
        """
        return tuple(sorted({round for round, _ in self._places()}, reverse=True))

    def read(self, round: int) -> Checkpoint:
        """Return the checkpoint of `round`.

        Raises:
            DamagedCheckpointError: it is damaged, or there is none.
            CheckpointError: it may not be read, or has the format of another version.
        """
        for found, place in self._places():
            if found == round:
                return _read(place, round)
        raise DamagedCheckpointError("there is none")

    def read_newest(self, *, at_most: int | None = None) -> Found:
        """Return the newest whole checkpoint, of round `at_most` at most.

        Damaged ones are renamed so that they are not tried again; nothing is deleted.

        Raises:
            CheckpointError: one may not be read, or has the format of another version.
        """
        places = [place for place in self._places() if at_most is None or place[0] <= at_most]
        problems: list[str] = []
        for number, (round, place) in enumerate(places, start=1):
            try:
                return Found(checkpoint=_read(place, round), problems=tuple(problems))
            except DamagedCheckpointError as damage:
                then = "there is none before it"
                if number < len(places):
                    then = f"going back to that of round {places[number][0]}"
                problems.append(f"checkpoint of round {round} is damaged ({damage}); {then}")
                _set_aside(place)
        return Found(checkpoint=None, problems=tuple(problems))

    def require_room(self, checkpoint: Checkpoint) -> None:
        """Refuse to begin where not even one checkpoint like this one can be kept.

        Raises:
            DiskError: there is none, and no room for it.
        """
        if not self.rounds():
            require_room(_needed_bytes(checkpoint), self._folder)

    def write(
        self, checkpoint: Checkpoint, *, abandoned: Callable[[], bool] = lambda: False
    ) -> None:
        """Write `checkpoint`; then remove those beyond `keep`, and those of later rounds.

        Later ones belong to a course that this node went back from. Until the last step has
        succeeded all others stay as they are, or on a full disk at least the newest one.

        Args:
            abandoned: asked now and then from this thread; once it says yes, writing stops.

        Raises:
            OSError: it could not be written, or was abandoned (ECANCELED); the disk may be full.
            DamagedCheckpointError: it is not fit to be read again.
        """
        if not self._folder.is_dir():
            self._folder.mkdir(parents=True, mode=0o700)
            sync_folder(self._folder.parent)
        self._sweep()
        needed_bytes = _needed_bytes(checkpoint)
        for place in needless(self._places()[:0:-1], needed_bytes, self._folder):
            _remove(place)
        if why := lacking(needed_bytes, self._folder):
            raise OSError(errno.ENOSPC, why, str(self._folder))
        _refuse_unfit(checkpoint)
        with TemporaryDirectory(
            dir=self._folder, prefix=_WRITING, ignore_cleanup_errors=True
        ) as name:
            folder = Path(name)
            progress = msgspec.json.encode(checkpoint.progress)
            write_sealed(folder, progress, _tensors_of(checkpoint), abandoned)
            self._put_in_place(folder, checkpoint.progress.round)
        self._prune(checkpoint.progress.round)

    def _places(self) -> list[tuple[int, Path]]:
        """Every checkpoint with its round, newest first, each before the one that it replaces."""
        try:
            names = os.listdir(self._folder)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except PermissionError as error:
            raise _unreadable(self._folder, error) from None
        found = [(match, name) for name in names if (match := _PLACE.fullmatch(name))]
        places = [(int(match[1]), self._folder / name) for match, name in found]
        return sorted(places, key=lambda place: (-place[0], place[1].name))

    def _put_in_place(self, folder: Path, round: int) -> None:
        """Give a written checkpoint its name; one that it replaces can be read until it has it."""
        place = self._folder / f"round-{round:08d}"
        if place.exists():
            replaced = place.with_name(place.name + _OLD)
            _remove(replaced)
            place.rename(replaced)
        folder.rename(place)
        sync_folder(self._folder)

    def _prune(self, written: int) -> None:
        """Remove what the checkpoint of round `written` made needless."""
        kept = [round for round in self.rounds() if round <= written][: self._keep]
        for round, place in self._places():
            is_replaced = place.name.endswith(_OLD) and place.with_suffix("").exists()
            if round not in kept or is_replaced:
                _remove(place)
        damaged = self._folder.glob(f"{_DAMAGED}*")
        for place in sorted(damaged, key=lambda place: place.stat().st_mtime)[:-1]:
            _remove(place)

    def _sweep(self) -> None:
        """Remove what killed processes left."""
        for prefix in (_WRITING, _REMOVING):
            for left in self._folder.glob(f"{prefix}*"):
                shutil.rmtree(left, ignore_errors=True)


def _needed_bytes(checkpoint: Checkpoint) -> int:
    return sum(tensor.nbytes for tensor in _tensors_of(checkpoint).values()) + SPARE_BYTES


class _AnyProgress(msgspec.Struct, frozen=True, kw_only=True):
    """What is the same in the `Progress` of every version."""

    format: int


def _read(folder: Path, round: int) -> Checkpoint:
    """Return the checkpoint in `folder`, which should be that of `round`.

    Raises:
        DamagedCheckpointError: it is not, or it is damaged.
        CheckpointError: it may not be read, or has the format of another version.
    """
    try:
        text, tensors = read_sealed(folder)
        progress = _progress(text, folder)
    except PermissionError as error:
        raise _unreadable(folder, error) from None
    except (DamagedFileError, msgspec.DecodeError) as error:
        raise DamagedCheckpointError(str(error)) from None
    checkpoint = _assembled(progress, tensors)
    _refuse_unfit(checkpoint)
    if progress.round != round:
        raise DamagedCheckpointError(f"it is that of round {progress.round}")
    return checkpoint


def _progress(text: msgspec.Raw, folder: Path) -> Progress:
    """Return what the JSON in a checkpoint says.

    Raises:
        msgspec.DecodeError: it is not what was written.
        CheckpointError: it has the format of another version.
    """
    found = msgspec.json.decode(text, type=_AnyProgress).format
    if found != FORMAT:
        raise CheckpointError(
            f"the checkpoint {folder} was written by another version of gasloc-p2p",
            why=f"it has format {found}; this version reads and writes format {FORMAT}",
            fix="use the version that wrote it, or move its folder away to go on without it",
        )
    return msgspec.json.decode(text, type=Progress)


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"a checkpoint may not be read: {path}",
        why=f"{error.strerror or error}; to start anew in its place would lose what it holds",
        fix="make it readable for this user, or move it away to go on without it",
    )


def _tensors_of(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Return every tensor of a checkpoint by its name in the file."""
    tensors = {"theta": checkpoint.theta, "memory": checkpoint.memory}
    if checkpoint.trained_theta is not None:
        tensors["trained_theta"] = checkpoint.trained_theta
    if checkpoint.stepped is not None:
        tensors["stepped"] = checkpoint.stepped
    return tensors | {_MODEL + name: part for name, part in checkpoint.model.tensors.items()}


def _assembled(progress: Progress, tensors: dict[str, Tensor]) -> Checkpoint:
    """Return the checkpoint whose `_tensors_of` are `tensors`.

    Raises:
        DamagedCheckpointError: one is missing, or there is one that has no place.
    """
    model = {
        name.removeprefix(_MODEL): tensors.pop(name)
        for name in list(tensors)
        if name.startswith(_MODEL)
    }
    if not {"theta", "memory"} <= tensors.keys() <= {"theta", "memory", "trained_theta", "stepped"}:
        raise DamagedCheckpointError(f"it has the tensors {', '.join(sorted(tensors))}")
    return Checkpoint(
        progress=progress,
        theta=tensors["theta"],
        memory=tensors["memory"],
        model=ModelState(
            tensors=model,
            next_sample=progress.next_sample,
            warmup_steps_left=progress.warmup_steps_left,
        ),
        trained_theta=tensors.get("trained_theta"),
        stepped=tensors.get("stepped"),
    )


def _refuse_unfit(checkpoint: Checkpoint) -> None:
    """Check what digests do not tell: shapes, dtypes, and that all numbers are numbers.

    Raises:
        DamagedCheckpointError: something does not fit.
    """
    progress, model, like = checkpoint.progress, checkpoint.model, checkpoint.theta
    counts = (model.next_sample, model.warmup_steps_left)
    if counts != (progress.next_sample, progress.warmup_steps_left):
        raise DamagedCheckpointError("its parts disagree about the samples or the warm-up")
    tensors = _tensors_of(checkpoint)
    for name, tensor in tensors.items():
        if (
            not name.startswith(_MODEL)
            and (tensor.dtype != torch.float32 or tensor.dim() != 1 or tensor.shape != like.shape)
            and name != "stepped"
        ):
            raise DamagedCheckpointError(
                f"{name} is {tensor.dtype} {list(tensor.shape)} beside {like.numel()} parameters"
            )
        if tensor.dtype not in DTYPE_NAMES:
            raise DamagedCheckpointError(f"{name} is {tensor.dtype}")
        if not is_finite(tensor):
            raise DamagedCheckpointError(f"{name} has values that are not finite")


def _set_aside(place: Path) -> None:
    """Rename a damaged checkpoint; where that is not possible it is passed over each time."""
    with suppress(OSError):
        place.rename(place.with_name(f"{_DAMAGED}{place.name}-{secrets.token_hex(4)}"))


def _remove(place: Path) -> None:
    """Remove a checkpoint at once as others see it; what is left is swept up by the next write."""
    removing = place.with_name(f"{_REMOVING}{secrets.token_hex(4)}")
    with suppress(OSError):
        place.rename(removing)
        shutil.rmtree(removing, ignore_errors=True)
