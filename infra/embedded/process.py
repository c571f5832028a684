"""A server or role as a child process: in a session of its own, logging to a file, ready according to a probe, and
killed if its parent ends.

A child dies with its parent, even if the parent is killed: the kernel sends it SIGKILL (prctl PR_SET_PDEATHSIG). To the
kernel the parent is a *thread*, so every child is started from one thread that lives as long as the process. Processes
that a child leaves behind are found by a mark in their environment and killed (`sweep`). `stop` and `kill` do so; in
case nobody is left to call them, `swept_by_another` starts a process that does.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import os
import queue
import re
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, ClassVar, Self

from turnlog.infra.embedded import DiskFull, EmbeddedError, LacksServer, NotReady, ServerDied
from turnlog.infra.embedded.liveness import Liveness
from turnlog.infra.embedded.ports import claim
from turnlog.infra.run_folder import lacks_room
from turnlog.names import RESTARTS_VARIABLE, ExitStatus

MARK = "TURNLOG_CHILD"
KEEPS_MARK = {"SPT_NOENV": "1"}
"""Variable by which the package setproctitle leaves the environment of a process alone. Engines give their processes
titles, which would overwrite it, so that nothing could find them once their parent is dead."""
TAIL_LINES = 20
PROBE_EVERY_S = 0.02
KILL_TIMEOUT_S = 5.0
NO_ROOM = re.compile(r"No space left on device|Disk quota exceeded|database or disk is full|the disk of .+ is full")
NO_ROOM_REMEDY = "a disk that it writes to is full: free space there, and it continues"
NO_FILES = "Too many open files"
RAISE_FILES = (
    "raise the user's limit (`ulimit -Hn` shows it; set it with LimitNOFILE in systemd or --ulimit nofile in Docker)"
)
FILES_REMEDY = (
    f"it needs more open files than its limit allows: {RAISE_FILES}, or start a run with fewer partitions ([kafka])"
)
OPEN_FILES = 65_536
"""Limit of open files that processes of ours request, as far as the user may have it."""
OF_ITS_END = 400
"""Number of log lines searched for the cause of a process's end: a broker prints a stack trace for each of its
threads."""
OWN_LAST_LINE = re.compile(r"turnlog [\w-]+: \w+: ")
EXEC_S = 5.0
"""Maximum seconds for a process to become the program that it executes."""
CLEAN_EXITS = frozenset({0, 128 + signal.SIGTERM, -signal.SIGTERM, -signal.SIGINT})
"""Exit statuses of a process that was stopped. The JVM exits with 143 after SIGTERM."""

DIE_WITH_PARENT = (
    "import ctypes, os, sys\n"
    "ctypes.CDLL(None).prctl(1, 9)\n"  # PR_SET_PDEATHSIG, SIGKILL; preserved across exec
    "if os.getppid() != int(sys.argv[1]): sys.exit('the parent is gone')\n"
    "os.execvpe(sys.argv[2], sys.argv[2:], os.environ)\n"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Command, environment and log of a child, and the checks that it works."""

    name: str
    argv: tuple[str, ...]
    log: Path
    """File to which standard output and error are appended."""
    arguments: Callable[[], tuple[str, ...]] = tuple
    """Returns additional arguments; called at each start."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables added to the inherited environment."""
    without: frozenset[str] = frozenset({"PYTHONDONTWRITEBYTECODE"})
    """Variables that the child does not inherit."""
    ready: Callable[[], bool] = lambda: True
    """Checks once, quickly (below a second), whether the child is ready."""
    ready_timeout_s: float = 60.0
    stop_timeout_s: float = 15.0
    liveness: Liveness | None = None
    """Check that the child continues to work; None for no check."""
    died: type[ServerDied] = ServerDied
    remedy: str = "see its log"


def raise_file_limit() -> None:
    """Raise the limit of open files for this process and its children to what the user may have, OPEN_FILES at most."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def wait_readable(descriptor: int, timeout_s: float) -> bool:
    """Wait at most `timeout_s` seconds until the file descriptor is readable (a pidfd: until its process has ended);
    return whether it is."""
    poll = select.poll()  # select() refuses descriptors above 1,023, and `raise_file_limit` allows many more
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(math.ceil(timeout_s * 1000)))


@functools.cache
def scope() -> str:
    """Return the prefix of the marks of all children of this process."""
    return f"{os.getpid()}-{time.time_ns()}"


class Child:
    """A single run of a Launch. Not thread-safe."""

    def __init__(self, launch: Launch, *, restarts: int = 0) -> None:
        """`restarts`: number of earlier runs of the launch."""
        self.launch = launch
        self._restarts = restarts
        self.mark = f"{scope()}:{launch.name}-{next(_numbers)}"
        self._process: subprocess.Popen[bytes] | None = None
        self._log_from = 0
        """Offset in the log file at which this run's lines begin."""

    def start(self) -> Self:
        """Start the process without waiting until it is ready. It runs without a log file if the log cannot be opened.
        Raises the launch's `died`."""
        launch = self.launch
        env = {key: value for key, value in os.environ.items() if key not in launch.without}
        env |= {MARK: self.mark, **KEEPS_MARK, RESTARTS_VARIABLE: str(self._restarts), **launch.env}
        try:
            with self._opened_log() as log:
                self._process = _spawn((*launch.argv, *launch.arguments()), env, log.fileno())
        except OSError as error:
            raise launch.died(f"{launch.name} cannot be started: {error}") from error
        return self

    def _opened_log(self) -> BinaryIO:
        try:
            self.launch.log.parent.mkdir(parents=True, exist_ok=True)
            log = self.launch.log.open("ab")
        except OSError as error:
            logging.getLogger(__name__).warning("%s runs without a log file: %s", self.launch.name, error)
            return open(os.devnull, "ab")
        self._log_from = log.tell()
        return log

    @property
    def pid(self) -> int:
        """Pid of the process, which leads its own process group."""
        return self._running_process.pid

    @property
    def returncode(self) -> int | None:
        """Exit status; None while the process runs, the negative signal number if a signal killed it."""
        return None if self._process is None else self._process.poll()

    def wait_ready(self) -> None:
        """Return when the probe succeeds. Raises the launch's `died` with the end of the log, or NotReady."""
        deadline = time.monotonic() + self.launch.ready_timeout_s
        while not self.launch.ready():
            if self.wait(PROBE_EVERY_S):
                raise self.death()
            if time.monotonic() > deadline:
                raise self.lateness()
        if self.returncode is not None:  # another process answered the probe
            raise self.death()

    def wait(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` for the end of the process; return whether it has ended."""
        if self.returncode is not None:
            return True
        with contextlib.suppress(ProcessLookupError):  # another thread has just seen its end
            pidfd = os.pidfd_open(self.pid)
            try:
                wait_readable(pidfd, timeout_s)
            finally:
                os.close(pidfd)
        return self.returncode is not None

    def stop(self) -> int:
        """Send SIGTERM, SIGKILL after the launch's `stop_timeout_s`, and kill what it has left behind; return its exit
        status."""
        if self._process is None:
            return 0
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        if not self.wait(self.launch.stop_timeout_s):
            self._process.kill()
        status = self._process.wait()
        sweep(self.mark)
        return status

    def kill(self) -> None:
        """Kill the process, its process group and everything else that it has started, at once."""
        if self._running_process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._running_process.pid, signal.SIGKILL)
        self._running_process.wait()
        sweep(self.mark)

    def death(self) -> ServerDied:
        """Return the typed error of a process that has ended."""
        kind = LacksServer if self.returncode == ExitStatus.UNREACHABLE else self.launch.died
        said = f"ended with status {self.returncode}: {self.remedy}; log {self.launch.log}\n{self.tail()}"
        return kind(f"{self.launch.name} {said}")

    def lateness(self) -> NotReady:
        """Return the typed error of a process that did not become ready in time."""
        said = f"was not ready after {self.launch.ready_timeout_s:.0f} s: {self.remedy}; log {self.launch.log}"
        return NotReady(f"{self.launch.name} {said}\n{self.tail()}")

    @property
    def remedy(self) -> str:
        """Remedy if the process has ended or does not become ready, according to its log."""
        return FILES_REMEDY if NO_FILES in self.tail(OF_ITS_END) else self.launch.remedy

    def with_cause(self, death: EmbeddedError) -> EmbeddedError:
        """Return the death as DiskFull if a full disk caused it (its log says so, or its disk is full), else
        unchanged."""
        if isinstance(death, LacksServer):
            return death
        full = lacks_room(self.launch.log.parent)
        if not full and not NO_ROOM.search(self.tail()):
            return death
        said = f"{full}; log {self.launch.log}\n{self.tail()}" if full else f"{NO_ROOM_REMEDY}; {death}"
        return DiskFull(f"{self.launch.name} stopped: {said}")

    def tail(self, lines: int = TAIL_LINES) -> str:
        """Return the last lines of this run in its log."""
        return log_tail(self.launch.log, lines, since=self._log_from)

    @property
    def _running_process(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError(f"{self.launch.name} was not started")
        return self._process


class ManagedServer:
    """A server that can be started, stopped and killed repeatedly at the same address. A context manager."""

    setting: ClassVar[str]
    """The setting that chooses its port."""
    port: int
    _child: Child | None = None

    def launch(self) -> Launch:
        """Return how to start the server. Raises EmbeddedError if something that it needs is missing."""
        raise NotImplementedError

    @property
    def address(self) -> str:
        raise NotImplementedError

    @property
    def pid(self) -> int:
        """Pid of the process. Raises RuntimeError before the first start."""
        if self._child is None:
            raise RuntimeError(f"{type(self).__name__} was not started")
        return self._child.pid

    def start(self) -> str:
        """Start the server and wait until clients can connect; return its address. Raises PortTaken, NotReady, the
        launch's `died`, and what `launch` raises."""
        claim(self.port, self.setting)
        self._child = Child(self.launch()).start()
        try:
            self._child.wait_ready()
        except BaseException:
            self._child.stop()
            raise
        return self.address

    def stop(self) -> int:
        """Stop the process (see Child); return its exit status, or 0 if it was never started."""
        return 0 if self._child is None else self._child.stop()

    def kill(self) -> None:
        """Kill the process (see Child)."""
        if self._child is not None:
            self._child.kill()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def cause_of(death: str) -> str:
    """Return the cause of a death from the end of its log, which follows our own description; empty if there is none.

    A verb of ours ends with a line of its own ("turnlog VERB: ERROR: ..."), any other process with its last line."""
    lines = [line.strip() for line in death.splitlines()[1:] if line.strip()]
    own = [line for line in lines if OWN_LAST_LINE.match(line)]
    return (own or lines or [""])[-1]


def log_tail(log: Path, lines: int = TAIL_LINES, *, since: int = 0) -> str:
    """Return the last lines of a file after offset `since`; empty if it cannot be read."""
    try:
        with log.open("rb") as file:
            file.seek(max(since, log.stat().st_size - 256 * lines))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
    except OSError:
        return ""


def find_marked_pids(mark: str) -> list[int]:
    """Return the pids of live processes whose environment has this mark, or one that begins with it and ':'."""
    begins = f"{MARK}={mark}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile, or is another user's
            variables = _environment(folder).split(b"\0")
            if any(variable == begins or variable.startswith(begins + b":") for variable in variables):
                found.append(int(folder.name))
    return found


def _environment(folder: Path) -> bytes:
    """Return the environment of a process, waiting while the kernel sets up the program that it is to become: meanwhile
    it shows no environment, and a command line first. Raises OSError for a process without a program: a kernel thread,
    or a zombie."""
    deadline = time.monotonic() + EXEC_S
    while not (found := (folder / "environ").read_bytes()) and _is_young(folder):
        os.readlink(folder / "exe")
        if time.monotonic() > deadline:
            break
        time.sleep(PROBE_EVERY_S / 20)  # there is no event to wait for
    return found


def _is_young(folder: Path) -> bool:
    """Whether a process may still be becoming a program. An older one without an environment has none."""
    ticks = int((folder / "stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK") < EXEC_S


def sweep(mark: str) -> int:
    """Kill every process with the mark until there is none; return how many there were."""
    killed: set[int] = set()
    while left := find_marked_pids(mark):
        for pid in left:
            _end(pid)
        killed.update(left)
    return len(killed)


def _end(pid: int) -> None:
    """Kill a process and wait until it is gone; do nothing if it is gone already."""
    with contextlib.suppress(ProcessLookupError):
        pidfd = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            select.select([pidfd], [], [], KILL_TIMEOUT_S)
        finally:
            os.close(pidfd)


@contextlib.contextmanager
def swept_by_another() -> Iterator[None]:
    """While the block runs, another process waits for the end of this one, and then kills what it has left behind."""
    argv = [sys.executable, "-m", "turnlog.infra.embedded.process", scope()]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, start_new_session=True):
        yield  # leaving closes the pipe, which is what the sweeper waits for


_Request = tuple[Sequence[str], Mapping[str, str], int, "Future[subprocess.Popen[bytes]]"]
_requests: queue.SimpleQueue[_Request] = queue.SimpleQueue()
_numbers = itertools.count()
_start_once = threading.Lock()
_spawner: threading.Thread | None = None


def _spawn(argv: Sequence[str], env: Mapping[str, str], log: int) -> subprocess.Popen[bytes]:
    global _spawner
    with _start_once:
        if _spawner is None or not _spawner.is_alive():
            _spawner = threading.Thread(target=_serve_spawns, name="spawner", daemon=True)
            _spawner.start()
    answer: Future[subprocess.Popen[bytes]] = Future()
    _requests.put((argv, env, log, answer))
    return answer.result()


def _serve_spawns() -> None:
    while True:
        argv, env, log, answer = _requests.get()
        guard = [sys.executable, "-I", "-S", "-c", DIE_WITH_PARENT, str(os.getpid()), *argv]
        try:
            process = subprocess.Popen(
                guard, env=dict(env), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        except OSError as error:
            answer.set_exception(error)
        else:
            answer.set_result(process)


def main() -> int:
    """Run `python -m turnlog.infra.embedded.process SCOPE`: when standard input ends, kill all processes with the
    scope's mark.

    Only one process has the other end of the pipe, which therefore ends with that process, however it ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    sweep(sys.argv[1])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
