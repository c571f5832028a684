"""Kill roles again and again: `python benchmarks/chaos/run.py [--only assembler,trainer] [--kills 20]`.

Every other script of this folder that takes --kills is one role's; it prints one JSON line on stdout (id, kills, lost,
twice, skipped, identical, ok, detail) and everything else on stderr. Status 1 when one failed or printed no such line.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SHARED = frozenset({"run", "servers", "sandbox_load", "sandbox_left", "scripted_engine"})
TIMEOUT_S = 3600.0


def scripts(only: list[str]) -> dict[str, Path]:
    """Role -> script; `only` picks some. Raises SystemExit for a role that has no script."""
    found = {path.stem: path for path in sorted(HERE.glob("*.py")) if path.stem not in SHARED}
    unknown = [name for name in only if name not in found]
    if unknown:
        raise SystemExit(f"no chaos run of {', '.join(unknown)}; there are {', '.join(found)}")
    return {name: found[name] for name in only or found}


def suffered(name: str, script: Path, kills: int) -> dict[str, Any]:
    """The script's line; of a broken one, a line that says so."""
    print(f"== {name}: {kills} kills", file=sys.stderr, flush=True)
    try:
        ran = subprocess.run(
            [sys.executable, str(script), "--kills", str(kills)],
            stdout=subprocess.PIPE, text=True, check=False, timeout=TIMEOUT_S,
        )  # fmt: skip
        line: dict[str, Any] = json.loads(ran.stdout.strip().splitlines()[-1])
    except (subprocess.TimeoutExpired, IndexError, json.JSONDecodeError) as error:
        return {"id": name, "ok": False, "detail": {"error": f"{type(error).__name__}: {error}"}}
    return line


def main() -> int:
    """Print every line as it comes."""
    parser = argparse.ArgumentParser(description="Kill roles again and again.")
    parser.add_argument("--only", default="", metavar="ROLES", help="for example assembler,trainer")
    parser.add_argument("--kills", type=int, default=20)
    arguments = parser.parse_args()
    only = [name.strip() for name in arguments.only.split(",") if name.strip()]
    passed = True
    for name, script in scripts(only).items():
        line = suffered(name, script, arguments.kills)
        passed = passed and bool(line.get("ok"))
        print(json.dumps(line), flush=True)
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
