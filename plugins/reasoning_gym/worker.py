"""A process that makes entries of reasoning-gym and scores answers. `process.py` starts it, and talks to it by lines.

It imports nothing of turnlog, so it runs on any interpreter that has reasoning-gym. A request is a line of JSON on its
standard input, `{"do": NAME, ...}`; its answer is one on its standard output. A client sends one request at a time. The
process ends with its input, and after an idle time, its argument in seconds.
"""

import importlib.util
import json
import math
import os
import resource
import select
import sys
import types
from typing import Any

MEMORY = 4 << 30
"""Bytes of address space. An answer that needs more raises MemoryError."""


def encode(value: Any) -> Any:
    """Return the value as JSON, with marks for what JSON lacks: tuples, and objects whose keys are no text."""
    if isinstance(value, tuple):
        return {"tuple": [encode(item) for item in value]}
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value) and value.keys() not in ({"tuple"}, {"items"}):
            return {key: encode(item) for key, item in value.items()}
        return {"items": [[encode(key), encode(item)] for key, item in value.items()]}
    if isinstance(value, (set, frozenset)):
        return {"set": sorted((encode(item) for item in value), key=json.dumps)}
    if hasattr(value, "tolist"):  # numpy
        return encode(value.tolist())
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    raise TypeError(f"an entry holds a {type(value).__name__}, which JSON cannot hold")


def decode(value: Any) -> Any:
    """Reverse `encode`."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"tuple"}:
        return tuple(decode(value["tuple"]))
    if value.keys() == {"set"}:
        return set(decode(value["set"]))
    if value.keys() == {"items"}:
        return {decode(key): decode(item) for key, item in value["items"]}
    return {key: decode(item) for key, item in value.items()}


class Worker:
    """Answers requests."""

    def __init__(self) -> None:
        self._datasets: dict[str, Any] = {}
        self._lacking = [] if importlib.util.find_spec("pycosat") else ["pycosat"]
        for name in self._lacking:  # reasoning-gym imports it, for zebra_puzzles alone
            sys.modules[name] = types.ModuleType(name)

    def tasks(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the tasks, with the names of the fields of their configurations."""
        import dataclasses

        from reasoning_gym.factory import DATASETS

        found = {name: [field.name for field in dataclasses.fields(config)] for name, (_, config) in DATASETS.items()}
        return {"tasks": found, "lacking": self._lacking}

    def entry(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return an entry."""
        return {"entry": encode(self._dataset(request)[request["index"]])}

    def score(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the score of an answer. If it raises, and the entry's own answer is right, the answer is at fault. An
        answer that takes more than `cpu_s` seconds of CPU time ends this process (SIGXCPU)."""
        dataset, entry = self._dataset(request), decode(request["entry"])
        _allow_cpu(request["cpu_s"])
        try:
            return {"score": _number(dataset.score_answer(request["answer"], entry))}
        except Exception as error:
            if entry["answer"] is not None and _number(dataset.score_answer(entry["answer"], entry)) < 1.0:
                raise
            return {"score": 0.0, "unscorable": f"{type(error).__name__}: {error}"[:400]}
        finally:
            _allow_cpu(None)

    def _dataset(self, request: dict[str, Any]) -> Any:
        import reasoning_gym

        key = json.dumps([request["task"], request["config"]], sort_keys=True)
        if key not in self._datasets:
            if len(self._datasets) >= 256:
                self._datasets.clear()
            self._datasets[key] = reasoning_gym.create_dataset(request["task"], **decode(request["config"]))
        return self._datasets[key]


def _number(score: Any) -> float:
    number = float(score)
    if not math.isfinite(number):
        raise ValueError(f"the score is {number}")
    return number


def _allow_cpu(seconds: int | None) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = resource.RLIM_INFINITY if seconds is None else math.ceil(used.ru_utime + used.ru_stime) + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))


def main() -> None:
    """Serve until the end of the input, or until there was no request for as long as the argument says."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # reasoning-gym prints
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    worker = Worker()
    idle_s = float(sys.argv[1])
    while select.select([sys.stdin], [], [], idle_s)[0] and (line := sys.stdin.readline()):
        request = json.loads(line)
        try:
            answer = getattr(worker, request["do"])(request)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"[:2000], "kind": type(error).__name__}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
