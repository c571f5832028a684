"""Under torchrun, tenants on the ranks of every layout get what they get on one rank."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OF_TWO = ("tp2-sp", "dp")
OF_TWO_MORE = ("tp2", "pp2", "pp2-tied", "tp2-tied", "cp2-packed", "ep2-replay", "tp2-sp-ep2-replay", "pp2-again")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "layouts", [pytest.param(OF_TWO, id="few"), pytest.param(OF_TWO_MORE, id="more", marks=pytest.mark.long)]
)
async def test_tenants_on_ranks_get_what_they_get_on_one(layouts: tuple[str, ...]) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-W", "ignore", *launcher, "-m", "tests.reference.tenant_layouts", *layouts),
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    found = [json.loads(line) for line in output.decode().splitlines() if line.startswith("{")]
    assert [each["layout"] for each in found] == list(layouts)
    for each in found:
        assert all(each[what] for what in ("resumed", "refused", "names")), each
        assert max(each[what] for what in ("loss", "norm", "logprobs", "factors")) < 1e-5, each
