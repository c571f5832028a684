"""Driver of a verifiers environment. The environment's own interpreter runs it, so it imports nothing of turnlog.

Two processes. The supervisor is the parent of everything that the environment starts (PR_SET_CHILD_SUBREAPER). When the
driver or the process that started both has ended, it kills what is left. The driver speaks JSON lines over the standard
input and output that it was started with; the environment's own prints go to standard error.

Requests, one object per line:
    {"op": "open", "env", "args", "split", "harness"}           the first one; answered by ready or failed
    {"op": "tasks", "seed", "count"}                            answered by a row per task, and end or failed
    {"op": "run", "id", "row", "base_url", "api_key", "model", "role", "max_turns"}  answered by ended or failed
    {"op": "cancel", "id"}                                      answered at once by cancelling, later by failed
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import logging
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

PR_SET_CHILD_SUBREAPER = 36
PARENT_CHECK_S = 0.5
"""Seconds between two checks of the supervisor that its parent still lives."""
GRACE_S = 10.0
"""Seconds that the driver has, after its parent has ended, to stop containers and servers of its own."""
LINE_BYTES = 16 << 20
"""Maximum size of an answer; the reader of the other end accepts twice as much."""
TEXT = 2000
"""Maximum number of characters of a text in an answer."""


def supervise() -> None:
    """Fork. Returns in the child, which becomes the driver; the parent never returns."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    starter, watched = os.getppid(), {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    driver = os.fork()
    if driver == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, watched)
        os.setpgid(0, 0)  # a terminal's Ctrl-C is for the supervisor's parent, which ends the driver in order
        return
    for number in (0, 1):  # the pipes end with the driver
        os.close(number)
    status, left_s = None, math.inf
    while status is None and left_s > 0:
        came = signal.sigtimedwait(watched, PARENT_CHECK_S)
        if came is not None and came.si_signo != signal.SIGCHLD:
            break
        if left_s == math.inf and os.getppid() != starter:
            left_s = GRACE_S  # standard input has ended as well, so that the driver is stopping
        left_s -= PARENT_CHECK_S
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                status = found[1] if found[0] == driver else status
    kill_descendants()
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, 0)[0]:
            kill_descendants()  # those that were started meanwhile
    code = 137 if status is None else os.waitstatus_to_exitcode(status)
    os._exit(128 - code if code < 0 else code)


def kill_descendants() -> None:
    """Kill all processes below this one, whatever session they are in."""
    below: dict[int, list[int]] = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{entry}/stat") as file:
            below.setdefault(int(file.read().rpartition(")")[2].split()[1]), []).append(int(entry))
    found = [os.getpid()]
    for process in found:
        found += below.get(process, [])
    for process in found[1:]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


class Channel:
    """Standard input and output of the process as it was started. What the environment prints goes to standard error,
    and it reads nothing."""

    def __init__(self) -> None:
        self.requests, self._answers = os.fdopen(os.dup(0), "rb"), os.dup(1)  # copies are not inherited by children
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(2, 1)
        os.close(nothing)
        self._one = threading.Lock()

    def answer(self, op: str, **fields: Any) -> None:
        """Write an answer. One that is too long becomes a failure of the same request."""
        line = json.dumps({"op": op, **fields}).encode() + b"\n"
        if len(line) > LINE_BYTES:
            about = f"an answer of {len(line)} bytes ({op}) is longer than {LINE_BYTES}"
            failure = {"type": "AnswerTooLong", "message": about}
            line = json.dumps({"op": "failed", "id": fields.get("id"), "error": failure}).encode() + b"\n"
        with self._one:
            view = memoryview(line)
            while view:
                try:
                    view = view[os.write(self._answers, view) :]
                except BrokenPipeError:  # nobody reads any more: standard input ends as well
                    return


def describe(error: BaseException) -> dict[str, str]:
    """Return an exception as an answer carries it."""
    lines = "".join(traceback.format_exception(error))
    return {"type": type(error).__name__, "message": str(error)[:TEXT], "traceback": lines[-TEXT:]}


class Driver:
    """Serves requests until standard input ends."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.environment: Any = None
        self.running: dict[Any, asyncio.Task[None]] = {}

    async def serve(self) -> None:
        """Read requests. Episodes run concurrently in this event loop."""
        loop, lines = asyncio.get_running_loop(), asyncio.Queue[bytes]()

        def read() -> None:
            while line := self.channel.requests.readline():
                loop.call_soon_threadsafe(lines.put_nowait, line)
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(lines.put_nowait, b"")
            time.sleep(GRACE_S)  # for an event loop that the environment blocks
            kill_descendants()
            os._exit(1)

        threading.Thread(target=read, name="requests", daemon=True).start()
        while line := await lines.get():
            self._handle(json.loads(line))
        for task in self.running.values():
            task.cancel()
        await asyncio.gather(*self.running.values(), return_exceptions=True)
        if self.environment is not None:
            await self.environment.close()

    def _handle(self, asked: dict[str, Any]) -> None:
        match asked["op"]:
            case "open":
                self._run_foreign(None, lambda: self._open(asked))
            case "tasks":
                rows = threading.Thread(target=self._run_foreign, args=(None, lambda: self._tasks(asked)), daemon=True)
                rows.start()
            case "run":
                self.running[asked["id"]] = asyncio.create_task(self._run(asked))
            case "cancel":
                self.channel.answer("cancelling", id=asked["id"])
                if (task := self.running.get(asked["id"])) is not None:
                    task.cancel()

    def _run_foreign(self, name: Any, do: Callable[[], None]) -> None:
        """Run foreign code, and answer `failed` for whatever it raises, SystemExit included."""
        try:
            do()
        except BaseException as error:
            self.channel.answer("failed", id=name, error=describe(error))

    def _open(self, asked: dict[str, Any]) -> None:
        from verifiers_guest.classic import ClassicEnvironment, is_classic
        from verifiers_guest.tasksets import TasksetEnvironment

        self.environment = (ClassicEnvironment if is_classic(asked["env"]) else TasksetEnvironment)(asked)
        self.channel.answer("ready", **self.environment.about())

    def _tasks(self, asked: dict[str, Any]) -> None:
        for row in self.environment.rows(asked["seed"], asked["count"]):  # until the supervisor kills this process
            self.channel.answer("row", row=row)
        self.channel.answer("end")

    async def _run(self, asked: dict[str, Any]) -> None:
        try:
            self.channel.answer("ended", **{**await self.environment.run(asked), "id": asked["id"]})
        except asyncio.CancelledError:
            self.channel.answer("failed", id=asked["id"], error={"type": "Cancelled", "message": "it was cancelled"})
        except BaseException as error:
            self.channel.answer("failed", id=asked["id"], error=describe(error))
        finally:
            self.running.pop(asked["id"], None)


def main() -> None:
    """Serve the requests of standard input until it ends."""
    supervise()
    channel = Channel()
    sys.path.append(str(Path(__file__).with_name("guest")))
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
    try:
        asyncio.run(Driver(channel).serve())
    finally:
        kill_descendants()
        os._exit(0)  # threads of the environment must not delay the end


if __name__ == "__main__":
    main()
