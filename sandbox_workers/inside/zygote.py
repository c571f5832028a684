"""The warm process of which every init of a slot is a fork, each in namespaces of its own; it runs nothing of agents'.

A new sandbox costs a fork so, in place of an interpreter's start. It is pid 1 of bubblewrap's namespaces, has
capabilities in their user namespace alone, and no process of a sandbox sees it. It takes one order: a byte with the
control socket of the next init. What ran before is dead then, and its namespaces go with it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import sys
from collections.abc import Callable

from turnlog.sandbox_workers.inside import enclosure, init
from turnlog.sandbox_workers.inside.frames import Socket
from turnlog.sandbox_workers.inside.processes import Place

REFUSED = "a sandbox cannot have namespaces of its own"


def main(orders: str, filter_fd: str, disk_bytes: str, network: str, *paths: str) -> None:
    """Until the worker is gone. `orders`: descriptor of the socket by which control sockets come; `filter_fd`: of two
    BPF programs for seccomp(2), for us and besides for inits, after the length of the first, or -1; `paths`: the
    writable folders, each of at most `disk_bytes`."""
    own, denied = _filters(int(filter_fd))
    if os.getpid() != 1:  # then kill(-1) would end more than sandboxes
        raise SystemExit("the zygote of a slot's sandboxes must be pid 1")
    folders = list(paths)
    place = Place(folders, own_user=True, namespace=True)
    init.protect(place)
    init.freeze()
    masks = enclosure.masked()
    try:
        enclosure.limited()
        if own:
            enclosure.deny(own)
        with socket.socket(fileno=int(orders)) as worker:
            worker.set_inheritable(False)
            while controls := _order(worker):
                _end()
                if not enclosure.forked():
                    worker.close()
                    enter = functools.partial(enclosure.entered, folders, int(disk_bytes), masks, denied)
                    _serve(controls[0], place, network, enter)
                os.close(controls[0])
    except OSError as error:
        raise SystemExit(f"{REFUSED}: {error}") from error
    _end()


def _order(worker: socket.socket) -> list[int]:
    """One descriptor; none when the worker is gone."""
    return socket.recv_fds(worker, 1, 1)[1]


def _filters(number: int) -> tuple[bytes, bytes]:
    if number < 0:
        return b"", b""
    with open(number, "rb") as file:
        own = file.read(int.from_bytes(file.read(4), "big"))
        return own, file.read()


def _serve(control: int, place: Place, network: str, enter: Callable[[], None]) -> None:
    """The init. Never returns."""
    code = 1
    try:
        enter()
        init.serve(Socket(control), place, network, forked=True)
        code = 0
    except OSError as error:
        os.write(2, f"{REFUSED}: {error}\n".encode())
    except BaseException:  # as an interpreter's end would show it; nothing here may go on as a second zygote
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


def _end() -> None:
    """Kill and reap whatever runs."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
