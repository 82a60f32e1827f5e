"""A node's Ed25519 identity: the file it lives in, what it signs, what it proves."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import secrets
import stat
import weakref
from pathlib import Path
from typing import Final

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from gasloc_p2p.core.errors import IdentityError
from gasloc_p2p.core.types import PeerId

# libp2p's protobuf framing: key type Ed25519, then the key. A peer id is the identity multihash
# of the public key's frame, so the key can be read back from it.
_PRIVATE_FRAME: Final = b"\x08\x01\x12\x40"
_PEER_ID_FRAME: Final = b"\x00\x24\x08\x01\x12\x20"
_RSA_FRAME: Final = b"\x08\x00"
_KEY_BYTES: Final = 32
_FILE_BYTES: Final = len(_PRIVATE_FRAME) + 2 * _KEY_BYTES
_MAX_PEER_ID_CHARS: Final = 64
_NEW_IDENTITY: Final = (
    "restore it from a backup, or move it away to start with a new identity (and a new peer id)"
)


class Identity:
    """An Ed25519 key pair and the libp2p peer id that embeds its public half.

    Made by `load_or_create` or `derived`. One that was loaded holds a lock on its file until
    `close`, so that no second process takes part under the same peer id.
    """

    def __init__(self, secret: bytes) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(secret)
        self._public = self._key.public_key().public_bytes_raw()
        self._unlock: weakref.finalize[[int], Identity] | None = None
        self.peer_id: Final[PeerId] = base58.b58encode(_PEER_ID_FRAME + self._public).decode()

    def sign(self, payload: bytes) -> bytes:
        """Return the 64-byte Ed25519 signature of `payload`."""
        return self._key.sign(payload)

    @staticmethod
    def verify(peer_id: PeerId, payload: bytes, signature: bytes) -> bool:
        """Whether `peer_id` signed `payload`; False for anything malformed."""
        public = _public_key(peer_id)
        if public is None:
            return False
        try:
            Ed25519PublicKey.from_public_bytes(public).verify(signature, payload)
        except (InvalidSignature, ValueError):
            return False
        return True

    def key_file(self) -> bytes:
        """Return the secret key as libp2p stores it in a file, 68 bytes."""
        return _PRIVATE_FRAME + self._key.private_bytes_raw() + self._public

    @classmethod
    def derived(cls, seed: int, index: int) -> Identity:
        """Return the identity of peer `index` of a local test swarm; anybody can derive it."""
        text = f"gasloc-p2p testnet identity, seed {seed}, peer {index}"
        return cls(hashlib.sha256(text.encode()).digest())

    @classmethod
    def load_or_create(cls, path: Path) -> Identity:
        """Read the identity in `path`, or make one there if there is no such file.

        A file that is there is never replaced, whatever it holds.

        Raises:
            IdentityError: the folder is missing, or the file is unreadable, damaged, of another
                kind, open to other users, or in use by another process.
        """
        descriptor = _open(path)
        if descriptor is None:
            _create(path, cls(secrets.token_bytes(_KEY_BYTES)).key_file())
            descriptor = _open(path)
        if descriptor is None:
            raise _error(path, "vanished", "another program removed it", "try again")
        try:
            _lock(path, descriptor)
            identity = cls(_read_secret(path, descriptor))
        except IdentityError:
            os.close(descriptor)
            raise
        identity._unlock = weakref.finalize(identity, os.close, descriptor)
        return identity

    def close(self) -> None:
        """Let another process use the file; safe to call twice."""
        if self._unlock is not None:
            self._unlock()


def _public_key(peer_id: PeerId) -> bytes | None:
    """Return the 32-byte key inside `peer_id`; None unless it is the canonical text of one."""
    if len(peer_id) > _MAX_PEER_ID_CHARS:
        return None
    try:
        raw = base58.b58decode(peer_id)
    except ValueError:
        return None
    if len(raw) != len(_PEER_ID_FRAME) + _KEY_BYTES or not raw.startswith(_PEER_ID_FRAME):
        return None
    # The decoder forgives white space; two texts must not name one peer.
    if base58.b58encode(raw).decode() != peer_id:
        return None
    return raw[len(_PEER_ID_FRAME) :]


def _error(path: Path, what: str, why: str, fix: str) -> IdentityError:
    return IdentityError(f"identity file {path} {what}", why=why, fix=fix)


def _open(path: Path) -> int | None:
    """Return a descriptor of the regular, private file `path`; None if there is no file."""
    try:
        # A pipe in its place must not make the open wait.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _error(
            path, "cannot be read", error.strerror or str(error), "check its owner and permissions"
        ) from None
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode) and not stat.S_IMODE(mode) & 0o077:
        return descriptor
    os.close(descriptor)
    if not stat.S_ISREG(mode):
        raise _error(
            path,
            "is not a file",
            "it is a folder" if stat.S_ISDIR(mode) else "it is a device, pipe or socket",
            "name a file, for example with --set net.identity=FILE",
        )
    raise _error(
        path,
        "is open to other users",
        f"its mode is {stat.S_IMODE(mode):04o}, and whoever reads it can act as this node",
        f"chmod 600 {path}",
    )


def _create(path: Path, content: bytes) -> None:
    """Write `content` into `path`, whole or not at all; a file that is already there stays."""
    fresh = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    try:
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with open(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            # Unlike a rename, a link fails where another process came first.
            with contextlib.suppress(FileExistsError):
                os.link(fresh, path)
        finally:
            fresh.unlink()
    except FileNotFoundError:
        raise _error(
            path,
            "cannot be made",
            f"the folder {path.parent} does not exist",
            f"mkdir -p {path.parent}",
        ) from None
    except OSError as error:
        raise _error(
            path,
            "cannot be made",
            error.strerror or str(error),
            "make room there, or name a file in a folder that this user may write to, on a local "
            "disk: --set net.identity=FILE",
        ) from None


def _lock(path: Path, descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise _error(
                path,
                "is in use",
                "another process runs with this identity, and two peers of one id break both",
                "stop it, or give this node an identity of its own with --set net.identity=FILE",
            ) from None
        raise _error(
            path, "cannot be locked", error.strerror or str(error), "keep it on a local disk"
        ) from None


def _read_secret(path: Path, descriptor: int) -> bytes:
    content = os.read(descriptor, _FILE_BYTES + 1)
    if not content:
        raise _error(path, "is empty", "a disk was full or a copy was cut", _NEW_IDENTITY)
    if content.startswith(_RSA_FRAME):
        raise _error(
            path,
            "holds an RSA key",
            "peers here have Ed25519 keys, whose public half is part of the peer id",
            "name another file: one that does not exist yet is made",
        )
    secret = content[len(_PRIVATE_FRAME) : len(_PRIVATE_FRAME) + _KEY_BYTES]
    if len(secret) != _KEY_BYTES or Identity(secret).key_file() != content:
        raise _error(path, "is damaged", "it is not an Ed25519 key in libp2p's form", _NEW_IDENTITY)
    return secret
