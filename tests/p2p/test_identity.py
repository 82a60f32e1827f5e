"""The identity file is made once, kept private, and used by one process at a time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import base58
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gasloc_p2p.core.errors import IdentityError
from gasloc_p2p.net.identity import Identity

HOLD_LOCK = """
import sys
from pathlib import Path
from gasloc_p2p.net.identity import Identity
identity = Identity.load_or_create(Path(sys.argv[1]))
print(identity.peer_id, flush=True)
sys.stdin.read()
"""


def test_a_new_file_is_private_and_reads_back_as_the_same_peer(tmp_path: Path) -> None:
    path = tmp_path / "identity"
    made = Identity.load_or_create(path)
    content = path.read_bytes()
    assert path.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["identity"]
    made.close()
    read = Identity.load_or_create(path)
    assert read.peer_id == made.peer_id
    assert path.read_bytes() == content == read.key_file()


def test_the_peer_id_is_the_one_of_libp2p_and_embeds_the_public_key() -> None:
    # The first example of libp2p's peer id specification for Ed25519, as key file and peer id.
    key_file = bytes.fromhex(
        "08011240"
        "7e0830617c4a7de83925dfb2694556b12936c477a0e1feb2e148ec9da60fee7d"
        "1ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e"
    )
    identity = Identity(key_file[4:36])
    assert identity.key_file() == key_file
    assert base58.b58decode(identity.peer_id).hex() == (
        "002408011220" + "1ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e"
    )
    assert identity.peer_id.startswith("12D3KooW")


def test_derived_identities_are_repeatable_and_distinct() -> None:
    ids = {Identity.derived(seed, index).peer_id for seed in range(3) for index in range(3)}
    assert len(ids) == 9
    assert Identity.derived(2, 1).peer_id == Identity.derived(2, 1).peer_id


def test_a_signature_holds_for_its_peer_and_payload_only() -> None:
    one, other = Identity.derived(0, 1), Identity.derived(0, 2)
    signature = one.sign(b"payload")
    assert len(signature) == 64
    assert Identity.verify(one.peer_id, b"payload", signature)
    assert not Identity.verify(one.peer_id, b"payload.", signature)
    assert not Identity.verify(other.peer_id, b"payload", signature)
    assert not Identity.verify(one.peer_id, b"payload", signature[:-1])
    assert not Identity.verify(one.peer_id, b"payload", b"")


@pytest.mark.parametrize(
    "change",
    [
        lambda peer: peer + " ",
        lambda peer: "1" + peer,
        lambda peer: peer[:-1],
        lambda peer: peer * 100,
        lambda peer: "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N",
        lambda peer: "\u00e9",
        lambda peer: "",
    ],
)
def test_a_peer_id_in_any_other_spelling_proves_nothing(change: object) -> None:
    identity = Identity.derived(0, 1)
    assert callable(change)
    assert not Identity.verify(change(identity.peer_id), b"payload", identity.sign(b"payload"))


@given(st.text(max_size=80), st.binary(max_size=80))
def test_verify_answers_no_to_anything_malformed(peer_id: str, signature: bytes) -> None:
    assert not Identity.verify(peer_id, b"payload", signature)


@pytest.mark.parametrize("bits", [0o640, 0o604, 0o620, 0o666])
def test_a_file_open_to_others_is_refused(tmp_path: Path, bits: int) -> None:
    path = tmp_path / "identity"
    Identity.load_or_create(path).close()
    path.chmod(bits)
    with pytest.raises(IdentityError, match="open to other users") as caught:
        Identity.load_or_create(path)
    assert f"{bits:04o}" in caught.value.why
    assert caught.value.fix == f"chmod 600 {path}"


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "is empty"),
        (b"junk", "is damaged"),
        (Identity.derived(0, 0).key_file()[:-1], "is damaged"),
        (Identity.derived(0, 0).key_file() + b"x", "is damaged"),
        (Identity.derived(0, 0).key_file()[:-1] + b"x", "is damaged"),
        (b"\x08\x00\x12\xa9\x09" + bytes(1193), "holds an RSA key"),
    ],
)
def test_a_bad_file_is_named_and_never_replaced(
    tmp_path: Path, content: bytes, complaint: str
) -> None:
    path = tmp_path / "identity"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(IdentityError, match=complaint) as caught:
        Identity.load_or_create(path)
    assert caught.value.why
    assert caught.value.fix
    assert path.read_bytes() == content


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "identity"
    with pytest.raises(IdentityError, match="cannot be made") as caught:
        Identity.load_or_create(path)
    assert caught.value.fix == f"mkdir -p {path.parent}"


def test_a_folder_or_a_pipe_in_its_place_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IdentityError, match="is not a file"):
        Identity.load_or_create(tmp_path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(IdentityError, match="is not a file"):
        Identity.load_or_create(tmp_path / "pipe")


def test_a_second_process_is_told_that_the_identity_is_in_use(tmp_path: Path) -> None:
    path = tmp_path / "identity"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD_LOCK, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        peer_id = holder.stdout.readline().strip()
        with pytest.raises(IdentityError, match="is in use"):
            Identity.load_or_create(path)
        holder.kill()
        holder.wait(timeout=10)
    assert Identity.load_or_create(path).peer_id == peer_id


def test_a_second_use_in_the_same_process_is_refused_until_the_first_is_closed(
    tmp_path: Path,
) -> None:
    path = tmp_path / "identity"
    first = Identity.load_or_create(path)
    with pytest.raises(IdentityError, match="is in use"):
        Identity.load_or_create(path)
    first.close()
    first.close()
    Identity.load_or_create(path).close()
