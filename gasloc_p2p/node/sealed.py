"""A folder of tensors and JSON that tells when it is not what was written.

tensors.safetensors   the tensors
progress.json         a JSON value, size and digest of the other file, its own digest
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec
import torch
from blake3 import blake3
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gasloc_p2p.core.types import BytesLike

TENSORS_FILE: Final = "tensors.safetensors"
PROGRESS_FILE: Final = "progress.json"
PIECE_BYTES: Final = 4 << 20
"""Bytes that are digested, written or read at once."""

DTYPE_NAMES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
}
"""The dtypes that can be written, with their names in the safetensors format."""


class DamagedFileError(Exception):
    """A file is not what was written; the message names it and says why, in a phrase."""


class _FileSum(msgspec.Struct, frozen=True, kw_only=True):
    """Size and blake3 digest, in hex, of a file as it was meant to be."""

    bytes: int
    blake3: str


class _Content(msgspec.Struct, frozen=True, kw_only=True):
    """What progress.json holds, beside its own digest."""

    tensors: _FileSum
    progress: msgspec.Raw


class _Sealed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """progress.json: `content` as it was encoded, and the digest of these very bytes."""

    blake3: str
    content: msgspec.Raw


def write_sealed(
    folder: Path, progress: bytes, tensors: Mapping[str, Tensor], abandoned: Callable[[], bool]
) -> None:
    """Write `progress`, which is JSON, and `tensors` into a folder, and flush it to the disk.

    The digests are those of what is handed over, so they also tell of a disk that keeps something
    else.

    Raises:
        OSError: it could not be written, or `abandoned` said yes (ECANCELED).
    """
    written = _write(folder / TENSORS_FILE, _tensor_pieces(tensors), abandoned)
    content = msgspec.json.encode(_Content(tensors=written, progress=msgspec.Raw(progress)))
    seal = _Sealed(blake3=blake3(content).hexdigest(), content=msgspec.Raw(content))
    _write(folder / PROGRESS_FILE, [msgspec.json.encode(seal) + b"\n"], abandoned)
    sync_folder(folder)


def read_sealed(folder: Path) -> tuple[msgspec.Raw, dict[str, Tensor]]:
    """Return the JSON and the tensors that were written into a folder, once all digests agree.

    Raises:
        DamagedFileError: a file is missing, cannot be read, or is another one than was written.
        PermissionError: a file may not be read.
    """
    file = folder / PROGRESS_FILE
    try:
        content = _unsealed(file.read_bytes())
        file = folder / TENSORS_FILE
        return content.progress, _read_tensors(file, content.tensors)
    except PermissionError:
        raise
    except OSError as error:
        raise DamagedFileError(f"{file.name}: {error.strerror or error}") from None
    except (msgspec.DecodeError, SafetensorError, _DifferentError) as error:
        raise DamagedFileError(f"{file.name}: {error}") from None


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _DifferentError(Exception):
    """A file differs in size or digest."""


def _write(path: Path, pieces: Iterable[BytesLike], abandoned: Callable[[], bool]) -> _FileSum:
    hasher, size = blake3(), 0
    with path.open("xb") as file:
        for piece in pieces:
            if abandoned():
                raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED), str(path))
            hasher.update(piece)
            size += file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    return _FileSum(bytes=size, blake3=hasher.hexdigest())


def _tensor_pieces(tensors: Mapping[str, Tensor]) -> Iterator[BytesLike]:
    """Yield the bytes of a safetensors file; those of a contiguous tensor are not copied.

    The library reads such files here but does not write them: it neither digests nor flushes what
    it writes, cannot be stopped half-way, and hides the `OSError` of a full disk.
    """
    # Wide elements first, so that every tensor begins at a multiple of its element's size.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header, end = {}, 0
    for name in names:
        start, end = end, end + tensors[name].nbytes
        header[name] = {
            "dtype": DTYPE_NAMES[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": [start, end],
        }
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        data = tensors[name].reshape(-1).view(torch.uint8).numpy().data
        for start in range(0, len(data), PIECE_BYTES):
            yield data[start : start + PIECE_BYTES]


def _unsealed(text: bytes) -> _Content:
    sealed = msgspec.json.decode(text, type=_Sealed)
    if blake3(bytes(sealed.content)).hexdigest() != sealed.blake3:
        raise _DifferentError("digest differs")
    return msgspec.json.decode(sealed.content, type=_Content)


def _read_tensors(path: Path, expected: _FileSum) -> dict[str, Tensor]:
    size = path.stat().st_size
    if size != expected.bytes:
        raise _DifferentError(f"{size} bytes instead of {expected.bytes}")
    hasher = blake3()
    with path.open("rb", buffering=0) as file:
        while piece := file.read(PIECE_BYTES):
            hasher.update(piece)
    if hasher.hexdigest() != expected.blake3:
        raise _DifferentError("digest differs")
    with safe_open(path, framework="pt") as tensors:
        names: list[str] = tensors.keys()
        # The library's tensors are views of the file, which may be removed before they are.
        return {name: tensors.get_tensor(name).clone() for name in names}
