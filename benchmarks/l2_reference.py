"""L2: optimizer steps of the Megatron learner against plain transformers and torch AdamW, on the same rows.

Loss and gradient norm of every step, in one process, and in two with tensor and with data parallelism. It does not show
bfloat16, CUDA or a model that does not fit one rank.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

from row import say, size, told

GOAL = 1e-5
LAYOUTS = {"one rank": (1, 1, 1), "tensor parallel 2": (2, 2, 1), "data parallel 2": (2, 1, 1)}
"""Name -> (ranks, tensor, pipeline)."""
STEPS, NAMES = size((6, tuple(LAYOUTS)), smallest=(1, ("one rank",)))


def compared(ranks: int, tensor: int, pipeline: int) -> dict[str, Any]:
    """What turnlog.trainer.reference prints for a layout."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *launcher, "-m", "turnlog.trainer.reference", str(tensor), str(pipeline), str(STEPS)]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(ran.stdout.strip().splitlines()[-1])
    return found


def worst(found: dict[str, Any]) -> float:
    """The largest difference: of losses absolute, of gradient norms relative."""
    losses = [abs(loss - wanted) for loss, wanted, _, _ in found["steps"]]
    norms = [abs(norm / wanted - 1) for _, _, norm, wanted in found["steps"]]
    return max(*losses, *norms)


def main() -> int:
    """Print one JSON line."""
    detail: dict[str, Any] = {"steps": STEPS}
    value = 0.0
    for name in NAMES:
        start = time.monotonic()
        found = compared(*LAYOUTS[name])
        say(f"{name}: {found} ({time.monotonic() - start:.0f} s)")
        detail[name] = {"difference": worst(found), "weights_after": found["weights"]}
        value = max(value, worst(found))
    return told(id="L2", value=value, unit="difference", goal=GOAL, met=value <= GOAL, detail=detail)


if __name__ == "__main__":
    raise SystemExit(main())
