"""Run the benchmarks, one after another: `python benchmarks/run.py [--only G1,T1] [--smallest | --record]`.

Every script `<id>_<name>.py` of this folder, and each of `NAMED`, prints one line (row.py) on stdout and everything
else on stderr. Status 1 when one missed its goal, broke or printed no such line. `--smallest` shows that they run, and
measures nothing. `--record` replaces their lines in docs/results/bench.jsonl (results.py).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from results import record
from row import SIZE, SMALLEST

HERE = Path(__file__).resolve().parent
SCRIPT = re.compile(r"([a-z]+\d+)_\w+\.py")
NAMED = {name: HERE / f"{name.lower()}.py" for name in ("MODES", "LOOP", "SCALE", "COST", "ENV", "TREE")}
NAMED["T2-VLLM"] = HERE / "vllm_gateway.py"
"""Scripts that measure no numbered goal, or one that has a script already."""
TIMEOUT_S = 1800.0


def scripts(only: list[str]) -> dict[str, Path]:
    """Id -> script, in order of id; `only` picks some. Raises SystemExit for an id that has no script."""
    found = NAMED | {match[1].upper(): path for path in HERE.iterdir() if (match := SCRIPT.fullmatch(path.name))}
    unknown = [name for name in only if name not in found]
    if unknown:
        raise SystemExit(f"no benchmark {', '.join(unknown)}; there are {', '.join(sorted(found, key=in_order))}")
    return {name: found[name] for name in sorted(only or found, key=in_order)}


def in_order(name: str) -> tuple[str, int]:
    """G2 before G10."""
    letters = name.rstrip("0123456789")
    return letters, int(name[len(letters) :] or 0)


def measured(name: str, script: Path) -> dict[str, Any]:
    """The script's line; of a broken one, a line that says so."""
    print(f"== {name}: {script.name}", file=sys.stderr, flush=True)
    try:
        ran = subprocess.run(
            [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, check=False, timeout=TIMEOUT_S
        )
        line: dict[str, Any] = json.loads(ran.stdout.strip().splitlines()[-1])
    except (subprocess.TimeoutExpired, IndexError, json.JSONDecodeError) as error:
        return {"id": name, "ok": False, "detail": {"error": f"{type(error).__name__}: {error}"}}
    return line


def main() -> int:
    """Print every line as it comes."""
    parser = argparse.ArgumentParser(description="Run the benchmarks one after another.")
    parser.add_argument("--only", default="", metavar="IDS", help="for example G1,T1")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--smallest", action="store_true", help="show that they run, measure nothing")
    how.add_argument("--record", action="store_true", help="replace their lines in docs/results/bench.jsonl")
    asked = parser.parse_args()
    if asked.smallest:
        os.environ[SIZE] = SMALLEST
    only = [name.strip().upper() for name in asked.only.split(",") if name.strip()]
    passed = True
    for name, script in scripts(only).items():
        line = measured(name, script)
        passed = passed and bool(line.get("ok"))
        print(json.dumps(line), flush=True)
        if asked.record:
            record("bench", line)
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
