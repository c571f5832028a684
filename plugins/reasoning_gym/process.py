"""The process in which reasoning-gym runs, one for each interpreter.

A process of its own, because reasoning-gym computes with what a model wrote: an answer such as `9**9**9**9` would stop
every session of a runner. It also keeps the package's imports (seconds) out of roles that never need them.

ReasoningGymError  reasoning-gym is missing, or refused a configuration or an entry: not the fault of an answer
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

WORKER: Final = Path(__file__).with_name("worker.py")
SCORE_CPU_S: Final = 20
"""Seconds of CPU time that the score of one answer may take."""
IDLE_S: Final = 60.0
"""Seconds without a request after which a process ends, because it takes some 200 MB."""
SILENT_S: Final = 240.0
"""Seconds after which a process that has not answered is ended."""


class ReasoningGymError(Exception):
    """Reasoning-gym cannot be used, or refused a request; see the message."""


@dataclass(frozen=True, slots=True)
class Score:
    """The score of an answer."""

    value: float
    fault: str = ""
    """Reason why reasoning-gym could not score the answer, which then has 0; empty if it could."""


class ReasoningGymProcess:
    """A worker process, started when it is first needed, and again after its death. Any thread may use it."""

    def __init__(self, python: str, score_cpu_s: int = SCORE_CPU_S, idle_s: float = IDLE_S) -> None:
        """Use this interpreter. The score of an answer may take `score_cpu_s` seconds of CPU time."""
        self._python, self._cpu_s, self._idle_s = python, score_cpu_s, idle_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def tasks(self) -> dict[str, list[str]]:
        """Return the tasks that can be made here, with the fields of their configurations. Raises ReasoningGymError."""
        answer = self._request({"do": "tasks"})
        if "pycosat" in answer["lacking"]:
            del answer["tasks"]["zebra_puzzles"]
        del answer["tasks"]["composite"]  # a mixture, which is what a list of tasks is here
        found: dict[str, list[str]] = answer["tasks"]
        return found

    def entry(self, task: str, config: dict[str, Any], index: int) -> dict[str, Any]:
        """Return entry `index` of a dataset, as JSON. Raises ReasoningGymError."""
        found: dict[str, Any] = self._request({"do": "entry", "task": task, "config": config, "index": index})["entry"]
        return found

    def score(self, task: str, config: dict[str, Any], entry: dict[str, Any], answer: str) -> Score:
        """Return the score of an answer. Raises ReasoningGymError if the fault is not the answer's."""
        request = {"do": "score", "task": task, "config": config, "entry": entry, "answer": answer}
        try:
            found = self._request({**request, "cpu_s": self._cpu_s})
        except _TooMuchCpu:
            return Score(0.0, "it takes too long to compute")
        return Score(found["score"], found.get("unscorable", ""))

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end()

    def _request(self, request: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            text = json.dumps(request) + "\n"
            line = self._exchange(text)
            if not line and self._process is not None and self._process.wait() == 0:
                line = self._exchange(text)  # it had just ended because it was idle
            if not line:
                raise self._death()
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            lacks = f"; install it: {self._python} -m pip install reasoning-gym" if _is_missing(answer) else ""
            raise ReasoningGymError(f"reasoning-gym, {request.get('task', 'its tasks')}: {answer['error']}{lacks}")
        return answer

    def _exchange(self, line: str) -> str:
        """Return the answer to a line; empty if the process died."""
        if self._process is None or self._process.poll() is not None:
            self._end()
            environment = {"PATH": os.environ.get("PATH", ""), "PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8"}
            self._process = subprocess.Popen(
                [self._python, "-P", "-W", "ignore", str(WORKER), str(self._idle_s)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
                text=True,
                encoding="utf-8",
            )
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(SILENT_S, process.kill)
        timer.start()
        try:
            process.stdin.write(line)
            process.stdin.flush()
            return process.stdout.readline()
        except BrokenPipeError:
            return ""
        finally:
            timer.cancel()

    def _death(self) -> Exception:
        assert self._process is not None
        status = self._process.wait()
        self._end()
        if status == -signal.SIGXCPU:
            return _TooMuchCpu()
        return ReasoningGymError(f"the process of reasoning-gym ({self._python}) ended with status {status}")

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            for pipe in (self._process.stdin, self._process.stdout):
                assert pipe is not None
                pipe.close()
            self._process.wait()
            self._process = None


class _TooMuchCpu(Exception):
    """The process exceeded its CPU time."""


def _is_missing(answer: dict[str, Any]) -> bool:
    return answer["kind"] == "ModuleNotFoundError" and "reasoning_gym" in answer["error"]


@cache
def reasoning_gym(python: str = "") -> ReasoningGymProcess:
    """Return the process on this interpreter, by default the one that runs turnlog."""
    return ReasoningGymProcess(python or sys.executable)
