"""What the init answers: one request at a time, from the worker's socket."""

from __future__ import annotations

import json
import select
import struct
from collections.abc import Callable
from typing import Any

from turnlog.sandbox_workers.inside import files, workspace
from turnlog.sandbox_workers.inside.call import Become, Call
from turnlog.sandbox_workers.inside.child import become
from turnlog.sandbox_workers.inside.ending import Reaped, end_all
from turnlog.sandbox_workers.inside.frames import Control, ControlClosed, exactly, receive_head, send
from turnlog.sandbox_workers.inside.integrity import Integrity
from turnlog.sandbox_workers.inside.interpreter import Interpreter
from turnlog.sandbox_workers.inside.observables import observed
from turnlog.sandbox_workers.inside.paths import Refused, Walk, parts, refusal
from turnlog.sandbox_workers.inside.processes import Place
from turnlog.sandbox_workers.inside.wipe import untouched, wipe

IDLE_MS = 250
"""Between looks at an interpreter that has to stand still."""

Answer = tuple[dict[str, Any], bytes]


class Service:
    """A sandbox's state is its files and its interpreter."""

    def __init__(self, control: Control, place: Place, become: Become = become, *, lazily: bool = False) -> None:
        """`lazily`: look around when that is asked for, not for a reset, since none will be."""
        self.control = control
        self.place = place
        self.become = become
        self.interpreter: Interpreter | None = None
        untouched(place)
        self.as_new = None if lazily else observed(place)
        self.integrity = Integrity(place, control)
        self.operations: dict[str, Callable[[dict[str, Any], bytes], Answer]] = {
            "exec": self._exec,
            "read": self._read,
            "read_files": self._read_files,
            "write": self._write,
            "index": self._index,
            "restore": self._restore,
            "reset": self._reset,
            "observed": self._observed,
            "health": self._health,
        }

    def serve(self) -> None:
        """Until the worker is gone, or has been told that a call has changed what it may not: raises ControlClosed."""
        try:
            while True:
                self._await()
                self._answer()
        except ControlClosed:
            raise
        except Exception:
            self.integrity.check()  # what fails under limits that a call has set is that call's doing
            raise

    def _answer(self) -> None:
        head, size = receive_head(self.control)
        body = exactly(self.control, size)
        if head["op"] in ("cancel", "beat"):  # it came when the call had just ended
            return
        try:
            about, content = self.operations[head["op"]](head, body)
        except Refused as refused:
            about, content = {"refused": refused.kind, "text": str(refused)}, b""
        if head["op"] == "exec":
            self.integrity.settle()
        send(self.control, about, content)

    def _await(self) -> None:
        """The next request; meanwhile the interpreter gets no further."""
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
            call = Call(self.place, self.control, head, self.interpreter, self.become, self.integrity)
            try:
                return call.run(source, stdin, walk.here), b""
            finally:
                self.interpreter = call.interpreter

    def _folder(self, path: str) -> Walk:
        names = parts(path)
        walk = Walk(self.place.folders[0])
        try:
            walk.down(names, path)
        except OSError as error:
            walk.__exit__()
            raise refusal(error, path) from error
        except Refused:
            walk.__exit__()
            raise
        return walk

    def _read(self, head: dict[str, Any], _: bytes) -> Answer:
        return {}, files.read(self.place, head["path"], head["most"], offset=head["offset"], size=head["size"])

    def _read_files(self, head: dict[str, Any], body: bytes) -> Answer:
        contents = workspace.read_many(self.place, json.loads(body), head["most"])
        return {}, struct.pack(f">{len(contents)}I", *map(len, contents)) + b"".join(contents)

    def _write(self, head: dict[str, Any], body: bytes) -> Answer:
        files.write(self.place, head["path"], body, head["mode"], head["disk_bytes"], follow=head["follow"])
        return {}, b""

    def _index(self, head: dict[str, Any], _: bytes) -> Answer:
        return {}, json.dumps(workspace.index(self.place, head["disk_bytes"]), separators=(",", ":")).encode()

    def _restore(self, head: dict[str, Any], body: bytes) -> Answer:
        entries = json.loads(body)
        workspace.check(entries, head["disk_bytes"])
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

    def _observed(self, _: dict[str, Any], __: bytes) -> Answer:
        self.as_new = self.as_new or observed(self.place)
        return {}, json.dumps(self.as_new).encode()

    def _health(self, _: dict[str, Any], __: bytes) -> Answer:
        alive = self.interpreter is not None and self.interpreter.hold()
        return {"healthy": True, "interpreter": alive}, b""

    def _end(self) -> None:
        """The interpreter, and what it has started."""
        if self.interpreter is not None:
            end_all(self.place, Reaped())
            self.interpreter.forget()
            self.interpreter = None
