"""Program of a command in an E2B machine: runs the init as a child and sends its answers as text.

The SDK decodes a command's output as UTF-8, so the init's frames are sent as lines of base64. Its input is bytes: first
the program that `inside.loader` reads, then frames. This is sent as the argument of `python3 -c`, so it is standard
library only and written for old Python versions."""

import base64
import contextlib
import ctypes
import json
import os
import socket
import subprocess
import sys
import threading
from typing import IO

PR_SET_NO_NEW_PRIVS = 38
PART_BYTES = 49152
CONTROL = 9
"""Descriptor of the init's end of its control socket."""
KEPT = ("PATH", "LD_LIBRARY_PATH")
"""Variables of the template's environment that are passed on; the others may be none of the agent's business."""


def main(folders: "list[str]", argv: "list[str]") -> int:
    """Create the writable folders in the user's home, run the init and return its exit code."""
    folders = [os.path.join(os.path.expanduser("~"), folder) for folder in folders]
    for folder in folders:
        os.makedirs(folder, 0o700, exist_ok=True)
    env = {name: os.environ[name] for name in KEPT if name in os.environ}
    env.update(HOME=folders[0], TMPDIR=folders[1], USER="sandbox", LANG="C.UTF-8")
    env.update(PYTHONHASHSEED="0", PYTHONDONTWRITEBYTECODE="1")
    # Templates let their user become root by sudo; no_new_privs disables setuid programs for calls.
    if ctypes.CDLL(None).prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise SystemExit("prctl(PR_SET_NO_NEW_PRIVS) failed")
    ours, theirs = socket.socketpair()
    os.dup2(theirs.fileno(), CONTROL)
    theirs.close()
    init = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=2, env=env, cwd="/", pass_fds=(CONTROL,))
    os.close(CONTROL)
    assert init.stdin is not None
    threading.Thread(target=inward, args=(init.stdin, folders, ours), daemon=True).start()
    outward(ours)
    return init.wait()


def inward(loader: "IO[bytes]", folders: "list[str]", ours: socket.socket) -> None:
    """Copy the worker's bytes: the program to the init's input, everything else to its socket."""
    with contextlib.suppress(OSError, ValueError):  # the worker or the init is gone; closing below ends the other
        program = json.loads(read_input(int.from_bytes(read_input(4), "big")).decode())
        program["arguments"] += folders
        data = json.dumps(program).encode()
        loader.write(len(data).to_bytes(4, "big") + data)
        loader.close()
        while True:
            part = os.read(0, PART_BYTES)
            if not part:
                break
            ours.sendall(part)
    with contextlib.suppress(OSError):
        loader.close()
    with contextlib.suppress(OSError):
        ours.shutdown(socket.SHUT_WR)


def read_input(size: int) -> bytes:
    """Read `size` bytes of the input, or all that there are."""
    data = b""
    while len(data) < size:
        part = os.read(0, size - len(data))
        if not part:
            break
        data += part
    return data


def outward(ours: socket.socket) -> None:
    """Write the init's answers as lines."""
    while True:
        part = ours.recv(PART_BYTES)
        if not part:
            return
        line = memoryview(base64.b64encode(part) + b"\n")
        while line:
            line = line[os.write(1, line) :]


if __name__ == "__main__":
    sys.exit(main(*json.loads(sys.argv[1])))
