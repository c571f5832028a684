"""Every benchmark runs, at its smallest size, and prints its line: what README says of it can be taken again.

Figures of such a run say nothing, so whether a goal was reached is not asked.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.browsed_run import CHROMIUM
from tests.shared_servers import SharedServers
from turnlog.sandbox_settings import SandboxSettings
from turnlog.sandbox_workers.pooling.worker_pools import find_isolation_failure

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NUMBERED = {path.stem.partition("_")[0].upper() for path in BENCHMARKS.glob("[a-z]*[0-9]_*.py")}
NAMES = sorted(NUMBERED - {"E1"} | {"SCALE", "COST", "TREE", "T2-VLLM"})
"""E1, MODES and LOOP need an engine: test_engine_scale.py and test_closed_loop.py run them, on one that is there."""
HEAVY = {
    "C1", "COST", "G7", "G9", "G15", "G16", "I2", "L1", "L2", "L3", "L4", "P1", "SCALE", "T2", "T2-VLLM", "TREE", "W1",
}  # fmt: skip
"""Benchmarks that take longer than 10 s at their smallest size."""
LINE = {"id", "value", "unit", "goal", "ok", "floor", "share", "goal_share", "load", "detail"}


@pytest.fixture(scope="session")
def environment(kafka: str, shared_servers: SharedServers) -> dict[str, str]:
    """The benchmarks share the session's broker."""
    return os.environ | {"BENCH_BROKER": f"{kafka} {shared_servers.folder / 'kafka/data'}"}


def printed(environment: dict[str, str], *arguments: str) -> str:
    """What benchmarks/run.py writes on stdout. Its status is 1 where a goal was missed, too."""
    command = [sys.executable, str(BENCHMARKS / "run.py"), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode in {0, 1}, done.stderr
    assert done.stdout, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout


def checked(line: dict[str, Any], name: str) -> None:
    """A line is whole, and its share is that of its floor."""
    assert line.keys() == LINE, line
    assert line["id"] == name
    assert line["unit"]
    assert isinstance(line["value"], int | float)
    assert isinstance(line["ok"], bool)
    assert (line["share"] is None) is (line["floor"] is None)
    assert line["goal_share"] is None or line["floor"] is not None
    if line["share"] is not None:
        ratio = line["value"] / line["floor"]
        is_rate = line["unit"].endswith("/s") or line["unit"] == "recall"
        assert line["share"] == pytest.approx(ratio if is_rate else 1 / ratio, rel=1e-2)
        assert line["detail"]["floor_is"]
        assert not (line["ok"] and line["goal_share"] and line["share"] < line["goal_share"])


@pytest.mark.kafka
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name in HEAVY else name for name in NAMES]
)
def test_a_benchmark_runs_at_its_smallest_size_and_prints_its_line(name: str, environment: dict[str, str]) -> None:
    if name in {"COST", "G15", "P1"} and asyncio.run(find_isolation_failure(SandboxSettings())):
        pytest.skip("user namespaces are off")
    if name == "I3" and CHROMIUM is None:
        pytest.skip("no browser is installed")
    checked(json.loads(printed(environment, "--smallest", "--only", name)), name)


def test_a_session_of_the_gateway_holds_bytes_in_proportion_to_its_tokens() -> None:
    detail = json.loads(printed(dict(os.environ), "--smallest", "--only", "T3"))["detail"]
    short, long = detail["bytes_per_token_at_turn"].values()
    assert 4 < long <= 1.05 * short, "a token is 4 bytes, and the same at twice the length"


@pytest.mark.kafka
@pytest.mark.long
@pytest.mark.timeout(1900)
@pytest.mark.parametrize(
    "rows",
    ["ending", "leader,group,begin,offsets,markers,stop,wipe,rolling"],
)
def test_a_broker_of_three_is_struck_and_everything_is_folded_once(rows: str) -> None:
    """The suite kills one broker, which comes back with what it acknowledged (test_embedded_broker.py)."""
    command = [sys.executable, str(BENCHMARKS / "chaos/brokers.py"), "--kills", "1", "--only", rows]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["id"] for line in lines] == [f"brokers-{row}" for row in rows.split(",")], done.stderr[-4000:]
    for line in lines:
        found = {name: line[name] for name in ("lost", "twice", "skipped", "identical", "ok")}
        wanted = {"lost": 0, "twice": 0, "skipped": 0, "identical": True, "ok": True}
        assert found == wanted, (line, done.stderr[-4000:])
        assert line["kills"] == len(line["detail"]["strikes"]) == (3 if line["id"] == "brokers-rolling" else 1)


@pytest.mark.kafka
@pytest.mark.long
def test_each_role_that_can_be_restarted_is(environment: dict[str, str]) -> None:
    """The suite restarts the assembler."""
    roles = "feeder,gateway,runner,sandbox,batcher,trainer,loader,archive,views"
    line = json.loads(printed(environment | {"BENCH_ROLES": roles}, "--smallest", "--only", "G9"))
    checked(line, "G9")
    assert line["detail"]["p50_s"].keys() == {*roles.split(",")}


def test_a_benchmark_that_does_not_exist_is_named_with_those_that_do() -> None:
    command = [sys.executable, str(BENCHMARKS / "run.py"), "--only", "G99"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "no benchmark G99; there are C1, COST, D1, D2, D3, E1, ENV, G1, " in done.stderr


def test_rows_of_the_readme_come_from_the_lines() -> None:
    line = {
        "id": "G1", "value": 1159.4, "unit": "samples/s", "goal": 1000, "ok": False, "floor": 1374.2, "share": 0.8437,
        "goal_share": 0.9, "load": 1.0, "detail": {},
    }  # fmt: skip
    broken = {"id": "T1", "ok": False, "detail": {"error": "IndexError: list index out of range"}}
    lines = "\n".join(json.dumps(each) for each in (broken, line))
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "table.py")], input=lines, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [
        "| G1 durable append and delivery of 8,192-token samples, one SegmentSample per request | 1,159 samples/s"
        " (missed) | goal 1,000; floor 1,374, share 0.84 of at least 0.9 | `make bench ONLY=G1` |",
        "| T1 one session of 200 turns x 5,000 new tokens (a context of a million) folded into its tree | broke:"
        " IndexError: list index out of range | | `make bench ONLY=T1` |",
    ]
