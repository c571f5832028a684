"""One run of a tool: fork, watch, end the whole tree, judge."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import socket
import time
from typing import Any

from turnlog.sandbox_workers.inside.child import become
from turnlog.sandbox_workers.inside.frames import receive
from turnlog.sandbox_workers.inside.processes import Place, disk_used, tasks

SAMPLE_S = 0.05
"""Pause between looks at the tree's processes, memory, CPU and disk."""
LIMIT_SIGNALS = {128 + signal.SIGXCPU: "cpu_s", 128 + signal.SIGXFSZ: "disk_bytes"}
"""Exit codes that an rlimit leaves."""

Verdict = tuple[str, str]
"""(status, reason)"""


class Call:
    """One run of a tool: its main process, its pipes, its limits."""

    def __init__(self, place: Place, control: socket.socket, head: dict[str, Any], source: bytes) -> None:
        self.place = place
        self.control = control
        self.limits = head["limits"]
        self.status: int | None = None
        self.peak_bytes = 0
        self.outputs: dict[int, bytearray] = {}
        self.began = time.monotonic()
        self.cpu_before = _children_cpu()
        ends = [os.pipe() for _ in range(3)]
        self.main = os.fork()
        if not self.main:
            become(place, head["tool"], source, self.limits, [write for _, write in ends])
        for _, write in ends:
            os.close(write)
        self.reads = [read for read, _ in ends]
        self.note = self.reads[2]
        for read in self.reads:
            os.set_blocking(read, False)
            self.outputs[read] = bytearray()
        self.handle = os.pidfd_open(self.main)

    def run(self) -> tuple[dict[str, Any], bytes]:
        """Head and body of the answer. Raises ControlClosed."""
        try:
            verdict = self._watch()
        finally:
            self._end_tree()
        duration = time.monotonic() - self.began
        for read in self.reads:
            self._drain(read)
        verdict = verdict or self._judge()
        for descriptor in (*self.reads, self.handle):
            os.close(descriptor)
        output = bytes(self.outputs[self.reads[0]] + self.outputs[self.reads[1]])[: self.limits["output_bytes"]]
        status, reason = verdict
        code = None if status not in ("ok", "tool_error") else self._exit_code()
        cpu = _children_cpu() - self.cpu_before
        return {"status": status, "reason": reason, "exit_code": code, "duration_s": duration, "cpu_s": cpu}, output

    def _watch(self) -> Verdict | None:
        """Until the main process ends (None) or a limit does."""
        poll = select.poll()
        for descriptor in (*self.reads, self.handle, self.control.fileno()):
            poll.register(descriptor, select.POLLIN)
        deadline = self.began + self.limits["wall_s"]
        look = self.began + SAMPLE_S
        while (now := time.monotonic()) < deadline:
            for descriptor, _ in poll.poll(max(0.0, min(deadline, look) - now) * 1000 + 1):
                if descriptor == self.handle:
                    return None
                if descriptor == self.control.fileno():
                    receive(self.control)
                    return "cancelled", "cancelled"
                if not self._drain(descriptor):
                    poll.unregister(descriptor)
            if self._written() > self.limits["output_bytes"]:
                return "resource_limit", "output_bytes"
            if time.monotonic() >= look:
                look = time.monotonic() + SAMPLE_S
                if verdict := self._look():
                    return verdict
        return "timeout", "wall_s"

    def _written(self) -> int:
        return sum(len(self.outputs[read]) for read in self.reads[:2])

    def _drain(self, descriptor: int) -> bool:
        """Take what is there, up to one byte beyond the limit; False at its end."""
        while self._written() <= self.limits["output_bytes"]:
            try:
                part = os.read(descriptor, 65536)
            except BlockingIOError:
                return True
            if not part:
                return False
            self.outputs[descriptor] += part
        return True

    def _look(self) -> Verdict | None:
        """Limits that no rlimit enforces on a tree of processes."""
        self._reap(os.WNOHANG)
        found = tasks(self.place)
        cpu = sum(task.cpu_s for task in found) + _children_cpu() - self.cpu_before
        if sum(task.threads for task in found) > self.limits["pids"]:
            return "resource_limit", "pids"
        if sum(task.memory_bytes for task in found) > self.limits["memory_bytes"]:
            return "resource_limit", "memory_bytes"
        if cpu > self.limits["cpu_s"]:
            return "resource_limit", "cpu_s"
        if disk_used(self.place) >= self.limits["disk_bytes"]:
            return "resource_limit", "disk_bytes"
        return None

    def _end_tree(self) -> None:
        """Kill and reap until nothing of the call is left."""
        if self.place.namespace:
            assert os.getpid() == 1  # anywhere else kill(-1) would end the machine
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
            self._reap(0)
            return
        while found := {task.pid for task in tasks(self.place)}:
            stopped: set[int] = set()
            while new := found - stopped:  # what stands still does not fork, so this ends even for a fork bomb
                _signal(new, signal.SIGSTOP)
                stopped |= new
                found = {task.pid for task in tasks(self.place)}
            _signal(found, signal.SIGKILL)
            self._reap(os.WNOHANG)
            time.sleep(0.001)

    def _reap(self, options: int) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status, usage = os.wait4(-1, options)
                if not pid:
                    return
                if pid == self.main:
                    self.status = status
                    self.peak_bytes = usage.ru_maxrss * 1024

    def _exit_code(self) -> int:
        assert self.status is not None
        code = os.waitstatus_to_exitcode(self.status)
        return 128 - code if code < 0 else code

    def _judge(self) -> Verdict:
        """Verdict on a main process that ended by itself."""
        note = self.outputs[self.note].decode(errors="replace")
        if self._written() > self.limits["output_bytes"]:
            return "resource_limit", "output_bytes"
        for limit in ("memory_bytes", "pids", "disk_bytes"):
            if note.startswith(limit):  # each process that met the limit has written its name
                return "resource_limit", limit
        if name := LIMIT_SIGNALS.get(self._exit_code()):
            return "resource_limit", name
        if _children_cpu() - self.cpu_before >= self.limits["cpu_s"]:
            return "resource_limit", "cpu_s"
        if self.peak_bytes > self.limits["memory_bytes"]:
            return "resource_limit", "memory_bytes"
        if disk_used(self.place) >= self.limits["disk_bytes"]:
            return "resource_limit", "disk_bytes"
        return ("tool_error" if self._exit_code() else "ok"), ""


def _signal(pids: set[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _children_cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
