"""A server or role as a child process: own session, log in a file, ready by a probe, gone when its parent is gone.

A child dies with its parent, also when the parent is killed: the kernel sends it SIGKILL (prctl PR_SET_PDEATHSIG).
The kernel means the parent *thread*, so every child is started from one thread that lives as long as the process.
What a child leaves behind (its own children) is found by a mark in the environment: `sweep`. `stop` and `kill` do
that; for the case that nobody is left to call them, `swept_by_another` starts a process that does.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
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
TAIL_LINES = 20
PROBE_EVERY_S = 0.02
KILL_TIMEOUT_S = 5.0
NO_ROOM = re.compile(r"No space left on device|Disk quota exceeded|database or disk is full|the disk of .+ is full")
NO_ROOM_REMEDY = "a disk that it writes to is full: make room there, and it goes on"
NO_FILES = "Too many open files"
RAISE_FILES = (
    "raise the limit of the user (`ulimit -Hn` shows it; LimitNOFILE of systemd, --ulimit nofile of Docker set it)"
)
FILES_REMEDY = (
    f"it may not open as many files as it needs: {RAISE_FILES}, or begin a run with fewer partitions ([kafka])"
)
OPEN_FILES = 65_536
"""As many as a process of ours may open, where the user may."""
OF_ITS_END = 400
"""Lines in which a process said why it ended: a broker prints a stack trace for each of its threads."""
OWN_LAST_LINE = re.compile(r"turnlog [\w-]+: \w+: ")
EXEC_S = 1.0
"""For a process to become the program that it executes."""
CLEAN_EXITS = frozenset({0, 128 + signal.SIGTERM, -signal.SIGTERM, -signal.SIGINT})
"""The JVM ends with 143 after SIGTERM."""

DIE_WITH_PARENT = (
    "import ctypes, os, sys\n"
    "ctypes.CDLL(None).prctl(1, 9)\n"  # PR_SET_PDEATHSIG, SIGKILL; kept over exec
    "if os.getppid() != int(sys.argv[1]): sys.exit('the parent is gone')\n"
    "os.execvpe(sys.argv[2], sys.argv[2:], os.environ)\n"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How a child is started, and how one sees that it works."""

    name: str
    argv: tuple[str, ...]
    log: Path
    """Standard output and error are appended here."""
    arguments: Callable[[], tuple[str, ...]] = tuple
    """Further ones, which each start asks for anew."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the inherited environment."""
    without: frozenset[str] = frozenset({"PYTHONDONTWRITEBYTECODE"})
    """Variables that the child does not inherit."""
    ready: Callable[[], bool] = lambda: True
    """One quick look (below a second)."""
    ready_timeout_s: float = 60.0
    stop_timeout_s: float = 15.0
    liveness: Liveness | None = None
    """How one sees that it goes on working; None: nobody looks."""
    died: type[ServerDied] = ServerDied
    remedy: str = "see its log"


def raise_file_limit() -> None:
    """From now on this process and its children may open as many files as the user may, OPEN_FILES at most."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@functools.cache
def scope() -> str:
    """What the marks of all children of this process begin with."""
    return f"{os.getpid()}-{time.time_ns()}"


class Child:
    """One run of a Launch. Not thread-safe."""

    def __init__(self, launch: Launch, *, restarts: int = 0) -> None:
        """`restarts`: runs of it that there were before."""
        self.launch = launch
        self._restarts = restarts
        self.mark = f"{scope()}:{launch.name}-{next(_numbers)}"
        self._process: subprocess.Popen[bytes] | None = None
        self._log_from = 0
        """Where this run's lines begin."""

    def start(self) -> Self:
        """Start the process; does not wait until it is ready. Without a log where the disk takes none. Raises the
        launch's `died`."""
        launch = self.launch
        env = {key: value for key, value in os.environ.items() if key not in launch.without}
        env |= {MARK: self.mark, RESTARTS_VARIABLE: str(self._restarts), **launch.env}
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
            logging.getLogger(__name__).warning("%s runs without a log: %s", self.launch.name, error)
            return open(os.devnull, "ab")
        self._log_from = log.tell()
        return log

    @property
    def pid(self) -> int:
        """Of the process (leader of its own process group)."""
        return self._started.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs; negative signal number when it was killed by one."""
        return None if self._process is None else self._process.poll()

    def wait_ready(self) -> None:
        """Return when the probe says so. Raises the launch's `died` with the log's tail, or NotReady."""
        deadline = time.monotonic() + self.launch.ready_timeout_s
        while not self.launch.ready():
            if self.wait(PROBE_EVERY_S):
                raise self.death()
            if time.monotonic() > deadline:
                raise NotReady(
                    f"{self.launch.name} was not ready after {self.launch.ready_timeout_s:.0f} s: "
                    f"{self.remedy}; log {self.launch.log}\n{self.tail()}"
                )
        if self.returncode is not None:  # someone else answered the probe
            raise self.death()

    def wait(self, timeout_s: float) -> bool:
        """Whether the process has ended, waiting for that at most so long."""
        if self.returncode is not None:
            return True
        with contextlib.suppress(ProcessLookupError):  # another thread has just seen its end
            pidfd = os.pidfd_open(self.pid)
            try:
                select.select([pidfd], [], [], timeout_s)
            finally:
                os.close(pidfd)
        return self.returncode is not None

    def stop(self) -> int:
        """SIGTERM, then SIGKILL after the launch's time, then whatever it left behind; its exit status."""
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
        """SIGKILL, now, its process group and everything else that it started."""
        if self._started.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._started.pid, signal.SIGKILL)
        self._started.wait()
        sweep(self.mark)

    def death(self) -> ServerDied:
        """The typed error of a process that has ended."""
        kind = LacksServer if self.returncode == ExitStatus.UNREACHABLE else self.launch.died
        said = f"ended with status {self.returncode}: {self.remedy}; log {self.launch.log}\n{self.tail()}"
        return kind(f"{self.launch.name} {said}")

    @property
    def remedy(self) -> str:
        """What to do about its end, or about its not becoming ready, by what it wrote."""
        return FILES_REMEDY if NO_FILES in self.tail(OF_ITS_END) else self.launch.remedy

    def with_cause(self, death: EmbeddedError) -> EmbeddedError:
        """The death, as DiskFull where a full disk has led to it: it wrote so, or its disk is."""
        if isinstance(death, LacksServer):
            return death
        full = lacks_room(self.launch.log.parent)
        if not full and not NO_ROOM.search(self.tail()):
            return death
        said = f"{full}; log {self.launch.log}\n{self.tail()}" if full else f"{NO_ROOM_REMEDY}; {death}"
        return DiskFull(f"{self.launch.name} stopped: {said}")

    def tail(self, lines: int = TAIL_LINES) -> str:
        """The last lines that this run has put into its log."""
        return log_tail(self.launch.log, lines, since=self._log_from)

    @property
    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError(f"{self.launch.name} was not started")
        return self._process


class Server:
    """A server that can be started, stopped and killed, again and again, at one address. A context manager."""

    setting: ClassVar[str]
    """What chooses its port."""
    port: int
    _child: Child | None = None

    def launch(self) -> Launch:
        """How it is started. Raises EmbeddedError where something for that is missing."""
        raise NotImplementedError

    @property
    def address(self) -> str:
        raise NotImplementedError

    @property
    def pid(self) -> int:
        """Raises RuntimeError before the first start."""
        if self._child is None:
            raise RuntimeError(f"the {type(self).__name__.lower()} was not started")
        return self._child.pid

    def start(self) -> str:
        """Start and wait until clients can connect; the address. Raises PortTaken, NotReady, the launch's `died`, and
        what `launch` raises."""
        claim(self.port, self.setting)
        self._child = Child(self.launch()).start()
        try:
            self._child.wait_ready()
        except BaseException:
            self._child.stop()
            raise
        return self.address

    def stop(self) -> int:
        """See Child; 0 where it was never started."""
        return 0 if self._child is None else self._child.stop()

    def kill(self) -> None:
        """See Child."""
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
    """What a process said last of its own end, in the tail of its log below what we say of it; empty: it said nothing.
    A verb of ours ends with a line of its own ("turnlog VERB: ERROR: ..."), anything else with its last line."""
    lines = [line.strip() for line in death.splitlines()[1:] if line.strip()]
    own = [line for line in lines if OWN_LAST_LINE.match(line)]
    return (own or lines or [""])[-1]


def log_tail(log: Path, lines: int = TAIL_LINES, *, since: int = 0) -> str:
    """The last lines of a file from a place on; empty where it cannot be read."""
    try:
        with log.open("rb") as file:
            file.seek(max(since, log.stat().st_size - 256 * lines))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
    except OSError:
        return ""


def marked(mark: str) -> list[int]:
    """Pids of live processes whose environment carries the mark (or one that begins with it and ':')."""
    begins = f"{MARK}={mark}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile, or is another user's
            variables = _environment(folder).split(b"\0")
            if any(variable == begins or variable.startswith(begins + b":") for variable in variables):
                found.append(int(folder.name))
    return found


def _environment(folder: Path) -> bytes:
    """Of a process, which shows none, nor a command line, while the kernel lays out the program that it becomes. Raises
    OSError for one without a program: the kernel's own, and a zombie."""
    deadline = time.monotonic() + EXEC_S
    while not (found := (folder / "environ").read_bytes()) and not (folder / "cmdline").read_bytes():
        os.readlink(folder / "exe")
        if time.monotonic() > deadline:
            break
        time.sleep(PROBE_EVERY_S / 20)  # nothing tells when it is done
    return found


def sweep(mark: str) -> int:
    """SIGKILL every process that carries the mark, until there is none; how many there were."""
    killed: set[int] = set()
    while left := marked(mark):
        for pid in left:
            _end(pid)
        killed.update(left)
    return len(killed)


def _end(pid: int) -> None:
    """SIGKILL and wait until it is gone; nothing when it is gone already."""
    with contextlib.suppress(ProcessLookupError):
        pidfd = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            select.select([pidfd], [], [], KILL_TIMEOUT_S)
        finally:
            os.close(pidfd)


@contextlib.contextmanager
def swept_by_another() -> Iterator[None]:
    """While the block runs, another process waits for the end of this one, then sweeps what it left behind."""
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
    """`python -m turnlog.infra.embedded.process SCOPE`: when standard input ends, kill what carries the scope's mark.

    The pipe's other end is held by one process alone: it ends when that process does, however that comes about."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    sweep(sys.argv[1])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
