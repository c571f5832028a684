"""The forked child of a call: limits on, then the tool."""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import errno
import gc
import linecache
import math
import os
import random
import resource
import signal
import sys
import threading
import traceback
import types
from typing import Any

from turnlog.sandbox_workers.inside.processes import Place, processes_of

NOTE_FD = 3
"""Where the child names the limit that its uncaught exception stands for."""
PR_SET_DUMPABLE = 4
FILE_NAME = "<python>"
SPARE_PIDS = 128
"""Room for what a user who is shared with others may start during a call."""
LIMIT_ERRORS = {
    errno.EAGAIN: b"pids",  # of fork(2), where the number of processes is limited
    errno.ENOMEM: b"memory_bytes",
    errno.ENOSPC: b"disk_bytes",
    errno.EFBIG: b"disk_bytes",
}
prctl = ctypes.CDLL(None, use_errno=True).prctl


def become(place: Place, tool: str, source: bytes, limits: dict[str, Any], pipes: list[int]) -> None:
    """In the forked child: put on the limits, then run the tool. Never returns."""
    code = 126
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        note = os.dup(pipes[2])
        os.dup2(pipes[0], 1)
        os.dup2(pipes[1], 2)
        os.dup2(note, NOTE_FD, inheritable=False) if note != NOTE_FD else os.set_inheritable(NOTE_FD, False)
        os.closerange(NOTE_FD + 1, 1024)
        os.umask(0o022)
        os.chdir(place.folders[0])
        limit(place, limits)
        prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL if tool == "shell" else signal.SIG_IGN)
        if tool == "shell":
            shell = "/bin/bash" if os.path.exists("/bin/bash") else "/bin/sh"
            os.execv(shell, [shell.encode(), b"-c", source])
        code = run_python(source)
    except BaseException as error:  # whatever it is, this child must not go on as a second init
        os.write(2, f"the call could not start: {error!r}\n".encode())
    finally:
        os._exit(code)


def limit(place: Place, limits: dict[str, Any]) -> None:
    """rlimits per process; what concerns the tree is looked at by `Call`."""
    cpu = math.ceil(limits["cpu_s"])
    bounds = {
        resource.RLIMIT_CPU: (cpu, cpu + 1),
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_NOFILE: (1024, 1024),
        resource.RLIMIT_FSIZE: (limits["disk_bytes"], limits["disk_bytes"]),
        # Address space is reserved far beyond what is touched; the memory that is touched is what `Call` looks at.
        resource.RLIMIT_AS: (2 * limits["memory_bytes"] + 2**28,) * 2,
    }
    # RLIMIT_NPROC counts all processes of our user: this one, one more to be seen beyond the limit, and those that are
    # not ours to count. It is always set: without it a fork bomb outruns everything that looks on.
    others = 0 if place.own_user else processes_of(os.getuid()) + SPARE_PIDS
    bounds[resource.RLIMIT_NPROC] = (limits["pids"] + 2 + others,) * 2
    for name, wanted in bounds.items():
        most = resource.getrlimit(name)[1]
        soft, hard = (bound if most == resource.RLIM_INFINITY else min(bound, most) for bound in wanted)
        resource.setrlimit(name, (soft, hard))


def run_python(source: bytes) -> int:
    """Run `source` as __main__ would; the exit code."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    random.seed()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # what was printed survives a time-out
    gc.enable()
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    sys.argv = ["-c"]
    sys.path.insert(0, "")
    code = 0
    try:
        exec(compile(source, FILE_NAME, "exec"), main.__dict__)
    except SystemExit as request:
        code = _requested(request.code)
    except BaseException as error:  # the agent's code failed: that is an answer
        code = 1
        _report(error, source)
    for finish in (threading._shutdown, atexit._run_exitfuncs, sys.stdout.flush, sys.stderr.flush):  # type: ignore[attr-defined]
        try:
            finish()
        except BaseException as error:
            code = code or 120  # as CPython's own exit does when a flush fails
            _note(error)
    return code


def _requested(code: object) -> int:
    if code is None or isinstance(code, int):
        return (code or 0) & 0xFF
    sys.stderr.write(f"{code}\n")
    return 1


def _report(error: BaseException, source: bytes) -> None:
    _note(error)
    lines = source.decode(errors="replace").splitlines(keepends=True)
    linecache.cache[FILE_NAME] = (len(source), None, lines, FILE_NAME)
    shown = error.with_traceback(error.__traceback__.tb_next if error.__traceback__ else None)
    try:
        if sys.excepthook is sys.__excepthook__:
            traceback.print_exception(shown)
        else:
            sys.excepthook(type(shown), shown, shown.__traceback__)
    except BaseException as second:
        os.write(2, f"{type(error).__name__} ({type(second).__name__} while showing it)\n".encode())


def _note(error: BaseException) -> None:
    """Tell `Call` which limit an exception stands for."""
    name = b"memory_bytes" if isinstance(error, MemoryError) else LIMIT_ERRORS.get(getattr(error, "errno", None) or 0)
    if name:
        with contextlib.suppress(OSError):
            os.write(NOTE_FD, name)
