from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gasloc_p2p.core.errors import DataError
from gasloc_p2p.train.data import (
    Corpus,
    SampleCursor,
    load_corpus,
    validation_windows,
)
from gasloc_p2p.train.settings import DataConfig

SEQUENCE = 8
POSITIONS = torch.arange(200, dtype=torch.uint8)  # a window's first byte is where it starts
WINDOWS = 200 - SEQUENCE


def starts(cursor: SampleCursor, batches: int, *, batch_size: int = 4) -> list[int]:
    found: list[int] = []
    for _ in range(batches):
        batch = cursor.batch(POSITIONS, batch_size=batch_size, sequence_length=SEQUENCE)
        found += batch[:, 0].tolist()
    return found


def write_files(folder: Path, names: list[str]) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"<{name}>" * 20)


def files_in(text: torch.Tensor) -> set[str]:
    """Names of the files that a corpus built by `write_files` holds, each one whole."""
    documents = bytes(text.tolist()).decode().split("\0")
    names = {document[1:].partition(">")[0] for document in documents}
    assert sorted(documents) == sorted(f"<{name}>" * 20 for name in names)
    return names


# Samples


def test_batch_is_int64_windows_of_consecutive_bytes() -> None:
    batch = SampleCursor(seed=1, peer_id="a").batch(POSITIONS, batch_size=5, sequence_length=8)
    assert batch.dtype == torch.int64
    assert batch.shape == (5, 9)
    assert torch.equal(batch, batch[:, :1] + torch.arange(9))


def test_samples_reach_every_window_about_equally() -> None:
    counts = torch.bincount(torch.tensor(starts(SampleCursor(seed=1, peer_id="a"), 4800)))
    assert len(counts) == WINDOWS
    assert counts.min() > 50, "100 are expected, with a deviation of 10"
    assert counts.max() < 150


def test_cursor_resumes_exactly() -> None:
    whole = starts(SampleCursor(seed=1, peer_id="a"), 6)
    cursor = SampleCursor(seed=1, peer_id="a")
    head = starts(cursor, 2)
    resumed = SampleCursor(seed=1, peer_id="a", next_sample=cursor.next_sample)
    assert head + starts(resumed, 4) == whole
    assert starts(SampleCursor(seed=1, peer_id="a"), 24, batch_size=1) == whole


def test_peers_and_runs_have_their_own_samples() -> None:
    sequences = {
        tuple(starts(SampleCursor(seed=seed, peer_id=peer), 4))
        for seed, peer in [(1, "a"), (1, "b"), (2, "a"), (1, "2a"), (12, "a"), (-1, "a")]
    }
    assert len(sequences) == 6
    for one in sequences:
        for other in sequences - {one}:
            same = sum(a == b for a, b in zip(one, other, strict=True))
            assert same <= 2, "16 draws among 192 windows"


def test_samples_do_not_depend_on_other_peers() -> None:
    alone = starts(SampleCursor(seed=1, peer_id="a"), 5)
    cursor, other = SampleCursor(seed=1, peer_id="a"), SampleCursor(seed=1, peer_id="b")
    together: list[int] = []
    for _ in range(5):
        starts(other, 3)
        together += starts(cursor, 1)
    assert together == alone


def test_validation_windows_are_evenly_spaced_and_predict_no_token_twice() -> None:
    windows = validation_windows(POSITIONS, tokens=80, sequence_length=SEQUENCE)
    assert windows.dtype == torch.int64
    assert torch.equal(windows, (torch.arange(10) * 19)[:, None] + torch.arange(9))
    everything = validation_windows(POSITIONS, tokens=10**6, sequence_length=SEQUENCE)
    assert len(everything) == 199 // 8
    assert torch.equal(everything[:-1, -1], everything[1:, 0])
    assert len(validation_windows(POSITIONS, tokens=1, sequence_length=SEQUENCE)) == 1


def test_one_window_is_enough_and_less_is_refused_with_the_bytes_needed() -> None:
    window = POSITIONS[: SEQUENCE + 1]
    cursor = SampleCursor(seed=1, peer_id="a")
    batch = cursor.batch(window, batch_size=2, sequence_length=SEQUENCE)
    assert torch.equal(batch, window.long().expand(2, -1))
    assert len(validation_windows(window, tokens=99, sequence_length=SEQUENCE)) == 1
    with pytest.raises(DataError, match=r"training text has 8 bytes; at least 9 are needed"):
        cursor.batch(window[:-1], batch_size=2, sequence_length=SEQUENCE)
    with pytest.raises(DataError, match=r"validation text has 8 bytes; at least 9 are needed"):
        validation_windows(window[:-1], tokens=99, sequence_length=SEQUENCE)


# Files

NAMES = [f"{folder}{index}.txt" for folder in ("", "in/", "in/deep/") for index in range(40)]


def test_folder_is_split_by_whole_files(tmp_path: Path) -> None:
    write_files(tmp_path, NAMES)
    corpus = load_corpus(DataConfig(path=str(tmp_path), validation_fraction=0.2))
    train, validation = files_in(corpus.train), files_in(corpus.validation)
    assert train | validation == set(NAMES)
    assert not train & validation
    assert 12 <= len(validation) <= 36, "24 of 120 are expected, with a deviation of 4.4"


def test_split_is_stable_when_files_are_added(tmp_path: Path) -> None:
    write_files(tmp_path, NAMES)
    before = files_in(load_corpus(DataConfig(path=str(tmp_path))).validation)
    write_files(tmp_path, [f"more{index}" for index in range(100)])
    after = files_in(load_corpus(DataConfig(path=str(tmp_path))).validation)
    assert after & set(NAMES) == before
    assert after - set(NAMES)


@pytest.mark.parametrize("fraction", [1e-9, 0.5])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_few_files_leave_neither_part_empty(tmp_path: Path, count: int, fraction: float) -> None:
    write_files(tmp_path, NAMES[:count])
    corpus = load_corpus(DataConfig(path=str(tmp_path), validation_fraction=fraction))
    assert files_in(corpus.train)
    assert files_in(corpus.validation)


def test_single_file_is_split_at_its_end(tmp_path: Path) -> None:
    text = bytes(range(1, 201))
    (tmp_path / "only.txt").write_bytes(text)
    named = load_corpus(DataConfig(path=str(tmp_path / "only.txt"), validation_fraction=0.25))
    assert bytes(named.train.tolist()) == text[:150]
    assert bytes(named.validation.tolist()) == text[150:]
    found = load_corpus(DataConfig(path=str(tmp_path), validation_fraction=0.25))
    assert found.digest == named.digest


def test_result_does_not_depend_on_file_system_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(tmp_path, NAMES)
    ordinary = load_corpus(DataConfig(path=str(tmp_path)))
    walk = os.walk

    def backwards(top: Path, **options: object) -> Iterator[tuple[str, list[str], list[str]]]:
        for folder, subfolders, names in walk(top):
            subfolders.sort(reverse=True)
            yield folder, subfolders, sorted(names, reverse=True)

    monkeypatch.setattr(os, "walk", backwards)
    assert load_corpus(DataConfig(path=str(tmp_path))).digest == ordinary.digest


def test_hidden_binary_and_empty_files_are_passed_over(tmp_path: Path) -> None:
    write_files(tmp_path, ["a.txt", "b.txt"])
    plain = load_corpus(DataConfig(path=str(tmp_path)))
    write_files(tmp_path, [".git/config", ".hidden"])
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "empty.txt").touch()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    assert load_corpus(DataConfig(path=str(tmp_path))).digest == plain.digest


def test_digest_covers_text_and_split() -> None:
    digests = {
        Corpus.from_bytes(train=train, validation=validation).digest
        for train, validation in [(b"ab", b"c"), (b"a", b"bc"), (b"abc", b""), (b"ab", b"d")]
    }
    assert len(digests) == 4
    assert all(len(digest) == 32 for digest in digests)


def test_corpus_is_a_copy() -> None:
    text = bytearray(b"train")
    corpus = Corpus.from_bytes(train=text, validation=b"")
    text[0] = 0
    assert bytes(corpus.train.tolist()) == b"train"
    assert corpus.train.dtype == torch.uint8


def test_standard_library_is_the_default() -> None:
    corpus = load_corpus(DataConfig())
    assert 4_000_000 < len(corpus.train) < 30_000_000
    share = len(corpus.validation) / (len(corpus.train) + len(corpus.validation))
    assert 0.03 < share < 0.2
    assert load_corpus(DataConfig()).digest == corpus.digest


def test_missing_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no text file or folder at .*absent"):
        load_corpus(DataConfig(path=str(tmp_path / "absent")))


def test_empty_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="There is no text in"):
        load_corpus(DataConfig(path=str(tmp_path)))
    (tmp_path / "empty.txt").touch()
    with pytest.raises(DataError, match="There is no text in"):
        load_corpus(DataConfig(path=str(tmp_path / "empty.txt")))


def test_wide_characters_are_refused(tmp_path: Path) -> None:
    (tmp_path / "wide.txt").write_text("wide", encoding="utf-16")
    with pytest.raises(DataError, match="UTF-16"):
        load_corpus(DataConfig(path=str(tmp_path / "wide.txt")))


@pytest.mark.skipif(not os.path.exists("/proc/self/mem"), reason="needs Linux")
def test_unreadable_text_is_refused() -> None:
    with pytest.raises(DataError, match="/proc/self/mem cannot be read"):
        load_corpus(DataConfig(path="/proc/self/mem"))


def test_more_text_than_the_limit_is_refused(tmp_path: Path) -> None:
    write_files(tmp_path, ["a.txt", "b.txt"])
    config = DataConfig(path=str(tmp_path))
    assert load_corpus(config, limit_bytes=280)
    with pytest.raises(DataError, match="has 280 bytes; at most 279"):
        load_corpus(config, limit_bytes=279)
