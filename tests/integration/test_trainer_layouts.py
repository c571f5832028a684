"""Under torchrun, every layout takes the steps that plain transformers and torch take in one process.

One launch a number of ranks, of 20 to 40 s of two cores each, most of which is what processes import: the
layouts come one after another in the same ones.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.reference.small_models import SMALL
from turnlog.trainer.families.family import family

ROOT = Path(__file__).parents[2]
STEPS = 2
OF_TWO = (
    "tp2",
    "pp2-tied",
    "dp",
    "cp2-packed",
    "ep2-moved",
    "dp-kept-moved",
    "dp-moved",
    "ep2-kept",
    "ep2-single-kept",
    "dp-gpt_oss-single-kept",
    "tp2-sp-ep2-qwen3_moe-balanced",
    "pp2-qwen3_moe-balanced-again",
    "cp2-packed-qwen3_moe-balanced",
    "dp-qwen3_moe-balanced",
    "cp2-replay-some",
    "tp2-sp-ep2-replay",
    "tp2-lora-moved",
    "dp:gspo",
    "dp-called:decoupled",
    "pp2-replay-some:gspo",
    "cp2-packed:gspo",
    "tp2:entropy",
    "tp2:kl",
    "pp2:cispo",
    "dp:clip_cov",
    "cp2-packed:kl_cov",
    "pp2:dppo_tv",
    "tp2:dppo_kl",
    "dp:normalized",
    "dp-kept:ppo",
    "tp2-moved:ppo",
    "tp2-sp:ppo",
    "cp2-packed:ppo",
    "pp2-tied-moved:ppo",
    "ep2:ppo",
    "pp2:opd",
    "tp2-sp-images-moved",
    "pp2-images-tied",
    "tp2-qwen3_vl-packed-lora",
    "pp2-qwen3_vl-tied-again",
    "dp-deepseek_v3-kept",
    "dp-qwen3_5_text-kept",
    "dp-qwen3_5_text-packed-again",
    "tp2-sp-qwen3_5_text-packed",
    "ep2-qwen3_5_moe_text-replay-lora",
    "dp-tree:ppo",
    "tp2-sp-tree:gspo",
    "pp2-tied-tree-again",
    "ep2-tree-replay-some",
    "tp2-sp-ep2-deepseek_v3-tree",
    "pp2-gemma3_text-tree",
    "cp2-tree",
)
OF_TWO_SHORT = (
    "tp2-sp-ep2-gpt_oss-replay",
    "pp2-tied-moved:ppo",
    "cp2-packed",
    "dp-moved",
    "pp2-glm4_moe-moved",
    "tp2-sp-ep2-deepseek_v3-replay",
    "tp2-qwen3_5_text-moved",
    "dp:clip_cov",
    "dp:normalized",
    "tp2-sp-ep2-tree-replay",
)
"""Of OF_TWO, one of each parallelism, of each kind of model, and of what is computed over the tokens of all ranks."""
OF_FOUR = (
    "tp2-pp2",
    "tp2-sp-ep2",
    "tp2-sp-ep2-replay",
    "tp2-sp-pp2-tree",
    "tp2-sp-cp2-tied",
    "tp2-sp-pp2-ep2-qwen3_moe-balanced",
    "pp2-cp2-replay-some-again",
    "tp2-sp-pp2-lora-again",
    "tp2-sp-pp2-images",
    "tp2-sp-pp2-qwen3_vl-again",
)
OF_DENSE = ("tp2-sp-{}-moved", "pp2-{}-moved", "cp2-packed-{}", "tp2-{}-lora-moved")
OF_MIXTURES = (
    "tp2-sp-ep2-{}-replay",
    "ep2-{}-moved",
    "pp2-{}-replay-some-moved",
    "cp2-packed-{}",
    "tp2-sp-ep2-{}-lora-moved",
)


def layouts_of(kind: str) -> list[str]:
    """Return the layouts of two ranks that a family's small model is tested in: all that the family does not refuse."""
    tested = OF_MIXTURES if SMALL[kind].mixture else OF_DENSE
    refused = family(kind).without
    return [each.format(kind) for each in tested if not ("context_parallel" in refused and each.startswith("cp"))]


FAMILIES = {mixtures: [kind for kind in SMALL if bool(SMALL[kind].mixture) is mixtures] for mixtures in (False, True)}
OF_FAMILIES = {
    mixtures: tuple(name for kind in kinds for name in layouts_of(kind)) for mixtures, kinds in FAMILIES.items()
}
TESTED = (*OF_TWO, *OF_FOUR, *OF_FAMILIES[False], *OF_FAMILIES[True])
"""Layouts that the table in docs/models.md names."""

PEAKS = {
    "dp-kept-moved": {"save": [(10, 11), (6, 7)], "load": [(0, 3)] * 2},
    "dp-moved": {"save": [(30, 39)] * 2, "load": [(16, 17)]},
}
"""Bytes a parameter of float32 on two data-parallel ranks, between which docs/learning.md has what checkpoints take
(Checkpoints): by place 12 / D, at the first 4 more, and to load 4 / D and the largest weight, here a fifth of all;
reshardable 24 + 12 / D and up to 8 that gloo takes, and to load, on one rank, 12 + 4. Besides comes what is small."""


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("ranks", "layouts"),
    [
        pytest.param(2, OF_TWO_SHORT, id="two ranks, each parallelism"),
        pytest.param(2, OF_TWO, id="two ranks", marks=pytest.mark.long),
        pytest.param(2, OF_FAMILIES[False], id="two ranks, dense families", marks=pytest.mark.long),
        pytest.param(2, OF_FAMILIES[True], id="two ranks, mixtures of experts", marks=pytest.mark.long),
        pytest.param(4, OF_FOUR, id="four ranks", marks=pytest.mark.long),
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
        *("-m", "tests.reference.layouts", str(STEPS), *layouts),
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    found = [json.loads(line) for line in output.decode().splitlines() if line.startswith("{")]
    assert [each["layout"] for each in found] == list(layouts)
    by_name = {each["layout"]: each for each in found}
    for each in found:
        for loss, wanted_loss, norm, wanted_norm in each["steps"]:
            assert loss == pytest.approx(wanted_loss, abs=1e-5), each["layout"]
            assert norm == pytest.approx(wanted_norm, rel=1e-5), each["layout"]
        assert each["weights"] < 1e-4, each["layout"]
        assert each["exact"], each["layout"]
        if other := by_name.get(each["layout"].replace("-overlap", "")):
            assert (each["steps"], each["weights"]) == (other["steps"], other["weights"]), each["layout"]
        for what, bounds in PEAKS.get(each["layout"], {}).items():
            for peak, (least, most) in zip(each["peaks"][what], bounds, strict=True):
                assert least <= peak <= most, (each["layout"], what)
