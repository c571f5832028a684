"""Frames on the control socket, both ways: two big-endian uint32 (lengths of head and body), JSON head, raw body.

A request is answered by one frame; before it, an `exec` sends any number of `output` frames. One request at a time.

exec        {"op", "kind", "argv", "env", "cwd", "limits", "source" (bytes of the body that are the source), "alive"
            (an interpreter is expected), "prompt" (send output as it comes), "agent", "keeps" (see Command),
            "silence_s"} + source, then stdin
            -> {"output": "stdout" | "stderr"} + part, while it runs; all bytes that count against output_bytes
            -> {"status", "reason", "exit_code", "duration_s", "cpu_s", "interpreter"}
            -> {"lost": true} if the expected interpreter has ended between calls; then nothing was run
cancel      {"op", "limit"?}, only while a call runs  ->  no frame of its own: the call answers `cancelled`, or that it
            met the named limit
beat        {"op"}, only while a call runs  ->  no frame; without a heartbeat for `silence_s`, call and sandbox end,
            because a stopped worker keeps its socket open while its successor may run the call
read        {"op", "path", "most", "offset", "size"} -> {} + content
read_files  {"op", "most"} + paths          ->  {"sizes"} + contents, one after the other
write       {"op", "path", "mode", "disk_bytes"} + content -> {}
index       {"op", "disk_bytes"}            ->  {} + entries
restore     {"op", "disk_bytes"} + entries  ->  {"go": true}; then a frame {} + contents of the files in order -> {}
reset       {"op"}                          ->  {"clean"}
observed    {"op"}                          ->  {} + its state at the start (observables.py)
health      {"op"}                          ->  {"healthy", "interpreter"}

Any request may get {"changed": "limits" | "folders"}: a call has changed what it may not, and the init ends.

File requests may get {"refused": "path" | "missing" | "quota", "text"}. Lists (paths, entries) are JSON; bytes of
names that are not UTF-8 are lone surrogates (PEP 383).
The first frame is the init's: {"ready": true}, with the proxy's listening socket as SCM_RIGHTS if there is one.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from typing import Any, Protocol

HEADER = struct.Struct(">II")
_encode = json.JSONEncoder(separators=(",", ":")).encode
_scan = json.JSONDecoder().scan_once  # type: ignore[attr-defined]
PART_BYTES = 65536
RECEIVED_BYTES = 1 << 20
"""Maximum number of bytes received at once."""


class ControlClosed(Exception):
    """The worker is gone."""


class Control(Protocol):
    """The init's end of the control socket, or of its substitute."""

    def fileno(self) -> int:
        """Return the descriptor that is readable when the worker has sent something."""
        ...

    def outgoing(self) -> int:
        """Return a descriptor that is writable when `sendall` of a part would not block."""
        ...

    def recv(self, most: int) -> bytes:
        """Receive at least one byte, if more can come."""
        ...

    def sendall(self, data: bytes) -> None:
        """Send all bytes, as `socket.sendall` does."""
        ...


class Socket(Control):
    """A unix socket. Its descriptor is used directly: a socket object costs every init 30 page faults."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        os.set_inheritable(descriptor, False)

    def fileno(self) -> int:
        return self._descriptor

    def outgoing(self) -> int:
        return self._descriptor

    def recv(self, most: int) -> bytes:
        return os.read(self._descriptor, most)

    def sendall(self, data: bytes) -> None:
        write_all(self._descriptor, data)

    def pass_on(self, data: bytes, descriptor: int) -> None:
        """Send a short frame with a descriptor."""
        with socket.socket(fileno=os.dup(self._descriptor)) as control:
            sent = socket.send_fds(control, [data], [descriptor])
        self.sendall(data[sent:])


def write_all(descriptor: int, data: bytes) -> None:
    """Write all bytes."""
    while data:
        data = data[os.write(descriptor, data) :]


def receive(control: Control) -> tuple[dict[str, Any], bytes]:
    """Return the next frame. Raises ControlClosed."""
    head, size = receive_head(control)
    return head, exactly(control, size)


def receive_head(control: Control) -> tuple[dict[str, Any], int]:
    """Return the head of the next frame and the length of its body, which is still to be received. Raises
    ControlClosed."""
    head_size, body_size = HEADER.unpack(exactly(control, HEADER.size))
    return _scan(exactly(control, head_size).decode(), 0)[0], body_size


def exactly(control: Control, size: int) -> bytes:
    """Receive exactly `size` bytes. Raises ControlClosed."""
    data = _receive(control, size) if size else b""
    if len(data) == size:
        return data
    parts, missing = [data], size - len(data)
    while missing:
        parts.append(_receive(control, missing))
        missing -= len(parts[-1])
    return b"".join(parts)


def _receive(control: Control, most: int) -> bytes:
    try:
        part = control.recv(min(most, RECEIVED_BYTES))
    except OSError as error:
        raise ControlClosed from error
    if not part:
        raise ControlClosed
    return part


def send(control: Control, head: dict[str, Any], body: bytes = b"") -> None:
    """Send a frame. Raises ControlClosed."""
    send_frame(control, frame(head, body))


def send_frame(control: Control, encoded: bytes) -> None:
    """Send an encoded frame. Raises ControlClosed."""
    try:
        control.sendall(encoded)
    except OSError as error:
        raise ControlClosed from error


def frame(head: dict[str, Any], body: bytes = b"") -> bytes:
    """Encode one frame."""
    text = _encode(head).encode()
    return HEADER.pack(len(text), len(body)) + text + body
