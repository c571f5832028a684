"""The forked child of a call: limits on, then the command."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import os
import resource
import signal
import sys
from typing import Any

from turnlog.sandbox_workers.inside import forgetting
from turnlog.sandbox_workers.inside import source as agents
from turnlog.sandbox_workers.inside.processes import Place, processes_of
from turnlog.sandbox_workers.inside.source import NOTE_FD

PR_SET_DUMPABLE = 4
FILE_NAME = "<python>"
SPARE_PIDS = 128
"""Room for what a user who is shared with others may start during a call."""
ARGUMENT_BYTES = 100_000
"""A longer script is passed as a file: execve(2) takes no argument of 128 KiB."""
FIRST_OTHER = 3
MOST_DESCRIPTORS = 1024
MOST_SIGNALS = 1024
"""That wait to be taken, timers of timer_create(2) among them: counted by user, and in a user namespace by that."""
prctl = ctypes.CDLL(None, use_errno=True).prctl


def become(place: Place, head: dict[str, Any], source: bytes, folder: int, streams: list[int], standing: int) -> None:
    """In the forked child: put on the limits, then run the command in `folder`. `streams` are what becomes 0, 1, 2 and
    the note; `standing` counts processes that are there already. Never returns."""
    code = 126
    try:
        os.setsid()
        os.fchdir(folder)
        wear(streams)
        os.closerange(FIRST_OTHER, NOTE_FD)
        os.umask(0o022)
        limit(place, head["limits"], standing)
        expendable()
        if head["kind"] == "python":
            defaults(signal.SIG_IGN)
            os.environ.update(head["env"])
            code = run_python(source)
        else:
            defaults(signal.SIG_DFL)
            code = replaced_by(command_line(head, source), os.environ | head["env"])
    except BaseException as error:  # whatever it is, this child must not go on as a second init
        os.write(2, f"the call could not start: {error}\n".encode(errors="backslashreplace"))
    finally:
        os._exit(code)


def wear(streams: list[int]) -> None:
    """Make them our standard streams and the note."""
    for number, target in zip(streams, (0, 1, 2, NOTE_FD)):  # noqa: B905 - images may have Python 3.9
        os.dup2(number, target, inheritable=target != NOTE_FD)


def expendable() -> None:
    """Let programs see our /proc entries, which are closed as the init is, and the kernel kill us first."""
    prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
    killed_first("self")


def killed_first(process: int | str) -> None:
    """When memory is short, the kernel is to take it before the init (proc(5))."""
    with contextlib.suppress(OSError):
        score = os.open(f"/proc/{process}/oom_score_adj", os.O_WRONLY)
        try:
            os.write(score, b"1000")
        finally:
            os.close(score)


def defaults(action: signal.Handlers) -> None:
    """Python ignores these and answers with exceptions; programs expect them to kill."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, action)


def replaced_by(argv: list[bytes], env: dict[str, str]) -> int:
    """Become a program; the exit code when it cannot be, as a shell has it. (os.execvpe would import and fork-copy more
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
    """argv of a `program` or `shell` call."""
    if head["kind"] == "program":
        return [os.fsencode(word) for word in head["argv"]]
    shell = b"/bin/bash" if os.path.exists("/bin/bash") else b"/bin/sh"
    if len(source) <= ARGUMENT_BYTES:
        return [shell, b"-c", source]
    script = sealed(source)
    os.set_inheritable(script, True)
    return [shell, b"/dev/fd/%d" % script]


def sealed(content: bytes) -> int:
    """A descriptor from which `content` is read, and which nobody can write to. It needs no feeding, so nothing waits
    for a reader."""
    import fcntl

    number = os.memfd_create("input", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    view = memoryview(content)
    while view:
        view = view[os.write(number, view) :]
    os.lseek(number, 0, os.SEEK_SET)
    fcntl.fcntl(number, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    return number


LACKING = (resource.RLIMIT_NPROC, resource.RLIMIT_MSGQUEUE, resource.RLIMIT_SIGPENDING)
"""Limits that not every kernel has; processes are counted by `Call`, too."""


def bounds(place: Place, limits: dict[str, Any], standing: int) -> dict[int, int]:
    """rlimits that suit one process as well as another; what concerns the tree is looked at by `Call`."""
    # RLIMIT_NPROC counts all processes of our user: this one, the zygote that may be above it, one more to be seen
    # beyond the limit, and those that are not ours to count. It is always set: without it a fork bomb outruns
    # everything that looks on. One more again, so that a control group, where there is one, refuses first: it keeps
    # count of that, and an rlimit does not.
    others = standing if place.own_user else processes_of(os.getuid()) + SPARE_PIDS
    return {
        resource.RLIMIT_FSIZE: limits["disk_bytes"],
        # Address space is reserved far beyond what is touched; the memory that is touched is what `Call` looks at.
        resource.RLIMIT_AS: 2 * limits["memory_bytes"] + 2**28,
        resource.RLIMIT_NPROC: limits["pids"] + 3 + int(place.namespace) + others,
    }


def limit(place: Place, limits: dict[str, Any], standing: int = 0, *, cpu: bool = True) -> None:
    """Put them on, for good. `cpu`: without, for a process that lives longer than a call."""
    for name, pair in pairs(place, limits, standing, cpu=cpu).items():
        put(0, name, pair)


def pairs(place: Place, limits: dict[str, Any], standing: int, *, cpu: bool) -> dict[int, tuple[int, int]]:
    """All of them, soft and hard, none above what we may set."""
    wanted = {name: (bound, bound) for name, bound in bounds(place, limits, standing).items()}
    wanted[resource.RLIMIT_CORE] = (0, 0)
    wanted[resource.RLIMIT_MSGQUEUE] = (0, 0)  # POSIX queues outlive processes, and nothing inside can list them
    wanted[resource.RLIMIT_NOFILE] = (MOST_DESCRIPTORS, MOST_DESCRIPTORS)
    if place.own_user:
        wanted[resource.RLIMIT_SIGPENDING] = (MOST_SIGNALS, MOST_SIGNALS)
    if cpu:
        seconds = math.ceil(limits["cpu_s"])
        wanted[resource.RLIMIT_CPU] = (seconds, seconds + 1)
    for name, pair in wanted.items():
        most = resource.getrlimit(name)[1]
        soft, hard = (bound if most == resource.RLIM_INFINITY else min(bound, most) for bound in pair)
        wanted[name] = (soft, hard)
    return wanted


def put(pid: int, name: int, pair: tuple[int, int]) -> None:
    """Set a limit of a process (0: ours). gVisor has some of them not, and lets nobody set those."""
    try:
        resource.prlimit(pid, name, pair)
    except (ValueError, PermissionError):
        if name not in LACKING:
            raise


def run_python(source: bytes) -> int:
    """Run `source` as __main__ would; the exit code."""
    awake()
    code, _ = agents.run(source, FILE_NAME, agents.fresh_main(), interactive=False)
    return code or agents.end()


def awake() -> None:
    """Undo what the init does for itself alone."""
    forgetting.stop()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # what was printed survives a time-out
    gc.enable()
