"""A descriptor that is readable once a child of ours has ended: a pidfd, or what stands in where there is none."""

from __future__ import annotations

import contextlib
import errno
import os
import threading


def opened(pid: int) -> int:
    """pidfd_open(2); gVisor does not have it, so a thread waits there and closes the other end of a pipe."""
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno != errno.ENOSYS:
            raise
    return waited_for(pid)


def waited_for(pid: int) -> int:
    """By a thread, which leaves the child to be reaped."""
    read, write = os.pipe()

    def wait() -> None:
        with contextlib.suppress(ChildProcessError):  # it was reaped before we looked
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        os.close(write)

    threading.Thread(target=wait, daemon=True).start()
    return read
