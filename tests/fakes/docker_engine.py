"""A stand-in for a Docker daemon: the Engine API as far as our backend speaks it, containers made by bubblewrap.

For machines without a daemon, tests above all. It runs real sandboxes and answers as dockerd does (status codes,
messages, multiplexed attach streams); it has no images but names for this machine's /usr, whether it builds them or
pulls them from `registry`, and bounds neither memory nor processes itself. Source: Docker Engine API 1.41.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import secrets
import shutil
import socket
import socketserver
import struct
import subprocess
import tarfile
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import TracebackType
from typing import IO, Any
from urllib.parse import parse_qs, unquote, urlsplit

from turnlog.sandbox_workers.backends.bubblewrap import find
from turnlog.sandbox_workers.backends.roots import interpreter

API = "1.41"
Answer = tuple[int, object]

HEADER = struct.Struct(">BxxxL")
PYTHON_HOME = "/opt/python"
ROOT_UID = 19_999
"""Host user of a container's root, as under a daemon with user namespaces."""
SYSTEM_FOLDERS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")


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
        data = self.rfile.read(length)
        is_tar = str(self.headers.get("Content-Type")).endswith("tar")
        body = {"tar": data} if is_tar else json.loads(data or b"{}")
        try:
            for method, pattern, act in ROUTES:
                found = re.fullmatch(pattern, path)
                if found and method == self.command:
                    status, said = act(self, [unquote(part) for part in found.groups()], query, body)
                    break
            else:
                status, said = 404, {"message": "page not found"}
        except ApiError as refusal:
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

    def __init__(self, socket_path: Path, cache: Path, images: dict[str, str | FakeImage]) -> None:
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


def _pull(request: Requests, names: list[str], query: dict[str, list[str]], body: dict[str, Any]) -> Answer:
    name = ":".join((query["fromImage"][0], *query.get("tag", ())))
    if name not in request.server.boxes.registry:
        raise ApiError(404, f"manifest for {name} not found: manifest unknown")
    request.server.boxes.add_image(name, FakeImage("/usr/bin:/bin"))
    return 200, {"status": f"Downloaded newer image for {name}"}


def _build(request: Requests, names: list[str], query: dict[str, list[str]], body: dict[str, Any]) -> Answer:
    with tarfile.open(fileobj=io.BytesIO(body["tar"])) as context:
        file = context.extractfile("Dockerfile")
        text = file.read().decode() if file is not None else ""
    if "RUN false" in text:
        return 200, {"error": "The command '/bin/sh -c false' returned a non-zero code: 1"}
    request.server.boxes.built.append((query["t"][0], query.get("networkmode", [""])[0]))
    request.server.boxes.add_image(query["t"][0], FakeImage("/usr/bin:/bin"))
    return 200, {"stream": "Successfully built"}


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
    ("POST", "/images/create", _pull),
    ("POST", "/build", _build),
)


class ApiError(Exception):
    """An error answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Container:
    """One, from its creation to its removal."""

    def __init__(self, name: str, config: dict[str, Any]) -> None:
        self.id = secrets.token_hex(32)
        self.name = name
        self.config = config
        self.labels: dict[str, str] = config.get("Labels") or {}
        self.process: subprocess.Popen[bytes] | None = None
        self.pid = 0
        self._connection: socket.socket | None = None
        self._started = threading.Event()
        self._sending = threading.Lock()
        self._exhausted = False
        self.refused = 0
        """ExitCode of a start that failed."""
        self.layer: Path | None = None
        """Folder on the host of what its own layer holds, if it may write there."""

    @property
    def state(self) -> str:
        """As `docker ps` shows it."""
        if self.process is None:
            return "created"
        return "running" if self.process.poll() is None else "exited"

    def listed(self) -> dict[str, Any]:
        """As in a list."""
        return {"Id": self.id, "Names": [f"/{self.name}"], "Labels": self.labels, "State": self.state}

    def inspected(self) -> dict[str, Any]:
        """As inspected."""
        code = (self.process.poll() if self.process else self.refused) or 0
        running = self.state == "running"
        state = {"Status": self.state, "Running": running, "Pid": self.pid if running else 0,
                 "OOMKilled": self._exhausted, "ExitCode": 128 - code if code < 0 else code, "Error": ""}  # fmt: skip
        return {"Id": self.id, "Name": f"/{self.name}", "State": state, "Config": self.config,
                "HostConfig": self.config["HostConfig"]}  # fmt: skip

    def attach(self, connection: socket.socket) -> None:
        """Serve a hijacked connection: its bytes are the input, whose end it is too (StdinOnce)."""
        self._connection = connection
        self._started.wait()
        if self.process is None:  # removed before it was started
            return
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            while part := connection.recv(65536):
                self.process.stdin.write(part)
                self.process.stdin.flush()
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        self.process.wait()

    def run(self, argv: list[str], user: dict[str, Any]) -> None:
        """Start it."""
        read, write = os.pipe()
        try:
            self.process = subprocess.Popen(
                [argv[0], "--info-fd", str(write), *argv[1:]], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, bufsize=0, env={}, cwd="/", pass_fds=(write,), **user,
            )  # fmt: skip
        finally:
            os.close(write)
        with os.fdopen(read) as told:
            said = told.read()
        self.pid = json.loads(said)["child-pid"] if said else self.process.pid
        outputs = ((1, self.process.stdout), (2, self.process.stderr))
        self._pumps = [threading.Thread(target=self._pump, args=output, daemon=True) for output in outputs]
        for pump in self._pumps:
            pump.start()
        threading.Thread(target=self._finish, daemon=True).start()
        self._started.set()

    def kill(self, *, exhausted: bool = False) -> None:
        """As `docker kill`, or as the kernel does it when the memory of the container is used up. Raises ApiError."""
        self._exhausted = exhausted
        if self.process is None or self.process.poll() is not None:
            raise ApiError(409, f"Container {self.id} is not running")
        self.process.kill()
        self.process.wait()

    def discard(self) -> None:
        """It is being removed."""
        with contextlib.suppress(ApiError):
            self.kill()
        self._started.set()
        if self.layer is not None:
            shutil.rmtree(self.layer, ignore_errors=True)

    def _pump(self, stream: int, output: IO[bytes]) -> None:
        with output:
            while part := output.read(65536):
                if self._connection is not None:
                    with contextlib.suppress(OSError), self._sending:
                        self._connection.sendall(HEADER.pack(stream, len(part)) + part)

    def _finish(self) -> None:
        for pump in self._pumps:
            pump.join()
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)


@dataclass(frozen=True)
class FakeImage:
    """An image beyond this machine's /usr: its PATH, its WORKDIR, files by their absolute paths, its CMD, and folders
    of this machine in it."""

    path: str
    workdir: str = "/"
    files: dict[str, str] = field(default_factory=dict)
    command: tuple[str, ...] = ()
    folders: dict[str, Path] = field(default_factory=dict)


class Boxes:
    """All containers, and the names of images."""

    def __init__(self, cache: Path, images: dict[str, str | FakeImage]) -> None:
        self._bwrap = find(cache)
        self._python = interpreter(cache)
        self._images = {name: FakeImage(image) if isinstance(image, str) else image for name, image in images.items()}
        self._boxes: dict[str, Container] = {}
        self.registry: set[str] = set()
        """Images that can be pulled."""
        self.built: list[tuple[str, str]] = []
        """Name and network of each build."""
        # bwrap dies with the thread that started it (PR_SET_PDEATHSIG), so it is one that stays.
        self._starter = ThreadPoolExecutor(1)

    def all(self) -> list[Container]:
        """Every container."""
        return list(self._boxes.values())

    def find(self, key: str) -> Container:
        """By id or name. Raises ApiError."""
        for box in self.all():
            if key in (box.id, box.name):
                return box
        raise ApiError(404, f"No such container: {key}")

    def image(self, name: str) -> dict[str, Any]:
        """As inspected. Raises ApiError."""
        if name not in self._images:
            raise ApiError(404, f"No such image: {name}")
        image = self._images[name]
        config = {"Entrypoint": None, "Cmd": list(image.command), "WorkingDir": image.workdir, "User": ""}
        return {"Id": f"sha256:{hashlib.sha256(name.encode()).hexdigest()}", "RepoTags": [name], "Config": config}

    def add_image(self, name: str, image: FakeImage) -> None:
        """Take an image in."""
        self._images[name] = image

    def create(self, name: str, config: dict[str, Any]) -> Container:
        """As `docker create`. Raises ApiError."""
        self.image(config["Image"])
        if config["HostConfig"].get("Runtime") not in (None, "", "runc"):
            raise ApiError(400, f"Unknown runtime specified {config['HostConfig']['Runtime']}")
        if any(box.name == name for box in self.all()):
            raise ApiError(409, f'Conflict. The container name "/{name}" is already in use')
        box = Container(name, config)
        self._boxes[box.id] = box
        return box

    def start(self, box: Container) -> None:
        """As `docker start`. Raises ApiError."""
        path = self._images[box.config["Image"]].path
        program = box.config["Entrypoint"][0]
        if not shutil.which(program, path=path.replace(PYTHON_HOME, str(self._python.root))):
            box.refused = 127
            raise ApiError(400, f'OCI runtime create failed: exec: "{program}": executable file not found in $PATH')
        uid = int(box.config["User"].partition(":")[0]) or ROOT_UID
        user = {"user": uid, "group": uid, "extra_groups": []} if os.geteuid() == 0 else {}
        layer = self._layer(box, uid) if not box.config["HostConfig"]["ReadonlyRootfs"] else None
        self._starter.submit(box.run, self._argv(box.config, path, layer), user).result()

    def _layer(self, box: Container, uid: int) -> Path:
        """A folder with the image's own files, which belong to the container's user."""
        box.layer = Path(tempfile.mkdtemp(prefix="turnlog-fake-layer-"))
        image = self._images[box.config["Image"]]
        for path, text in {**image.files, f"{image.workdir}/.": ""}.items():
            target = box.layer / path[1:]
            target.parent.mkdir(parents=True, exist_ok=True)
            if not path.endswith("/."):
                target.write_text(text)
        if os.geteuid() == 0:
            for path in (box.layer, *box.layer.rglob("*")):
                os.chown(path, uid, uid)
        return box.layer

    def remove(self, key: str) -> None:
        """As `docker rm -f`. Raises ApiError."""
        box = self.find(key)
        box.discard()
        del self._boxes[box.id]

    def close(self) -> None:
        """End and remove every container."""
        for box in self.all():
            self.remove(box.id)
        self._starter.shutdown()

    def _argv(self, config: dict[str, Any], path: str, layer: Path | None = None) -> list[str]:
        host = config["HostConfig"]
        uid, gid = config["User"].split(":")
        words = [str(self._bwrap), "--unshare-all", "--unshare-user", "--uid", uid, "--gid", gid, "--disable-userns",
                 "--hostname", config["Hostname"], "--die-with-parent", "--new-session", "--as-pid-1",
                 "--cap-drop", host["CapDrop"][0], "--clearenv", "--setenv", "PATH", path,
                 "--setenv", "HOME", "/"]  # fmt: skip
        words += ["--setenv", "HOSTNAME", config["Hostname"], "--setenv", "LD_LIBRARY_PATH", f"{PYTHON_HOME}/lib"]
        for variable in config["Env"]:
            words += ["--setenv", *variable.split("=", 1)]
        words += ["--ro-bind", "/usr", "/usr", "--ro-bind", str(self._python.root), PYTHON_HOME]
        for folder in SYSTEM_FOLDERS:
            if os.path.islink(folder):
                words += ["--symlink", os.readlink(folder), folder]
            elif os.path.isdir(folder):
                words += ["--ro-bind", folder, folder]
        words += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache", "--ro-bind-try", "/etc/alternatives",
                  "/etc/alternatives", "--proc", "/proc", "--dev", "/dev"]  # fmt: skip
        for mount in host.get("Mounts") or ():
            words += ["--ro-bind", mount["Source"], mount["Target"]]
        for top in sorted(layer.iterdir()) if layer is not None else ():
            words += ["--bind", str(top), f"/{top.name}"]
        for target, source in self._images[config["Image"]].folders.items():
            words += ["--ro-bind", str(source), target]
        for folder, options in host["Tmpfs"].items():
            asked = dict(option.partition("=")[::2] for option in options.split(","))
            words += ["--perms", asked["mode"], "--size", asked["size"], "--tmpfs", folder]
        words += ["--remount-ro", "/dev", "--remount-ro", "/"] if host["ReadonlyRootfs"] else []
        workdir = config.get("WorkingDir") or self._images[config["Image"]].workdir
        return [*words, "--chdir", workdir, "--", *config["Entrypoint"]]
