"""What the peers of a run must share, and the invite that leads a newcomer to it."""

from __future__ import annotations

import base64
import json
import re
from typing import Annotated, Final, TypeAlias

import msgspec
from blake3 import blake3

from gasloc_p2p.core.errors import InviteError, ManifestError
from gasloc_p2p.core.records import RunId

Scalar: TypeAlias = str | int | float | bool | None
Sections: TypeAlias = dict[str, dict[str, Scalar]]

MAX_MANIFEST_BYTES: Final = 64 * 1024
MAX_INVITE_CHARS: Final = 4096
MAX_ADDRESSES: Final = 16
INVITE_VERSION: Final = 1

_CHECKSUM_BYTES: Final = 4
_INVITE_HEAD: Final = re.compile(r"gasloc([1-9][0-9]{0,8})-", re.ASCII)
_WRAPPING: Final = " \t\r\n\v\f\"'`\u2018\u2019\u201c\u201d"
_MANIFEST_FIX: Final = "ask whoever invited you for a fresh invite"


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The shared facts of a run; their digest is the run's identity.

    Attributes:
        run_id: name of the run.
        founded_s: unix seconds at which the run was founded; round 0 of a timed run begins then.
        sections: shared configuration, section -> key -> value.
    """

    run_id: RunId
    founded_s: Annotated[float, msgspec.Meta(ge=0)]
    sections: Sections

    def encode(self) -> bytes:
        """Return the canonical JSON: sorted keys, no white space, UTF-8, finite numbers.

        Raises:
            ManifestError: a value has no canonical JSON form.
        """
        try:
            return _canonical(
                {
                    "run_id": self.run_id,
                    "founded_s": float(self.founded_s),
                    "sections": self.sections,
                }
            )
        except ValueError as error:
            raise ManifestError(
                "the run's shared settings cannot be written down",
                why=str(error),
                fix="use finite numbers and plain text in the shared sections of the configuration",
            ) from error

    @property
    def digest(self) -> bytes:
        """32 bytes: the blake3 digest of the canonical JSON."""
        return blake3(self.encode()).digest()


def parse_manifest(data: bytes, expected_digest: bytes) -> Manifest:
    """Read a manifest that any peer may have sent.

    Raises:
        ManifestError: it is larger than 64 KiB, has another digest, or is malformed.
    """
    if len(data) > MAX_MANIFEST_BYTES:
        raise ManifestError(
            "the run's manifest is refused",
            why=f"it is {len(data)} bytes long, more than {MAX_MANIFEST_BYTES}",
            fix=_MANIFEST_FIX,
        )
    found = blake3(data).digest()
    if found != expected_digest:
        raise ManifestError(
            "the run's manifest is not the one that the invite names",
            why=f"its digest begins with {found[:6].hex()}, expected {expected_digest[:6].hex()}",
            fix=_MANIFEST_FIX,
        )
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except msgspec.DecodeError as error:
        raise _malformed(str(error)) from error
    # Otherwise the digest of what was read would not be the digest that was asked for.
    if manifest.encode() != data:
        raise _malformed("it is not in canonical form")
    return manifest


def _malformed(why: str) -> ManifestError:
    return ManifestError(
        "the run's manifest cannot be read",
        why=why,
        fix="use the version of gasloc-p2p with which the run was founded",
    )


def _canonical(value: object) -> bytes:
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    ).encode()


class Invite(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a newcomer needs to find a run and to know that it is the right one.

    Attributes:
        run_id: name of the run.
        bootstrap: multiaddrs of peers through which the swarm is reached, at most 16.
        digest: 32 bytes, the digest of the run's manifest.
    """

    run_id: RunId
    bootstrap: tuple[Annotated[str, msgspec.Meta(min_length=1, max_length=512)], ...]
    digest: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]

    def encode(self) -> str:
        """Return the invite as one string.

        Raises:
            InviteError: it names no address, more than 16, or is too long.
        """
        _check_addresses(self)
        payload = msgspec.msgpack.encode(self)
        text = f"gasloc{INVITE_VERSION}-" + _to_base64(payload + _checksum(payload))
        _check_length(text)
        return text


def parse_invite(text: str) -> Invite:
    """Read an invite as a person pasted it; surrounding white space and quotes are dropped.

    Raises:
        InviteError: it is no invite, cut or mistyped, of a newer version, or names no address.
    """
    text = text.strip(_WRAPPING)
    _check_length(text)
    head = _INVITE_HEAD.match(text)
    if head is None:
        raise InviteError(
            "this is not an invite",
            why=f"an invite begins with gasloc{INVITE_VERSION}-",
            fix="paste the whole string that `gasloc start` printed",
        )
    if int(head[1]) > INVITE_VERSION:
        raise InviteError(
            "this invite needs a newer version of gasloc-p2p",
            why=f"it has format {head[1]}, and this version reads format {INVITE_VERSION}",
            fix="pip install --upgrade gasloc-p2p",
        )
    payload = _payload(text[head.end() :])
    try:
        invite = msgspec.msgpack.decode(payload, type=Invite)
    except msgspec.DecodeError as error:
        raise InviteError(
            "this invite cannot be used",
            why=f"it was not written by gasloc-p2p: {error}",
            fix="ask for an invite that `gasloc start` printed",
        ) from error
    _check_addresses(invite)
    return invite


def _payload(body: str) -> bytes:
    try:
        data = base64.urlsafe_b64decode(body + "=" * (-len(body) % 4))
    except ValueError:
        data = b""
    payload, checksum = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
    # The decoder passes over characters that are not its own, so the text is compared as well.
    if _to_base64(data) != body or _checksum(payload) != checksum:
        raise InviteError(
            "this invite is cut or mistyped",
            why="its checksum does not match",
            fix="copy the whole string again, in one piece",
        )
    return payload


def _to_base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _checksum(payload: bytes) -> bytes:
    return blake3(payload).digest(length=_CHECKSUM_BYTES)


def _check_length(text: str) -> None:
    if len(text) > MAX_INVITE_CHARS:
        raise InviteError(
            "this invite is too long",
            why=f"it has {len(text)} characters, more than {MAX_INVITE_CHARS}",
            fix="paste only the string that `gasloc start` printed, or name fewer addresses",
        )


def _check_addresses(invite: Invite) -> None:
    if not invite.bootstrap:
        raise InviteError(
            "this invite names no address",
            why="without one the swarm cannot be reached",
            fix="found the run with net.announce set to an address that others can reach",
        )
    if len(invite.bootstrap) > MAX_ADDRESSES:
        raise InviteError(
            "this invite names too many addresses",
            why=f"it names {len(invite.bootstrap)}, more than {MAX_ADDRESSES}",
            fix=f"name the {MAX_ADDRESSES} best ones",
        )
