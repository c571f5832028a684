"""Under torchrun, ranks that share a model take the memory that is predicted for them."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAYOUTS = ("tp2", "tp2-sp", "tp2-sp-again", "tp2-lora", "ep2", "tp2-sp-ep2", "pp2", "pp2-again", "dp", "dp-again")


@pytest.mark.long
@pytest.mark.timeout(600)
def test_ranks_take_what_is_predicted() -> None:
    """Ranks that share experts are compared by their mean, because routers send them unequally many tokens."""
    launcher = (sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    ended = subprocess.run(
        [*launcher, "-m", "tests.reference.memory_record", *LAYOUTS], stdout=subprocess.PIPE, cwd=ROOT, check=True
    )
    found = [json.loads(line) for line in ended.stdout.decode().splitlines() if line.startswith("{")]
    assert [each["layout"] for each in found] == list(LAYOUTS)
    for each in found:
        most = statistics.mean if "ep2" in each["layout"] else max
        assert min(abs(one - each["predicted"]["resident"]) for one in each["resident"]) < 1000, each
        assert most(each["step"]) == pytest.approx(each["predicted"]["step"], rel=0.1), each
