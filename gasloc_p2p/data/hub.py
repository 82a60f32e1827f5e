"""Files on the Hugging Face hub, or on one that speaks as it does, read piece by piece.

The library knows addresses, tokens and errors; what is here goes on where a connection was cut,
and waits when the hub wants to be left alone, so that no trouble of a network ends a run.
"""

from __future__ import annotations

import io
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

import msgspec
from huggingface_hub import HfApi, constants, get_session, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
from huggingface_hub.utils import (  # type: ignore[attr-defined]  # exported, without `as`
    build_hf_headers,
    hf_raise_for_status,
)

from gasloc_p2p.core.errors import DataError
from gasloc_p2p.data.patience import Patience
from gasloc_p2p.data.refusal import refusal, require_name
from gasloc_p2p.data.shards import NAMED, STREAMED
from gasloc_p2p.data.subset import find_files, subsets_of, training_files

TIMEOUT_S = 20.0
"""A hub that says nothing for so long is taken to be out."""
STALL_S = 30.0
STALL_BYTES = 32 << 10
"""A connection that brings fewer bytes in `STALL_S` is given up; a new one goes on from there."""
READ_BYTES = 1 << 20
"""What is asked for at once, at least, by readers that want a few bytes."""

# httpx in some versions of the library, httpx2 in others.
HTTPError: type[Exception] = HfHubHTTPError.__bases__[0]


class _StalledError(Exception):
    """Hardly any bytes came."""


class HubListing(msgspec.Struct, frozen=True, kw_only=True):
    """A repository at one commit.

    Attributes:
        commit: the hash of the commit that is read, whatever its branch does later.
        names: the files that are wanted, sorted: of a data set those with documents.
    """

    commit: str
    names: tuple[str, ...]


@dataclass(kw_only=True, slots=True)
class Hub:
    """One repository of a hub.

    Attributes:
        name: as in OWNER/NAME.
        kind: "dataset" or "model".
        patience: how troubles are told and endured.
        endpoint: address of the hub; None: that of the library, which HF_ENDPOINT sets.
        clock: seconds from somewhere, to tell slow connections.
        without: what a person can do without a hub, in a few words.
    """

    name: str
    kind: str
    patience: Patience
    endpoint: str | None = None
    clock: Callable[[], float] = time.monotonic
    without: str = ""

    def list_files(self, *, revision: str) -> HubListing:
        """Find all files of a model.

        Args:
            revision: branch, tag or commit.

        Raises:
            DataError: it is not there, or not accessible.
        """
        info = self._patiently(
            lambda: HfApi(endpoint=self.endpoint).model_info(
                self.name, revision=revision, timeout=TIMEOUT_S
            ),
            listing=True,
        )
        names = sorted(sibling.rfilename for sibling in info.siblings or ())
        return HubListing(commit=str(info.sha), names=tuple(names))

    def list_documents(self, *, revision: str, subset: str, files: Sequence[str]) -> HubListing:
        """Find the files of a data set.

        Args:
            revision: branch, tag or commit.
            subset: name of one of its configurations, or of a folder; empty: its default one.
            files: patterns of the files to take instead, `*` within a folder, `**` across.

        Raises:
            DataError: it is not there, not accessible, needs code of its own, or has no such files.
        """
        require_name(self.name, kind=self.kind)
        info = self._patiently(
            lambda: HfApi(endpoint=self.endpoint).dataset_info(
                self.name, revision=revision, timeout=TIMEOUT_S
            ),
            listing=True,
        )
        found = sorted(sibling.rfilename for sibling in info.siblings or ())
        if files:
            names = [name for name in find_files(found, files) if name.endswith(NAMED)]
        else:
            self._refuse_script(found)
            chosen = training_files(info.card_data, found, subset=subset)
            names = [name for name in chosen if name.endswith(STREAMED)]
        if not names:
            has = () if files else subsets_of(info.card_data)
            raise DataError(
                f"{self.name} has no documents that this machine can read"
                + (f" in its subset {subset!r}" if subset else ""),
                why=f"They are Parquet or JSON Lines files, and it has {len(found)} files"
                + (f", in the subsets {', '.join(has)}." if has else "."),
                fix="Name a subset (data.subset) or patterns of files (data.files).",
            )
        return HubListing(commit=str(info.sha), names=tuple(names))

    def _refuse_script(self, names: Sequence[str]) -> None:
        script = self.name.rpartition("/")[2] + ".py"
        if script in names:
            raise DataError(
                f"{self.name} is loaded by a program of its own, {script}.",
                why="Programs from a hub are never run, and only this one knows which files to "
                "read.",
                fix="Name its files (data.files), or use a copy of it as Parquet.",
            )

    def read_whole(self, path: str, *, revision: str) -> bytes:
        """Return a file.

        Raises:
            DataError: it is not there, or not accessible.
        """
        with self.open(path, revision=revision) as file:
            return file.read()

    def open(self, path: str, *, revision: str) -> BinaryIO:
        """Open a file for reading and seeking.

        Raises:
            DataError: it is not there, or not accessible.
        """
        repo_type = None if self.kind == "model" else self.kind
        url = hf_hub_url(
            self.name, path, repo_type=repo_type, revision=revision, endpoint=self.endpoint
        )
        return cast("BinaryIO", io.BufferedReader(_HubFile(self, url), READ_BYTES))

    def read_range(self, url: str, start: int, end: int) -> tuple[bytes, int]:
        """Return bytes `start` to `end` of a file, fewer where it ends, and its size.

        Raises:
            DataError: it is not there, or not accessible.
            ClosedError: nobody wants it any more.
        """
        received = bytearray()
        size = 0

        def go_on() -> bool:
            nonlocal size
            size = self._receive(url, start, end, received)
            return True

        self._patiently(go_on)
        return bytes(received), size

    def _receive(self, url: str, start: int, end: int, received: bytearray) -> int:
        """Add what is still missing of a range to `received`, and return the size of the file."""
        headers = build_hf_headers() | {
            "Range": f"bytes={start + len(received)}-{end - 1}",
            "Accept-Encoding": "identity",
        }
        with self._get(url, headers) as response:
            size = _size_of(response, start + len(received), url)
            left = min(end, size) - start - len(received)
            began_s, began_bytes = self.clock(), len(received)
            for piece in response.iter_raw():
                received += piece[: max(left, 0)]
                left -= len(piece)
                self.patience.relax()
                self.patience.check()
                # A response that is read to its end leaves its connection for the next one.
                if left < 0:
                    return size
                if self.clock() - began_s > STALL_S:
                    if len(received) - began_bytes < STALL_BYTES:
                        raise _StalledError
                    began_s, began_bytes = self.clock(), len(received)
        if left > 0:
            raise ConnectionError("the connection ended early")
        return size

    @contextmanager
    def _get(self, url: str, headers: dict[str, str]) -> Iterator[Any]:
        with get_session().stream("GET", url, headers=headers, timeout=TIMEOUT_S) as response:
            if response.status_code >= 400:
                response.read()
                hf_raise_for_status(response)
            yield response

    def _patiently(self, ask: Callable[[], Any], *, listing: bool = False) -> Any:
        """Ask until there is an answer; only what waiting cannot mend is raised."""
        hub = f"the hub {self.endpoint or constants.ENDPOINT}"
        while True:
            try:
                answer = ask()
            except _StalledError:
                self.patience.endure(f"{hub} sends hardly anything; it is asked anew")
            except OfflineModeIsEnabled as error:
                raise DataError(
                    f"{self.name} is not fetched from the hub.",
                    why="HF_HUB_OFFLINE is set, so that nothing is, and no copy was kept here.",
                    fix=f"Unset it{self.without and ', or ' + self.without}.",
                ) from error
            except (HTTPError, OSError) as error:
                status = _status_of(error)
                if status == 429:
                    self.patience.endure(
                        f"{hub} wants fewer requests (429)", asked_s=_retry_after_s(error)
                    )
                elif status is None:
                    self.patience.endure(self._unanswered(hub, error))
                elif status >= 500 or status == 408:
                    self.patience.endure(
                        f"{hub} is out of order ({status})", asked_s=_retry_after_s(error)
                    )
                else:
                    refused = refusal(self.name, self.kind, error, status, listing=listing)
                    raise refused from error
            else:
                self.patience.relax()
                return answer

    def _unanswered(self, hub: str, error: Exception) -> str:
        """Return what is told of a request without an answer."""
        without = self.without and f"; to do without, {self.without}"
        # What is said of a connection that was cut counts bytes, and would be told each time anew.
        if type(error).__name__ != "ConnectError":
            return f"the connection to {hub} failed or was cut{without}"
        why = str(error).partition("\n")[0] or "no connection"
        return f"{hub} cannot be reached ({why}){without}"


class _HubFile(io.RawIOBase):
    """A file on a hub that can be read from any place; nothing is kept."""

    def __init__(self, hub: Hub, url: str) -> None:
        self._hub = hub
        self._url = url
        self._offset = 0
        # One small request says how large it is, and whether it may be had.
        _, self._size = hub.read_range(url, 0, 1)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._offset, io.SEEK_END: self._size}[whence]
        self._offset = max(0, origin + offset)
        return self._offset

    def readinto(self, buffer: Any) -> int:
        end = min(self._offset + len(buffer), self._size)
        if end <= self._offset:
            return 0
        data, _ = self._hub.read_range(self._url, self._offset, end)
        buffer[: len(data)] = data
        self._offset += len(data)
        return len(data)


@dataclass(frozen=True, kw_only=True, slots=True)
class HubShards:
    """A data set of a hub at one commit.

    Attributes:
        hub: its repository.
        listing: commit and files.
    """

    hub: Hub
    listing: HubListing

    @property
    def names(self) -> Sequence[str]:
        """The files, sorted."""
        return self.listing.names

    @property
    def version(self) -> str:
        """The commit."""
        return self.listing.commit

    @property
    def local(self) -> bool:
        """No: what is read comes from the hub."""
        return False

    def check(self, name: str) -> None:
        """Do nothing: a commit never changes."""

    def open(self, name: str) -> BinaryIO:
        """Open a shard.

        Raises:
            DataError: it is not there, or not accessible.
        """
        return self.hub.open(name, revision=self.listing.commit)


def _size_of(response: Any, start: int, url: str) -> int:
    """Return the size of the file that a response is a part of, from `start` on."""
    if response.status_code == 206:
        found = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", response.headers.get("Content-Range", ""))
        if found is not None and int(found[1]) == start:
            return int(found[2])
    elif start == 0 and "Content-Length" in response.headers:
        return int(response.headers["Content-Length"])
    raise DataError(
        f"{url.partition('?')[0]} cannot be read in parts.",
        why="Its server does not answer requests for ranges of bytes.",
        fix="Check HF_ENDPOINT and proxies, or fetch the data set and name its folder.",
    )


def _status_of(error: Exception) -> int | None:
    response = getattr(error, "response", None)
    return None if response is None else int(response.status_code)


def _retry_after_s(error: Exception) -> float | None:
    text = getattr(error, "response", None).headers.get("Retry-After", "")  # type: ignore[union-attr]  # its callers have seen a status
    return float(text) if text.isdecimal() else None
