"""Agents' Python source: run it, show what went wrong in its own lines, name the limit that it met."""

from __future__ import annotations

import ast
import atexit
import builtins
import contextlib
import errno
import linecache
import os
import resource
import sys
import threading
import traceback
import types

NOTE_FD = 1000
"""Where a process of the call names the limit that its uncaught exception stands for; far from what programs use."""
NO_THREAD = ("can't start new thread",)
"""Of the RuntimeError that threading raises."""
LIMIT_ERRORS = {
    errno.EAGAIN: b"pids",  # of fork(2), where the number of processes is limited
    errno.ENOMEM: b"memory_bytes",
    errno.ENOSPC: b"disk_bytes",
    errno.EFBIG: b"disk_bytes",
}


def fresh_main() -> types.ModuleType:
    """A `__main__` without our names."""
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    sys.argv = ["-c"]
    sys.path.insert(0, "")
    return main


def run(source: bytes, name: str, main: types.ModuleType, *, interactive: bool) -> tuple[int, bool]:
    """Exit code, and whether the source asked to exit. `interactive` prints what the last expression is worth."""
    try:
        linecache.cache[name] = (len(source), None, source.decode(errors="replace").splitlines(keepends=True), name)
        if interactive:
            for part in _parts(source, name):
                exec(part, main.__dict__)
        else:
            exec(compile(source, name, "exec"), main.__dict__)
    except SystemExit as request:
        return _requested(request.code), True
    except BaseException as error:  # the agent's code failed: that is an answer
        report(error)
        return 1, False
    return 0, False


def _parts(source: bytes, name: str) -> list[types.CodeType]:
    """All statements but a last expression; that one, to be shown by sys.displayhook as the prompt does."""
    tree = ast.parse(source, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    parts = [compile(tree, name, "exec")]
    if last is not None:
        parts.append(compile(ast.Interactive([last]), name, "single"))
    return parts


def _requested(code: object) -> int:
    if code is None or isinstance(code, int):
        return (code or 0) & 0xFF
    sys.stderr.write(f"{code}\n")
    return 1


def end() -> int:
    """What CPython does at its end: threads, atexit, flush; the exit code that a failure there leaves."""
    code = 0
    for finish in (threading._shutdown, atexit._run_exitfuncs, flush):  # type: ignore[attr-defined]
        try:
            finish()
        except BaseException as error:
            code = 120  # as CPython's own exit does when a flush fails
            note(error)
    return code


def flush() -> None:
    """Everything printed is in the pipes. Raises what the last failing stream raised."""
    failed: BaseException | None = None
    for stream in {id(stream): stream for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)}.values():
        try:
            if stream is not None and not getattr(stream, "closed", False):
                stream.flush()
        except BaseException as error:  # these objects may be the agent's own
            failed = error
    if failed is not None:
        raise failed


def report(error: BaseException) -> None:
    """Show the traceback without our frames."""
    note(error)
    below = error.__traceback__
    while below is not None and below.tb_frame.f_code.co_filename == __file__:
        below = below.tb_next
    shown = error.with_traceback(below)
    try:
        if sys.excepthook is sys.__excepthook__:
            traceback.print_exception(type(shown), shown, shown.__traceback__)
        else:
            sys.excepthook(type(shown), shown, shown.__traceback__)
    except BaseException as second:
        os.write(2, f"{type(error).__name__} ({type(second).__name__} while showing it)\n".encode())


def note(error: BaseException) -> None:
    """Tell the init which limit an exception stands for."""
    name = b"memory_bytes" if isinstance(error, MemoryError) else LIMIT_ERRORS.get(getattr(error, "errno", None) or 0)
    if isinstance(error, RuntimeError) and error.args == NO_THREAD:
        name = _thread_limit()
    if name:
        with contextlib.suppress(OSError):
            os.write(NOTE_FD, name)


def _thread_limit() -> bytes:
    """What kept a thread from starting: pthread_create(3) says EAGAIN both when no more processes may be and when there
    is no address space for a stack."""
    most, stack = (resource.getrlimit(name)[0] for name in (resource.RLIMIT_AS, resource.RLIMIT_STACK))
    with open("/proc/self/statm", "rb") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    return b"memory_bytes" if most != resource.RLIM_INFINITY and used + stack > most else b"pids"
