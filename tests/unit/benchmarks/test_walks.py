"""The walks through the product are traced in tests that exist."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "benchmarks/walks.py"


def test_every_leg_of_a_walk_names_a_test() -> None:
    for walk in runpy.run_path(str(SCRIPT))["WALKS"].values():
        for leg in walk.legs.values():
            path, _, name = leg.test.partition("::")
            assert f"async def {name}(" in (ROOT / path).read_text(), leg.test


def test_a_weight_version_passes_through_the_trainer_and_the_loader() -> None:
    done = subprocess.run([sys.executable, SCRIPT, "--only", "weights"], capture_output=True, text=True)
    line = json.loads(done.stdout)
    assert done.returncode == int(line["files"] > line["goal"]), done.stderr
    assert line["id"] == "walk weights"
    assert all(10 < leg["files"] < leg["functions"] and leg["moves"] > 10 for leg in line["legs"].values())
    assert max(leg["files"] for leg in line["legs"].values()) < line["files"]
    assert set(line["legs"]) == {"trainer", "loader"}
