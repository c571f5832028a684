"""The process in which an environment of verifiers runs, as its user sees it: episodes, and rows of tasks.

EnvironmentProcessError
├── NotStarted     the interpreter cannot be executed, or the package does not import or refuses its options
├── ProcessDied    the process ended, or answered what cannot be read
└── EpisodeFailed  an exception of the environment ended an episode, or the list of its tasks
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import math
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)
DRIVER = Path(__file__).with_name("driver.py")
PASSED = frozenset(
    {
        "PATH",
        "HOME",
        "USER",
        "LOGNAME",
        "SHELL",
        "LANG",
        "LANGUAGE",
        "TZ",
        "TMPDIR",
        "XDG_CACHE_HOME",
        "XDG_RUNTIME_DIR",
    }
    | {"SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "HF_HOME", "NLTK_DATA", "DOCKER_HOST", "LD_LIBRARY_PATH"}
    | {"HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"}
)
"""Variables that the process inherits, beside those whose names begin with a prefix of PASSED_PREFIXES. Others of the
runner may hold credentials."""
PASSED_PREFIXES = ("LC_", "UV_", "PIP_")
LINE_BYTES = 32 << 20
"""Maximum size of an answer."""
START_S = 300.0
"""Seconds for the import of the package and the construction of the environment, which may download data."""
OBEY_S = 4.0
"""Seconds in which a driver acknowledges that an episode is cancelled; after that, its event loop is blocked."""
RETRY_S = 30.0
"""Seconds for which a failed start is reported again without another attempt."""
TAIL_LINES, TAIL_CHARS = 40, 1500
"""Amount of standard error that goes into a message."""


class EnvironmentProcessError(Exception):
    """Base class of the tree in this module's docstring."""


class NotStarted(EnvironmentProcessError):
    """The message says what to install or to change."""


class ProcessDied(EnvironmentProcessError):
    """The message holds the end of the process's standard error."""


class EpisodeFailed(EnvironmentProcessError):
    """The message holds the end of the exception's traceback."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentOptions:
    """Name, configuration and interpreter of an environment."""

    env: str
    """Id of the package, as `vf-eval` takes it; `ENV+TASKSET` for an environment paired with a taskset."""
    python: str
    """Interpreter of the virtual environment that has verifiers and the package."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Configuration of the environment."""
    split: str = ""
    harness: str = ""
    variables: tuple[str, ...] = ()
    """Names of further variables that the process inherits, such as the key of a judge's endpoint."""

    def command(self) -> list[str]:
        """Return the command line of the process. It holds no secret."""
        return [self.python, "-P", "-u", str(DRIVER)]

    def environ(self) -> dict[str, str]:
        """Return the variables of the process."""
        named = PASSED | set(self.variables)
        found = {name: value for name, value in os.environ.items() if name in named or name.startswith(PASSED_PREFIXES)}
        return found | {"PYTHONUNBUFFERED": "1", "TQDM_DISABLE": "1"}

    def opening(self) -> bytes:
        """Return the first request."""
        asked = {"op": "open", "env": self.env, "args": dict(self.args), "split": self.split, "harness": self.harness}
        return _line(asked)


def _line(asked: Mapping[str, Any]) -> bytes:
    return json.dumps(asked).encode() + b"\n"


def _not_started(options: EnvironmentOptions, error: Mapping[str, Any]) -> NotStarted:
    said = f"{error.get('type')}: {error.get('message')}"
    remedy = f"check the options, and that {options.python} has it: {options.python} -m pip install PACKAGE"
    return NotStarted(f"verifiers environment {options.env!r} does not start: {said} ({remedy})")


def _failure(error: Mapping[str, Any]) -> str:
    return f"{error.get('type')}: {error.get('message')}\n{error.get('traceback', '')}".strip()


def task_rows(options: EnvironmentOptions, seed: int, count: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield the environment's tasks from a process of their own, which ends with the iteration. Raises NotStarted,
    ProcessDied, EpisodeFailed."""
    with contextlib.ExitStack() as stack:
        try:
            process = stack.enter_context(
                subprocess.Popen(
                    options.command(), env=options.environ(), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                    start_new_session=True,
                )
            )  # fmt: skip
        except OSError as error:
            raise NotStarted(f"python={options.python} cannot be executed: {error}") from error
        stack.callback(_end, process.pid)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(options.opening() + _line({"op": "tasks", "seed": seed, "count": count}))
        process.stdin.flush()
        ready = False
        for line in iter(lambda: process.stdout.readline(LINE_BYTES), b""):  # type: ignore[union-attr]
            try:
                answer = json.loads(line)
            except ValueError as error:
                raise ProcessDied(f"verifiers environment {options.env!r} answered no JSON: {line[:200]!r}") from error
            match answer["op"]:
                case "ready":
                    ready = True
                case "row":
                    yield answer["row"]
                case "end":
                    return
                case "failed" if not ready:
                    raise _not_started(options, answer["error"])
                case "failed":
                    said = _failure(answer["error"])
                    raise EpisodeFailed(f"verifiers environment {options.env!r} cannot list its tasks: {said}")
        raise ProcessDied(
            f"verifiers environment {options.env!r} ended with status {process.wait()} while it listed tasks"
        )


def _end(supervisor: int) -> None:
    """Ask the supervisor to kill everything below it."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(supervisor, signal.SIGTERM)


class EnvironmentProcess:
    """A running environment that plays episodes concurrently. It belongs to one event loop."""

    def __init__(self, options: EnvironmentOptions, process: asyncio.subprocess.Process) -> None:
        self._options, self._process = options, process
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._obeyed: dict[int, asyncio.Event] = {}
        self._opened: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._said: deque[str] = deque(maxlen=TAIL_LINES)
        self._keys: dict[int, str] = {}
        self._why = ""
        self.dead = False
        """True once the process takes no further episode."""
        self._reading = [asyncio.create_task(self._read()), asyncio.create_task(self._read_errors())]

    @classmethod
    async def start(cls, options: EnvironmentOptions) -> EnvironmentProcess:
        """Start the process, and wait until the package is imported. Raises NotStarted."""
        try:
            process = await asyncio.create_subprocess_exec(
                *options.command(), env=options.environ(), stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, start_new_session=True,
                limit=LINE_BYTES,
            )  # fmt: skip
        except OSError as error:
            raise NotStarted(f"python={options.python} cannot be executed: {error}") from error
        self = cls(options, process)
        try:
            self._send(options.opening())
            async with asyncio.timeout(START_S):
                about = await self._opened
        except ProcessDied as error:
            raise NotStarted(str(error)) from error
        except TimeoutError as error:
            raise NotStarted(f"verifiers environment {options.env!r} has not started within {START_S:g} s") from error
        finally:
            if not self._opened.done() or self._opened.cancelled() or self._opened.exception() is not None:
                await self.stop()
        log.info("verifiers environment %s runs as process %d: %s", options.env, process.pid, about)
        return self

    async def stop(self) -> None:
        """Kill the process and everything that it started."""
        self.dead = True
        _end(self._process.pid)
        await self._process.wait()
        await asyncio.gather(*self._reading, return_exceptions=True)

    async def play(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Run an episode, and return its answer. If this is cancelled, the episode is cancelled as well; a process that
        does not obey is killed. Raises EpisodeFailed, ProcessDied."""
        if self.dead:
            raise self._death()
        number = next(self._numbers)
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        self._keys[number] = str(asked["api_key"])
        try:
            self._send(_line({**asked, "op": "run", "id": number}))
            found = await answer
        except asyncio.CancelledError:
            await self._cancel(number)
            raise
        finally:
            self._answers.pop(number, None)
            self._keys.pop(number, None)
        if found["op"] == "failed":
            raise EpisodeFailed(_failure(found["error"]))
        return found

    async def _cancel(self, number: int) -> None:
        if self.dead:
            return
        obeyed = self._obeyed[number] = asyncio.Event()
        try:
            self._send(_line({"op": "cancel", "id": number}))
            async with asyncio.timeout(OBEY_S):
                await obeyed.wait()
        except TimeoutError:
            self._why = f"its event loop was blocked for {OBEY_S:g} s, by an environment that does not await"
            log.warning("verifiers environment %s: %s; killing it", self._options.env, self._why)
            self.dead = True
            _end(self._process.pid)
        finally:
            del self._obeyed[number]

    def _send(self, line: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError):  # its end is noticed by what it answers
            self._process.stdin.write(line)

    async def _read(self) -> None:
        assert self._process.stdout is not None
        try:
            while line := await self._process.stdout.readline():
                self._take(json.loads(line))
        except ValueError as error:  # no JSON, or longer than LINE_BYTES
            self._why = f"it answered what cannot be read: {error}"
            _end(self._process.pid)
        except Exception as error:  # a well-formed answer of another shape
            self._why = f"it answered what cannot be read: {type(error).__name__}: {error}"
            _end(self._process.pid)
        self.dead = True
        await self._process.wait()
        await asyncio.wait({self._reading[1]}, timeout=1.0)
        died = self._death()
        for waiting in (self._opened, *self._answers.values()):
            if not waiting.done():
                waiting.set_exception(died)
                waiting.exception()  # nobody may be waiting

    def _take(self, answer: dict[str, Any]) -> None:
        match answer["op"]:
            case "ready":
                self._opened.set_result(answer)
            case "failed" if answer.get("id") is None:
                self._opened.set_exception(_not_started(self._options, answer["error"]))
            case "cancelling":
                if (obeyed := self._obeyed.get(answer["id"])) is not None:
                    obeyed.set()
            case "ended" | "failed":
                waiting = self._answers.get(answer["id"])
                if waiting is not None and not waiting.done():
                    waiting.set_result(answer)

    async def _read_errors(self) -> None:
        assert self._process.stderr is not None
        rest = b""
        while chunk := await self._process.stderr.read(1 << 16):
            *lines, rest = (rest + chunk).split(b"\n")
            rest = rest[-TAIL_CHARS:]
            self._said.extend(self._without_keys(line) for line in lines)
        self._said.append(self._without_keys(rest))

    def _without_keys(self, line: bytes) -> str:
        text = line[-TAIL_CHARS:].decode(errors="replace")
        for key in filter(None, self._keys.values()):
            text = text.replace(key, "***")
        return text

    def _death(self) -> ProcessDied:
        said = "\n".join(self._said).strip()
        how = self._why or f"it ended with status {self._process.returncode}"
        return ProcessDied(
            f"the process of verifiers environment {self._options.env!r} died: {how}; the end of its standard error: "
            f"{said[-TAIL_CHARS:] or 'empty'}"
        )


class EnvironmentProcesses:
    """Processes of an environment: one for each event loop, started at its first use, and again after its death."""

    def __init__(self, options: EnvironmentOptions) -> None:
        self.options = options
        self._loop: asyncio.AbstractEventLoop | None = None
        self._started: asyncio.Task[EnvironmentProcess] | None = None
        self._failed_at = -math.inf

    async def current(self) -> EnvironmentProcess:
        """Return the running process. A session that is cut off while it waits leaves the start to the others. Raises
        NotStarted."""
        if self._loop is not (loop := asyncio.get_running_loop()):
            self._loop, self._started = loop, None
        if self._started is None or self._is_over(self._started):
            self._started = loop.create_task(self._start(), name=f"start of {self.options.env}")
        return await asyncio.shield(self._started)

    async def stop(self) -> None:
        """Kill the process, if one runs in this event loop."""
        if self._loop is asyncio.get_running_loop() and self._started is not None:
            await asyncio.wait({self._started})
            if not self._started.cancelled() and self._started.exception() is None:
                await self._started.result().stop()

    def _is_over(self, started: asyncio.Task[EnvironmentProcess]) -> bool:
        if not started.done():
            return False
        if started.cancelled() or started.exception() is not None:
            return time.monotonic() - self._failed_at > RETRY_S
        return started.result().dead

    async def _start(self) -> EnvironmentProcess:
        try:
            return await EnvironmentProcess.start(self.options)
        except BaseException:
            self._failed_at = time.monotonic()
            raise
