"""Count the files of the product that one turn, one tool call and one weight version pass through.

`python benchmarks/walks.py [--only turn,call] [--list]` profiles a test for each leg of a walk, with the log, the store
and the engine in memory: every function of the product that is called, in any thread. It prints one JSON line for each
walk: files, functions, moves (how often execution passes from one file to another), the goal for files, and the same of
each leg. What the test itself calls counts, what its fixtures do does not. `untraced` names what is in memory or in
another process. The status is 1 if a leg has no figures or a walk has too many files.
"""

from __future__ import annotations

import argparse
import dis
import inspect
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = str(ROOT / "src/turnlog") + "/"
FOLDERS = tuple(
    f"{ROOT / name}/"
    for name in ("schemas", "producers", "processors", "consumers", "sandbox_workers", "trainer", "infra", "plugins")
)
OUT = "WALKS_OUT"
"""Environment variable with the file into which the profiled pytest writes."""


@dataclass(frozen=True)
class Leg:
    """A part of a walk that happens in one process."""

    test: str
    """Node id of the test that is profiled."""
    start: str = ""
    """Qualified name of the function whose first call begins the leg, or "" for the beginning of the test."""
    end: str = ""
    """Qualified name of the function whose first completion ends the leg, or "" for the end of the test."""
    without: str = ""
    """Folder whose files are another walk's."""


@dataclass(frozen=True)
class Walk:
    """What one piece of data passes through."""

    goal: int
    """Files at most."""
    legs: dict[str, Leg]
    untraced: dict[str, str]
    """What the legs lack -> why."""


TRAINER = "tests/unit/trainer/test_draws.py::test_tokens_that_a_step_does_not_compute_are_trained_and_told"
KAFKA = "infra/kafka: the log is in memory"
STORE = "infra/s3.py: the store is in memory"
WALKS = {
    "turn": Walk(
        60,
        {
            "gateway": Leg(
                "tests/unit/gateway/test_gateway_turns.py"
                "::test_a_conversation_with_a_tool_call_extends_the_sampled_tokens_exactly",
                start="Gateway.turn",
            ),
            "assembler": Leg(
                "tests/unit/runtime/test_assembler_runner.py::test_a_group_becomes_trees_samples_and_a_score"
            ),
            "batcher": Leg(
                "tests/unit/runtime/test_batcher.py::test_each_draw_is_cut_into_parts_and_its_files_hold_the_rows"
            ),
            "trainer": Leg(TRAINER, start="Trainer._train_all"),
        },
        {
            "Kafka client": KAFKA,
            "object store client": STORE,
            "engine client": "infra/engines/sglang.py: the engine is in memory",
            "rank group": "trainer/calls.py: there is one rank, in the trainer's process",
        },
    ),
    "call": Walk(
        40,
        {
            "runner": Leg(
                "tests/integration/test_runner_sessions.py"
                "::test_a_rollout_uses_its_tool_through_the_log_and_is_rewarded_before_it_is_finished",
                without="producers/gateway/",
            ),
            "worker": Leg("tests/unit/sandbox/test_worker.py::test_a_call_is_announced_run_and_answered"),
        },
        {
            "Kafka client": KAFKA,
            "object store client": STORE,
            "bubblewrap": "sandbox_workers/backends: the call runs in the subprocess backend",
            "guest": "sandbox_workers/inside: it runs in the sandbox's process",
        },
    ),
    "weights": Walk(
        25,
        {
            "trainer": Leg(TRAINER, start="Publications.begin", end="Trainer._record_version"),
            "loader": Leg("tests/unit/consumers/test_loader.py::test_registers_and_acknowledges_each_version"),
        },
        {
            "Kafka client": KAFKA,
            "object store client": STORE,
            "engine client": "infra/engines/sglang.py: the engine's control is in memory",
            "adapters and deltas": "infra/tensors: the version is a whole one",
            "gateway": "producers/gateway: its leg of `turn` follows the engine's reports",
        },
    ),
}


class LegCounter:
    """Which functions of the product a leg calls, and how often execution passes from one of their files to another."""

    def __init__(self, leg: Leg) -> None:
        self.leg = leg
        self.functions: set[tuple[str, str]] = set()
        """(file, qualified name)"""
        self.moves = 0
        self._latest = threading.local()
        self._began, self._ended = not leg.start, False

    def call(self, file: str, function: str) -> None:
        """Count a call, or the resumption of a coroutine."""
        self._began = self._began or function == self.leg.start
        if self._began and not self._ended and not (self.leg.without and file.startswith(self.leg.without)):
            self.functions.add((file, function))
            self.moves += getattr(self._latest, "file", file) != file
            self._latest.file = file

    def complete(self, function: str) -> None:
        """End the leg if this function is its last."""
        self._ended = self._ended or (self._began and function == self.leg.end)


class Profiler:
    """Profile function of all threads (see sys.setprofile)."""

    def __init__(self) -> None:
        self.counters: list[LegCounter] = []
        self._files: dict[CodeType, str] = {}

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        """Tell the counters of a call or a completion of a function of the product."""
        code = frame.f_code
        if not self.counters or event not in ("call", "return"):
            return
        file = self._files.get(code)
        if file is None:
            file = self._files[code] = product_file(code)
        for counter in self.counters if file else ():
            if event == "call":
                counter.call(file, code.co_qualname)
            elif code.co_code[frame.f_lasti] == dis.opmap["RETURN_VALUE"]:  # a coroutine is not merely suspended
                counter.complete(code.co_qualname)


def product_file(code: CodeType) -> str:
    """Return the product's file of a function, from the repository's root, or "" for code that is none: of others, of a
    module or of a class body."""
    if not code.co_flags & inspect.CO_OPTIMIZED:
        return ""
    if code.co_filename.startswith(PACKAGE):
        return code.co_filename.removeprefix(PACKAGE)
    return code.co_filename.removeprefix(f"{ROOT}/") if code.co_filename.startswith(FOLDERS) else ""


PROFILER = Profiler()


def pytest_configure() -> None:
    """Profile every thread from now on."""
    sys.setprofile(PROFILER)
    threading.setprofile(PROFILER)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Write what each leg of this test has called; nothing if the test fails or is skipped."""
    named = {(walk, leg): LegCounter(of) for walk, each in WALKS.items() for leg, of in each.legs.items()}
    counted = {name: counter for name, counter in named.items() if counter.leg.test == item.nodeid}
    PROFILER.counters = list(counted.values())
    outcome = yield
    PROFILER.counters = []
    if outcome.excinfo is None:
        with Path(os.environ[OUT]).open("a") as out:
            for (walk, leg), counter in counted.items():
                figures = {"functions": sorted(counter.functions), "moves": counter.moves}
                print(json.dumps({"walk": walk, "leg": leg, **figures}), file=out)


def profiled(walks: list[str]) -> dict[tuple[str, str], dict[str, Any]]:
    """Run the tests of these walks; return (walk, leg) -> functions and moves, without legs whose test did not pass."""
    tests = list(dict.fromkeys(leg.test for walk in walks for leg in WALKS[walk].legs.values()))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "legs.jsonl"
        out.touch()
        path = os.pathsep.join((str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")))
        subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "walks", *tests],
            cwd=ROOT, env=os.environ | {"PYTHONPATH": path, OUT: str(out)}, stdout=sys.stderr, check=False,
        )  # fmt: skip
        return {(line["walk"], line["leg"]): line for line in map(json.loads, out.read_text().splitlines())}


def figures(legs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of some legs together."""
    functions = {(file, name) for leg in legs for file, name in leg["functions"]}
    files = {file for file, _ in functions}
    return {"files": len(files), "functions": len(functions), "moves": sum(leg["moves"] for leg in legs)}


def main() -> int:
    """Print a line for each walk."""
    parser = argparse.ArgumentParser(description="Count the files that a walk through the product passes.")
    parser.add_argument("--only", default=",".join(WALKS), metavar="WALKS", help="for example turn,call")
    parser.add_argument("--list", action="store_true", help="list the files of each leg on stderr")
    arguments = parser.parse_args()
    chosen = arguments.only.split(",")
    found, passed = profiled(chosen), True
    for name in chosen:
        walk = WALKS[name]
        legs = {leg: found[name, leg] for leg in walk.legs if found.get((name, leg), {}).get("functions")}
        missing = {
            leg: f"{of.test} did not pass or never called it" for leg, of in walk.legs.items() if leg not in legs
        }
        line = {"id": f"walk {name}", **figures(list(legs.values())), "goal": walk.goal}
        ok = not missing and line["files"] <= walk.goal
        each = {leg: figures([one]) for leg, one in legs.items()}
        print(json.dumps({**line, "ok": ok, "legs": each, "untraced": missing | walk.untraced}), flush=True)
        for leg, one in legs.items() if arguments.list else ():
            print(f"== {name}, {leg}", *sorted({file for file, _ in one["functions"]}), sep="\n", file=sys.stderr)
        passed = passed and ok
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
