"""A proxy before an S3 store that gives the answers that S3's protocol allows and a healthy store seldom gives."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

XML, HTML = "application/xml", "text/html"


def error(code: str, message: str = "said the store", more: str = "") -> bytes:
    """An error as S3 writes it."""
    head = b'<?xml version="1.0" encoding="UTF-8"?>\n'
    return (
        head + f"<Error><Code>{code}</Code><Message>{message}</Message>{more}<RequestId>1</RequestId></Error>".encode()
    )


@dataclass(frozen=True)
class Fault:
    """An answer instead of the store's, or a change of it. `what`: which requests, of COMPLETE, COPY, PART and any
    method; `times`: how many of them, -1 for all."""

    what: str = "*"
    status: int = 0
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    kind: str = XML
    times: int = -1
    change: Callable[[dict[str, str], bytes], bytes] | None = None
    """Of the store's own answer: its headers, in place, and its body."""
    done: bool = False
    """The store does what is asked; its answer is replaced."""


class FaultyStore:
    """Passes requests on, but for those that `fault` is about."""

    def __init__(self, upstream: int) -> None:
        self.upstream, self.asked = upstream, list[str]()
        self._fault, self._left = Fault(times=0), 0

    @property
    def fault(self) -> Fault:
        """What is wrong now."""
        return self._fault

    @fault.setter
    def fault(self, fault: Fault) -> None:
        self._fault, self._left = fault, fault.times
        self.asked.clear()

    def heal(self) -> None:
        """Nothing is wrong."""
        self.fault = Fault(times=0)

    def taken(self, *names: str) -> Fault | None:
        """The fault, if the request is one of its kind."""
        self.asked.append(names[0])
        if self._left == 0 or self._fault.what not in (*names, "*"):
            return None
        self._left -= 1
        return self._fault

    @contextmanager
    def serving(self) -> Iterator[str]:
        """Its URL while the block runs."""
        server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"store": self}))
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    store: FaultyStore

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        names = [self.command]
        if "uploadId=" in self.path:
            names.append({"POST": "COMPLETE", "PUT": "PART"}.get(self.command, "ABORT"))
        if self.headers.get("x-amz-copy-source"):
            names.append("COPY")
        fault = self.store.taken(*names)
        if fault is not None and fault.change is None:
            if fault.done:
                self._upstream(body)
            headers = {"content-type": fault.kind, "date": formatdate(usegmt=True), **fault.headers}
            self._send(fault.status, headers, fault.body)
            return
        status, headers, content = self._upstream(body)
        if fault is not None and fault.change is not None:
            content = fault.change(headers, content)
        self._send(status, headers, content)

    def _upstream(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.store.upstream, timeout=60)
        try:
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                connection.putheader(name, value)
            connection.endheaders(body)
            answer = connection.getresponse()
            content = answer.read()
            dropped = ("transfer-encoding", "connection")
            return answer.status, {k.lower(): v for k, v in answer.getheaders() if k.lower() not in dropped}, content
        finally:
            connection.close()

    def _send(self, status: int, headers: dict[str, str], content: bytes) -> None:
        self.send_response_only(status)
        if self.command != "HEAD" or "content-length" not in headers:
            headers.setdefault("content-length", str(len(content)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
        self.close_connection = headers.get("content-length") != str(len(content))

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _answer
