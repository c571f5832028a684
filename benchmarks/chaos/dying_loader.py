"""A loader that dies in the middle of a call of a kind: `python benchmarks/chaos/dying_loader.py KIND SEED`.

The n-th call of that kind starts a timer within the time that the one before took, and nobody outlives its end.
"""

from __future__ import annotations

import random
import sys
from typing import Any

from dying import doom

FETCH = ("rebuild", "download", "hash", "seal")
SWAP = ("load", "acknowledge", "continue", "pause")
LATEST = 3
"""Call of its kind that a process dies in."""


def places(kind: str) -> tuple[Any, str]:
    """What is called while the loader does that: (owner, name)."""
    from turnlog.consumers.loader.engine_status import EngineStatus
    from turnlog.infra.engines.sglang import SGLangControl
    from turnlog.infra.s3 import S3Blobs
    from turnlog.infra.tensors import versions

    return {
        "download": (S3Blobs, "get_file"),
        "hash": (versions.Verification, "hash_file"),
        "rebuild": (versions, "rebuilt"),
        "seal": (versions, "seal"),
        "pause": (SGLangControl, "pause"),
        "load": (SGLangControl, "load"),
        "continue": (SGLangControl, "resume"),
        "acknowledge": (EngineStatus, "say"),
    }[kind]


def doomed(kind: str, seed: int) -> int:
    """Be a loader that dies in the middle of a call of that kind; it always does."""
    from turnlog.cli import main

    rng = random.Random(seed)
    doom(*places(kind), rng.randint(2, LATEST), rng.random())
    return main(["role", "loader"])


if __name__ == "__main__":
    raise SystemExit(doomed(sys.argv[1], int(sys.argv[2])))
