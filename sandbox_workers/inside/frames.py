"""Frames on the control socket, both ways: two big-endian uint32 (lengths of head and body), JSON head, raw body.

exec   {"op", "tool", "limits"} + source   ->  {"status", "reason", "exit_code", "duration_s", "cpu_s"} + output
reset  {"op"}                              ->  {"clean"}
cancel {"op"}, only while a call runs      ->  nothing of its own: the call answers `cancelled`
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

HEADER = struct.Struct(">II")


class ControlClosed(Exception):
    """The worker is gone."""


def receive(control: socket.socket) -> tuple[dict[str, Any], bytes]:
    """Next frame. Raises ControlClosed."""
    head_size, body_size = HEADER.unpack(_exactly(control, HEADER.size))
    head = json.loads(_exactly(control, head_size))
    return head, _exactly(control, body_size)


def _exactly(control: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = control.recv(size - len(data))
        if not part:
            raise ControlClosed
        data += part
    return bytes(data)


def send(control: socket.socket, head: dict[str, Any], body: bytes = b"") -> None:
    """Answer. Raises ControlClosed."""
    text = json.dumps(head).encode()
    try:
        control.sendall(HEADER.pack(len(text), len(body)) + text + body)
    except OSError as error:
        raise ControlClosed from error
