"""Documents of Parquet and JSON Lines, unit by unit."""

from __future__ import annotations

import gzip
import json
from itertools import count
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gasloc_p2p.core.errors import DataError
from gasloc_p2p.data import units
from gasloc_p2p.data.shards import LocalShards, holds_documents
from gasloc_p2p.data.units import Units
from tests.data.texts import documents, write_json_lines, write_parquet


def read_all(path: Path, field: str = "text", say: list[str] | None = None) -> list[list[bytes]]:
    shards = LocalShards(path)
    reader = Units(shards, field, (list[str]() if say is None else say).append)
    [name] = shards.names
    found: list[list[bytes]] = []
    for unit in count():
        if (read := reader.read(name, unit)) is None:
            return found
        found.append(read)
    raise AssertionError


def one_by_one(path: Path, count: int) -> list[list[bytes] | None]:
    """Read every unit with a reader that has read nothing before."""
    shards = LocalShards(path)
    return [Units(shards, "text", print).read(shards.names[0], unit) for unit in range(count)]


@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "UNIT_BYTES", 300)
    monkeypatch.setattr(units, "UNIT_ROWS", 4)


@pytest.mark.usefixtures("small_units")
@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl", "a.jsonl.gz", "a.json", "a.json.gz"])
def test_units_hold_every_document_once_and_can_be_read_in_any_order(
    tmp_path: Path, name: str
) -> None:
    texts = documents(0, 30)
    path = tmp_path / name
    write = write_parquet if name.endswith(".parquet") else write_json_lines
    write(path, texts)
    found = read_all(path)
    assert [text.decode() for unit in found for text in unit] == texts
    assert len(found) > 5
    assert one_by_one(path, len(found) + 1) == [*found, None]
    assert all(len(unit) <= 4 for unit in found)


@pytest.mark.usefixtures("small_units")
@pytest.mark.parametrize("length", [299, 300, 301])
def test_lines_that_begin_at_a_border_are_read_once(tmp_path: Path, length: int) -> None:
    empty = len(json.dumps({"text": ""})) + 1
    texts = [str(i) * (length - empty) for i in range(6)]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    found = read_all(path)
    assert [text.decode() for unit in found for text in unit] == texts
    assert one_by_one(path, len(found)) == found


@pytest.mark.usefixtures("small_units")
def test_a_line_longer_than_units_leaves_them_empty(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write_json_lines(path, ["short", "x" * 1000, "last"])
    found = read_all(path)
    assert [len(unit) for unit in found] == [2, 0, 0, 1]
    assert one_by_one(path, 5) == [*found, None]


def test_lines_of_windows_and_a_missing_last_line_end_are_fine(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "one"}\r\n\r\n{"text": "two"}')
    assert read_all(path) == [[b"one", b"two"]]


def test_text_that_is_no_unicode_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "half a pair \\ud83d"}\n{"text": "\\ud83d\\ude42 \\u0000"}\n')
    assert read_all(path) == [[b"half a pair ?", "🙂 \0".encode()]]


def test_gzip_in_several_members_is_one_text(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "one"}\n') + gzip.compress(b'{"text": "two"}\n'))
    assert read_all(path) == [[b"one", b"two"]]


def test_bad_lines_are_skipped_and_told(tmp_path: Path) -> None:
    path, said = tmp_path / "a.jsonl", list[str]()
    path.write_text('{"text": "one"}\nnonsense\n{"text": 3}\n["text"]\n{"text": ""}\n')
    assert read_all(path, say=said) == [[b"one"]]
    assert said == [
        "3 of the first 5 lines of a.jsonl (line 2 is the first of them) have no text under "
        "'text' and are skipped"
    ]


@pytest.mark.usefixtures("small_units")
def test_bad_lines_of_a_file_are_told_once_however_often_it_is_read(tmp_path: Path) -> None:
    text, said = ('{"text": "' + "x" * 80 + '"}\n') * 4, list[str]()
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text(text + "\n" + "nonsense\n" * 80 + text)
    reader = Units(LocalShards(tmp_path), "text", said.append)
    laps = [[len(unit) for unit in reader.by_name()] for _ in range(3)]
    assert laps[0] == laps[1] == laps[2]
    # Even a unit that holds nothing else is skipped, in a file that has text.
    assert 0 in laps[0]
    assert [words.partition(" have ")[0] for words in said] == [
        f"26 of the first 30 lines of {name} (line 6 is the first of them)"
        for name in ("a.jsonl", "b.jsonl")
    ]
    fresh = Units(LocalShards(tmp_path), "text", said.append)
    assert fresh.read("a.jsonl", 2) == []
    assert "lines of a.jsonl from byte 600 on have no text" in said[-1]


def test_large_strings_count_as_text_and_numbers_do_not(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table({"text": pa.array(["one", None], type=pa.large_string()), "n": [1, 2]})
    pq.write_table(table, path)
    assert read_all(path) == [[b"one"]]
    with pytest.raises(DataError, match="no text field 'n'"):
        read_all(path, "n")


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl"])
def test_without_the_field_it_says_which_there_are(tmp_path: Path, name: str) -> None:
    write = write_parquet if name.endswith(".parquet") else write_json_lines
    write(tmp_path / name, ["one"], field="content")
    with pytest.raises(DataError, match="no text field 'text'") as raised:
        read_all(tmp_path / name)
    assert "data.text_field" in raised.value.fix
    assert "content" in raised.value.why
    assert "id" not in raised.value.why
    assert read_all(tmp_path / name, "content") == [[b"one"]]


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl.gz"])
@pytest.mark.parametrize("harm", ["cut", "other"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str, harm: str) -> None:
    path = tmp_path / name
    write = write_parquet if name.endswith(".parquet") else write_json_lines
    write(path, documents(0, 50))
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2] if harm == "cut" else b"other" * 100)
    with pytest.raises(DataError, match=rf"{name} is damaged") as raised:
        read_all(path)
    assert "data.files" not in raised.value.fix


def test_lines_that_are_no_json_are_no_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("Once upon a time\n\n3\n[4]\n")
    with pytest.raises(DataError, match=r"a\.jsonl is no JSON Lines") as raised:
        read_all(path)
    assert "None of its first 3 lines" in raised.value.why


def test_a_line_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "MAX_LINE_BYTES", 1 << 20)
    (tmp_path / "a.jsonl").write_bytes(b"[" * (1 << 20) + b"]")
    with pytest.raises(DataError, match="line of more than 1 MiB"):
        read_all(tmp_path / "a.jsonl")


def test_documents_are_told_from_text(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "settings.json").write_text("{}")
    write_parquet(tmp_path / "docs" / "deep" / "a.parquet", ["one"])
    (tmp_path / "docs" / ".hidden.parquet").write_text("")
    assert not holds_documents("")
    assert not holds_documents(str(tmp_path / "code"))
    assert not holds_documents(str(tmp_path / "book.txt"))
    assert holds_documents(str(tmp_path / "docs"))
    assert holds_documents(str(tmp_path / "code" / "settings.json"))
    assert LocalShards(tmp_path / "docs").names == ["deep/a.parquet"]
    with pytest.raises(DataError, match="no documents"):
        LocalShards(tmp_path / "code")
    with pytest.raises(DataError, match="cannot be read"):
        LocalShards(tmp_path / "absent.parquet")
