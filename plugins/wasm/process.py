"""The process of a wasm sandbox: holds the compiled modules, forks once per call, and owns the workspace.

It is the init of the local backends with guests in place of programs, so files, limits that are watched from outside,
streaming and cancelling use the same code. It is started as the worker's user, since it reads the worker's packages,
and becomes the slot's user before the first call."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

from turnlog.plugins.wasm.guest import PR_SET_PDEATHSIG, THREADS, Unusable, become, engines_of
from turnlog.sandbox_workers.inside.call import Become, CommandProcess, Reaped, Verdict, end_all
from turnlog.sandbox_workers.inside.child import PR_SET_DUMPABLE, bounds, prctl
from turnlog.sandbox_workers.inside.frames import Control, ControlClosed, Socket, send
from turnlog.sandbox_workers.inside.init import PR_SET_CHILD_SUBREAPER, Answer, Service, freeze
from turnlog.sandbox_workers.inside.observables import Integrity
from turnlog.sandbox_workers.inside.processes import InitEnvironment

PR_SET_NO_NEW_PRIVS = 38
OVERHEAD_BYTES = 192 << 20
"""Bytes that wasmtime and this interpreter may use beside a guest's own memory, including a compiler."""


class GuestCall(CommandProcess):
    """A guest and its limits. The limits in `head` are the guest's; its process gets additional room for the host. The
    threads are wasmtime's alone: its file calls make some on a busy machine, and the rlimit ends that without harm."""

    def __init__(
        self, place: InitEnvironment, control: Control, head: dict[str, Any], become: Become, integrity: Integrity
    ) -> None:
        super().__init__(place, control, head, None, become, integrity)
        memory, threads = self.limits["memory_bytes"] + OVERHEAD_BYTES, bounds(place, self.limits, THREADS)
        self.limits = {**self.limits, "memory_bytes": memory, "pids": threads[resource.RLIMIT_NPROC]}

    def _end_tree(self, *, spare: bool) -> None:
        super()._end_tree(spare=spare)
        self.reaped.look(0)  # the kernel reports a guest only when its last thread is gone

    def _judge(self, cpu_s: float) -> Verdict:
        if self.output.note.startswith(b"wall_s"):
            return "timeout", "wall_s"
        if self.output.note.startswith(b"fuel"):
            return "resource_limit", "fuel"
        return super()._judge(cpu_s)


class GuestService(Service):
    """The init's service, without a persistent interpreter."""

    def _exec(self, head: dict[str, Any], body: bytes) -> Answer:
        if head["kind"] == "session" and head["alive"]:
            return {"lost": True}, b""
        source, stdin = body[: head["source"]], body[head["source"] :]
        head = head | {"kind": "a persistent interpreter"} if head["kind"] == "session" else head
        with self._folder(head["cwd"]) as walk:
            call = GuestCall(self.place, self.control, head, self.become, self.integrity)
            return call.run(source, stdin, walk.here), b""


def main(words: str) -> None:
    """Run the process. `words` is JSON {"control": descriptor, "uid": host user or null, "modules": {name: path},
    "library", "fuel", "filter": descriptor of a system call filter or null, "folders": [workspace, temporary]}."""
    about = json.loads(words)
    modules = {name: Path(path) for name, path in about["modules"].items()}
    try:
        engines = engines_of(modules, about["library"], about["fuel"], read_descriptor(about["filter"]))
    except Unusable as error:
        raise SystemExit(str(error)) from error
    drop_privileges(about["uid"])
    place = InitEnvironment(about["folders"], about["uid"] is not None, namespace=False)
    freeze()
    control = Socket(about["control"])
    with contextlib.suppress(ControlClosed):
        send(control, {"ready": True, "pid": os.getpid()})
        GuestService(control, place, functools.partial(become, engines)).serve()
    end_all(place, Reaped())


def read_descriptor(descriptor: int | None) -> bytes:
    """Read all bytes of a descriptor; empty for None."""
    if descriptor is None:
        return b""
    with open(descriptor, "rb") as file:
        return file.read()


def drop_privileges(uid: int | None) -> None:
    """Become the slot's user permanently, and arrange to end with the worker."""
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.environ.clear()
    os.umask(0o022)
    # This follows the change of user, because that clears the first two (prctl(2)).
    for option, value in (
        (PR_SET_PDEATHSIG, signal.SIGKILL),
        (PR_SET_DUMPABLE, 0),
        (PR_SET_NO_NEW_PRIVS, 1),
        (PR_SET_CHILD_SUBREAPER, 1),
    ):
        if prctl(option, value, 0, 0, 0):
            raise SystemExit(f"prctl({option}, {value}) failed")


if __name__ == "__main__":
    main(*sys.argv[1:])
