"""A local stand-in for a Docker daemon: the Engine API as far as our backend speaks it, containers made by bubblewrap.

For machines without a daemon, tests above all. It runs real sandboxes and answers as dockerd does (status codes,
messages, multiplexed attach streams); it has no images but names for this machine's /usr, and bounds neither memory
nor processes itself. Source: Docker Engine API 1.41.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import socketserver
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from turnlog.sandbox_workers.backends.docker.server_container import Boxes, Container, Refused

API = "1.41"
Answer = tuple[int, object]


class Requests(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server: Listener

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: tests read the log."""

    def address_string(self) -> str:
        """A unix socket's peer has no address."""
        return "local"

    def do_GET(self) -> None:
        """See `_answer`."""
        self._answer()

    do_POST = do_DELETE = do_GET

    def _answer(self) -> None:
        split = urlsplit(self.path)
        path, query = re.sub(r"^/v[\d.]+", "", split.path), parse_qs(split.query)
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length) or b"{}")
        try:
            for method, pattern, act in ROUTES:
                found = re.fullmatch(pattern, path)
                if found and method == self.command:
                    status, said = act(self, [unquote(part) for part in found.groups()], query, body)
                    break
            else:
                status, said = 404, {"message": "page not found"}
        except Refused as refusal:
            status, said = refusal.status, {"message": str(refusal)}
        if status != 101:
            self._send(status, said)

    def _send(self, status: int, said: object) -> None:
        data = b"" if said is None else said.encode() if isinstance(said, str) else json.dumps(said).encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain" if isinstance(said, str) else "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if status != 204:
            self.wfile.write(data)

    def hijack(self, container: Container) -> None:
        """Give the connection to the container until it ends. Source: "Attach to a container", hijacking."""
        self.close_connection = True
        self.wfile.write(
            b"HTTP/1.1 101 UPGRADED\r\nContent-Type: application/vnd.docker.raw-stream\r\n"
            b"Connection: Upgrade\r\nUpgrade: tcp\r\n\r\n"
        )
        self.server.hijacked.add(self.connection)
        try:
            container.attach(self.connection)
        finally:
            self.server.hijacked.discard(self.connection)


class Listener(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """Connections on a unix socket, a thread for each."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, path: Path, boxes: Boxes) -> None:
        super().__init__(str(path), Requests)
        self.boxes = boxes
        self.hijacked: set[socket.socket] = set()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no error."""


class DockerServer:
    """A context in which `url` is a daemon's address."""

    def __init__(self, socket_path: Path, cache: Path, images: dict[str, str]) -> None:
        """`images`: the PATH of each, in which python3 is looked for; `cache` as of the local backends."""
        self.url = f"unix://{socket_path}"
        self.boxes = Boxes(cache, images)
        self._listener = Listener(socket_path, self.boxes)
        self._thread = threading.Thread(target=self._listener.serve_forever, kwargs={"poll_interval": 0.05})

    def __enter__(self) -> DockerServer:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
                 ) -> None:  # fmt: skip
        self.stop()
        self.boxes.close()

    def stop(self) -> None:
        """The daemon is gone; its containers' inputs end with it."""
        if not self._thread.is_alive():
            return
        self._listener.shutdown()
        self._listener.server_close()
        self._thread.join()
        for connection in tuple(self._listener.hijacked):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


def _info(request: Requests, names: list[str], query: dict[str, list[str]], body: dict[str, Any]) -> Answer:
    return 200, {"ServerVersion": "local", "DefaultRuntime": "runc", "Runtimes": {"runc": {"path": "bwrap"}},
                 "MemoryLimit": False, "PidsLimit": False, "CpuCfsQuota": False, "OSType": "linux",
                 "Architecture": os.uname().machine}  # fmt: skip


def _list(request: Requests, names: list[str], query: dict[str, list[str]], body: dict[str, Any]) -> Answer:
    wanted = json.loads(query.get("filters", ["{}"])[0]).get("label", [])
    return 200, [box.listed() for box in request.server.boxes.all() if all(label in box.labels for label in wanted)]


def _create(request: Requests, names: list[str], query: dict[str, list[str]], body: dict[str, Any]) -> Answer:
    return 201, {"Id": request.server.boxes.create(query["name"][0], body).id, "Warnings": []}


def _attach(request: Requests, names: list[str], query: dict[str, list[str]], body: dict[str, Any]) -> Answer:
    request.hijack(request.server.boxes.find(names[0]))
    return 101, None


def _start(request: Requests, names: list[str], query: dict[str, list[str]], body: dict[str, Any]) -> Answer:
    request.server.boxes.start(request.server.boxes.find(names[0]))
    return 204, None


def _inspect(request: Requests, names: list[str], query: dict[str, list[str]], body: dict[str, Any]) -> Answer:
    return 200, request.server.boxes.find(names[0]).inspected()


def _kill(request: Requests, names: list[str], query: dict[str, list[str]], body: dict[str, Any]) -> Answer:
    request.server.boxes.find(names[0]).kill()
    return 204, None


def _remove(request: Requests, names: list[str], query: dict[str, list[str]], body: dict[str, Any]) -> Answer:
    request.server.boxes.remove(names[0])
    return 204, None


def _image(request: Requests, names: list[str], query: dict[str, list[str]], body: dict[str, Any]) -> Answer:
    return 200, request.server.boxes.image(names[0])


ROUTES: tuple[tuple[str, str, Callable[[Requests, list[str], dict[str, list[str]], dict[str, Any]], Answer]], ...] = (
    ("GET", "/version", lambda *_: (200, {"Version": "local", "ApiVersion": API, "MinAPIVersion": "1.12"})),
    ("GET", "/info", _info),
    ("GET", "/containers/json", _list),
    ("POST", "/containers/create", _create),
    ("POST", "/containers/([^/]+)/attach", _attach),
    ("POST", "/containers/([^/]+)/start", _start),
    ("GET", "/containers/([^/]+)/json", _inspect),
    ("POST", "/containers/([^/]+)/kill", _kill),
    ("DELETE", "/containers/([^/]+)", _remove),
    ("GET", "/images/(.+)/json", _image),
)
