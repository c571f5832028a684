"""The init's hold on the persistent interpreter: started on demand, running only during `session` calls."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import time
from typing import Any

from turnlog.sandbox_workers.inside import handles
from turnlog.sandbox_workers.inside.child import bounds, put, sealed
from turnlog.sandbox_workers.inside.processes import ENDED as PROCESS_ENDED
from turnlog.sandbox_workers.inside.processes import STOPPED, Place, thread_states
from turnlog.sandbox_workers.inside.session import SIZES, live

ENDED = b"the interpreter has ended: the next call starts a new one, without variables and imports\n"
WAKING = tuple(b"signal: %d/" % number for number in (signal.SIGCONT, signal.SIGKILL))
CPUCLOCK_SCHED = 2
"""Of posix-timers in the kernel: the clock of a process's run time."""


class Interpreter:
    """One process, stopped by SIGSTOP whenever no `session` call runs."""

    def __init__(self, place: Place, folder: int, limits: dict[str, Any]) -> None:
        self.place = place
        self.used = False
        self.channel, theirs = socket.socketpair()
        self.channel.setblocking(False)
        self.pid = os.fork()
        if not self.pid:
            live(place, theirs.fileno(), folder, limits, 0)
        theirs.close()
        self.handle = handles.opened(self.pid)

    def begin(self, head: dict[str, Any], source: bytes, folder: int, streams: list[int]) -> None:
        """Let it run this. Raises OSError when it cannot take it."""
        if self.used:  # a new one puts on those of its first call by itself
            for name, bound in bounds(self.place, head["limits"], 0).items():
                hard = resource.prlimit(self.pid, name)[1]
                put(self.pid, name, (min(bound, hard), hard))
        self.used = True
        with contextlib.suppress(BlockingIOError):
            self.channel.recv(4096)  # what nobody asked for
        about = json.dumps({"env": head["env"], "cwd": head["cwd"]}).encode()
        call = sealed(SIZES.pack(len(about)) + about + source)
        try:
            socket.send_fds(self.channel, [b"!"], [*streams, folder, call])
        finally:
            os.close(call)
        os.kill(self.pid, signal.SIGCONT)

    def answer(self) -> int | None:
        """Exit code of the call once it has said so, or None. Raises OSError when it has closed its channel."""
        try:
            said = self.channel.recv(1)
        except BlockingIOError:
            return None
        if not said:
            raise ConnectionResetError
        return said[0]

    def hold(self) -> bool:
        """Stop all its threads; False when it is dead."""
        while not (states := thread_states(self.pid)) <= set(PROCESS_ENDED):
            if states <= {STOPPED, *PROCESS_ENDED}:
                return True
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGSTOP)
            time.sleep(0.0002)
        return False

    def wakes_itself(self) -> bool:
        """A timer of its own would let it go on, or end it, between its calls (timer_create(2) with SIGCONT, SIGKILL);
        every other signal waits for the next call, and descriptors send none of one's choice (seccomp)."""
        try:
            with open(f"/proc/{self.pid}/timers", "rb") as file:
                return any(line.startswith(WAKING) for line in file)
        except OSError:
            return False  # this kernel does not tell (CONFIG_CHECKPOINT_RESTORE); the init looks again and again

    def cpu_s(self) -> float:
        """Of all its threads, living or not, to the nanosecond (clock_getcpuclockid(3))."""
        try:
            return time.clock_gettime((~self.pid << 3) | CPUCLOCK_SCHED)
        except OSError:
            return 0.0  # reaped: then it is in RUSAGE_CHILDREN

    def forget(self) -> None:
        """Kill it, where that has not happened yet. It is reaped as every child is."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.channel.close()
        os.close(self.handle)
