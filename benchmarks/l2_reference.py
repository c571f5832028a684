"""L2: optimizer steps of the Megatron learner against plain transformers and torch AdamW, on the same rows.

Loss and gradient norm of every step of a draw, in one process and in each layout of two, four and eight ranks that is
named, by each algorithm's loss, and with each of what else counts: recomputed log-probs under truncated weights, a
divergence in the loss and in the reward, the entropy, a teacher, a critic. It does not show bfloat16, CUDA or a model
that does not fit one rank.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from row import say, size, told

ROOT = Path(__file__).parents[1]
GOAL = 1e-5
LAYOUTS = {
    1: (
        *("dp", "dp:gspo", "dp:sapo", "dp:cispo", "dp:dual", "dp:ppo", "dp:opd"),
        *("dp:clip_cov", "dp:kl_cov", "dp:dppo_tv", "dp:dppo_kl"),
        *("dp:decoupled", "dp:normalized", "dp:kl", "dp:penalty", "dp:entropy", "dp-packed", "dp-lora", "dp-replay"),
        *("dp-tree", "dp-tree:gspo", "dp-tree:ppo", "dp-tree:kl", "dp-tree-replay", "dp-tree-lora"),
    ),
    2: (
        *("tp2", "tp2-sp", "pp2-tied", "dp", "cp2", "cp2-packed", "ep2", "tp2-sp-ep2-replay", "tp2-lora"),
        *("dp:gspo", "pp2:sapo", "pp2:cispo", "cp2:dual", "dp:ppo", "tp2:ppo", "pp2:opd"),
        *("dp:clip_cov", "cp2:clip_cov", "tp2:kl_cov", "pp2:dppo_tv", "tp2:dppo_kl", "dp:normalized"),
        *("dp:decoupled", "tp2:kl", "cp2:penalty", "tp2:entropy"),
        *("tp2-sp-tree", "pp2-tied-tree:sapo", "dp-tree:ppo", "ep2-tree:cispo", "tp2-sp-ep2-tree-replay"),
    ),
    4: ("tp2-pp2", "tp2-sp-ep2", "tp2-sp-cp2", "tp2-pp2:gspo", "tp2-sp-ep2:ppo", "tp2-pp2-tree"),
    8: ("tp2-pp2", "tp2-pp2:ppo"),
}
"""Ranks -> what they share, and by which objective they step, as tests.reference.layouts names it."""
STEPS, RANKS = size((6, tuple(LAYOUTS)), smallest=(1, (1,)))


def compared(ranks: int) -> list[dict[str, Any]]:
    """What tests.reference.layouts prints for the layouts of so many ranks."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *launcher, "-m", "tests.reference.layouts", str(STEPS), *LAYOUTS[ranks]]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
    return [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]


def worst(found: dict[str, Any]) -> float:
    """The largest difference: of losses absolute, of gradient norms relative."""
    losses = [abs(loss - wanted) for loss, wanted, _, _ in found["steps"]]
    norms = [abs(norm / wanted - 1) for _, _, norm, wanted in found["steps"]]
    return max(*losses, *norms)


def main() -> int:
    """Print one JSON line."""
    detail: dict[str, Any] = {"steps": STEPS}
    value = 0.0
    for ranks in RANKS:
        start = time.monotonic()
        found = compared(ranks)
        say(f"{ranks} ranks: {found} ({time.monotonic() - start:.0f} s)")
        for each in found:
            detail[f"{ranks} ranks, {each['layout']}"] = {"difference": worst(each), "weights_after": each["weights"]}
            value = max(value, worst(each))
    return told(id="L2", value=value, unit="difference", goal=GOAL, met=value <= GOAL, detail=detail)


if __name__ == "__main__":
    raise SystemExit(main())
