"""The persistent interpreter, as the process itself sees it: take a call's source and streams, run it, say so.

What it says on its channel is believed no more than an exit code: code that it runs could say the same.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
from typing import Any

from turnlog.sandbox_workers.inside import source as agents
from turnlog.sandbox_workers.inside.child import FIRST_OTHER, awake, defaults, expendable, limit, prctl, wear
from turnlog.sandbox_workers.inside.processes import Place
from turnlog.sandbox_workers.inside.source import NOTE_FD

PR_SET_PDEATHSIG = 1

CHANNEL_FD = NOTE_FD + 1
SIZES = struct.Struct(">I")
DESCRIPTORS = 6
"""stdin, stdout, stderr, note, folder, and a file with the call: length of its head, head (JSON), source."""


def live(place: Place, channel: int, folder: int, limits: dict[str, Any], standing: int) -> None:
    """In the forked child: become the interpreter. Never returns."""
    code = 126
    try:
        os.setsid()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # it stands still, and nobody else would look for it
        os.fchdir(folder)
        os.dup2(channel, CHANNEL_FD, inheritable=False)
        os.closerange(FIRST_OTHER, NOTE_FD)
        os.umask(0o022)
        _wear_nothing()
        limit(place, limits, standing, cpu=False)
        expendable()
        defaults(signal.SIG_IGN)
        awake()
        code = _calls(socket.socket(fileno=CHANNEL_FD))
    finally:
        os._exit(code)


def _calls(channel: socket.socket) -> int:
    """Until one of them asks to exit, or the init is gone: the exit code."""
    main, here, number = agents.fresh_main(), os.getpid(), 0
    while True:
        found, descriptors, _, _ = socket.recv_fds(channel, 1, DESCRIPTORS)
        if not found:
            return 0
        source = _taken(descriptors)
        number += 1
        code, leaves = agents.run(source, f"<call {number}>", main, interactive=True)
        if leaves or os.getpid() != here:  # a child that the source forked, and that did not exit, is not us
            return code or agents.end()
        code = code or _flushed()
        _wear_nothing()
        channel.sendall(bytes([code]))


def _taken(descriptors: list[int]) -> bytes:
    """A call's source; its streams and environment are ours from now on."""
    import sys

    *streams, folder, call = descriptors
    wear(streams)
    with open(call, "rb", buffering=0) as file:
        content = file.readall()
    size = SIZES.unpack_from(content)[0]
    head = json.loads(content[SIZES.size : SIZES.size + size])
    if head["cwd"]:
        os.fchdir(folder)
    for number in (*streams, folder):
        os.close(number)
    os.environ.update(head["env"])
    sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
    return content[SIZES.size + size :]


def _flushed() -> int:
    try:
        agents.flush()
    except BaseException as error:
        agents.note(error)
        return 120
    return 0


def _wear_nothing() -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    wear([nothing] * 4)
    os.close(nothing)
