"""The manifest's canonical form and digest, and the invite string."""

from __future__ import annotations

import base64
import json

import msgspec
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from gasloc_p2p.core.errors import InviteError, ManifestError
from gasloc_p2p.core.manifest import (
    MAX_INVITE_CHARS,
    MAX_MANIFEST_BYTES,
    Invite,
    Manifest,
    Scalar,
    parse_invite,
    parse_manifest,
)

timeless = settings(deadline=None)
"""An example may take long on a busy machine."""

MANIFEST = Manifest(
    run_id="run",
    founded_s=1.7e9,
    sections={"outer": {"rule": "nesterov", "lr": 0.7}, "inner": {"lr": 1e-3, "steps": 30}},
)
INVITE = Invite(
    run_id="run",
    bootstrap=("/ip4/192.0.2.1/tcp/4001/p2p/12D3KooWA", "/dns4/seed.example/tcp/4001/p2p/12D3B"),
    digest=bytes(range(32)),
)

text = st.text(st.characters(codec="utf-8"), max_size=8)
scalars: st.SearchStrategy[Scalar] = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | text
)
manifests = st.builds(
    Manifest,
    run_id=text.filter(bool),
    founded_s=st.floats(0, 1e12) | st.integers(0, 2**31),
    sections=st.dictionaries(text, st.dictionaries(text, scalars, max_size=3), max_size=3),
)


def read(data: bytes) -> Manifest:
    return parse_manifest(data, blake3(data).digest())


def refusal(data: bytes) -> ManifestError:
    with pytest.raises(ManifestError) as caught:
        read(data)
    return caught.value


def invite_text(payload: bytes, head: str = "gasloc1-") -> str:
    """Write any payload with a true checksum, as a hostile or broken program would."""
    body = base64.urlsafe_b64encode(payload + blake3(payload).digest(length=4))
    return head + body.rstrip(b"=").decode()


def invite_refusal(text: str) -> InviteError:
    with pytest.raises(InviteError) as caught:
        parse_invite(text)
    return caught.value


def test_the_canonical_form_is_fixed() -> None:
    assert MANIFEST.encode() == (
        b'{"founded_s":1700000000.0,"run_id":"run","sections":'
        b'{"inner":{"lr":0.001,"steps":30},"outer":{"lr":0.7,"rule":"nesterov"}}}'
    )
    assert MANIFEST.digest == blake3(MANIFEST.encode()).digest()
    assert len(MANIFEST.digest) == 32


@timeless
@given(manifests)
def test_a_manifest_is_read_back_with_the_same_digest(manifest: Manifest) -> None:
    again = parse_manifest(manifest.encode(), manifest.digest)
    assert again.encode() == manifest.encode()
    assert again == manifest


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "\ud800"])
def test_what_has_no_canonical_form_cannot_be_written(value: Scalar) -> None:
    manifest = msgspec.structs.replace(MANIFEST, sections={"inner": {"lr": value}})
    with pytest.raises(ManifestError, match="cannot be written down"):
        manifest.encode()


def test_another_digest_is_refused() -> None:
    with pytest.raises(ManifestError, match="not the one that the invite names") as caught:
        parse_manifest(MANIFEST.encode(), bytes(32))
    assert "expected 000000000000" in caught.value.why
    assert caught.value.fix


def test_the_size_is_limited() -> None:
    assert "65537 bytes" in refusal(b" " * (MAX_MANIFEST_BYTES + 1)).why


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "truncated"),
        (b"\xff", "malformed"),
        (b"[" * MAX_MANIFEST_BYTES, "Expected `object`"),
        (b'{"sections":' + b'{"a":' * 13000, "$.sections"),
        (b'{"run_id":"run","founded_s":1.0}', "sections"),
        (b'{"founded_s":NaN,"run_id":"run","sections":{}}', "malformed"),
        (b'{"founded_s":1e999,"run_id":"run","sections":{}}', "out of range"),
        (b'{"founded_s":-1.0,"run_id":"run","sections":{}}', "$.founded_s"),
        (b'{"founded_s":1.0,"run_id":"","sections":{}}', "$.run_id"),
        (b'{"founded_s":1.0,"run_id":"run","sections":{"a":{"b":[]}}}', "array"),
        (b'{"founded_s":1.0,"run_id":"run","sections":{"a":1}}', "$.sections"),
        (b'{"founded_s":1.0,"run_id":"run","sections":{},"x":1}', "unknown field"),
        (b'{"founded_s":1,"run_id":"run","sections":{}}', "canonical"),
        (b'{"run_id":"run","founded_s":1.0,"sections":{}}', "canonical"),
        (b'{"founded_s":1.0, "run_id":"run","sections":{}}', "canonical"),
        (b'{"founded_s":1.0,"run_id":"run","sections":{"a":{},"a":{}}}', "canonical"),
    ],
)
def test_a_malformed_manifest_is_refused_with_its_reason(data: bytes, why: str) -> None:
    error = refusal(data)
    assert why in error.why
    assert error.what == "the run's manifest cannot be read"
    assert error.fix


@timeless
@given(st.binary(max_size=64))
def test_any_bytes_are_refused_as_a_manifest(data: bytes) -> None:
    assert refusal(data).why


def test_a_long_number_is_read_exactly_or_refused() -> None:
    for digits in (30, 400, 5000):
        data = b'{"founded_s":1.0,"run_id":"run","sections":{"a":{"b":' + b"9" * digits + b"}}}"
        try:
            manifest = read(data)
        except ManifestError:
            continue
        assert json.loads(manifest.encode()) == json.loads(data)


@timeless
@given(
    st.builds(
        Invite,
        run_id=text.filter(bool),
        bootstrap=st.lists(text.filter(bool), min_size=1, max_size=16).map(tuple),
        digest=st.binary(min_size=32, max_size=32),
    )
)
def test_an_invite_is_read_back(invite: Invite) -> None:
    assert parse_invite(invite.encode()) == invite


@pytest.mark.parametrize("wrapping", [" {}\n", '"{}"', " '{}' ", "`{}`", "\u201c{}\u201d", "\t{}"])
def test_white_space_and_quotes_around_an_invite_are_dropped(wrapping: str) -> None:
    assert parse_invite(wrapping.format(INVITE.encode())) == INVITE


def test_an_invite_is_one_word() -> None:
    head, _, body = INVITE.encode().partition("-")
    assert head == "gasloc1"
    assert body.replace("-", "").replace("_", "").isalnum()


@pytest.mark.parametrize("text", ["", "hello", "https://example.org", "gasloc-", "gaslocx-AAAA"])
def test_something_else_is_not_an_invite(text: str) -> None:
    assert invite_refusal(text).what == "this is not an invite"


def test_a_newer_invite_asks_for_a_newer_version() -> None:
    error = invite_refusal("gasloc2-anything")
    assert "newer version" in error.what
    assert "format 2" in error.why


@timeless
@given(st.data())
def test_a_cut_or_mistyped_invite_is_told_apart(data: st.DataObject) -> None:
    whole = INVITE.encode()
    at = data.draw(st.integers(len("gasloc1-"), len(whole) - 1))
    character = data.draw(st.sampled_from("AZaz09-_=+/ é\n").filter(lambda c: c != whole[at]))
    for wrong in (whole[:at], whole[:at] + "A" + character + whole[at + 1 :]):
        assert invite_refusal(wrong).what == "this invite is cut or mistyped"
    if at < len(whole) - 1:
        swapped = whole[:at] + character + whole[at + 1 :]
        assert invite_refusal(swapped).what == "this invite is cut or mistyped"


def test_the_unused_bits_of_the_last_character_count_too() -> None:
    text = next(
        t
        for n in range(1, 4)
        if len(t := msgspec.structs.replace(INVITE, run_id="r" * n).encode()[8:]) % 4 == 2
    )
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    wrong = text[:-1] + alphabet[alphabet.index(text[-1]) ^ 1]
    assert parse_invite("gasloc1-" + text)
    assert invite_refusal("gasloc1-" + wrong).what == "this invite is cut or mistyped"


def test_an_invite_without_addresses_is_refused_on_both_sides() -> None:
    empty = msgspec.structs.replace(INVITE, bootstrap=())
    assert "no address" in invite_refusal(invite_text(msgspec.msgpack.encode(empty))).what
    with pytest.raises(InviteError, match="no address"):
        empty.encode()


def test_the_number_of_addresses_is_limited_on_both_sides() -> None:
    many = msgspec.structs.replace(INVITE, bootstrap=("/ip4/192.0.2.1/tcp/1",) * 17)
    assert "names 17" in invite_refusal(invite_text(msgspec.msgpack.encode(many))).why
    with pytest.raises(InviteError, match="too many addresses"):
        many.encode()


def test_the_length_is_limited_on_both_sides() -> None:
    assert "4097 characters" in invite_refusal("gasloc1-".ljust(MAX_INVITE_CHARS + 1, "A")).why
    with pytest.raises(InviteError, match="too long"):
        msgspec.structs.replace(INVITE, bootstrap=("/" + "a" * 400,) * 16).encode()


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x91" * 2000,
        msgspec.msgpack.encode(msgspec.structs.replace(INVITE, digest=bytes(31))),
        msgspec.msgpack.encode(msgspec.structs.replace(INVITE, bootstrap=("",))),
        msgspec.msgpack.encode(msgspec.to_builtins(INVITE) | {"extra": 1}),
    ],
)
def test_a_whole_invite_with_foreign_content_is_refused(payload: bytes) -> None:
    assert invite_refusal(invite_text(payload)).what == "this invite cannot be used"


@timeless
@given(st.text(max_size=40), st.booleans())
def test_any_text_is_refused_as_an_invite(text: str, with_head: bool) -> None:
    assert invite_refusal("gasloc1-" * with_head + text).fix
