"""Records of what was measured last: docs/results/bench.jsonl and chaos.jsonl, a JSON line for each id.

A line is what the script printed, with the machine, the commit and the date. `make bench` and `make chaos` replace the
lines of what they ran. docs/benchmarks.md and the figures of README.md are generated from these files (table.py).
"""

from __future__ import annotations

import datetime
import functools
import json
import os
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs/results"
GENERATED = (":!docs/results", ":!docs/benchmarks.md", ":!README.md")
"""What a measurement itself changes, which makes no other commit of it."""


def recorded(name: str, folder: Path = FOLDER) -> dict[str, dict[str, Any]]:
    """Return id -> line of `bench` or `chaos`."""
    path = folder / f"{name}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return {line["id"]: line for line in map(json.loads, lines)}


def record(name: str, line: dict[str, Any], folder: Path = FOLDER) -> None:
    """Replace the line of this id."""
    found = recorded(name, folder) | {line["id"]: line | provenance()}
    (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(found[key])}\n" for key in sorted(found)))


@functools.cache
def provenance() -> dict[str, str]:
    """Return the machine, the commit (with "+" if the tree has changes) and the date, as of the first call."""
    commit = _git("rev-parse", "--short", "HEAD") or "unknown"
    changed = "+" if _git("status", "--porcelain", "--untracked-files=no", "--", ".", *GENERATED) else ""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    gpu = "an NVIDIA GPU" if Path("/proc/driver/nvidia").exists() else "no GPU"
    return {
        "machine": f"{os.cpu_count()} cores, {memory:.0f} GB, {gpu}",
        "commit": commit + changed,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""
