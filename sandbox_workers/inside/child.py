"""The child process of a call: sets its limits, then runs the command, which is a program, a shell script or Python
source.

Where possible, a program is started by vfork(2), which takes two thirds of the time: a fork of this interpreter has to
copy its pages. Limits that a program may not lift must be set before it runs, so prlimit(1) of util-linux sets them and
becomes the program. The fork is used where prlimit is missing, or where the environment could lead the dynamic linker
astray before the limits are set.

The bytes of calls pass through the init, and a `python` call is a fork of it, so freed memory must hold nothing of an
earlier call. Therefore the init runs on the C library's allocator, which overwrites what is freed (M_PERTURB of
mallopt(3)), without the cache of freed blocks that evades that (glibc.malloc.tcache_count of the GNU C library's
tunables), and without Python's own allocator, which overwrites nothing. A child stops overwriting: its memory is gone
when it ends."""

from __future__ import annotations

import _random
import _signal  # type: ignore[import-not-found]
import ast
import atexit
import builtins
import contextlib
import ctypes
import errno
import functools
import gc
import linecache
import math
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import traceback
import types
from typing import Any

from turnlog.sandbox_workers.inside.processes import InitEnvironment, processes_of

PR_SET_DUMPABLE = 4
FILE_NAME = "<python>"
SPARE_PIDS = 128
"""Number of processes that a user who is shared with others may start during a call."""
ARGUMENT_BYTES = 100_000
"""Maximum size of a script passed as an argument; a longer one is passed as a file, because execve(2) takes no argument
of 128 KiB."""
FIRST_OTHER = 3
MOST_DESCRIPTORS = 1024
MOST_SIGNALS = 1024
"""Maximum number of pending signals, including timers of timer_create(2). The kernel counts them by user, or by the
user in a user namespace."""
prctl = ctypes.CDLL(None, use_errno=True).prctl

LACKING = (resource.RLIMIT_NPROC, resource.RLIMIT_MSGQUEUE, resource.RLIMIT_SIGPENDING)
"""Limits that not every kernel has. Processes are counted by `Call`, too."""

PRLIMIT = "/usr/bin/prlimit"
OPTIONS = {
    resource.RLIMIT_FSIZE: "fsize",
    resource.RLIMIT_AS: "as",
    resource.RLIMIT_NPROC: "nproc",
    resource.RLIMIT_CPU: "cpu",
    resource.RLIMIT_CORE: "core",
    resource.RLIMIT_MSGQUEUE: "msgqueue",
    resource.RLIMIT_NOFILE: "nofile",
    resource.RLIMIT_SIGPENDING: "sigpending",
}
LINKER = "LD_"
"""Prefix of the variables of ld.so(8)."""

NOTE_FD = 1000
"""Descriptor to which a process of the call writes the limit that its uncaught exception stands for; far from those
that programs use."""
NO_THREAD = ("can't start new thread",)
"""Arguments of the RuntimeError that threading raises."""
LIMIT_ERRORS = {
    errno.EAGAIN: b"pids",  # of fork(2), where the number of processes is limited
    errno.ENOMEM: b"memory_bytes",
    errno.ENOSPC: b"disk_bytes",
    errno.EFBIG: b"disk_bytes",
}

MAIN = types.ModuleType("__main__")
MAIN.__dict__["__builtins__"] = builtins

FORGETFUL = {"PYTHONMALLOC": "malloc", "GLIBC_TUNABLES": "glibc.malloc.perturb=165:glibc.malloc.tcache_count=0"}
"""Environment in which the init must be started; it removes these variables before a call runs."""
M_PERTURB = -6
_mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
_forgetting = False
_fork = ctypes.PyDLL(None).fork


def become(
    place: InitEnvironment, head: dict[str, Any], source: bytes, folder: int, streams: list[int], standing: int
) -> None:
    """Set the limits in the forked child, then run the command in `folder`. Never returns. `streams` become descriptors
    0, 1, 2 and the note; `standing` is the number of processes that exist already."""
    code = 126
    try:
        os.setsid()
        os.fchdir(folder)
        wear(streams)
        os.closerange(FIRST_OTHER, NOTE_FD)
        os.umask(0o022)
        limit(place, head["limits"], standing, reserves=head["agent"])
        expendable()
        if head["kind"] == "python":
            if head["env"]:
                os.environ.update(head["env"])
            code = run_python(source)
        else:
            defaults(signal.SIG_DFL)
            code = replaced_by(command_line(head, source), os.environ | head["env"])
    except BaseException as error:  # this child must never continue as a second init
        os.write(2, f"the call could not start: {error}\n".encode(errors="backslashreplace"))
    finally:
        os._exit(code)


def fork_call() -> int:
    """Fork as os.fork does, without CPython's repairs and the hooks of os.register_at_fork: they cost as many page
    faults as a short call. Only this thread may exist, so no lock is held by another; `repair` does the rest."""
    return int(_fork())


def repair() -> None:
    """Do what the hooks of the modules that an init has imported would have done in a child of `fork_call`."""
    _random.Random.seed(random._inst)
    threading._main_thread._native_id = os.getpid()  # type: ignore[attr-defined]


def wear(streams: list[int]) -> None:
    """Make `streams` our standard streams and the note."""
    for number, target in zip(streams, (0, 1, 2, NOTE_FD)):  # noqa: B905 - images may have Python 3.9
        os.dup2(number, target, target != NOTE_FD)


def expendable() -> None:
    """Let programs see our /proc entries, which are hidden as the init's are, and let the kernel kill us first."""
    prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
    killed_first("self")


def killed_first(process: int | str) -> None:
    """Make the kernel kill the process before the init when memory is short (proc(5))."""
    try:
        score = os.open(f"/proc/{process}/oom_score_adj", os.O_WRONLY)
        os.write(score, b"1000")
        os.close(score)
    except OSError:
        pass


def defaults(action: signal.Handlers) -> None:
    """Set the action for SIGPIPE and SIGXFSZ. Python ignores them and raises exceptions instead; programs expect to be
    killed."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, action)


def replaced_by(argv: list[bytes], env: dict[str, str]) -> int:
    """Become a program. Return the exit code as a shell does if that fails. (os.execvpe would import and fork-copy more
    than the program itself costs.)"""
    name, why = argv[0], ""
    folders = [b""] if b"/" in name else os.fsencode(env.get("PATH", os.defpath)).split(b":")
    for folder in folders:
        try:
            os.execve(os.path.join(folder, name), argv, env)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except PermissionError as error:
            why = error.strerror or "Permission denied"
    os.write(2, name + b": " + (why or "command not found").encode() + b"\n")
    return 126 if why else 127


def command_line(head: dict[str, Any], source: bytes) -> list[bytes]:
    """Return the argv of a `program` or `shell` call."""
    if head["kind"] == "program":
        return [os.fsencode(word) for word in head["argv"]]
    shell = b"/bin/bash" if os.path.exists("/bin/bash") else b"/bin/sh"
    if len(source) <= ARGUMENT_BYTES:
        return [shell, b"-c", source]
    script = make_sealed_file(source)
    os.set_inheritable(script, True)
    return [shell, b"/dev/fd/%d" % script]


def make_sealed_file(content: bytes) -> int:
    """Return a descriptor from which `content` can be read and to which nobody can write. It needs no feeding, so
    nothing waits for a reader."""
    import fcntl

    number = os.memfd_create("input", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    view = memoryview(content)
    while view:
        view = view[os.write(number, view) :]
    os.lseek(number, 0, os.SEEK_SET)
    fcntl.fcntl(number, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    return number


def bounds(place: InitEnvironment, limits: dict[str, Any], standing: int) -> dict[int, int]:
    """Return the rlimits that are the same for every process of the call. Limits of the whole tree are checked by
    `Call`."""
    # RLIMIT_NPROC counts all processes of our user: this one, the zygote that may be above it, one more by which the
    # limit is seen to be exceeded, and those that do not belong to the call. It is always set, since a fork bomb
    # outruns everything that only watches. One more is added so that a control group, where there is one, refuses
    # first: it counts refusals, and an rlimit does not.
    others = standing if place.own_user else processes_of(os.getuid()) + SPARE_PIDS
    return {
        resource.RLIMIT_FSIZE: limits["disk_bytes"],
        # Programs reserve far more address space than they touch; `Call` checks the memory that is touched.
        resource.RLIMIT_AS: 2 * limits["memory_bytes"] + 2**28,
        resource.RLIMIT_NPROC: limits["pids"] + 3 + int(place.namespace) + others,
    }


def limit(
    place: InitEnvironment, limits: dict[str, Any], standing: int = 0, *, cpu: bool = True, reserves: bool = False
) -> None:
    """Set the rlimits, permanently. `cpu` is False for a process that lives longer than a call; for `reserves` see
    `pairs`."""
    for name, pair in pairs(place, limits, standing, cpu=cpu, reserves=reserves).items():
        put(0, name, pair)


def pairs(
    place: InitEnvironment, limits: dict[str, Any], standing: int, *, cpu: bool, reserves: bool = False
) -> dict[int, tuple[int, int]]:
    """Return all rlimits as (soft, hard), none above what we may set. `reserves`: address space is not limited."""
    wanted = {}
    for name, bound in bounds(place, limits, standing).items():
        wanted[name] = bound, bound
    if reserves:
        del wanted[resource.RLIMIT_AS]
    wanted[resource.RLIMIT_CORE] = (0, 0)
    wanted[resource.RLIMIT_MSGQUEUE] = (0, 0)  # POSIX queues outlive processes, and cannot be listed inside
    wanted[resource.RLIMIT_NOFILE] = (MOST_DESCRIPTORS, MOST_DESCRIPTORS)
    if place.own_user:
        wanted[resource.RLIMIT_SIGPENDING] = (MOST_SIGNALS, MOST_SIGNALS)
    if cpu:
        seconds = math.ceil(limits["cpu_s"])
        wanted[resource.RLIMIT_CPU] = (seconds, seconds + 1)
    for name, (soft, hard) in wanted.items():
        most = resource.getrlimit(name)[1]
        if most != resource.RLIM_INFINITY:
            wanted[name] = min(soft, most), min(hard, most)
    return wanted


def put(pid: int, name: int, pair: tuple[int, int]) -> None:
    """Set an rlimit of a process (0: ours). gVisor lacks some of LACKING and lets nobody set them; those errors are
    ignored."""
    try:
        resource.prlimit(pid, name, pair)
    except (ValueError, PermissionError):
        if name not in LACKING:
            raise


def run_python(source: bytes) -> int:
    """Run `source` as __main__ would. Return the exit code."""
    repair()
    awake()
    code, _ = run_source(source, FILE_NAME, fresh_main(), interactive=False)
    return code or finish()


def awake() -> None:
    """Undo the settings that the init makes for itself alone."""
    stop_forgetting()
    _signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.enable()


def spawnable(argv: list[bytes], env: dict[str, str], folder: int) -> bool:
    """Return whether `argv` can be started by `spawn_with_limits`, with `env` added to the environment."""
    return _has_prlimit() and not any(name.startswith(LINKER) for name in env) and _program_found(argv[0], env, folder)


@functools.lru_cache(maxsize=1)
def _has_prlimit() -> bool:
    """Return whether prlimit exists and the kernel has all of the limits (gVisor does not)."""
    try:
        for name in OPTIONS:
            resource.setrlimit(name, resource.getrlimit(name))
    except (OSError, ValueError):
        return False
    return os.access(PRLIMIT, os.X_OK)


def _program_found(name: bytes, env: dict[str, str], folder: int) -> bool:
    """Return whether the program exists. A missing one is left to the fork: prlimit would report it in its own
    words."""
    if b"/" in name:
        return os.access(name, os.X_OK, dir_fd=folder)
    path = env.get("PATH") or os.environ.get("PATH") or os.defpath
    return any(os.access(os.path.join(part, name), os.X_OK, dir_fd=folder) for part in os.fsencode(path).split(b":"))


def spawn_with_limits(
    argv: list[bytes], env: dict[str, str], folder: int, streams: list[int], limits: dict[int, tuple[int, int]]
) -> int:
    """Start `argv` in `folder` and return its pid; `streams` become 0, 1 and 2. Raises OSError, ValueError."""
    options = [f"--{OPTIONS[name]}={soft}:{hard}" for name, (soft, hard) in limits.items()]
    here = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    os.fchdir(folder)
    try:
        process = subprocess.Popen(
            [PRLIMIT, *options, "--", *argv],
            env={**os.environ, **env},
            stdin=streams[0],
            stdout=streams[1],
            stderr=streams[2],
            start_new_session=True,
            umask=0o022,
        )
    finally:
        os.fchdir(here)
        os.close(here)
    process.returncode = 0  # it is reaped with all the others
    killed_first(process.pid)
    return process.pid


def fresh_main() -> types.ModuleType:
    """Return a `__main__` without our names; once in a process."""
    sys.modules["__main__"] = MAIN
    sys.argv = ["-c"]
    sys.path.insert(0, "")
    return MAIN


def run_source(source: bytes, name: str, main: types.ModuleType, *, interactive: bool) -> tuple[int, bool]:
    """Run the source. Return the exit code, and whether the source asked to exit. `interactive` prints the value of the
    last expression."""
    try:
        linecache.cache[name] = (len(source), None, source.decode("utf-8", "replace").splitlines(True), name)
        if interactive:
            for part in _parts(source, name):
                exec(part, main.__dict__)
        else:
            exec(compile(source, name, "exec"), main.__dict__)
    except SystemExit as request:
        return _system_exit_code(request.code), True
    except BaseException as error:  # the agent's code failed, which is a regular outcome
        report(error)
        return 1, False
    return 0, False


def _parts(source: bytes, name: str) -> list[types.CodeType]:
    """Compile all statements except a last expression, and that expression, to be shown by sys.displayhook as the
    prompt does."""
    tree = ast.parse(source, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    parts = [compile(tree, name, "exec")]
    if last is not None:
        parts.append(compile(ast.Interactive([last]), name, "single"))
    return parts


def _system_exit_code(code: object) -> int:
    if code is None or isinstance(code, int):
        return (code or 0) & 0xFF
    sys.stderr.write(f"{code}\n")
    return 1


def finish() -> int:
    """Do what CPython does at exit: threads, atexit, flush. Return 120 if something fails there, otherwise 0."""
    code = 0
    threads = len(threading._active) > 1 or threading._threading_atexits  # type: ignore[attr-defined]
    for step in (*((threading._shutdown,) if threads else ()), atexit._run_exitfuncs, flush):  # type: ignore[attr-defined]
        try:
            step()
        except BaseException as error:
            code = 120  # as CPython's own exit does when a flush fails
            note(error)
    return code


def flush() -> None:
    """Flush all output into the pipes. Raises what the last failing stream raised."""
    failed: BaseException | None = None
    streams = [sys.stdout, sys.stderr]
    streams += [] if sys.__stdout__ is sys.stdout else [sys.__stdout__]
    streams += [] if sys.__stderr__ is sys.stderr else [sys.__stderr__]
    for stream in streams:
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
    """Return the limit that kept a thread from starting: pthread_create(3) reports EAGAIN both if no more processes are
    allowed and if there is no address space for a stack."""
    most, stack = (resource.getrlimit(name)[0] for name in (resource.RLIMIT_AS, resource.RLIMIT_STACK))
    with open("/proc/self/statm", "rb") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    return b"memory_bytes" if most != resource.RLIM_INFINITY and used + stack > most else b"pids"


def begin_forgetting() -> None:
    """Remove the FORGETFUL variables from the environment."""
    global _forgetting
    for name in FORGETFUL:
        _forgetting |= os.environ.pop(name, None) is not None


def stop_forgetting() -> None:
    """Stop overwriting freed memory in a child: what it frees from now on is its own."""
    if _forgetting and _mallopt is not None:
        _mallopt(M_PERTURB, 0)
