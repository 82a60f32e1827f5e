"""A hub on this machine: a real HTTP server that answers what the library asks, and misbehaves."""

from __future__ import annotations

import json
import re
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "c" * 40
DRIBBLED_BYTES = 7


@dataclass
class MockHub:
    """One data set and one model, served from a folder.

    Attributes:
        folder: what it serves.
        name: of the data set, and of a model with a tokenizer.json.
        card: metadata of the data set.
        script: what happens to the next requests for files: "ok", "429", "503", "cut", "dribble",
            "gated", "missing" or "whole"; "ok" once it is used up.
        listings: the same for the next requests for listings, of which "ok", the statuses, "gated"
            and "token" are known.
        done: what happened to requests for files, in order.
        down: answers 503 to everything while it is set.
        asked: the paths of all requests, in order.
        awake: ends dribbling.
        cdn: the address that hands out the files in place of this one; empty: none does.
        coded: whether it says in a header why it refuses.
        renamed: what the data set was called before.
        tokens: the Authorization of each request, or None.
    """

    folder: Path
    name: str = "someone/texts"
    card: dict[str, Any] = field(default_factory=dict)
    script: deque[str] = field(default_factory=deque)
    listings: deque[str] = field(default_factory=deque)
    done: list[str] = field(default_factory=list)
    down: bool = False
    asked: list[str] = field(default_factory=list)
    awake: threading.Event = field(default_factory=threading.Event)
    cdn: str = ""
    coded: bool = True
    renamed: str = ""
    tokens: list[str | None] = field(default_factory=list)
    endpoint: str = ""
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def note(self, action: str) -> None:
        with self._changed:
            self.done.append(action)
            self._changed.notify_all()

    def wait_for(self, requests: int) -> bool:
        """Wait until so many requests for files have been answered; False when they do not come."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self.done) >= requests, timeout=60)

    def names(self) -> Sequence[str]:
        found = (path for path in self.folder.rglob("*") if path.is_file())
        return [path.relative_to(self.folder).as_posix() for path in found]

    @contextmanager
    def served(self) -> Iterator[MockHub]:
        hub = self

        class Handler(_Handler):
            served = hub

        server = _Server(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.awake.set()
            server.shutdown()
            server.server_close()
            thread.join()


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of clients that went away, which is what they are here to do."""


class _Handler(BaseHTTPRequestHandler):
    served: MockHub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        hub = self.served
        hub.asked.append(self.path)
        hub.tokens.append(self.headers.get("Authorization"))
        if hub.down:
            return self._refuse(503)
        if hub.renamed and hub.renamed in self.path:
            there = self.path.replace(hub.renamed, hub.name)
            return self._send(307, b"", {"Location": there})
        if hub.cdn and "/resolve/" in self.path:
            return self._send(302, b"", {"Location": f"{hub.cdn}{self.path}?signed=1"})
        if match := re.match(rf"/api/(?:datasets|models)/{hub.name}/revision/([^?]+)", self.path):
            action = hub.listings.popleft() if hub.listings else "ok"
            return self._listing(match[1]) if action == "ok" else self._refuse_as(action)
        if match := re.match(rf"(?:/datasets)?/{hub.name}/resolve/[^/]+/([^?]+)", self.path):
            return self._file(hub.folder / match[1])
        return self._refuse(404, {"X-Error-Code": "RepoNotFound"} if hub.coded else {})

    def _listing(self, revision: str) -> None:
        hub = self.served
        if revision not in ("main", COMMIT):
            return self._refuse(404, {"X-Error-Code": "RevisionNotFound"})
        body = {
            "id": hub.name,
            "sha": COMMIT,
            "cardData": hub.card,
            "siblings": [{"rfilename": name} for name in hub.names()],
        }
        return self._send(200, json.dumps(body).encode())

    def _file(self, path: Path) -> None:
        action = self.served.script.popleft() if self.served.script else "ok"
        self.served.note(action)
        if action in ("429", "503", "gated", "missing"):
            return self._refuse_as(action)
        data = path.read_bytes()
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if asked is None or action == "whole":
            return self._send(200, data)
        first, last = int(asked[1]), min(int(asked[2]), len(data) - 1)
        part = data[first : last + 1]
        headers = {"Content-Range": f"bytes {first}-{last}/{len(data)}"}
        if action == "cut":
            self._send(206, part, headers, of_it=len(part) // 2)
            self.close_connection = True
        elif action == "dribble":
            self._send(206, part, headers, of_it=min(DRIBBLED_BYTES, len(part)))
            if len(part) > DRIBBLED_BYTES:
                self.served.awake.wait()
                self.served.awake.clear()
                self.close_connection = True
        else:
            self._send(206, part, headers)
        return None

    def _refuse_as(self, action: str) -> None:
        match action:
            case "429":
                self._refuse(429, {"Retry-After": "7"})
            case "gated":
                self._refuse(403, {"X-Error-Code": "GatedRepo"})
            case "token":
                words = "Invalid credentials in Authorization header"
                self._refuse(401, {"X-Error-Message": words})
            case "missing":
                self._refuse(404, {"X-Error-Code": "EntryNotFound"})
            case status:
                self._refuse(int(status))

    def _refuse(self, status: int, headers: dict[str, str] | None = None) -> None:
        self._send(status, b"{}", headers)

    def _send(
        self,
        status: int,
        body: bytes,
        headers: dict[str, str] | None = None,
        *,
        of_it: int | None = None,
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[:of_it])
        self.wfile.flush()

    def log_message(self, format: str, *args: object) -> None:
        pass
