"""The init of a container whose worker is attached to its standard input and output, as a container engine does it.

Before an answer to a call is sent, the init reads the container's control group. If the kernel has killed a process for
memory, the call met that limit, whatever its exit code."""

from __future__ import annotations

import base64
import contextlib
import json
import os
from collections.abc import Mapping
from typing import Any

from turnlog.sandbox_workers.inside import init
from turnlog.sandbox_workers.inside.frames import HEADER, Control, frame, write_all
from turnlog.sandbox_workers.inside.observables import empty
from turnlog.sandbox_workers.inside.processes import InitEnvironment
from turnlog.sandbox_workers.inside.workspace import outermost
from turnlog.sandbox_workers.inside.zygote import deny

UNFIT = "this image's working directory is"
"""Start of the message about a working directory that cannot be a workspace."""
ENGINES = ("HOSTNAME",)
"""Variables that a container engine adds and that no sandbox should have."""
Events = Mapping[str, tuple[tuple[str, str], ...]]
EVENTS: Events = {
    "memory_bytes": (
        ("/sys/fs/cgroup/memory.events", "oom_kill"),
        ("/sys/fs/cgroup/memory/memory.oom_control", "oom_kill"),
    ),
    "pids": (("/sys/fs/cgroup/pids.events", "max"), ("/sys/fs/cgroup/pids/pids.events", "max")),
}
"""Files and lines that count how often each limit was met, for cgroup v2 and v1 (admin-guide/cgroup-v2, cgroup-v1)."""


class Pipes(Control):
    """Standard input and output as one control socket. Everything else that is written to standard output goes to
    standard error, so that it cannot be taken for an answer."""

    def __init__(self, events: Events = EVENTS) -> None:
        self._events = events
        self._read, self._write = os.dup(0), os.dup(1)
        with open(os.devnull) as nothing:  # text mode on purpose: Python 3.9 imports a module at the first use
            os.dup2(nothing.fileno(), 0)
        os.dup2(2, 1)
        self._met = count_limit_events(events)

    def fileno(self) -> int:
        return self._read

    def outgoing(self) -> int:
        return self._write

    def recv(self, most: int) -> bytes:
        return os.read(self._read, most)

    def sendall(self, data: bytes) -> None:
        """Send one frame, `data`; see Control. In an answer to a call, a limit that the kernel enforced meanwhile is
        named."""
        head_size, body_size = HEADER.unpack_from(data)
        if not body_size and "status" in (head := json.loads(data[HEADER.size : HEADER.size + head_size])):
            before, self._met = self._met, count_limit_events(self._events)
            data = frame(apply_limits(head, before, self._met))
        write_all(self._write, data)


def main(denied: str, roots: str, *folders: str) -> None:
    """Install the seccomp filter, then run the init. `denied` is a BPF program for seccomp(2) in base64, or empty.
    `folders` are the writable ones, workspace first. `roots`: a JSON list of the folders of the image that make up the
    workspace instead; those that do not exist are made."""
    for name in ENGINES:
        os.environ.pop(name, None)
    cwd, places = workspace_roots(json.loads(roots))
    for folder in folders if places else ():  # an image need not have one
        os.makedirs(folder, 0o1777, exist_ok=True)
    if not places:  # runtimes copy an image's mode, and may copy its files
        empty(InitEnvironment(list(folders), own_user=True, namespace=True))
    if denied:
        try:
            deny(base64.b64decode(denied))
        except OSError as error:
            raise SystemExit(f"the seccomp filter was refused: {error}") from error
    init.run(Pipes(), "namespace", "own", "none", *folders, roots=places, cwd=cwd)


def workspace_roots(paths: list[str]) -> tuple[str, tuple[str, ...]]:
    """Make the folders that make up the workspace. Return the working directory and the outermost of them. `.` is the
    container's working directory. Raises SystemExit."""
    if not paths:
        return "", ()
    cwd = os.getcwd() if paths[0] == "." else paths[0]
    if cwd == "/":
        raise SystemExit(f"{UNFIT} /: give it a WORKDIR, or the task a [environment] workdir")
    roots = outermost([cwd, *paths[1:]])
    for path in (*roots, cwd):
        os.makedirs(path, exist_ok=True)
    os.environ["IMAGE_WORKDIR"] = os.getcwd()
    os.chdir(cwd)
    return cwd, roots


def apply_limits(head: dict[str, Any], before: dict[str, int], now: dict[str, int]) -> dict[str, Any]:
    """Return the answer; if the kernel has enforced a limit meanwhile, name it as the reason."""
    limit = next((name for name, count in now.items() if count > before.get(name, 0)), None)
    if limit is None or head["status"] not in ("ok", "tool_error"):
        return head
    return {**head, "status": "resource_limit", "reason": limit, "exit_code": None}


def count_limit_events(events: Events = EVENTS) -> dict[str, int]:
    """Return how often each limit was met until now. Counts that cannot be read are left out (gVisor shows no control
    group)."""
    counts = {}
    for limit, places in events.items():
        for path, name in places:
            with contextlib.suppress(OSError, ValueError), open(path, encoding="utf-8") as file:
                counts[limit] = int(dict(line.split() for line in file).get(name, 0))
                break
    return counts
