"""What a session costs, from what was counted: CPU time by process, samples of stacks by kind of work, requests."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))  # its scripts import each other by their names

import cost
import cost_kinds
import cost_meter
import cost_walk

from tests.each import each

STAT = "71 (C2 Compiler) 0)) S 1 71 71 0 -1 4194560 900 8 0 0 {} {} {} {} 20 0 1 0 500 9000 300\n"
SITE = "/venv/lib/python3.11/site-packages/"
HOME = "/repository/src/turnlog/"


def test_a_process_is_parsed_whatever_its_name() -> None:
    usage = cost_meter.Usage.parse(STAT.format(*(cost_meter.TICKS_PER_S * seconds for seconds in (3, 1, 20, 5))))
    assert usage == cost_meter.Usage("C2 Compiler) 0)", 1, 4.0, 25.0)


def test_a_tree_counts_what_its_processes_have_reaped_and_no_other_root() -> None:
    known = {
        pid: cost_meter.Usage("p", parent, seconds, reaped)
        for pid, parent, seconds, reaped in ((1, 0, 1.0, 10.0), (2, 1, 2.0, 0.0), (3, 2, 4.0, 1.0), (4, 1, 8.0, 0.0))
    }
    assert cost_meter.tree_seconds({"supervisor": 1, "sandbox": 2, "gone": 9}, known) == {
        "supervisor": (1.0, 18.0), "sandbox": (2.0, 5.0), "gone": (0.0, 0.0),
    }  # fmt: skip


def test_this_process_and_its_children_are_found_with_their_time() -> None:
    began = cost_meter.tree_seconds({"this": os.getpid()}, cost_meter.processes())["this"]
    spin = "import time\nwhile time.process_time() < 0.1: pass"
    subprocess.run([sys.executable, "-c", spin], check=True)
    until = time.process_time() + 0.1
    while time.process_time() < until:
        pass
    own, started = cost_meter.tree_seconds({"this": os.getpid()}, cost_meter.processes())["this"]
    assert own - began[0] >= 0.08
    assert started - began[1] >= 0.08
    assert cost_meter.thread_seconds(os.getpid())
    assert cost_meter.forks() > 1


ORPHANED = """
import os, subprocess, sys, time
import cost_meter
cost_meter.adopt_orphans()
spin = "import time\\nwhile time.process_time() < 0.1: pass"
known = subprocess.Popen(["sleep", "60"])
parent = subprocess.run(["sh", "-c", f'"{sys.executable}" -c "{spin}" & echo $!'], capture_output=True, text=True)
orphan = int(parent.stdout)
os.waitid(os.P_PID, orphan, os.WEXITED | os.WNOWAIT)
cost_meter.reap_orphans({known.pid})
found = cost_meter.processes()
assert orphan not in found and known.pid in found
own, started = cost_meter.tree_seconds({"this": os.getpid()}, found)["this"]
assert started >= 0.08, started
known.kill()
known.wait()
cost_meter.reap_orphans({known.pid})
"""


def test_processes_whose_parent_has_ended_are_counted_too() -> None:
    paths = {"PYTHONPATH": str(Path(cost_meter.__file__).parent)}
    done = subprocess.run([sys.executable, "-c", ORPHANED], env=os.environ | paths, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_threads_of_a_broker_are_told_apart_by_their_names() -> None:
    after = {
        (1, "data-plane-kafk"): 3.0,
        (2, "C2 CompilerThre"): 2.0,
        (3, "G1 Service"): 1.0,
        (4, "kafka-scheduler"): 0.5,
    }
    assert cost_meter.by_thread_kind({(1, "data-plane-kafk"): 1.0}, after) == {
        cost_meter.REQUESTS: 2.0, cost_meter.COMPILER: 2.0, cost_meter.COLLECTOR: 1.0, cost_meter.UPKEEP: 0.5,
    }  # fmt: skip


@each(
    ("output", "count"),
    [
        ("# started on Sun\n\n123456,,instructions:u,1000,100.00,,\n", 123456),
        ("<not supported>,,instructions,0,100.00,,\n", None),
        ("<not counted>,,instructions,0,0.00,,\n", None),
        ("", None),
    ],
)
def test_perf_tells_how_many_instructions_or_that_it_cannot(output: str, count: int | None) -> None:
    assert cost_meter.parse_perf(output) == count


def test_valgrind_tells_how_many_instructions() -> None:
    assert cost_walk.counted("==7== Cachegrind\n==7== \n==7== I   refs:      1,234,567\n") == 1234567
    assert cost_walk.counted("==7== killed\n") is None


@each(
    ("line", "files", "kind"),
    [
        ("body = orjson.loads(content)", (HOME + "infra/engines/sglang.py",), cost_kinds.JSON),
        ("return hashlib.sha256(text).hexdigest()", (HOME + "schemas/ids.py",), cost_kinds.HASHING),
        ("self._db.executemany(insert, rows)", (HOME + "consumers/index/rows.py",), cost_kinds.SQL),
        ("writer(out, schema, value)", (SITE + "fastavro/_write.py", HOME + "schemas/codec.py"), cost_kinds.ENCODING),
        ("return value", ("/usr/lib/python3.11/asyncio/streams.py", SITE + "aiokafka/conn.py"), cost_kinds.KAFKA),
        ("pass", (HOME + "infra/kafka/readers.py", HOME + "producers/runner.py"), cost_kinds.KAFKA),
        ("pass", (SITE + "h11/_events.py", SITE + "httpx/_client.py", HOME + "producers/runner.py"), cost_kinds.HTTP),
        ("pass", ("/usr/lib/python3.11/enum.py", HOME + "producers/gateway/app.py"), "producers/gateway"),
        ("pass", (HOME + "infra/roles/loop.py",), "infra/roles"),
        ("pass", (HOME + "verbs/roles.py",), "src/turnlog"),
        ("pass", (SITE + "numpy/core.py", HOME + "infra/batch_files.py"), cost_kinds.OTHER),
        ("self._run_once()", ("/usr/lib/python3.11/asyncio/base_events.py",), cost_kinds.LOOP),
        (
            "request.encode()",
            ("/x/benchmarks/cost_probe/sitecustomize.py", SITE + "aiokafka/conn.py"),
            cost_kinds.PROBE,
        ),
    ],
)
def test_a_sample_belongs_to_the_kind_of_its_innermost_line_or_file(
    line: str, files: tuple[str, ...], kind: str
) -> None:
    assert cost_kinds.kind_of(line, [[file, "f"] for file in files]) == kind


def test_shares_leave_the_probe_out_and_count_other_threads() -> None:
    samples = [
        sample(HOME + "producers/runner.py", 1.0),
        sample("/b/cost_probe/x.py", 5.0),
        sample(SITE + "h11/a.py", 1.0),
    ]
    shares = cost_kinds.shares(samples, main_s=7.0, process_s=9.0)
    assert shares == {"producers": 0.25, cost_kinds.HTTP: 0.25, cost_kinds.THREADS: 0.5}
    assert cost_kinds.shares([], main_s=0.0, process_s=0.0) == {}
    assert cost_kinds.hottest(samples, 1) == [("producers/runner.py:f", 1.0)]


def test_a_ledger_divides_by_what_was_done_between_its_marks() -> None:
    one = ledger()
    assert one["core_ms"]["gateway"] == {"session": 40.0, "turn": 20.0, "call": 80.0}
    assert one["core_ms"]["sandbox"] == {"session": 5.0, "turn": 2.5, "call": 10.0}
    assert one["core_ms_per_session"] == pytest.approx(65.0)
    assert one["in_flight"] == pytest.approx(5.0, rel=0.05)
    assert one["kinds_per_session"]["gateway"] == {"producers": 10.0, cost_kinds.THREADS: 30.0, cost_kinds.STARTED: 0.0}
    assert one["kinds_per_session"]["kafka"] == {cost_meter.REQUESTS: 15.0}
    assert one["requests_per_session"]["gateway"] == {"Produce": [2.0, 4000.0, 1000.0], "EndTxn": [0.5, 10.0, 10.0]}
    assert one["forks_per_call"] == 3.0
    assert one["instructions_per_session"] == {"gateway": 1e6}
    assert cost.grouped(one["requests_per_session"]["gateway"]) == [2.0, 0.0, 0.0, 0.0, 0.5, 0.0, 4.01, 1.01]


def test_a_table_shows_the_dearest_role_first_and_goals_are_compared() -> None:
    one = ledger()
    lines = list(cost.table(16, one))
    assert lines[1] == "16 sessions in flight (5 counted): 100 sessions, 200 turns, 50 calls in 8 s"
    assert lines[3].split() == [
        "gateway", "40.00", "20.00", "80.00", "other", "threads", "30.00,", "producers", "10.00"
    ]  # fmt: skip
    assert cost.missed({16: one}) == {
        "broker at 16, of 5 per session": 20.0, "gateway and runner at 16, of 7 per session": 40.0,
        "sandbox worker at 16, of 6 per call": 10.0,
    }  # fmt: skip


def sample(file: str, seconds: float) -> dict[str, Any]:
    return {"line": "", "frames": [[file, "f"]], "seconds": seconds}


def ledger() -> dict[str, Any]:
    """One of 100 sessions, 200 turns and 50 calls, and of as many for the kinds."""
    spent = [
        {"gateway-0": (1.0, 0.0), "sandbox-0": (1.0, 1.0), "kafka": (1.0, 0.0)},
        {"gateway-0": (5.0, 0.0), "sandbox-0": (1.2, 1.3), "kafka": (3.0, 0.0)},
    ]
    marks = [
        cost.Mark(at=8.0 * number, cpu_s=spent[min(number, 1)], threads={(1, "data-plane-kafk"): 1.5 * number},
                  forks=150 * number)
        for number in range(4)
    ]  # fmt: skip
    times = [number / 100 * 8 for number in range(400)]
    work = cost.Work(turns=sorted(times * 2), calls=times[::2])
    for number, at in enumerate(times):  # each lasts for five others
        work.started[str(number)], work.finished[str(number)] = at - 0.4, at
    probe = {
        "main_s": 1.0, "process_s": 4.0, "samples": [sample(HOME + "producers/runner.py", 1.0)],
        "requests": {"Produce": [200, 400_000, 100_000], "EndTxn": [50, 1000, 1000]},
    }  # fmt: skip
    return cost.ledger(marks, work, {"gateway-0": 100_000_000, "kafka": None}, {"gateway-0": probe})
