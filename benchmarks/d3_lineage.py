"""D3: core-microseconds per session of `turnlog lineage --weights` over an index of 200,000 trained sessions.

Floor in the same run: SQLite counts the rows of the same batches and adds up their tokens, without any fact of a
session. The index is written as rows, with several values of every fact, four tool calls per session and a restart of
the trainer. Not shown: the start of Python, and the table on the terminal.
usage: python benchmarks/d3_lineage.py (`make bench ONLY=D3`; BENCH_SESSIONS for another number of sessions)
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import resource
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from row import percentile, say, size, told

from turnlog.consumers.index.indexer import opened_writer
from turnlog.consumers.index.lineage import Lineage, LineageReader
from turnlog.consumers.index.schema import place_of
from turnlog.processors.core.fold_versions import FOLD_VERSION
from turnlog.schemas import topics
from turnlog.schemas.codec import Codec
from turnlog.schemas.events import ALL

SESSIONS = int(os.environ.get("BENCH_SESSIONS", size(200_000, smallest=2_000)))
REPEATS = size(5, smallest=1)
GROUP, BATCH, CALLS = 8, 512, 4
"""Sessions of a group and of a batch, and tool calls of a session."""
GOAL_US = 50.0
"""So that a page of 100,000 sessions takes at most five seconds, half of the dashboard's limit for a query."""
CODEC = Codec({name: number for number, name in enumerate(ALL, start=1)})


def name_of(number: int) -> str:
    """An id in no order, as digests are."""
    return f"{number * 2_654_435_761 % 2**32:08x}-{number}"


def fill(path: Path) -> None:
    """Write the index."""
    with opened_writer(path, "run", FOLD_VERSION, CODEC) as writer:
        writer.about(written_ms=0)
    batches = -(-SESSIONS // BATCH)
    with contextlib.closing(sqlite3.connect(path)) as sql:
        for pragma in ("synchronous = OFF", "journal_mode = OFF", "cache_size = -1000000"):
            sql.execute(f"PRAGMA {pragma}")

        def put(table: str, rows: Iterable[dict[str, Any]]) -> None:
            rows = iter(rows)
            first = next(rows)
            names = ", ".join(first)
            marks = ", ".join(f":{name}" for name in first)
            sql.execute(f"INSERT INTO {table} ({names}) VALUES ({marks})", first)
            sql.executemany(f"INSERT INTO {table} ({names}) VALUES ({marks})", rows)

        put("origins", (
            {"origin": f"origin-{number}", "recipe": ("calc", "code", "search")[number % 3], "agent": "loop/1",
             "environment": f"sandbox/{number % 2}", "packages": '{"turnlog": "0.2.0"}', "tools": "{}"}
            for number in range(6)
        ))  # fmt: skip
        put("sessions", (
            {"session_id": name_of(number), "group_id": f"group-{number // GROUP}", "rollout_id": f"rollout-{number}",
             "task_id": f"task-{number % 20_000}", "origin": f"origin-{number % 6}", "started_ms": number, "settled": 1,
             "reward": number % 7 / 6, "verifier": f"tests/{number % 2}", "engines": json.dumps([f"e-{number % 4}"]),
             "advantage": 0.5, "turns": 5, "calls": CALLS, "output_tokens": 900, "version_min": number // BATCH,
             "version_max": number // BATCH, "trained_tokens": 900, "batch_index": number // BATCH, "fate": "trained"}
            for number in range(SESSIONS)
        ))  # fmt: skip
        put("rollouts_records", (
            {"place": place_of(topics.TASKS.name, 0, number), "rollout_id": f"rollout-{number}",
             "dataset": f"tasks-{number % 2}.jsonl", "code": "0.2.0", "counts": 1}
            for number in range(SESSIONS)
        ))  # fmt: skip
        put("session_events_records", (
            {"place": place_of(topics.SESSIONS.name, kind, number), "session_id": name_of(number), "value": b"x" * 600,
             "kind": ("SessionStarted", "RewardAssigned")[kind], "code": f"0.2.{number % 2}", "counts": 1}
            for kind in range(2) for number in range(SESSIONS)
        ))  # fmt: skip
        put("tool_starts_records", (
            {"place": place_of(topics.TOOL_RESULTS.name, call, number), "session_id": name_of(number),
             "call_id": f"{number}-{call}", "code": "0.2.0", "counts": 1}
            for call in range(CALLS) for number in range(SESSIONS)
        ))  # fmt: skip
        put("group_scores_records", (
            {"place": place_of(topics.SAMPLES.name, 0, number), "group_id": f"group-{number}", "status": "trained",
             "estimator": "grpo/1", "rollouts": "[]" * 200, "code": "0.2.0", "counts": 1}
            for number in range(-(-SESSIONS // GROUP))
        ))  # fmt: skip
        put("batch_rows", (
            {"batch_index": number // BATCH, "row": number % BATCH, "sample_id": f"sample-{number}",
             "group_id": f"group-{number // GROUP}", "session_id": name_of(number), "segment_index": 0, "tokens": 1500,
             "trained_tokens": 900, "weight_divisor": 1}
            for number in range(SESSIONS)
        ))  # fmt: skip
        put("batches_records", (
            {"place": place_of(topics.BATCHES.name, 0, batch), "batch_index": batch, "code": "0.2.0", "counts": 1}
            for batch in range(batches)
        ))  # fmt: skip
        put("steps_records", (
            {"place": place_of(topics.STEPS.name, 0, batch), "batch_index": batch, "incarnation": batch // 200,
             "step": batch + 1, "skipped": 0, "trained_tokens": 900 * BATCH, "masked": "{}", "code": "0.2.0",
             "counts": 1}
            for batch in range(batches)
        ))  # fmt: skip
        put("versions_records", (
            {"place": place_of(topics.WEIGHTS.name, 0, version), "version": version, "batch_index": version - 1,
             "incarnation": max(0, version - 1) // 200, "step": version, "counts": 1}
            for version in range(batches + 1)
        ))  # fmt: skip
        put("engine_events_records", (
            {"place": place_of(topics.ENGINES.name, 0, number), "engine_id": f"e-{number}", "kind": "EngineRegistered",
             "engine_kind": ("sglang", "vllm")[number % 2], "code": "0.2.0", "counts": 1}
            for number in range(4)
        ))  # fmt: skip
        sql.commit()
        sql.execute("PRAGMA journal_mode = WAL")


def core_s(work: Callable[[], object]) -> float:
    """Processor seconds of a call."""
    began = time.process_time()
    work()
    return time.process_time() - began


def main() -> int:
    """Measure; the exit status."""
    found: list[Lineage] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "index.sqlite"
        filling = multiprocessing.get_context("fork").Process(target=fill, args=(path,))  # whose memory is not ours
        filling.start()
        filling.join()
        version = -(-SESSIONS // BATCH)

        def ask() -> None:
            with LineageReader.open(lambda run: path) as reader:
                found.append(reader.weights("run", version))

        def count() -> None:
            with contextlib.closing(sqlite3.connect(path)) as sql:
                sql.execute(
                    "SELECT count(*), sum(trained_tokens) FROM batch_rows WHERE batch_index <= ?", (version,)
                ).fetchone()

        count()  # the file is in the page cache from here on
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        times = [(core_s(count), core_s(ask)) for _ in range(REPEATS)]
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert all((each.total("sessions"), each.total("tokens")) == (SESSIONS, SESSIONS * 900) for each in found)
    floor, value = (percentile([each[at] for each in times], 0.5) / SESSIONS * 1e6 for at in range(2))
    say(f"D3: {value:.2f} core-us per session of {SESSIONS:,}, bare count {floor:.3f}, {grown:.0f} MiB more memory")
    return told(
        id="D3", value=value, unit="core-us/session", goal=GOAL_US, floor=floor, met=value <= GOAL_US,
        detail={
            "floor_is": "SELECT count(*), sum(trained_tokens) over the rows of the same batches", "sessions": SESSIONS,
            "batches": version, "tool_calls": SESSIONS * CALLS, "grown_mib": round(grown, 1),
            "slowest_s": round(max(each[1] for each in times), 2),
        },
    )  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
