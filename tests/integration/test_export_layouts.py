"""Under torchrun, the ranks of every layout export the tensors of one rank bit for bit, each its own part."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.reference.exports import LIMIT

ROOT = Path(__file__).parents[2]
OF_TWO = (
    "tp2",
    "pp2",
    "dp",
    "ep2",
    "tp2-sp-ep2",
    "tp2-qwen3_5_text",
    "tp2-sp-ep2-gpt_oss",
    "pp2-lora:adapter",
    "tp2-lora:adapter",
    "tp2-lora:base",
)
OF_TWO_MORE = ("cp2", "pp2-tied", "tp2-images", "ep2-qwen3_5_moe_text", "tp2-sp-ep2-deepseek_v3", "tp2-qwen3_vl")
OF_FOUR = ("tp2-pp2", "tp2-sp-ep2", "tp2-sp-pp2-ep2", "tp2-pp2-lora:adapter", "dp")
BALANCED = ("tp2", "tp2-sp-ep2", "tp2-qwen3_5_text", "tp2-sp-ep2-gpt_oss", "tp2-lora:base", "tp2-images")
"""Layouts whose senders hold equal shares of everything."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("ranks", "layouts"),
    [
        pytest.param(2, OF_TWO, id="two ranks"),
        pytest.param(2, OF_TWO_MORE, id="two ranks, more models", marks=pytest.mark.long),
        pytest.param(4, OF_FOUR, id="four ranks", marks=pytest.mark.long),
    ],
)
async def test_ranks_export_what_one_rank_exports(ranks: int, layouts: tuple[str, ...]) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-W", "ignore", *launcher, "-m", "tests.reference.exports", *layouts),
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    found = [json.loads(line) for line in output.decode().splitlines() if line.startswith("{")]
    assert [each["layout"] for each in found] == list(layouts)
    for each in found:
        name = each["layout"]
        assert all(each[what] for what in ("same", "digests", "files", "checksums")), name
        assert max(each["peaks"]) <= LIMIT, name
        if name in BALANCED:
            assert len(each["senders"]) == 2, name
            assert max(each["sent"]) - min(each["sent"]) < each["largest"], name
        if name.endswith(":adapter"):
            assert each["senders"] == [0], name
