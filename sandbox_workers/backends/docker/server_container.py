"""Containers of the local stand-in for a Docker daemon: what a create request asks for, as a bubblewrap.

Refused    what dockerd would answer with: its status and message
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import socket
import struct
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

from turnlog.sandbox_workers.backends.bubblewrap import find
from turnlog.sandbox_workers.backends.interpreter_cache import interpreter

HEADER = struct.Struct(">BxxxL")
PYTHON_HOME = "/opt/python"
SYSTEM_FOLDERS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")


class Refused(Exception):
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
        """As `docker kill`, or as the kernel does it when the memory of the container is used up. Raises Refused."""
        self._exhausted = exhausted
        if self.process is None or self.process.poll() is not None:
            raise Refused(409, f"Container {self.id} is not running")
        self.process.kill()
        self.process.wait()

    def discard(self) -> None:
        """It is being removed."""
        with contextlib.suppress(Refused):
            self.kill()
        self._started.set()

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


class Boxes:
    """All containers, and the names of images."""

    def __init__(self, cache: Path, images: dict[str, str]) -> None:
        self._bwrap = find(cache)
        self._python = interpreter(cache)
        self._images = images
        self._boxes: dict[str, Container] = {}
        # bwrap dies with the thread that started it (PR_SET_PDEATHSIG), so it is one that stays.
        self._starter = ThreadPoolExecutor(1)

    def all(self) -> list[Container]:
        """Every container."""
        return list(self._boxes.values())

    def find(self, key: str) -> Container:
        """By id or name. Raises Refused."""
        for box in self.all():
            if key in (box.id, box.name):
                return box
        raise Refused(404, f"No such container: {key}")

    def image(self, name: str) -> dict[str, Any]:
        """As inspected. Raises Refused."""
        if name not in self._images:
            raise Refused(404, f"No such image: {name}")
        return {"Id": f"sha256:{hashlib.sha256(name.encode()).hexdigest()}", "RepoTags": [name]}

    def create(self, name: str, config: dict[str, Any]) -> Container:
        """As `docker create`. Raises Refused."""
        self.image(config["Image"])
        if config["HostConfig"].get("Runtime") not in (None, "", "runc"):
            raise Refused(400, f"Unknown runtime specified {config['HostConfig']['Runtime']}")
        if any(box.name == name for box in self.all()):
            raise Refused(409, f'Conflict. The container name "/{name}" is already in use')
        box = Container(name, config)
        self._boxes[box.id] = box
        return box

    def start(self, box: Container) -> None:
        """As `docker start`. Raises Refused."""
        path = self._images[box.config["Image"]]
        program = box.config["Entrypoint"][0]
        if not shutil.which(program, path=path.replace(PYTHON_HOME, str(self._python.root))):
            box.refused = 127
            raise Refused(400, f'OCI runtime create failed: exec: "{program}": executable file not found in $PATH')
        uid = int(box.config["User"].partition(":")[0])
        user = {"user": uid, "group": uid, "extra_groups": []} if os.geteuid() == 0 else {}
        self._starter.submit(box.run, self._argv(box.config, path), user).result()

    def remove(self, key: str) -> None:
        """As `docker rm -f`. Raises Refused."""
        box = self.find(key)
        box.discard()
        del self._boxes[box.id]

    def close(self) -> None:
        """End and remove every container."""
        for box in self.all():
            self.remove(box.id)
        self._starter.shutdown()

    def _argv(self, config: dict[str, Any], path: str) -> list[str]:
        host = config["HostConfig"]
        uid, gid = config["User"].split(":")
        words = [str(self._bwrap), "--unshare-all", "--unshare-user", "--uid", uid, "--gid", gid, "--disable-userns",
                 "--hostname", config["Hostname"], "--die-with-parent", "--new-session", "--as-pid-1",
                 "--cap-drop", host["CapDrop"][0], "--clearenv", "--setenv", "PATH", path]  # fmt: skip
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
        for folder, options in host["Tmpfs"].items():
            asked = dict(option.partition("=")[::2] for option in options.split(","))
            words += ["--perms", asked["mode"], "--size", asked["size"], "--tmpfs", folder]
        words += ["--remount-ro", "/dev", "--remount-ro", "/"] if host["ReadonlyRootfs"] else []
        return [*words, "--chdir", config["WorkingDir"], "--", *config["Entrypoint"]]
