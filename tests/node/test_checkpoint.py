"""Checkpoints come back whole or not at all, whatever happens while they are written."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from gasloc_p2p.core.errors import CheckpointError, DiskError
from gasloc_p2p.core.substrate import ModelState
from gasloc_p2p.core.types import EdgeKind
from gasloc_p2p.node.checkpoint import (
    SPARE_BYTES,
    Checkpoint,
    CheckpointStore,
    DamagedCheckpointError,
    Progress,
)
from gasloc_p2p.node.report import EdgeReport, RoundReport
from gasloc_p2p.node.sealed import PROGRESS_FILE, TENSORS_FILE, write_sealed
from tests.node.crashing import (
    CHILDREN,
    read_as_nobody_special,
    small_checkpoint,
    write_line_by_line,
    write_with_a_file_size_limit,
)


def with_progress(checkpoint: Checkpoint, **changes: Any) -> Checkpoint:
    return replace(checkpoint, progress=msgspec.structs.replace(checkpoint.progress, **changes))


def full_checkpoint(round: int) -> Checkpoint:
    """One with everything that a checkpoint can hold."""
    report = RoundReport(
        round=3,
        closing=False,
        local_steps=2,
        train_loss=5.25,
        edges=(EdgeReport(partner="b", kind=EdgeKind.LOST, reason="gone"),),
        bytes_sent=1,
        bytes_received=2,
        train_s=0.1,
        exchange_s=0.2,
        wait_s=0.3,
    )
    checkpoint = with_progress(
        small_checkpoint(round, value=0.5),
        next_sample=7,
        warmup_steps_left=2,
        companions=("peer", "b"),
        unconfirmed={"b": (3, 4)},
        reports=(report, report),
        trained_val_loss=2.5,
    )
    return replace(
        checkpoint,
        trained_theta=torch.randn(checkpoint.theta.numel()),
        model=ModelState(
            tensors={
                "exp_avg": torch.randn(3, 4).T,
                "half": torch.randn(5).bfloat16(),
                "steps": torch.tensor(2**40),
                "none": torch.zeros(0),
            },
            next_sample=7,
            warmup_steps_left=2,
        ),
    )


def assert_equal(a: Checkpoint, b: Checkpoint) -> None:
    assert a.progress == b.progress
    for left, right in [(a.theta, b.theta), (a.memory, b.memory)]:
        assert torch.equal(left, right)
    assert a.model.tensors.keys() == b.model.tensors.keys()
    for name, tensor in a.model.tensors.items():
        assert tensor.dtype == b.model.tensors[name].dtype
        assert torch.equal(tensor, b.model.tensors[name])
    assert a.model.next_sample == b.model.next_sample
    assert a.model.warmup_steps_left == b.model.warmup_steps_left
    if a.trained_theta is None or b.trained_theta is None:
        assert a.trained_theta is b.trained_theta
    else:
        assert torch.equal(a.trained_theta, b.trained_theta)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def store_with(folder: Path, *rounds: int, keep: int = 3) -> CheckpointStore:
    store = CheckpointStore(folder, keep=keep)
    for round in rounds:
        store.write(small_checkpoint(round))
    return store


# What comes back.


@pytest.mark.parametrize("checkpoint", [small_checkpoint(0), full_checkpoint(12)])
def test_everything_comes_back(tmp_path: Path, checkpoint: Checkpoint) -> None:
    store = CheckpointStore(tmp_path / "deep" / "checkpoints", keep=1)
    store.write(checkpoint)
    assert_equal(store.read(checkpoint.progress.round), checkpoint)
    found = store.read_newest()
    assert found.checkpoint is not None
    assert_equal(found.checkpoint, checkpoint)
    assert found.problems == ()


def test_the_files_are_what_their_names_say(tmp_path: Path) -> None:
    checkpoint = full_checkpoint(12)
    CheckpointStore(tmp_path, keep=1).write(checkpoint)
    folder = tmp_path / "round-00000012"
    tensors = load_file(folder / TENSORS_FILE)
    assert torch.equal(tensors["theta"], checkpoint.theta)
    assert torch.equal(tensors["model.exp_avg"], checkpoint.model.tensors["exp_avg"])
    content = json.loads((folder / PROGRESS_FILE).read_text())["content"]
    assert content["progress"]["round"] == 12
    assert content["tensors"]["bytes"] == (folder / TENSORS_FILE).stat().st_size


def test_what_was_read_does_not_need_its_files(tmp_path: Path) -> None:
    store = store_with(tmp_path, 1)
    read = store.read(1)
    with (tmp_path / "round-00000001" / TENSORS_FILE).open("r+b") as file:
        file.write(bytes(10_000))
    assert_equal(read, small_checkpoint(1))


def test_without_any_there_is_none(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        store = CheckpointStore(folder, keep=3)
        assert store.rounds() == ()
        assert store.read_newest().checkpoint is None
        assert store.read_newest().problems == ()
        with pytest.raises(DamagedCheckpointError, match="there is none"):
            store.read(3)


# Which ones are kept.


def test_the_newest_are_kept(tmp_path: Path) -> None:
    store = store_with(tmp_path, 4, 8, 12, 16, 123456789, keep=3)
    assert store.rounds() == (123456789, 16, 12)
    assert len(names_in(tmp_path)) == 3


def test_a_round_that_is_written_again_is_replaced(tmp_path: Path) -> None:
    store = store_with(tmp_path, 4, 8)
    store.write(small_checkpoint(8, value=3.0))
    assert store.rounds() == (8, 4)
    assert store.read(8).theta[0] == 3.0
    assert names_in(tmp_path) == ["round-00000004", "round-00000008"]


def test_later_rounds_of_a_course_that_was_given_up_go(tmp_path: Path) -> None:
    store = store_with(tmp_path, 4, 8, 12, keep=3)
    store.write(small_checkpoint(7))
    assert store.rounds() == (7, 4)


def test_at_most_passes_over_later_ones(tmp_path: Path) -> None:
    store = store_with(tmp_path, 4, 8, 12)
    for at_most, expected in [(12, 12), (11, 8), (8, 8), (4, 4)]:
        found = store.read_newest(at_most=at_most)
        assert found.checkpoint is not None
        assert (found.checkpoint.progress.round, found.problems) == (expected, ())
    assert store.read_newest(at_most=3).checkpoint is None
    assert store.rounds() == (12, 8, 4)


# Damage.


def flip(file: Path, position: int, bit: int) -> None:
    data = bytearray(file.read_bytes())
    data[position] ^= 1 << bit
    file.write_bytes(data)


@pytest.mark.parametrize("name", [PROGRESS_FILE, TENSORS_FILE])
def test_a_flipped_bit_anywhere_is_found(tmp_path: Path, name: str) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    store.write(small_checkpoint(1, elements=40))
    file = tmp_path / "round-00000001" / name
    for position in range(file.stat().st_size):
        flip(file, position, position % 8)
        with pytest.raises(DamagedCheckpointError, match=name):
            store.read(1)
        flip(file, position, position % 8)
    store.read(1)


def falsify(folder: Path) -> None:
    """Turn one digit in progress.json into another."""
    text = (folder / PROGRESS_FILE).read_bytes()
    flip(folder / PROGRESS_FILE, text.index(b'"round":') + len('"round":'), 1)


def cut(name: str, size: int) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / name, size)


def poison(folder: Path) -> None:
    """Write again, digests and all, with a number that is none."""
    checkpoint = small_checkpoint(12)
    checkpoint.memory[17] = torch.nan
    rewrite(folder, checkpoint.progress, memory=checkpoint.memory)


def rewrite(folder: Path, progress: Progress, **changes: torch.Tensor | None) -> None:
    """Write a folder again with other tensors, as no store would."""
    checkpoint = small_checkpoint(12)
    parts = {"theta": checkpoint.theta, "memory": checkpoint.memory, **changes}
    tensors = {name: tensor for name, tensor in parts.items() if tensor is not None}
    for file in folder.iterdir():
        file.unlink()
    write_sealed(folder, msgspec.json.encode(progress), tensors, lambda: False)


def move_from_another_round(folder: Path) -> None:
    for name in (TENSORS_FILE, PROGRESS_FILE):
        (folder.parent / "round-00000008" / name).rename(folder / name)


PROGRESS = small_checkpoint(12).progress
DAMAGE: dict[str, Callable[[Path], None]] = {
    "tensors.safetensors: 100 bytes instead of": cut(TENSORS_FILE, 100),
    "progress.json: Input data was truncated": cut(PROGRESS_FILE, 0),
    "progress.json: ": cut(PROGRESS_FILE, 200),
    "tensors.safetensors: digest differs": lambda folder: flip(folder / TENSORS_FILE, 900, 3),
    "progress.json: digest differs": falsify,
    "tensors.safetensors: No such file": lambda folder: (folder / TENSORS_FILE).unlink(),
    "progress.json: No such file": lambda folder: (folder / PROGRESS_FILE).unlink(),
    "memory has values that are not finite": poison,
    "it has the tensors theta": lambda folder: rewrite(folder, PROGRESS, memory=None),
    "it has the tensors memory, other, theta": lambda folder: rewrite(
        folder, PROGRESS, other=torch.zeros(1)
    ),
    "memory is torch.float64": lambda folder: rewrite(
        folder, PROGRESS, memory=torch.zeros(300).double()
    ),
    "memory is torch.float32 \\[299\\] beside 300": lambda folder: rewrite(
        folder, PROGRESS, memory=torch.zeros(299)
    ),
    "trained_theta is .* \\[1\\]": lambda folder: rewrite(
        folder, PROGRESS, trained_theta=torch.zeros(1)
    ),
    "it is that of round 8": move_from_another_round,
}


@pytest.mark.parametrize("why", DAMAGE)
def test_damage_is_named(tmp_path: Path, why: str) -> None:
    store = store_with(tmp_path, 8, 12)
    DAMAGE[why](tmp_path / "round-00000012")
    with pytest.raises(DamagedCheckpointError, match=why):
        store.read(12)


def test_the_one_before_a_damaged_one_is_taken_and_that_is_said(tmp_path: Path) -> None:
    store = store_with(tmp_path, 8, 11, 12)
    flip(tmp_path / "round-00000012" / TENSORS_FILE, 900, 3)
    falsify(tmp_path / "round-00000011")
    files = sum(1 for _ in tmp_path.glob("*/*"))
    found = store.read_newest()
    assert found.checkpoint is not None
    assert found.checkpoint.progress.round == 8
    assert found.problems == (
        "checkpoint of round 12 is damaged (tensors.safetensors: digest differs); "
        "going back to that of round 11",
        "checkpoint of round 11 is damaged (progress.json: digest differs); "
        "going back to that of round 8",
    )
    assert store.rounds() == (8,)
    assert sum(1 for _ in tmp_path.glob("*/*")) == files, "reading deletes nothing"
    assert store.read_newest().problems == ()


def test_with_damaged_ones_alone_there_is_none(tmp_path: Path) -> None:
    store = store_with(tmp_path, 8)
    (tmp_path / "round-00000008" / PROGRESS_FILE).unlink()
    found = store.read_newest()
    assert found.checkpoint is None
    assert found.problems == (
        "checkpoint of round 8 is damaged (progress.json: No such file or directory); "
        "there is none before it",
    )


def test_damaged_ones_do_not_count_and_one_is_kept(tmp_path: Path) -> None:
    store = store_with(tmp_path, 4, 8, 12, keep=3)
    for round in (8, 12):
        flip(tmp_path / f"round-{round:08d}" / TENSORS_FILE, 900, 3)
    assert store.read_newest().checkpoint is not None
    for round in (8, 12):
        store.write(small_checkpoint(round))
    assert store.rounds() == (12, 8, 4)
    assert sum(name.startswith("damaged-") for name in names_in(tmp_path)) == 1
    assert len(names_in(tmp_path)) == 4


def test_one_of_another_version_is_an_error_and_stays(tmp_path: Path) -> None:
    store = store_with(tmp_path, 8)
    store.write(with_progress(small_checkpoint(12), format=2))
    for read in (store.read_newest, lambda: store.read(12)):
        with pytest.raises(CheckpointError, match="has format 2; this version reads"):
            read()
    assert store.rounds() == (12, 8)


def test_a_folder_that_may_not_be_read_is_an_error(tmp_path: Path) -> None:
    store_with(tmp_path, 8)
    tmp_path.chmod(0)
    ours, its = CHILDREN.Pipe(duplex=False)
    child = CHILDREN.Process(target=read_as_nobody_special, args=(its, tmp_path))
    child.start()
    said = ours.recv()
    child.join()
    tmp_path.chmod(0o700)
    assert "may not be read" in said
    assert "Permission denied" in said


def test_a_version_with_fewer_fields_is_read(tmp_path: Path) -> None:
    store = store_with(tmp_path, 12)
    required = {field.name for field in msgspec.structs.fields(Progress) if field.required} | {
        "format"
    }
    fewer = {name: getattr(PROGRESS, name) for name in required}
    rewrite(tmp_path / "round-00000012", msgspec.convert({**msgspec.to_builtins(fewer)}, Progress))
    assert store.read(12).progress == PROGRESS


# Writing that fails.


def test_what_could_not_be_read_again_is_not_written(tmp_path: Path) -> None:
    store = store_with(tmp_path, 8)
    good = small_checkpoint(12)
    bad = [
        (replace(good, theta=good.theta / 0), "theta has values that are not finite"),
        (replace(good, memory=good.memory[:-1]), "memory is"),
        (with_progress(good, next_sample=1), "disagree about the samples"),
        (
            replace(good, model=replace(good.model, tensors={"flag": torch.zeros(2).bool()})),
            "model.flag is torch.bool",
        ),
    ]
    for checkpoint, why in bad:
        with pytest.raises(DamagedCheckpointError, match=why):
            store.write(checkpoint)
    assert names_in(tmp_path) == ["round-00000008"]


@pytest.mark.parametrize("limit_bytes", [0, 100, 1000, 3000])
def test_a_write_that_fails_half_way_leaves_the_older_ones(
    tmp_path: Path, limit_bytes: int
) -> None:
    store = store_with(tmp_path, 0, 1)
    ours, its = CHILDREN.Pipe(duplex=False)
    child = CHILDREN.Process(target=write_with_a_file_size_limit, args=(its, tmp_path, limit_bytes))
    child.start()
    assert ours.recv() == errno.EFBIG
    child.join()
    assert names_in(tmp_path) == ["round-00000000", "round-00000001"]
    assert_equal(store.read(1), small_checkpoint(1))


def test_a_disk_with_too_little_room_is_not_filled(tmp_path: Path) -> None:
    store = store_with(tmp_path, 8)
    huge = torch.zeros(1).expand(2**50)  # takes four bytes here and a few petabytes on a disk
    with pytest.raises(OSError, match=r"it needs 4,503,599,6.* MB, and the disk has") as raised:
        store.write(replace(small_checkpoint(12), theta=huge))
    assert raised.value.errno == errno.ENOSPC
    assert names_in(tmp_path) == ["round-00000008"]


def test_older_ones_make_room_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path, keep=5)
    for round in (4, 8, 12):
        store.write(small_checkpoint(round))
    whole = shutil.disk_usage(tmp_path)
    capacity_bytes = held_bytes(tmp_path)

    def usage(folder: Path) -> Any:
        return whole._replace(free=capacity_bytes - held_bytes(tmp_path) + SPARE_BYTES)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    store.require_room(small_checkpoint(16))
    store.write(small_checkpoint(16))
    assert store.rounds() == (16, 12, 8)
    huge = torch.zeros(1).expand(2**50)
    with pytest.raises(OSError, match="the disk has"):
        store.write(replace(small_checkpoint(20), theta=huge))
    assert store.rounds() == (16, 12, 8), "none goes in vain"


def held_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("round-*/*"))


def test_a_disk_without_room_for_one_is_found_before_there_is_a_folder(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "home" / "checkpoints", keep=1)
    store.require_room(small_checkpoint(0))
    huge = torch.zeros(1).expand(2**50)
    with pytest.raises(DiskError, match="no room for a checkpoint in") as raised:
        store.require_room(replace(small_checkpoint(0), theta=huge))
    assert "it needs 4,503,599,6" in raised.value.why
    assert "node.home" in raised.value.fix
    assert not (tmp_path / "home").exists()


def test_a_folder_that_is_none_is_an_os_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    store = CheckpointStore(tmp_path / "file", keep=1)
    assert store.rounds() == ()
    with pytest.raises(FileExistsError):
        store.write(small_checkpoint(1))


@pytest.mark.parametrize("pieces", [0, 1, 3])
def test_a_write_that_is_abandoned_leaves_nothing(tmp_path: Path, pieces: int) -> None:
    store = store_with(tmp_path, 8)
    asked = 0

    def abandoned() -> bool:
        nonlocal asked
        asked += 1
        return asked > pieces

    with pytest.raises(OSError, match="canceled") as raised:
        store.write(small_checkpoint(12), abandoned=abandoned)
    assert raised.value.errno == errno.ECANCELED
    assert names_in(tmp_path) == ["round-00000008"]


# Killed while writing.


class Killed:
    """A child that writes checkpoints until it is killed before its n-th line of code."""

    def __init__(self, folder: Path, rounds: Sequence[int], *, keep: int, line: int | None) -> None:
        ours, its = CHILDREN.Pipe()
        child = CHILDREN.Process(
            target=write_line_by_line, args=(its, folder, rounds), kwargs={"keep": keep}
        )
        child.start()
        its.close()
        self.written = 0
        self.lines = 0
        while self.written < len(rounds):
            said = ours.recv()
            if said is not None:
                self.written = said
                continue
            if self.lines == line:
                child.kill()
                break
            self.lines += 1
            ours.send(None)
        child.join()
        assert child.exitcode == (0 if line is None else -9)


COURSES = {"one after the other": ((4, 8, 12), 2), "the same again": ((4, 4, 4), 1)}


@pytest.mark.parametrize("course", COURSES)
def test_killed_at_any_moment_a_whole_checkpoint_is_left(tmp_path: Path, course: str) -> None:
    rounds, keep = COURSES[course]
    lines = Killed(tmp_path / "all", rounds, keep=keep, line=None).lines
    moments = sorted(random.Random(7).sample(range(lines), 30))
    left_over = set[str]()
    for line in moments:
        folder = tmp_path / str(line)
        killed = Killed(folder, rounds, keep=keep, line=line)
        left_over |= {name for name in names_in(folder) if not name.startswith("round")}
        store = CheckpointStore(folder, keep=keep)
        found = store.read_newest()
        assert found.problems == (), line
        value = 0.0 if found.checkpoint is None else found.checkpoint.theta[0].item()
        assert value in (killed.written, killed.written + 1), line
        if found.checkpoint is not None:
            assert found.checkpoint.progress.round == rounds[int(value) - 1]
        for round in store.rounds():
            assert store.read(round).progress.round == round, "one half removed shows up"
        store.write(small_checkpoint(20))
        assert len(store.rounds()) == min(keep, 1 + (value > 0)), line
        assert names_in(folder) == [f"round-{round:08d}" for round in sorted(store.rounds())]
    assert len(left_over) > 5, "many moments are in the middle of something"
