"""Run one command: start it, watch it, collect its output, end its process tree, and determine its status.

No process of a call outlives it, except the persistent interpreter and the servers that it keeps, which are stopped."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import select
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from turnlog.sandbox_workers.inside.child import (
    ARGUMENT_BYTES,
    become,
    command_line,
    fork_call,
    make_sealed_file,
    pairs,
    spawn_with_limits,
    spawnable,
)
from turnlog.sandbox_workers.inside.frames import PART_BYTES, Control, ControlClosed, receive, send
from turnlog.sandbox_workers.inside.interpreter import ENDED, Interpreter, open_pidfd
from turnlog.sandbox_workers.inside.observables import Integrity
from turnlog.sandbox_workers.inside.processes import (
    SOCKET_BYTES,
    InitEnvironment,
    ProcessInfo,
    Unclaimed,
    disk,
    exact_memory,
    tasks,
    uncharged_bytes,
)

SAMPLE_S = 0.05
"""Seconds between looks at the tree's processes, memory, CPU and disk."""
LONGEST_LOOK_S = 1.0
LIMIT_SIGNALS = {128 + signal.SIGXCPU: "cpu_s", 128 + signal.SIGXFSZ: "disk_bytes"}
"""Exit codes of processes that an rlimit has killed."""

Verdict = tuple[str, str]
"""(status, reason)"""
Become = Callable[[InitEnvironment, dict[str, Any], bytes, int, list[int], int], None]
"""Function that the forked child of a call runs; see child.become."""

NOTE_BYTES = 64
CUT_BYTES = 64
"""Bytes of the last half reserved for the line that marks left-out output."""
MOST_PARTS = 64
"""Maximum number of parts read from one pipe before anything else is looked at; more than a pipe holds."""
STREAMS = ("stdout", "stderr")

MOST_ROUNDS = 2000
"""Maximum rounds of ending all processes but the spared one; after them the spared one is ended, too."""
PAUSE_S = 0.0005


_kill = ctypes.CDLL(None, use_errno=True).kill


class CommandProcess:
    """A command's main process, its pipes and its limits. `interpreter` is the persistent one, or None."""

    def __init__(
        self,
        place: InitEnvironment,
        control: Control,
        head: dict[str, Any],
        interpreter: Interpreter | None,
        become: Become,
        integrity: Integrity,
    ) -> None:
        self.place = place
        self.integrity = integrity
        self.become = become
        self.control = control
        self.head = head
        self.limits = head["limits"]
        self.interpreter = interpreter
        self.session = head["kind"] == "session"
        self.code: int | None = None
        """Exit code of a session call's source; None while it runs, and if the interpreter ended with it."""
        self.reaped = Reaped()
        self.output = Output(control, self.limits["output_bytes"], prompt=head["prompt"], cuts=head["agent"])
        self.began = self.looked = time.monotonic()
        self.unheard_s = 0.0
        self.unclaimed = Unclaimed()
        self.cpu_before = self._cpu()
        self.disk_before = disk(place)

    def run(self, source: bytes, stdin: bytes, folder: int) -> dict[str, Any]:
        """Run the command and return the head of the answer. Raises ControlClosed, or its subclass Tampered."""
        verdict: Verdict | None = ("cancelled", "cancelled")
        try:
            self._start(source, stdin, folder)
            verdict = self._watch()
            if verdict is None and self.session:
                verdict = self._look()
        finally:
            self._end_tree(spare=not self.session or (verdict is None and self.code is not None))
        return self._answer(verdict)

    def _start(self, source: bytes, stdin: bytes, folder: int) -> None:
        given = make_sealed_file(stdin) if stdin else os.open(os.devnull, os.O_RDONLY)
        streams = [given, *self.output.ends]
        if self.session:
            self.interpreter = self.interpreter or Interpreter(self.place, folder, self.limits)
            self.main, self.handle = self.interpreter.pid, os.dup(self.interpreter.handle)
            self.interpreter.begin(self.head, source, folder, streams)
        else:
            standing = sum(task.threads for task in tasks(self.place)) if self.interpreter else 0
            self.main = self._spawn_program(source, folder, streams, standing) or self._fork()
            if not self.main:
                self.become(self.place, self.head, source, folder, streams, standing)
            self.handle = open_pidfd(self.main)
        os.close(given)
        self.output.handed_over()

    def _fork(self) -> int:
        alone = self.become is become and threading.active_count() == 1
        return fork_call() if alone else os.fork()

    def _spawn_program(self, source: bytes, folder: int, streams: list[int], standing: int) -> int:
        """Start a program without a fork and return its pid; 0 if that is not possible or failed."""
        quick = self.become is become and self.head["kind"] in ("program", "shell") and len(source) <= ARGUMENT_BYTES
        if not quick:
            return 0
        limits = pairs(self.place, self.limits, standing, cpu=True, reserves=self.head["agent"])
        try:
            argv, env = command_line(self.head, source), self.head["env"]
            return spawn_with_limits(argv, env, folder, streams, limits) if spawnable(argv, env, folder) else 0
        except (OSError, ValueError):
            return 0  # the fork gets the same error and reports it

    def _watch(self) -> Verdict | None:
        """Wait for the main process or a session's source to end (None), or for a limit to be met."""
        channel = self.interpreter.channel.fileno() if self.session and self.interpreter else -1
        poll = select.poll()
        for descriptor in (*self.output.reads, self.handle, *([channel] if self.session else ())):
            poll.register(descriptor, select.POLLIN)
        deadline = self.began + self.limits["wall_s"]
        look = self.began + SAMPLE_S
        while (now := time.monotonic()) < deadline:
            poll.register(self.control.fileno(), select.POLLIN | (select.POLLOUT if self.output.due else 0))
            for descriptor, event in poll.poll(max(0.0, min(deadline, look) - now) * 1000 + 1):
                if descriptor == self.control.fileno() and event != select.POLLOUT:
                    head, _ = receive(self.control)
                    if head["op"] == "beat":
                        self.unheard_s = 0.0
                        continue
                    return ("resource_limit", head["limit"]) if "limit" in head else ("cancelled", "cancelled")
                if descriptor == self.handle:
                    self._reap_main()
                    return None
                if not self._read_descriptor(descriptor):
                    poll.unregister(descriptor)
            if self.code is not None:
                return None
            if self.output.exceeded:
                return "resource_limit", "output_bytes"
            if time.monotonic() >= look:
                look = time.monotonic() + SAMPLE_S
                self.output.forward()
                self._hears()
                if verdict := self._look():
                    return verdict
        return "timeout", "wall_s"

    def _reap_main(self) -> None:
        """Reap the main process, so that `kill_others` finds nothing if nothing else is left."""
        if not self.session and self.main not in self.reaped.statuses:
            self.reaped.take(*os.wait4(self.main, 0))

    def _hears(self) -> None:
        """Check that a heartbeat of the worker came lately. Raises ControlClosed. A look counts for at most
        LONGEST_LOOK_S: after a longer gap the whole machine was suspended."""
        now = time.monotonic()
        self.unheard_s += min(now - self.looked, LONGEST_LOOK_S)
        self.looked = now
        if self.unheard_s > self.head["silence_s"]:
            raise ControlClosed

    def _read_descriptor(self, descriptor: int) -> bool:
        """Read what `descriptor` has. Return False if nothing more can come."""
        if descriptor in self.output.reads:
            return self.output.drain(descriptor)
        if self.interpreter is not None and descriptor == self.interpreter.channel.fileno():
            return self._listening()
        self.output.forward()
        return True

    def _listening(self) -> bool:
        """Read the interpreter's report that the source has ended, if there is one. Return False if it can send nothing
        any more."""
        assert self.interpreter is not None
        try:
            self.code = self.interpreter.answer()
        except OSError:
            return False
        return True

    def _look(self) -> Verdict | None:
        """Check the limits that no rlimit enforces on a tree of processes. Raises Tampered."""
        self.integrity.check()
        self.reaped.look()
        if self.interpreter is not None and not self.session:
            self.interpreter.hold()
        elif self.interpreter is not None and not self.head.get("keeps"):
            self.interpreter.hold_kept()
        found = tasks(self.place)
        if sum(task.threads for task in found if not self._stands(task)) > self.limits["pids"]:
            return "resource_limit", "pids"
        most = self.limits["memory_bytes"]
        if sum(task.memory_bytes for task in found) > most and exact_memory(found) > most:
            return "resource_limit", "memory_bytes"
        if self.place.namespace and uncharged_bytes() > SOCKET_BYTES:
            return "resource_limit", "memory_bytes"
        if self._cpu_of(found) - self.cpu_before > self.limits["cpu_s"]:
            return "resource_limit", "cpu_s"
        if disk(self.place).has_reached_limit(self.limits["disk_bytes"], self.disk_before):
            return "resource_limit", "disk_bytes"
        return None

    def _stands(self, task: ProcessInfo) -> bool:
        """Return whether the process is an interpreter that has no part in this call, or a dead child of it."""
        if self.interpreter is None or self.head.get("keeps"):
            return False
        if task.pid in self.interpreter.kept_pids():
            return True
        return not self.session and self.interpreter.pid in (task.pid, task.parent)

    def _cpu(self) -> float:
        return self._cpu_of(tasks(self.place) if self.interpreter else [])

    def _cpu_of(self, found: list[ProcessInfo]) -> float:
        """Return the CPU time of all processes, living and dead. A dead process's time is reported by its parent once
        it has reaped it."""
        children = children_cpu()
        if found or self.unclaimed.before:
            self.unclaimed.look(found, children)
        total = children + self.unclaimed.cpu_s
        for task in found:
            exact = self.interpreter is not None and task.pid == self.interpreter.pid
            total += task.reaped_s + (self.interpreter.cpu_s() if exact and self.interpreter else task.cpu_s)
        return total

    def _end_tree(self, *, spare: bool) -> None:
        kept = self.interpreter if spare else None
        if kept is not None and self.head.get("keeps"):
            kept.keep()
        if kept is None or not end_others(self.place, kept, self.reaped) or kept.wakes_itself():
            end_all(self.place, self.reaped)
            if self.interpreter is not None:
                self.interpreter.forget()
            self.interpreter = None

    def _answer(self, verdict: Verdict | None) -> dict[str, Any]:
        duration = time.monotonic() - self.began
        for read in self.output.reads:
            self.output.drain(read, ended=True)
        cpu = max(0.0, self._cpu() - self.cpu_before)
        status, reason = verdict or self._judge(cpu)
        if self.session and self.interpreter is None and status in ("ok", "tool_error"):
            self.output.add("stderr", ENDED)
        self.output.end()
        self.output.forward(wait=True)
        self.output.close()
        os.close(self.handle)
        code = self._exit_code() if status in ("ok", "tool_error") else None
        about = {"status": status, "reason": reason, "exit_code": code, "duration_s": duration, "cpu_s": cpu}
        return about | {"interpreter": self.interpreter is not None}

    def _exit_code(self) -> int:
        if self.code is not None:
            return self.code
        code = os.waitstatus_to_exitcode(self.reaped.statuses[self.main])
        return 128 - code if code < 0 else code

    def _judge(self, cpu_s: float) -> Verdict:
        """Determine the status of a main process that ended by itself."""
        note = self.output.note.decode(errors="replace")
        if self.output.exceeded:
            return "resource_limit", "output_bytes"
        for limit in ("memory_bytes", "pids", "disk_bytes"):
            if note.startswith(limit):  # each process that met the limit has written the limit's name
                return "resource_limit", limit
        if name := LIMIT_SIGNALS.get(self._exit_code()):
            return "resource_limit", name
        if cpu_s >= self.limits["cpu_s"]:
            return "resource_limit", "cpu_s"
        if not self.session and self.reaped.peak_bytes[self.main] > self.limits["memory_bytes"]:
            return "resource_limit", "memory_bytes"
        if disk(self.place).has_reached_limit(self.limits["disk_bytes"], self.disk_before):
            return "resource_limit", "disk_bytes"
        return ("tool_error" if self._exit_code() else "ok"), ""


class Output:
    """Output of a call, of which at most `most` bytes are held in memory.

    `prompt`: output is sent as it comes; otherwise when a part is full, at every look at the call, and at its end,
    because a frame for every line costs more than most calls. `cuts`: too much output is not a met limit; the first and
    the last half of `most` are sent, all of it as stdout, in the order it came."""

    def __init__(self, control: Control, most: int, *, prompt: bool, cuts: bool = False) -> None:
        self.control = control
        self.cuts = cuts
        self.last = bytearray()
        self.left_out = 0
        self.most = most // 2 if cuts else most
        self.kept = most // 2 - CUT_BYTES
        self.prompt = prompt
        self.written = 0
        self.exceeded = False
        self.note = b""
        self.pending = {"stdout": bytearray(), "stderr": bytearray()}
        self.ends: list[int] = []
        self.reads: dict[int, str] = {}
        for name in (*STREAMS, "note"):
            read, write = os.pipe()
            os.set_blocking(read, False)
            self.reads[read] = name
            self.ends.append(write)

    def handed_over(self) -> None:
        """Close our ends of the pipes, after the call has inherited them."""
        for descriptor in self.ends:
            os.close(descriptor)
        self.ends = []

    def drain(self, descriptor: int, *, ended: bool = False) -> bool:
        """Read what is there, up to one byte beyond the limit. Return False at the end of the stream. Unless the call
        has `ended`, a short part is the last: an exception for an empty pipe costs 20 page faults."""
        name = self.reads[descriptor]
        for _ in range(MOST_PARTS):
            if self.exceeded:
                break
            try:
                part = os.read(descriptor, PART_BYTES)
            except BlockingIOError:
                return True
            if not part:
                return False
            if name == "note":
                self.note = (self.note + part)[:NOTE_BYTES]
            else:
                self.add(name, part)
            if len(part) < PART_BYTES and not ended:
                break
        return True

    def add(self, name: str, part: bytes) -> None:
        """Count a part of the output. If it is due, send it as soon as the control socket has room."""
        room = self.most - self.written
        if self.cuts:
            name = "stdout"
            self.last += part[room:]
            over = max(0, len(self.last) - self.kept)
            self.left_out += over
            del self.last[:over]
        else:
            self.exceeded = self.exceeded or len(part) > room
        self.written += min(len(part), room)
        self.pending[name] += part[:room]
        if self.due:
            self.forward()

    def end(self) -> None:
        """Finish the output: add the retained last part, after a note of what was left out."""
        if self.left_out:
            self.pending["stdout"] += b"\n[%d bytes left out]\n" % self.left_out
        self.pending["stdout"] += self.last

    @property
    def due(self) -> bool:
        """True if something is to be sent now."""
        return any(data and (self.prompt or len(data) >= PART_BYTES) for data in self.pending.values())

    def forward(self, *, wait: bool = False) -> None:
        """Send what the control socket takes at once, so that a slow worker delays no limit; with `wait`, send all of
        it. Raises ControlClosed."""
        for name, data in self.pending.items():
            while data and (wait or self._writable()):
                send(self.control, {"output": name}, bytes(data[:PART_BYTES]))
                del data[:PART_BYTES]

    def close(self) -> None:
        """Close the pipes."""
        for descriptor in (*self.reads, *self.ends):
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def _writable(self) -> bool:
        """Return whether there is room for one part. The kernel reports a unix socket as writable while three quarters
        of it are free."""
        poll = select.poll()
        poll.register(self.control.outgoing(), select.POLLOUT)
        return bool(poll.poll(0))


class Reaped:
    """Exit statuses and peak memory of our children that ended."""

    def __init__(self) -> None:
        self.statuses: dict[int, int] = {}
        self.peak_bytes: dict[int, int] = {}

    def look(self, options: int = os.WNOHANG) -> None:
        """Reap children that have ended; with `options` 0, wait until there is no child."""
        try:
            while True:
                pid, status, usage = os.wait4(-1, options)
                if not pid:
                    return
                self.take(pid, status, usage)
        except ChildProcessError:
            return

    def take(self, pid: int, status: int, usage: resource.struct_rusage) -> None:
        """Note a child that was reaped."""
        self.statuses[pid] = status
        self.peak_bytes[pid] = usage.ru_maxrss * 1024


def end_all(place: InitEnvironment, reaped: Reaped) -> None:
    """Kill and reap every process but ours."""
    if place.namespace:
        assert os.getpid() == 1  # anywhere else kill(-1) would end the machine
        if kill_others():
            reaped.look(0)
        return
    reaped.look()  # if no child is left, the host's processes need not be scanned
    while found := _living(place):
        _kill_round(place, found, frozenset(), reaped)
    reaped.look()


def kill_others() -> bool:
    """Kill every other process of our pid namespace. Return False if there is none. (os.kill would raise an exception,
    which costs 20 page faults.)"""
    if not _kill(-1, signal.SIGKILL):
        return True
    if (number := ctypes.get_errno()) != errno.ESRCH:
        raise OSError(number, os.strerror(number))
    return False


def end_others(place: InitEnvironment, spared: Interpreter, reaped: Reaped) -> bool:
    """Kill every process but ours, `spared` and those that it keeps, which are stopped. Return False if `spared` is
    dead, too."""
    for _ in range(MOST_ROUNDS):
        standing = frozenset((spared.pid, *spared.kept_pids()))
        if not (found := _living(place, standing)):
            reaped.look()
            return spared.hold()
        with contextlib.suppress(ProcessLookupError):
            os.kill(spared.pid, signal.SIGSTOP)
        _kill_round(place, found, standing, reaped)
    end_all(place, reaped)
    return False


def _kill_round(place: InitEnvironment, found: set[int], spared: frozenset[int], reaped: Reaped) -> None:
    """Kill in one round: everything is stopped first, and a stopped process does not fork, so the rounds end even for a
    fork bomb."""
    if place.namespace:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGSTOP)
        found = _living(place, spared)
    else:
        stopped: set[int] = set()
        while new := found - stopped:
            _signal(new, signal.SIGSTOP)
            stopped |= new
            found = _living(place, spared)
    _signal(found, signal.SIGKILL)
    reaped.look()
    time.sleep(PAUSE_S)
    reaped.look()


def _living(place: InitEnvironment, spared: frozenset[int] = frozenset()) -> set[int]:
    return {task.pid for task in tasks(place) if task.pid not in spared and not task.ended}


def _signal(pids: set[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def children_cpu() -> float:
    """Return the CPU seconds of all children that we have reaped, and of theirs."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
