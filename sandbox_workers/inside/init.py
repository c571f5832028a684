"""First process of a sandbox. It runs one call at a time from a control socket.

No process outlives its call, except the persistent interpreter and the servers that it keeps, which are stopped between
their calls.

This module uses the standard library only, since this folder is all of turnlog that a sandbox holds. `python` calls
fork this warm interpreter; `shell` and `program` calls fork and exec. Under bubblewrap it is pid 1 of its own pid
namespace, so that kill(-1) ends every other process at once (pid_namespaces(7)); elsewhere it adopts orphans
(PR_SET_CHILD_SUBREAPER) and kills its descendants. When the control socket is closed, everything is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import struct
from typing import Any

from turnlog.sandbox_workers.inside import workspace
from turnlog.sandbox_workers.inside.child import PR_SET_DUMPABLE, become, begin_forgetting, prctl
from turnlog.sandbox_workers.inside.frames import Control, ControlClosed, exactly, receive_head, send
from turnlog.sandbox_workers.inside.interpreter import Interpreter
from turnlog.sandbox_workers.inside.observables import listener
from turnlog.sandbox_workers.inside.workspace import PathRefused, Walk, locate, parts, refusal

# Imported for the calls, so that the modules that agents' code uses most are warm.
import collections, datetime, decimal, fractions, functools, itertools, json, math, re, statistics, string  # isort: skip # noqa: E401, F401
import gc
import select
import sys

from turnlog.sandbox_workers.inside.call import Become, CommandProcess, Reaped, end_all
from turnlog.sandbox_workers.inside.frames import Socket, frame, send_frame
from turnlog.sandbox_workers.inside.observables import Integrity, read_observables, reset_folder_times, wipe
from turnlog.sandbox_workers.inside.processes import InitEnvironment

PR_SET_CHILD_SUBREAPER = 36

IDLE_MS = 250
"""Milliseconds between looks at an interpreter that has to stay stopped."""

READY = frame({"ready": True})

Answer = tuple[dict[str, Any], bytes]
OPERATIONS = {
    "exec": "_exec", "read": "_read", "read_files": "_read_files", "write": "_write", "index": "_index",
    "restore": "_restore", "reset": "_reset", "end": "_end_session", "observed": "_answer_observables",
    "health": "_health",
}  # fmt: skip
"""Methods of Service by the operation that they serve."""


def main(control: str, *arguments: str) -> None:
    """Run the init from the command line: the control socket's descriptor, then the arguments of `run`."""
    run(Socket(int(control)), *arguments)


def run(
    control: Control,
    namespace: str,
    own_user: str,
    network: str,
    *folders: str,
    roots: tuple[str, ...] = (),
    cwd: str = "",
) -> None:
    """Serve until the worker is gone.

    Arguments: "namespace" or "plain"; "own" or "shared" user; network "none" or "allowlist"; the writable folders. With
    "allowlist" the worker gets a socket that listens on our loopback, and we retain no descriptor of it. `roots` and
    `cwd`: see InitEnvironment."""
    others = [folder for folder in folders if folder not in roots]
    place = InitEnvironment([*roots, *others], own_user == "own", namespace == "namespace", roots, cwd)
    if place.namespace != (os.getpid() == 1):
        raise SystemExit("a sandbox's init must be pid 1 exactly when it has a pid namespace")
    if any(os.stat(folder).st_uid != os.getuid() for folder in folders):
        raise SystemExit(f"{', '.join(folders)}: a reset empties these, and they belong to somebody else")
    protect(place)
    freeze()
    serve(control, place, network)


def serve(control: Control, place: InitEnvironment, network: str, *, forked: bool = False) -> None:
    """Report readiness, then answer requests until the worker is gone. `forked`: by a zygote, so the init will not be
    reused."""
    with contextlib.suppress(ControlClosed):
        _ready(control, place, network)
        Service(control, place, lazily=forked).serve()
    end_all(place, Reaped())


def _ready(control: Control, place: InitEnvironment, network: str) -> None:
    if network == "none":
        send_frame(control, READY)
    elif network == "allowlist" and isinstance(control, Socket):
        with listener(namespace=place.namespace) as proxy:
            control.pass_on(READY, proxy.fileno())
    else:
        raise SystemExit(f"network {network!r} cannot be served here")


def protect(place: InitEnvironment) -> None:
    """Protect this process from the calls: memory, signals, environment."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # pid 1 is immune to every signal that it does not handle
    if prctl(PR_SET_DUMPABLE, 0, 0, 0, 0):  # so that no call can write to our memory through /proc/1/mem
        raise SystemExit("prctl(PR_SET_DUMPABLE) failed")
    if not place.namespace and prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise SystemExit("prctl(PR_SET_CHILD_SUBREAPER) failed")
    begin_forgetting()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # what a call printed survives a time-out
    os.environ.pop("LD_BIND_NOW", None)
    if (own := os.environ.pop("PYTHONPATH", "")) in sys.path:
        sys.path.remove(own)


def freeze() -> None:
    """Freeze the garbage collector, so that forked children share these pages instead of copying them."""
    gc.collect()
    gc.freeze()
    gc.disable()


class Service:
    """The service of a sandbox, whose state is its files and its interpreter."""

    def __init__(
        self, control: Control, place: InitEnvironment, become: Become = become, *, lazily: bool = False
    ) -> None:
        """Create the service. `lazily`: the folders are new, and their initial state is recorded only when the worker
        asks for it; a reset is not expected then."""
        self.control = control
        self.place = place
        self.become = become
        self.interpreter: Interpreter | None = None
        if not lazily:
            reset_folder_times(place)
        self.as_new = None if lazily else read_observables(place)
        self.integrity = Integrity(place, control)

    def serve(self) -> None:
        """Answer requests until the worker is gone, or has been notified that a call changed something that it may not;
        then raise ControlClosed."""
        try:
            while True:
                self._await()
                self._answer()
        except ControlClosed:
            raise
        except Exception:
            self.integrity.check()  # a failure under limits that a call has changed is that call's fault
            raise

    def _answer(self) -> None:
        head, size = receive_head(self.control)
        body = exactly(self.control, size)
        if head["op"] in ("cancel", "beat"):  # it arrived just after the call had ended
            return
        try:
            about, content = getattr(self, OPERATIONS[head["op"]])(head, body)
        except PathRefused as refused:
            about, content = {"refused": refused.kind, "text": str(refused)}, b""
        if head["op"] == "exec":
            self.integrity.settle()
        send(self.control, about, content)

    def _await(self) -> None:
        """Wait for the next request; keep the interpreter stopped meanwhile."""
        if self.interpreter is None:
            return
        poll = select.poll()
        poll.register(self.control.fileno(), select.POLLIN)
        while not poll.poll(IDLE_MS):
            self.interpreter.hold()

    def _exec(self, head: dict[str, Any], body: bytes) -> Answer:
        if self.interpreter is not None and not self.interpreter.hold():
            self._end()
        if head["kind"] == "session" and head["alive"] and self.interpreter is None:
            return {"lost": True}, b""
        source, stdin = body[: head["source"]], body[head["source"] :]
        with self._folder(head["cwd"]) as walk:
            call = CommandProcess(self.place, self.control, head, self.interpreter, self.become, self.integrity)
            try:
                return call.run(source, stdin, walk.here), b""
            finally:
                self.interpreter = call.interpreter

    def _folder(self, path: str) -> Walk:
        root, within = locate(self.place, path)
        walk = Walk(root)
        try:
            if within:
                walk.down(parts(within), path)
        except OSError as error:
            walk.__exit__()
            raise refusal(error, path) from error
        except PathRefused:
            walk.__exit__()
            raise
        return walk

    def _read(self, head: dict[str, Any], _: bytes) -> Answer:
        return {}, workspace.read(self.place, head["path"], head["most"], offset=head["offset"], size=head["size"])

    def _read_files(self, head: dict[str, Any], body: bytes) -> Answer:
        contents = workspace.read_many(self.place, json.loads(body), head["most"])
        return {}, struct.pack(f">{len(contents)}I", *map(len, contents)) + b"".join(contents)

    def _write(self, head: dict[str, Any], body: bytes) -> Answer:
        workspace.write(self.place, head["path"], body, head["mode"], head["disk_bytes"], follow=head["follow"])
        return {}, b""

    def _index(self, head: dict[str, Any], _: bytes) -> Answer:
        return {}, json.dumps(workspace.index(self.place, head["disk_bytes"]), separators=(",", ":")).encode()

    def _restore(self, head: dict[str, Any], body: bytes) -> Answer:
        entries = json.loads(body)
        workspace.check(entries, head["disk_bytes"], self.place.roots)
        self._end()
        send(self.control, {"go": True})
        contents = workspace.Contents(self.control, receive_head(self.control)[1])
        try:
            workspace.restore(self.place, entries, contents)
        finally:
            contents.skip()
        return {}, b""

    def _reset(self, _: dict[str, Any], __: bytes) -> Answer:
        self._end()
        return {"clean": wipe(self.place, self.as_new)}, b""

    def _answer_observables(self, _: dict[str, Any], __: bytes) -> Answer:
        self.as_new = self.as_new or read_observables(self.place)
        return {}, json.dumps(self.as_new).encode()

    def _health(self, _: dict[str, Any], __: bytes) -> Answer:
        alive = self.interpreter is not None and self.interpreter.hold()
        return {"healthy": True, "interpreter": alive}, b""

    def _end_session(self, _: dict[str, Any], __: bytes) -> Answer:
        self._end()
        return {}, b""

    def _end(self) -> None:
        """End the interpreter and what it has started."""
        if self.interpreter is not None:
            end_all(self.place, Reaped())
            self.interpreter.forget()
            self.interpreter = None


if __name__ == "__main__":
    main(*sys.argv[1:])
