"""A collector of traces: the OTLP/HTTP endpoint /v1/traces, decoded by OpenTelemetry's own protocol buffers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass
class Collector:
    """What was sent to it."""

    url: str = ""
    requests: list[ExportTraceServiceRequest] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    status: int = 200
    """What it answers; nothing is kept of another one."""
    at: int | None = None
    """From so many requests on it answers 400."""

    @property
    def spans(self) -> list[Any]:
        """Every span, in order of arrival."""
        return [span for request in self.requests for of in request.resource_spans for scope in of.scope_spans
                for span in scope.spans]  # fmt: skip

    def take(self, path: str, headers: dict[str, str], body: bytes) -> int:
        """One request; the status."""
        if path != "/v1/traces" or headers.get("content-type") != "application/x-protobuf":
            return 404
        if self.at is not None and len(self.requests) >= self.at:
            return 400
        if self.status == 200:
            self.requests.append(ExportTraceServiceRequest.FromString(body))
            self.headers.append(headers)
        return self.status


@contextmanager
def collecting() -> Iterator[Collector]:
    """One on the loopback."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            status = collector.take(self.path, headers, self.rfile.read(int(headers["content-length"])))
            self.send_response(status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()
