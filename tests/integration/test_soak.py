"""Load that lasts, for half a minute: it starts, is struck, and what it has done comes out whole. That so short a run
tells nothing about memory, it says itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks/chaos/soak.py"


@pytest.mark.kafka
@pytest.mark.chaos
@pytest.mark.long  # the suite judges recorded samples of a soak (tests/unit/benchmarks/test_soak.py)
@pytest.mark.timeout(1200)
def test_a_loaded_run_whose_topics_are_pruned_ends_whole_with_a_page_of_its_own(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--minutes", "0.7", "--step", "5", "--keep", str(tmp_path / "soak")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1100, check=False)
    assert done.returncode == 1, done.stderr[-4000:]  # of so few looks nothing can be told
    line = json.loads(done.stdout)
    found = {name: line[name] for name in ("id", "lost", "twice", "skipped", "identical")}
    assert found == {"id": "soak", "lost": 0, "twice": 0, "skipped": 0, "identical": True}, done.stderr[-4000:]
    assert line["kills"] == sum(line["detail"]["kills"].values()) > 0
    assert line["detail"]["books"]
    assert not line["detail"]["waits_in_the_end"]
    assert not line["detail"]["grows"]
    assert "memory of assembler-0" in "".join(line["detail"]["unsure"])
    assert (tmp_path / "soak/soak.html").read_text().count("<svg") == 4
