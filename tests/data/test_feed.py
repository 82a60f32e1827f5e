"""Samples from a stream: their order, the buffer, restarts, and what a hub does to all that."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from gasloc_p2p.core.errors import DataError
from gasloc_p2p.data.feed import Closing
from gasloc_p2p.data.order import is_held_out
from gasloc_p2p.data.patience import ClosedError, Patience
from gasloc_p2p.data.shelf import INDEX, Shelf
from gasloc_p2p.train.learner import Learner
from gasloc_p2p.train.model import build_model
from gasloc_p2p.train.samples import Samples
from gasloc_p2p.train.settings import InnerConfig
from tests.data.following import HELD_OUT, LENGTH, WINDOWS, following, same
from tests.data.hub import MockHub
from tests.data.texts import SHARDS, documents, write_json_lines, write_parquet, write_usual

BATCHES = 30
"""More than once through the usual data set."""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_usual(tmp_path / "source")
    return tmp_path / "source"


@pytest.fixture
def hub(source: Path) -> Iterator[MockHub]:
    with MockHub(source).served() as served:
        yield served


@pytest.fixture
def undisturbed(source: Path, tmp_path: Path) -> list[Tensor]:
    with following(source, tmp_path / "undisturbed") as peer:
        return peer.windows(BATCHES)


class Recorded:
    """Samples that remember what was drawn."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples
        self.drawn: list[Tensor] = []

    @property
    def next_sample(self) -> int:
        return self.samples.next_sample

    @next_sample.setter
    def next_sample(self, sample: int) -> None:
        self.samples.next_sample = sample

    def batch(self, windows: int) -> Tensor:
        self.drawn.append(self.samples.batch(windows))
        return self.drawn[-1]


def learner_of(samples: Samples) -> Learner:
    return Learner(
        build_model("nano", 3),
        samples,
        torch.zeros(1, LENGTH + 1, dtype=torch.int64),
        InnerConfig(batch_size=WINDOWS),
    )


def test_training_survives_a_bad_hub_and_a_restart_without_losing_or_doubling_a_sample(
    hub: MockHub, tmp_path: Path, undisturbed: list[Tensor]
) -> None:
    with following(hub.folder, tmp_path / "calm") as peer:
        calm = learner_of(peer.feed)
        losses = [calm.step(1e-3) for _ in range(BATCHES)]

    hub.script.extend(["429", "ok", "cut", "dribble", "503", "503", "cut", "ok", "dribble"] * 5)
    with following(hub, tmp_path / "home") as peer:
        first = Recorded(peer.feed)
        learner = learner_of(first)
        found = [learner.step(1e-3) for _ in range(9)]
        saved, theta = learner.state(), learner.theta()
        # What comes after the checkpoint is done again after the restart.
        found_again = [learner.step(1e-3) for _ in range(4)]
        assert set(hub.done) == {"429", "ok", "cut", "dribble", "503"}
        said = "\n".join(peer.said)
        assert 7.0 in peer.pauses_s
    for words in ("(429)", "hardly anything", "was cut", "out of order (503)"):
        assert words in said
    with following(hub, tmp_path / "home") as peer:
        second = Recorded(peer.feed)
        learner = learner_of(second)
        learner.load(theta)
        learner.restore(saved)
        found += [learner.step(1e-3) for _ in range(BATCHES - 9)]

    assert found == losses
    assert found[9:13] == found_again
    assert torch.equal(learner.theta(), calm.theta())
    assert same(first.drawn[:9] + second.drawn, undisturbed)


async def test_training_goes_on_from_the_buffer_while_the_hub_is_out_and_over_a_restart(
    hub: MockHub, tmp_path: Path, undisturbed: list[Tensor]
) -> None:
    out = threading.Event()
    with following(hub, tmp_path / "home") as peer:
        await peer.feed.ready(WINDOWS * BATCHES)
        hub.down = True
        assert same(peer.windows(5), undisturbed[:5])
    hub.down = False
    with following(hub, tmp_path / "home", hold=out.set) as peer:
        hub.down = True
        peer.feed.next_sample = 2 * WINDOWS
        assert same(peer.windows(BATCHES - 2), undisturbed[2:])
        # Beyond what was read ahead it waits, and says so.
        waiting = threading.Thread(target=peer.windows, args=(60,))
        waiting.start()
        assert out.wait(30)
        assert any("out of order (503)" in said for said in peer.said)
        hub.down = False
        waiting.join(30)
        assert not waiting.is_alive()


async def test_waiting_for_text_leaves_the_event_loop_free_and_says_so(
    hub: MockHub, tmp_path: Path
) -> None:
    hub.script.extend(["503"] * 3)
    with following(hub, tmp_path / "home") as peer:
        await peer.feed.ready(WINDOWS)
        assert peer.feed.batch(WINDOWS).shape == (WINDOWS, LENGTH + 1)
    assert any("the text buffer is empty" in said for said in peer.said)
    assert any("training goes on after" in said for said in peer.said)


def test_samples_cover_the_stream_without_gaps(source: Path, tmp_path: Path) -> None:
    with following(source, tmp_path / "home") as peer:
        windows = torch.cat(peer.windows(6))
        read = peer.shelf.entries
        stream = torch.cat(
            [torch.from_numpy(peer.shelf.load(n).astype(np.int64)) for n in range(len(read))]  # type: ignore[union-attr]  # they are there
        )
    for k, window in enumerate(windows):
        assert torch.equal(window, stream[k * LENGTH : (k + 1) * LENGTH + 1])


def texts_of(windows: list[Tensor]) -> set[str]:
    """The documents that lie in the windows as a whole."""
    rows = torch.cat(windows)
    stream = bytes(torch.cat([rows[0, :1], rows[:, 1:].flatten()]).tolist())
    return {text.decode() for text in stream.split(b"\0")[1:-1]}


def test_every_document_is_trained_on_but_those_held_out(source: Path, tmp_path: Path) -> None:
    everything = {text for shard in range(SHARDS) for text in documents(shard)}
    held_out = {text for text in everything if is_held_out(text.encode(), HELD_OUT)}
    assert 0 < len(held_out) < len(everything) / 3
    with following(source, tmp_path / "home") as peer:
        seen = texts_of(peer.windows(200))
        assert peer.shelf.entries[-1].place.lap >= 2
    with following(source, tmp_path / "judge") as judge:
        judged = judge.stream.read_held_out(10**6).tobytes().split(b"\0")
    assert seen == everything - held_out
    assert {text.decode() for text in judged if text} == held_out


def test_a_copy_of_a_held_out_document_in_another_shard_is_held_out_too(tmp_path: Path) -> None:
    for shard in range(2):
        write_parquet(tmp_path / "source" / f"{shard}.parquet", documents(0, 40))
    with following(tmp_path / "source", tmp_path / "home") as peer:
        seen = texts_of(peer.windows(30))
    assert seen == {text for text in documents(0, 40) if not is_held_out(text.encode(), HELD_OUT)}


def test_peers_seeds_and_laps_have_orders_of_their_own(source: Path, tmp_path: Path) -> None:
    for shard in range(SHARDS, 12):
        write_parquet(source / "data" / f"part-{shard}.parquet", documents(shard))
    orders = []
    for peer_id, seed in (("a", 1), ("b", 1), ("a", 2)):
        home = tmp_path / f"{peer_id}{seed}"
        with following(source, home, peer_id=peer_id, seed=seed) as peer:
            peer.feed.batch(1200)
            names = [(entry.place.lap, entry.name) for entry in peer.shelf.entries]
        orders += [[name for lap, name in names if lap == wanted] for wanted in (0, 1)]
    assert len({tuple(order) for order in orders}) == len(orders)
    assert len({frozenset(order) for order in orders}) == 1


def test_the_order_does_not_depend_on_where_or_in_which_order_files_were_written(
    tmp_path: Path, undisturbed: list[Tensor]
) -> None:
    for shard in reversed(range(SHARDS)):
        write_parquet(tmp_path / "else" / "data" / f"part-{shard}.parquet", documents(shard))
    with following(tmp_path / "else", tmp_path / "home") as peer:
        assert same(peer.windows(BATCHES), undisturbed)


@pytest.mark.parametrize("harm", ["gone", "torn", "changed"])
def test_without_its_index_the_stream_is_read_again_with_the_same_result(
    source: Path, tmp_path: Path, undisturbed: list[Tensor], harm: str
) -> None:
    with following(source, tmp_path / "home") as peer:
        peer.windows(10)
    entries = peer.shelf.entries
    index = tmp_path / "home" / INDEX
    text = index.read_bytes()
    if harm == "gone":
        index.unlink()
    else:
        index.write_bytes(text[:-9] if harm == "torn" else text.replace(b"1", b"2", 1))
    assert len(Shelf(tmp_path / "home").entries) == (len(entries) - 1 if harm == "torn" else 0)
    with following(source, tmp_path / "home") as peer:
        peer.feed.next_sample = 10 * WINDOWS
        assert same(peer.windows(BATCHES - 10), undisturbed[10:])
    again = Shelf(tmp_path / "home").entries
    assert len(again) > 10
    assert all(one == other for one, other in zip(again, entries, strict=False))


async def test_a_damaged_part_of_the_buffer_is_read_again(
    source: Path, tmp_path: Path, undisturbed: list[Tensor]
) -> None:
    with following(source, tmp_path / "home") as peer:
        await peer.feed.ready(WINDOWS * BATCHES)
        for unit in (tmp_path / "home").glob("unit-????????"):
            data = bytearray(unit.read_bytes())
            data[-1] ^= 1
            unit.write_bytes(data)
        assert same(peer.windows(BATCHES), undisturbed)
    assert any("damaged on the disk" in said for said in peer.said)


def test_a_full_disk_costs_the_buffer_and_nothing_else(
    source: Path, tmp_path: Path, undisturbed: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    with following(source, tmp_path / "home") as peer:

        def full(name: str, data: bytes) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(peer.shelf, "_write", full)
        assert same(peer.windows(10), undisturbed[:10])
    assert [said for said in peer.said if "cannot be written" in said] == [
        "the text buffer cannot be written (No space left on device); training goes on with what "
        "fits into memory"
    ]


def held_bytes(folder: Path) -> int:
    """Return what the units of a buffer take, while its thread goes on."""
    held = 0
    for path in folder.glob("unit-*"):
        # What was renamed or dropped in the meantime counts no more.
        with suppress(FileNotFoundError):
            held += path.stat().st_size
    return held


def test_the_buffer_stays_below_its_limit_and_counts_all_that_it_holds(
    source: Path, tmp_path: Path, undisturbed: list[Tensor]
) -> None:
    limit = 5000
    with following(source, tmp_path / "home", limit_bytes=limit) as peer:
        for expected in undisturbed:
            assert torch.equal(peer.feed.batch(WINDOWS), expected)
            assert held_bytes(tmp_path / "home") <= limit + 2 * 1000
        peer.feed.close()
        on_disk = sum(path.stat().st_size for path in (tmp_path / "home").iterdir())
        assert peer.shelf.held_bytes == on_disk
        assert len(list(peer.shelf.units())) < len(peer.shelf.entries)


def test_text_that_has_changed_ends_the_training(source: Path, tmp_path: Path) -> None:
    with following(source, tmp_path / "home") as peer:
        peer.windows(10)
    for unit in (tmp_path / "home").glob("unit-*"):
        unit.unlink()
    for shard in range(SHARDS):
        write_parquet(source / "data" / f"part-{shard}.parquet", documents(shard + 5))
    with (
        following(source, tmp_path / "home") as peer,
        pytest.raises(DataError, match="not what it was") as raised,
    ):
        peer.windows(10)
    assert "begin with the text as it is" in raised.value.fix


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("harm", ["cut", "rewritten", "gone"])
def test_a_file_that_changes_while_it_is_read_again_and_again_ends_the_training(
    tmp_path: Path, files: int, harm: str
) -> None:
    source = tmp_path / "source"
    for shard in range(files):
        write_json_lines(source / f"{shard}.jsonl", documents(shard))
    # Such a file is a single unit, so that no part of it is ever missing.
    with following(source, tmp_path / "home", limit_bytes=10_000) as peer:
        peer.windows(5)
        path = source / "0.jsonl"
        text = path.read_bytes()
        if harm == "gone":
            path.unlink()
        else:
            path.write_bytes(text[:1000] if harm == "cut" else text.replace(b"a", b"b"))
            os.utime(path, ns=(1, 1))
        words = "cannot be read" if harm == "gone" else r"0\.jsonl has changed"
        with pytest.raises(DataError, match=words) as raised:
            peer.windows(300)
    assert ("1000" in raised.value.why) == (harm == "cut")


async def test_a_change_is_noticed_while_everything_waits_in_the_buffer(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for shard in range(3):
        write_json_lines(source / f"{shard}.jsonl", documents(shard))
    with following(source, tmp_path / "home") as peer:
        await peer.feed.ready(WINDOWS * 50)
        peer.windows(4)
        (source / "2.jsonl").write_bytes(b"")
        with pytest.raises(DataError, match=r"2\.jsonl has changed"):
            peer.windows(3)


async def test_a_file_that_changes_ends_the_training_before_the_buffer_is_used_up(
    tmp_path: Path,
) -> None:
    source = tmp_path / "source" / "a.jsonl"
    write_json_lines(source, documents(0))
    with following(source, tmp_path / "home", limit_bytes=400_000) as peer:
        await peer.feed.ready(200_000 // LENGTH)
        source.write_bytes(b"")
        with pytest.raises(DataError, match="has changed"):
            peer.windows(10_000)
        read = sum(entry.tokens for entry in peer.shelf.entries)
        assert peer.feed.next_sample * LENGTH < read - 20_000


def test_nothing_but_empty_documents_ends_the_training(tmp_path: Path) -> None:
    write_parquet(tmp_path / "source" / "a.parquet", ["", None, ""])
    with (
        following(tmp_path / "source", tmp_path / "home") as peer,
        pytest.raises(DataError, match="no text to train on"),
    ):
        peer.windows(1)


def test_a_thread_that_waits_for_a_hub_is_gone_once_it_was_told_to_be() -> None:
    closing, waits, ended = Closing(), threading.Event(), threading.Event()
    patience = Patience(lambda text: waits.set(), closing.pause)

    def work() -> None:
        with pytest.raises(ClosedError):
            patience.endure("the hub is out of order")
        ended.set()

    closing.start(work, name="text")
    assert waits.wait(10)
    closing.join(deadline_s=0.0)
    assert not ended.is_set()
    closing.close()
    closing.join()
    assert ended.is_set()
