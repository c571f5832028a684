"""Two ranks under torchrun take the steps that plain transformers and torch take in one process."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("tensor", "pipeline"),
    [
        pytest.param(2, 1, id="tensor"),
        pytest.param(1, 1, id="data", marks=pytest.mark.long),
        pytest.param(1, 2, id="pipeline", marks=pytest.mark.long),
    ],
)
async def test_loss_and_gradient_norm_are_those_of_the_reference(tensor: int, pipeline: int) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", "turnlog.trainer.reference", str(tensor), str(pipeline), "4"),
        stdout=subprocess.PIPE,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    found = json.loads(output.decode().strip().splitlines()[-1])
    for loss, wanted_loss, norm, wanted_norm in found["steps"]:
        assert loss == pytest.approx(wanted_loss, abs=1e-5)
        assert norm == pytest.approx(wanted_norm, rel=1e-5)
    assert found["weights"] < 1e-4
