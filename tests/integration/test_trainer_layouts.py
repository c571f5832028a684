"""Under torchrun, every layout takes the steps that plain transformers and torch take in one process.

One launch a number of ranks: the layouts come one after another in the same processes.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys

import pytest

STEPS = 2
OTHERS = (
    "tp2-lora-moved",
    "dp:gspo",
    "dp-called:decoupled",
    "pp2-replay-some:gspo",
    "cp2-packed:gspo",
    "tp2:entropy",
    "dp:ppo",
    "tp2:ppo",
    "tp2-sp:ppo",
    "cp2-packed:ppo",
    "pp2:opd",
    "tp2-sp-images-moved",
    "pp2-images-tied",
)


@pytest.mark.parametrize(
    ("ranks", "layouts"),
    [
        pytest.param(
            2,
            ("tp2", "pp2-tied", "dp", "cp2-packed", "ep2-moved", "dp-kept-moved", "ep2-kept", *OTHERS),
            id="two ranks",
        ),
        pytest.param(
            4,
            ("tp2-pp2", "tp2-sp-ep2", "pp2-cp2-replay-some-again", "tp2-sp-pp2-lora-again", "tp2-sp-pp2-images"),
            id="four ranks",
            marks=pytest.mark.long,
        ),
        pytest.param(
            4, ("tp2-sp-ep2-replay", "tp2-sp-cp2-tied"), id="four ranks in other layouts", marks=pytest.mark.long
        ),
        pytest.param(8, ("tp2-pp2",), id="eight ranks", marks=pytest.mark.long),
    ],
)
async def test_loss_and_gradient_norm_are_those_of_the_reference(ranks: int, layouts: tuple[str, ...]) -> None:
    process = await asyncio.create_subprocess_exec(
        *(
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(ranks),
        ),
        *("-m", "turnlog.trainer.reference", str(STEPS), *layouts),
        stdout=subprocess.PIPE,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    found = [json.loads(line) for line in output.decode().splitlines() if line.startswith("{")]
    assert [each["layout"] for each in found] == list(layouts)
    for each in found:
        for loss, wanted_loss, norm, wanted_norm in each["steps"]:
            assert loss == pytest.approx(wanted_loss, abs=1e-5), each["layout"]
            assert norm == pytest.approx(wanted_norm, rel=1e-5), each["layout"]
        assert each["weights"] < 1e-4, each["layout"]
        assert each["exact"], each["layout"]
