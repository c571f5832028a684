"""What processes have used so far: CPU seconds of process trees and of a JVM's threads, by /proc, and instructions, by
perf."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
REQUESTS, COMPILER, COLLECTOR, UPKEEP = "requests", "JIT compiler", "garbage collector and VM", "upkeep"
THREADS = (
    (REQUESTS, re.compile("data-plane")),
    (COMPILER, re.compile("C[12] Compiler|Sweeper thread")),
    (COLLECTOR, re.compile("GC Thread|G1 |VM |Reference Handl|Finalizer")),
)
"""Kind of work -> names of a broker's threads that do it, of which the kernel keeps 15 characters."""
PR_SET_CHILD_SUBREAPER = 36
NOT_INSTALLED = "perf is not installed"
NO_COUNTERS = "perf cannot count instructions here: most virtual machines have no performance counters"


@dataclass(frozen=True, slots=True)
class Usage:
    """One process or thread."""

    name: str
    parent: int
    seconds: float
    """User and system time of its own."""
    reaped_s: float
    """That of the children whose end it has waited for."""

    @classmethod
    def parse(cls, stat: str) -> Usage:
        """Parse /proc/PID/stat (proc_pid_stat(5)). The name may contain spaces and parentheses."""
        before, _, rest = stat.rpartition(")")
        fields = rest.split()
        own, reaped = (sum(map(int, fields[at : at + 2])) / TICKS_PER_S for at in (11, 13))
        return cls(before.partition("(")[2], int(fields[1]), own, reaped)


def processes() -> dict[int, Usage]:
    """Return every process of the machine by its pid."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            found[int(folder.name)] = Usage.parse((folder / "stat").read_text())
    return found


def trees(roots: Iterable[int], known: Mapping[int, Usage]) -> dict[int, list[int]]:
    """Return root -> pids of its tree. A root below another one has its own tree."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    roots = list(roots)
    for pid, process in known.items():
        if pid not in roots:
            children[process.parent].append(pid)
    found = {}
    for root in roots:
        found[root] = pids = [root]
        for pid in pids:
            pids += children[pid]
    return found


def tree_seconds(roots: Mapping[str, int], known: Mapping[int, Usage]) -> dict[str, tuple[float, float]]:
    """Return name -> CPU seconds of its root, and of the other processes of its tree. What an ended process used counts
    for whoever waited for it."""
    below, found = trees(roots.values(), known), {}
    for name, root in roots.items():
        own = known[root].seconds if root in known else 0.0
        whole = sum(known[pid].seconds + known[pid].reaped_s for pid in below[root] if pid in known)
        found[name] = own, whole - own
    return found


def adopt_orphans() -> None:
    """Become the parent of all descendants whose parent ends (prctl(2), PR_SET_CHILD_SUBREAPER). Otherwise it is the
    machine's first process, and what they used is lost among its other children. Raises OSError."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def reap_orphans(known: Collection[int]) -> None:
    """Wait for the children that have ended, up to the first one that is `known`: others wait for that."""
    with contextlib.suppress(ChildProcessError):  # there are no children
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid in known:
                return
            os.waitpid(ended.si_pid, 0)


def thread_seconds(pid: int) -> dict[tuple[int, str], float]:
    """Return (thread id, name) -> CPU seconds of a process's live threads."""
    found = {}
    for folder in Path(f"/proc/{pid}/task").glob("*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            thread = Usage.parse((folder / "stat").read_text())
            found[int(folder.name), thread.name] = thread.seconds
    return found


def by_thread_kind(before: Mapping[tuple[int, str], float], after: Mapping[tuple[int, str], float]) -> dict[str, float]:
    """Return kind of work -> seconds between two calls of `thread_seconds`."""
    found: Counter[str] = Counter()
    for thread, seconds in after.items():
        kind = next((kind for kind, names in THREADS if names.match(thread[1])), UPKEEP)
        found[kind] += seconds - before.get(thread, 0.0)
    return dict(found)


def forks() -> int:
    """Return the number of processes and threads that this machine has started since its boot."""
    return int(re.search(r"^processes (\d+)", Path("/proc/stat").read_text(), re.MULTILINE)[1])  # type: ignore[index]


def parse_perf(output: str) -> int | None:
    """Return the count in the output of `perf stat -x,`, or None if the event is not supported."""
    for line in output.splitlines():
        count, *rest = line.split(",")
        if len(rest) > 1 and rest[1].startswith("instructions"):
            return int(count) if count.isdigit() else None
    return None


def lacks_counters() -> str:
    """Return why instructions cannot be counted on this machine; empty if they can."""
    if shutil.which("perf") is None:
        return NOT_INSTALLED
    command = ["perf", "stat", "-x,", "-e", "instructions", "true"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if parse_perf(done.stderr) else NO_COUNTERS


@contextlib.contextmanager
def counted_instructions(roots: Mapping[str, int]) -> Iterator[dict[str, int | None]]:
    """Count the instructions of each tree while the block runs, with the processes that it starts meanwhile; the
    figures are there after the block, and none where perf cannot count."""
    found: dict[str, int | None] = {}
    if lacks_counters():
        yield found
        return
    below = trees(roots.values(), processes())
    with tempfile.TemporaryDirectory(prefix="turnlog-perf-") as folder:
        running = {
            name: subprocess.Popen(
                ["perf", "stat", "-x,", "-e", "instructions", "-o", f"{folder}/{number}",
                 "-p", ",".join(map(str, below[root]))],
                stderr=subprocess.DEVNULL,
            )
            for number, (name, root) in enumerate(roots.items())
        }  # fmt: skip
        try:
            yield found
        finally:
            for perf in running.values():
                perf.send_signal(signal.SIGINT)  # upon which it writes what it has counted
                perf.wait()
        for number, name in enumerate(running):
            written = Path(folder, str(number))
            found[name] = parse_perf(written.read_text()) if written.exists() else None
