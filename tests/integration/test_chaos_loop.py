"""Every role and server of the whole loop is killed, hung and doubled once: the smallest size of `make chaos`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks/chaos/loop.py"
VICTIMS = ("feeder", "gateway", "runner", "sandbox", "assembler", "reaper", "batcher", "trainer", "loader", "archiver",
           "views", "broker", "registry", "store")  # fmt: skip
"""All but the engine, which takes half a minute to come back each time."""
DOUBLED = len(VICTIMS) - len(("gateway", "views", "broker", "registry", "store"))

pytestmark = [pytest.mark.kafka, pytest.mark.engine, pytest.mark.chaos, pytest.mark.timeout(1800)]


def test_nothing_is_lost_or_counted_twice_whoever_is_struck(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--kills", "1", "--only", ",".join(VICTIMS), "--keep", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1700, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["id"] for line in lines] == list(VICTIMS), done.stderr[-4000:]
    for line in lines:
        found = {name: line[name] for name in ("lost", "twice", "skipped", "identical", "ok")}
        assert found == {"lost": 0, "twice": 0, "skipped": 0, "identical": True, "ok": True}, (
            line,
            done.stderr[-4000:],
        )
    strikes = [line["detail"]["strikes"] for line in lines]
    assert sum("zombie" in each for each in strikes) == DOUBLED
    assert all(each["kill"] == each["hang"] == 1 for each in strikes)
