"""Roles and servers of the whole loop are killed, hung and doubled: the smallest size of `make chaos`.

The suite kills two roles of its one loop (test_closed_loop.py)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks/chaos/loop.py"
VICTIMS = ("feeder", "gateway", "runner", "sandbox", "assembler", "reaper", "batcher", "trainer", "loader", "archiver",
           "views", "broker", "registry", "store")  # fmt: skip
"""All but the engine, which takes half a minute to come back each time."""
DOUBLED = len(VICTIMS) - len(("gateway", "views", "broker", "registry", "store"))

pytestmark = [pytest.mark.kafka, pytest.mark.engine, pytest.mark.chaos, pytest.mark.long, pytest.mark.timeout(1800)]


def strikes(folder: Path, *victims: str, kinds: str, more: tuple[str, ...] = ()) -> Counter[str]:
    """What was done to them by kind, once nothing was found lost, twice, skipped or different."""
    command = [sys.executable, str(SCRIPT), "--kills", "1", "--only", ",".join(victims), "--strikes", kinds]
    command += ["--keep", str(folder), *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1700, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["id"].partition("_")[0] for line in lines] == list(victims), done.stderr[-4000:]
    for line in lines:
        found = {name: line[name] for name in ("lost", "twice", "skipped", "identical", "ok")}
        assert found == {"lost": 0, "twice": 0, "skipped": 0, "identical": True, "ok": True}, (
            line,
            done.stderr[-4000:],
        )
        calc, household = (line["detail"]["datasets"][f"tasks-{name}.jsonl"] for name in ("calc", "household"))
        assert abs(calc - 3 * household) <= 4, "of the fresh tasks each recipe gets its weight"
        assert line["detail"]["closed"]["quorum"] > 0, "who is slowest is cut"
    return sum((Counter(line["detail"]["strikes"]) for line in lines), Counter())


def test_nothing_is_lost_or_counted_twice_whoever_is_struck(tmp_path: Path) -> None:
    found = strikes(tmp_path, *VICTIMS, kinds="kill,hang,zombie")
    assert found == {"kill": len(VICTIMS), "hang": len(VICTIMS), "zombie": DOUBLED}


def test_books_and_replay_hold_where_a_trainer_of_trl_is_killed(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "examples/trl_trainer.py"
    found = strikes(tmp_path, "trainer", kinds="kill", more=("--trainer", str(script)))
    assert found == {"kill": 1}
