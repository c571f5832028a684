"""`turnlog up`, `supervise`, `down`: a run's servers and roles under one supervisor, in the background or in the
foreground.

The supervisor reports every state change to `up` over a pipe, as one JSON line each. The last line says that the run is
ready, or names the error.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import select
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from turnlog.infra import embedded, run_folder
from turnlog.infra.embedded import EmbeddedError, NotReady, NotUp, SupervisorDied
from turnlog.infra.embedded.broker import class_path
from turnlog.infra.embedded.broker_cluster import check_files
from turnlog.infra.embedded.on_log import OnLog
from turnlog.infra.embedded.plan import READING, ROLES, LaunchPlan, waiting_for
from turnlog.infra.embedded.process import cause_of, log_tail, raise_file_limit, scope, sweep, swept_by_another
from turnlog.infra.embedded.supervisor import SATISFIED, ChildState, Supervisor, Watched
from turnlog.infra.run_folder import (
    CREDENTIAL_KEY,
    GATEWAY_KEY,
    LOGS,
    SETTINGS,
    Endpoints,
    check_room,
    check_secrets,
    is_live,
    kept_secret,
    lock_file,
    lock_run,
    private_folder,
    read_state,
    write_settings,
    write_state,
)
from turnlog.settings import Settings

log = logging.getLogger(__name__)
NOTIFY = "TURNLOG_NOTIFY_FD"
PARENT = "TURNLOG_PARENT_FD"
SUPERVISED_ROLES = "TURNLOG_SUPERVISED_ROLES"
READING_LOCK = "reading.lock"
"""Lock file in the run's directory, held by the process that has started its servers for reading."""
STOP_TIMEOUT_S = 90.0
TICK_S, SAY_EVERY_S = 1.0, 15.0
"""Intervals in seconds while `up` waits: between two checks of the time, and between two lines about the members that
are not ready."""
OPTIONAL_S = 60.0
"""Seconds that `up` waits for roles that training does not need, once all others are ready."""
Say = Callable[[str], None]
Notify = Callable[[dict[str, Any]], None]
_held: dict[Path, int] = {}
"""Run directory -> pipe by which an attached supervisor notices that this process has ended."""


def _silent(_: str) -> None:
    """Discard progress messages."""


class SupervisorFailed(Exception):
    """An error that the supervisor reported; `up` raises its `cause`."""

    def __init__(self, cause: EmbeddedError) -> None:
        super().__init__(str(cause))
        self.cause = cause


def up(
    settings: Settings,
    roles: Sequence[str] = ROLES,
    *,
    wait: bool = True,
    attached: bool = False,
    timeout_s: float = 900.0,
    say: Say = _silent,
) -> Endpoints:
    """Start a run and leave it running; return when every server answers and every role is ready.

    `say` receives each line of progress. With `wait` False, it returns as soon as the addresses are known. An
    `attached` run ends with this process. Raises EmbeddedError: AlreadyUp; the error that kept a server from starting,
    after stopping the others; NotReady, leaving the run as it is unless it is attached. Raises SecretUnusable."""
    directory = Path(settings.run.directory)
    private_folder(directory)
    with lock_run(directory):  # raises AlreadyUp
        check_secrets(directory)
        check_room(directory)
        check_files(settings.kafka)
        if tuple(roles) != READING:
            write_settings(directory, settings)
    if not settings.kafka.bootstrap:
        class_path(say=say)
    pipe, pid = _spawn(directory, roles, attached=attached)
    with pipe:
        try:
            _follow(pipe, directory, wait=wait, attached=attached, timeout_s=timeout_s, say=say)
        except (KeyboardInterrupt, SupervisorFailed, NotReady) as error:
            if attached or not isinstance(error, NotReady):
                _let_go(directory)
                _end(pid)
            if isinstance(error, SupervisorFailed):
                raise error.cause from None
            raise
    return run_folder.read_endpoints(directory)


def supervise(settings: Settings, roles: Sequence[str] | None = None) -> int:
    """Run a run's servers and roles in the foreground until SIGTERM or SIGINT; return 0. Raises EmbeddedError,
    SecretUnusable."""
    directory = Path(settings.run.directory)
    private_folder(directory)
    (directory / LOGS).mkdir(exist_ok=True)
    named = os.environ.pop(SUPERVISED_ROLES, None)
    chosen = roles if roles is not None else named.split(",") if named is not None else ROLES
    notify = _notifier()
    check_secrets(directory)  # outside of the block below, whose end kills what this process has started
    with lock_run(directory), swept_by_another():
        try:
            check_room(directory)
            check_files(settings.kafka)
            raise_file_limit()
            if tuple(chosen) != READING:
                write_settings(directory, settings)
            for key in (GATEWAY_KEY, CREDENTIAL_KEY):
                kept_secret(directory / key)
            asyncio.run(_supervise(settings, [role for role in chosen if role], notify))
        except EmbeddedError as error:
            notify({"error": type(error).__name__, "message": str(error)})
            raise
        finally:
            (directory / run_folder.FILE).unlink(missing_ok=True)
            sweep(scope())
    return 0


def down(settings: Settings, *, say: Say = _silent) -> None:
    """Stop a run: roles drain, then the servers stop. Also kills what a killed supervisor has left behind. Raises
    NotUp."""
    directory = Path(settings.run.directory)
    state = read_state(directory)
    _let_go(directory)
    if not is_live(directory):
        left = sweep(state["scope"]) if state else 0
        if left:
            say(f"stopped {left} processes that a killed supervisor had left behind")
            return
        raise NotUp(f"no process of {directory} is running; `{run_folder.verb_line(directory, 'up')}` starts it")
    pidfd = os.pidfd_open(state["pid"])
    try:
        say(f"stopping {len(state['children'])} processes of {directory}")
        signal.pidfd_send_signal(pidfd, signal.SIGTERM)
        if not select.select([pidfd], [], [], STOP_TIMEOUT_S)[0]:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            sweep(state["scope"])
    finally:
        os.close(pidfd)
    say("stopped")


@contextlib.contextmanager
def readable(settings: Settings, say: Say) -> Iterator[None]:
    """Keep the servers of the run's log and objects available while the block runs.

    If they do not run already, the embedded ones are started without roles and engines, and end with the block and with
    this process. Only one process at a time starts them; others wait. Raises EmbeddedError."""
    directory = Path(settings.run.directory)
    own = settings.kafka.bootstrap and settings.registry.url and settings.store.endpoint
    if own or not (directory / SETTINGS).exists():  # nothing to start; the verb itself reports a missing run
        yield
        return
    with contextlib.ExitStack() as stack:
        stack.enter_context(lock_file(directory / READING_LOCK))
        if is_live(directory):
            stack.close()
            yield
            return
        say(f"starting the servers of {directory} to read it; they stop when this command ends")
        up(settings, READING, attached=True)
        try:
            yield
        finally:
            with contextlib.suppress(NotUp):  # its supervisor died
                down(settings)


def status_processes(settings: Settings) -> list[dict[str, Any]]:
    """Return the supervisor's entry for each child (name, pid, state, restarts, since, log, error), and why a role is
    not ready (`waiting`). Empty if the run is not up."""
    directory = Path(settings.run.directory)
    return _children(directory) if is_live(directory) else []


def _children(directory: Path) -> list[dict[str, Any]]:
    with contextlib.suppress(run_folder.NoEndpoints):
        health = run_folder.read_endpoints(directory).health
        children: list[dict[str, Any]] = read_state(directory).get("children", [])
        starting = {child["name"] for child in children if child["state"] == ChildState.STARTING}
        return [
            {**child, "waiting": waiting_for(health[child["name"]]) if child["name"] in starting & set(health) else ""}
            for child in children
        ]
    return []


class Bookkeeping:
    """Writes a supervisor's state to its files. If the disk rejects a write, it is repeated later without harm to the
    run."""

    def __init__(self, write: Callable[[], None], *, again_s: float = 5.0) -> None:
        self._write, self._again_s = write, again_s
        self._again: asyncio.TimerHandle | None = None

    def keep(self) -> None:
        """Write the current state, now or as soon as that is possible."""
        if self._again is not None:
            self._again.cancel()
            self._again = None
        try:
            self._write()
        except OSError as error:
            log.warning(
                "`turnlog status` shows an outdated state, because the current one cannot be written: %s", error
            )
            self._again = asyncio.get_running_loop().call_later(self._again_s, self.keep)


async def _supervise(settings: Settings, roles: Sequence[str], notify: Notify) -> None:
    directory = Path(settings.run.directory)
    plan = await asyncio.to_thread(LaunchPlan, settings, roles)
    pid, began = os.getpid(), time.time()

    def write() -> None:
        children = [one.as_dict() for one in supervisor.watched.values()]
        write_state(directory, {"pid": pid, "scope": scope(), "since": began, "children": children})
        run_folder.write_endpoints(directory, dataclasses.replace(plan.endpoints, supervisor_pid=pid))

    def on_change(watched: Watched) -> None:
        books.keep()
        on_log.on_change(watched)
        notify({"child": watched.as_dict()})
        waits = [one.member.optional for one in supervisor.watched.values() if not one.is_past_start]
        if all(waits):  # only optional members are not settled, or none
            notify({"trains" if waits else "ready": True})

    supervisor = Supervisor(
        plan.members,
        on_change,
        run_restarts=settings.liveness.run_restarts,
        on_failure=lambda failure: on_log.report_failure(failure),
    )
    books = Bookkeeping(write)
    on_log = OnLog(settings, plan, supervisor, books.keep)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, supervisor.stopping.set)
    if parent := os.environ.pop(PARENT, ""):
        loop.add_reader(int(parent), supervisor.stopping.set)  # end of file: the process that owns us is gone
    write()
    notify({"endpoints": True})
    if tuple(roles) == READING:  # a reader must not start what the log requests, such as engines
        await supervisor.run()
        return
    async with _follow_log(on_log):
        await supervisor.run()


@contextlib.asynccontextmanager
async def _follow_log(on_log: OnLog) -> AsyncIterator[None]:
    """Follow the log while the block runs. An unexpected error there ends the following, but not the run."""
    following = asyncio.create_task(on_log.run())
    following.add_done_callback(_tell_why)
    try:
        yield
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


def _tell_why(following: asyncio.Task[None]) -> None:
    if not following.cancelled():
        log.error(
            "the supervisor no longer follows the log: engines are left as they are", exc_info=following.exception()
        )


def _spawn(directory: Path, roles: Sequence[str], *, attached: bool) -> tuple[BinaryIO, int]:
    """Start the supervisor in a session of its own; return the pipe on which it reports, and its pid.

    subprocess.Popen is not used because it warns about a process that is not waited for."""
    logs = directory / LOGS
    logs.mkdir(parents=True, exist_ok=True)
    reading, writing = os.pipe()
    env = {**os.environ, NOTIFY: str(writing), SUPERVISED_ROLES: ",".join(roles)}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    passed = [writing]
    if attached:
        alive, _held[directory.resolve()] = os.pipe()
        env[PARENT] = str(alive)
        passed.append(alive)
    for number in passed:
        os.set_inheritable(number, True)
    argv = [sys.executable, "-m", "turnlog.cli", "--settings", str(directory / SETTINGS), "supervise"]
    others = [number for number in map(int, os.listdir("/proc/self/fd")) if number > 2 and number not in passed]
    append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, str(logs / "supervisor.log"), append, 0o600),
        (os.POSIX_SPAWN_DUP2, 1, 2),
        *((os.POSIX_SPAWN_CLOSE, number) for number in others),  # the run must not inherit a lock of our caller
    ]
    try:
        pid = os.posix_spawn(sys.executable, argv, env, file_actions=actions, setsid=True)
    finally:
        for number in passed:
            os.close(number)
    return os.fdopen(reading, "rb", buffering=0), pid


def _follow(
    pipe: BinaryIO, directory: Path, *, wait: bool, attached: bool, timeout_s: float, say: Say,
    optional_s: float = OPTIONAL_S,
) -> None:  # fmt: skip
    """Pass on the supervisor's reports, and from time to time which members are not ready and why. Return when
    everything is ready, or when the members that train are ready and the others have had `optional_s`. Raises
    SupervisorFailed, NotReady."""
    began = said_at = time.monotonic()
    trains_at = float("inf")
    for told in _read_reports(pipe, began + timeout_s):
        now = time.monotonic()
        if "error" in told:
            raise SupervisorFailed(_error(told["error"], told["message"]))
        if "child" in told:
            child = told["child"]
            if child["state"] == ChildState.FAILED:
                raise SupervisorFailed(_error(child["error_type"], child["error"]))
            if child["state"] in (ChildState.READY, ChildState.RESTARTING):
                ended, why = child["error"].partition("\n")[0], cause_of(child["error"])
                of_death = [part for part in (ended, why) if part] if child["state"] == ChildState.RESTARTING else []
                say(": ".join([f"{now - began:6.1f} s  {child['name']} {child['state']}", *of_death]))
        if "endpoints" in told and (page := run_folder.read_endpoints(directory).dashboard):
            say(f"dashboard {page}")
        if "ready" in told or ("endpoints" in told and not wait):
            return
        if "trains" in told:
            trains_at = min(trains_at, now)
        if now - trains_at > optional_s:
            _say_waits(directory, "not ready, but the run trains without it:", say)
            return
        if now - said_at > SAY_EVERY_S:
            said_at = now
            _say_waits(directory, f"{now - began:6.1f} s  waiting for", say)
    if time.monotonic() < began + timeout_s:
        log = directory / LOGS / "supervisor.log"
        raise SupervisorFailed(SupervisorDied(f"the supervisor of {directory} ended; log {log}\n{log_tail(log)}"))
    raise _not_ready(directory, timeout_s, attached=attached)


def _not_ready(directory: Path, timeout_s: float, *, attached: bool) -> NotReady:
    unready = _waits(directory) or ["the supervisor"]  # without members to wait for, it has not started itself
    status, stop = (run_folder.verb_line(directory, verb) for verb in ("status", "down"))
    left = f"the run was left running: `{status}` shows what they wait for, `{stop}` stops it; logs are in"
    left = "everything was stopped; logs are in" if attached else left
    return NotReady(f"{', '.join(unready)}: not ready after {timeout_s:.0f} s; {left} {directory / LOGS}")


def _say_waits(directory: Path, what: str, say: Say) -> None:
    for line in _waits(directory):
        say(f"{what} {line}")


def _waits(directory: Path) -> list[str]:
    """Return each member that is not ready, with its failing readiness conditions or last error."""
    return [
        ": ".join(filter(None, (child["name"], child["waiting"] or cause_of(child["error"]))))
        for child in _children(directory)
        if child["state"] not in (*SATISFIED, ChildState.WAITING)
    ]


def _read_reports(pipe: BinaryIO, deadline: float) -> Iterator[dict[str, Any]]:
    """Yield the reports from the pipe until it ends or the deadline has passed; {} after each TICK_S without a
    report."""
    rest = b""
    while (left := deadline - time.monotonic()) > 0:
        if not select.select([pipe], [], [], min(left, TICK_S))[0]:
            yield {}
            continue
        chunk = os.read(pipe.fileno(), 1 << 16)
        if not chunk:
            return
        *lines, rest = (rest + chunk).split(b"\n")
        yield from map(json.loads, lines)


def _notifier() -> Notify:
    """Return a function that writes to the pipe of `up`, if there is one and while somebody reads it."""
    number = os.environ.pop(NOTIFY, "")
    if not number:
        return lambda _: None
    pipe = [os.fdopen(int(number), "wb", buffering=0)]
    os.set_inheritable(int(number), False)

    def notify(told: dict[str, Any]) -> None:
        try:
            for open_pipe in pipe:
                open_pipe.write(json.dumps(told).encode() + b"\n")
        except BrokenPipeError:  # `up` no longer reads
            pipe.clear()

    return notify


def _error(name: str, message: str) -> EmbeddedError:
    """Return the typed error that another process reported."""
    kind = getattr(embedded, name, EmbeddedError)
    return kind(message) if issubclass(kind, EmbeddedError) else EmbeddedError(f"{name}: {message}")


def _end(pid: int) -> None:
    """Stop the supervisor that we started, and wait for it."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


def _let_go(directory: Path) -> None:
    number = _held.pop(directory.resolve(), None)
    if number is not None:
        os.close(number)
