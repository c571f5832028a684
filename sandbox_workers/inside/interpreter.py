"""The persistent interpreter, started on demand and running only during `session` calls.

`Interpreter` is the init's handle on it. `live` is the process itself: it receives a call's source and streams, runs
the source and reports its end. The report is trusted no more than an exit code, since code that it runs could send the
same."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import signal
import socket
import struct
import threading
import time
from typing import Any

from turnlog.sandbox_workers.inside.child import (
    FIRST_OTHER,
    NOTE_FD,
    awake,
    bounds,
    defaults,
    expendable,
    finish,
    flush,
    fresh_main,
    limit,
    make_sealed_file,
    note,
    prctl,
    put,
    run_source,
    wear,
)
from turnlog.sandbox_workers.inside.processes import ENDED as PROCESS_ENDED
from turnlog.sandbox_workers.inside.processes import STOPPED, InitEnvironment, below, start_of, tasks, thread_states

ENDED = b"the interpreter has ended: the next call starts a new one, without variables and imports\n"
WAKING = tuple(b"signal: %d/" % number for number in (signal.SIGCONT, signal.SIGKILL))
CPUCLOCK_SCHED = 2
"""Constant of posix-timers in the kernel: the clock of a process's run time."""

PR_SET_PDEATHSIG = 1

CHANNEL_FD = NOTE_FD + 1
SIZES = struct.Struct(">I")
DESCRIPTORS = 6
"""Descriptors of a call: stdin, stdout, stderr, note, folder, and a file with the length of its head, the head (JSON)
and the source."""


class Interpreter:
    """A process, stopped by SIGSTOP whenever no `session` call runs."""

    def __init__(self, place: InitEnvironment, folder: int, limits: dict[str, Any]) -> None:
        self.place = place
        self.used = False
        self._kept: dict[int, int] = {}
        """Start times of the servers that it keeps and their children, by pid."""
        self.channel, theirs = socket.socketpair()
        self.channel.setblocking(False)
        self.pid = os.fork()
        if not self.pid:
            live(place, theirs.fileno(), folder, limits, 0)
        theirs.close()
        self.handle = open_pidfd(self.pid)

    def begin(self, head: dict[str, Any], source: bytes, folder: int, streams: list[int]) -> None:
        """Start running the source. Raises OSError if the interpreter cannot receive it."""
        if self.used:  # a new interpreter sets the limits of its first call itself
            for name, bound in bounds(self.place, head["limits"], 0).items():
                hard = resource.prlimit(self.pid, name)[1]
                put(self.pid, name, (min(bound, hard), hard))
        self.used = True
        with contextlib.suppress(BlockingIOError):
            self.channel.recv(4096)  # discard unexpected bytes
        about = json.dumps({"env": head["env"], "cwd": head["cwd"]}).encode()
        call = make_sealed_file(SIZES.pack(len(about)) + about + source)
        try:
            socket.send_fds(self.channel, [b"!"], [*streams, folder, call])
        finally:
            os.close(call)
        os.kill(self.pid, signal.SIGCONT)
        for pid in self.kept_pids() if head.get("keeps") else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def keep(self) -> None:
        """Stop the interpreter and every process below it, and keep these from now on: the servers that a call with
        `keeps` has started."""
        self.hold()
        found: set[int] = set()
        while (now := below(self.pid, tasks(self.place))) != found:  # what is stopped does not fork
            found = now
            for pid in found:
                _stop(pid)
        self._kept = {pid: start for pid in found if (start := start_of(pid)) is not None}

    def kept_pids(self) -> set[int]:
        """Return the pids of the kept processes that live."""
        self._kept = {pid: start for pid, start in self._kept.items() if start_of(pid) == start}
        return set(self._kept)

    def hold_kept(self) -> None:
        """Stop the kept processes."""
        for pid in self.kept_pids():
            _stop(pid)

    def answer(self) -> int | None:
        """Return the call's exit code once the interpreter has reported it, else None. Raises OSError if it has closed
        its channel."""
        try:
            said = self.channel.recv(1)
        except BlockingIOError:
            return None
        if not said:
            raise ConnectionResetError
        return said[0]

    def hold(self) -> bool:
        """Stop all its threads, and the processes that it keeps. Return False if it is dead."""
        if self._kept:
            self.hold_kept()
        return _stop(self.pid)

    def wakes_itself(self) -> bool:
        """Return whether a timer of its own, or of a process that it keeps, would continue or end that one between its
        calls (timer_create(2) with SIGCONT, SIGKILL). Every other signal waits for the next call, and seccomp prevents
        descriptors from sending a chosen signal."""
        return any(_has_waking_timer(pid) for pid in (self.pid, *self._kept))

    def cpu_s(self) -> float:
        """Return the CPU time of all its threads, living or dead, to the nanosecond (clock_getcpuclockid(3))."""
        try:
            return time.clock_gettime((~self.pid << 3) | CPUCLOCK_SCHED)
        except OSError:
            return 0.0  # reaped: then it is in RUSAGE_CHILDREN

    def forget(self) -> None:
        """Kill it if it is not dead yet, and close its descriptors. It is reaped as every child is."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.channel.close()
        os.close(self.handle)


def _stop(pid: int) -> bool:
    """Stop all threads of a process. Return False if it is dead."""
    while not (states := thread_states(pid)) <= set(PROCESS_ENDED):
        if states <= {STOPPED, *PROCESS_ENDED}:
            return True
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
        time.sleep(0.0002)
    return False


def _has_waking_timer(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/timers", "rb") as file:
            return any(line.startswith(WAKING) for line in file)
    except OSError:
        return False  # the kernel lacks CONFIG_CHECKPOINT_RESTORE; the init checks periodically instead


def live(place: InitEnvironment, channel: int, folder: int, limits: dict[str, Any], standing: int) -> None:
    """Become the interpreter in the forked child. Never returns."""
    code = 126
    try:
        os.setsid()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # it is stopped, and nobody else would end it
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
    """Run calls until one of them asks to exit, or the init is gone. Return the exit code."""
    main, here, number = fresh_main(), os.getpid(), 0
    while True:
        found, descriptors, _, _ = socket.recv_fds(channel, 1, DESCRIPTORS)
        if not found:
            return 0
        source = _receive_source(descriptors)
        number += 1
        code, leaves = run_source(source, f"<call {number}>", main, interactive=True)
        if leaves or os.getpid() != here:  # a child that the source forked, and that did not exit, is not us
            return code or finish()
        code = code or _flush_streams()
        _wear_nothing()
        channel.sendall(bytes([code]))


def _receive_source(descriptors: list[int]) -> bytes:
    """Return a call's source, after adopting its streams and environment."""
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


def _flush_streams() -> int:
    try:
        flush()
    except BaseException as error:
        note(error)
        return 120
    return 0


def _wear_nothing() -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    wear([nothing] * 4)
    os.close(nothing)


def open_pidfd(pid: int) -> int:
    """Return a descriptor that becomes readable when the process ends: pidfd_open(2). gVisor does not have it, so there
    a thread waits and closes the other end of a pipe."""
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno != errno.ENOSYS:
            raise
    return waited_for(pid)


def waited_for(pid: int) -> int:
    """Return a pipe that a thread closes when the process ends; the child is left to be reaped."""
    read, write = os.pipe()

    def wait() -> None:
        with contextlib.suppress(ChildProcessError):  # it was reaped before we looked
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        os.close(write)

    threading.Thread(target=wait, daemon=True).start()
    return read
