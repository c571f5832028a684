"""Servers that all workers of a test run share: the process that began the run starts each when a test first needs it.

A worker asks that process over a Unix socket, and a run in one process asks itself. The servers stop at the end of the
run, also if it is interrupted or a worker crashes; they die with the process that started them.
"""

from __future__ import annotations

import contextlib
import json
import socket
import socketserver
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import httpx

from turnlog.infra.embedded import RegistryDied
from turnlog.infra.embedded.broker import Broker
from turnlog.infra.embedded.ports import HOST, free_ports
from turnlog.infra.embedded.process import Child, Launch
from turnlog.infra.embedded.servers import ObjectStore
from turnlog.settings import StoreSettings

Server = TypeVar("Server")
PATIENT = "broker.session.timeout.ms=60000\n"
"""Otherwise other tests could keep the machine so busy that the broker is fenced. No test kills this one."""


class SharedServers(Protocol):
    """The servers of a run, as its tests see them."""

    folder: Path
    """Folder of the servers' data and logs."""

    def find(self, name: str) -> dict[str, str]:
        """Return how to reach the server NAME, which is started if no test has needed it yet. Raises what its start
        raises."""


class OwnServers:
    """The servers of the run that this process began."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._found: dict[str, dict[str, str]] = {}
        self._locks = {name: threading.Lock() for name in STARTS}
        self._running = contextlib.ExitStack()
        self._stopped = False

    def find(self, name: str) -> dict[str, str]:
        """See SharedServers."""
        with self._locks[name]:  # others wait until it is ready
            if self._stopped:
                raise RuntimeError("the run has ended")
            if name not in self._found:
                self._found[name] = STARTS[name](self)
            return self._found[name]

    def run(self, server: AbstractContextManager[Server]) -> Server:
        """Start the server, which stops at the end of the run."""
        return self._running.enter_context(server)

    def answer_workers(self, path: Path) -> None:
        """Answer, from now on, the workers that ask at the socket `path`."""
        listener = _Listener(str(path), _WorkerRequest)
        listener.servers = self
        threading.Thread(target=listener.serve_forever, daemon=True).start()
        self._running.callback(listener.server_close)
        self._running.callback(listener.shutdown)

    def stop(self) -> None:
        """Stop all servers, the last one first."""
        self._stopped = True
        for lock in self._locks.values():
            with lock:  # what is just starting becomes ready, and is stopped with the others
                pass
        self._running.close()


class ServersOfRun:
    """The servers of the run in which this process is a worker."""

    def __init__(self, folder: Path, path: Path) -> None:
        self.folder, self._path = folder, path

    def find(self, name: str) -> dict[str, str]:
        """See SharedServers."""
        with socket.socket(socket.AF_UNIX) as connection, connection.makefile("rw") as lines:
            connection.connect(str(self._path))
            lines.write(f"{name}\n")
            lines.flush()
            answer: dict[str, dict[str, str]] = json.loads(lines.readline())
        if "error" in answer:
            raise RuntimeError(f"{name} was not started: {answer['error']}")
        return answer["found"]


class _Listener(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    block_on_close = False
    servers: OwnServers


class _WorkerRequest(socketserver.StreamRequestHandler):
    server: _Listener

    def handle(self) -> None:
        answer: dict[str, Any]
        try:
            answer = {"found": self.server.servers.find(self.rfile.readline().decode().strip())}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        self.wfile.write(f"{json.dumps(answer)}\n".encode())


def registry_launch(kafka: str, prefix: str, log: Path) -> tuple[str, Launch]:
    """Return the URL of a schema registry whose state is on `kafka`, and how to start it."""
    port = free_ports(1)[0]
    url = f"http://{HOST}:{port}"
    launch = Launch(
        name="registry",
        argv=(sys.executable, "-m", "turnlog.infra.embedded.registry_app"),
        log=log,
        env={
            "TURNLOG_KAFKA_BOOTSTRAP": kafka,
            "TURNLOG_KAFKA_PREFIX": prefix,
            "TURNLOG_REGISTRY_PORT": str(port),
        },
        ready=lambda: _answers(f"{url}/subjects"),
        died=RegistryDied,
    )
    return url, launch


@contextlib.contextmanager
def running_registry(kafka: str, prefix: str, log: Path) -> Iterator[str]:
    """Run a schema registry while the block runs, which gets its URL."""
    url, launch = registry_launch(kafka, prefix, log)
    child = Child(launch).start()
    try:
        child.wait_ready()
        yield url
    finally:
        child.stop()


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=0.5).is_success
    except httpx.TransportError:
        return False


def _start_kafka(servers: OwnServers) -> dict[str, str]:
    return {"bootstrap": servers.run(Broker(servers.folder / "kafka", heap_mb=512, properties=PATIENT)).bootstrap}


def _start_store(servers: OwnServers) -> dict[str, str]:
    settings = servers.run(ObjectStore(servers.folder / "store", StoreSettings())).settings
    return {"endpoint": settings.endpoint, "secret_key": settings.secret_key}


def _start_registry(servers: OwnServers) -> dict[str, str]:
    kafka = servers.find("kafka")["bootstrap"]
    return {"url": servers.run(running_registry(kafka, "registry-", servers.folder / "registry.log"))}


STARTS: dict[str, Callable[[OwnServers], dict[str, str]]] = {
    "kafka": _start_kafka,
    "store": _start_store,
    "registry": _start_registry,
}
