"""Strike roles and servers: `python benchmarks/chaos/run.py [--only assembler,loader] [--kills 20] [--record]`.

loop.py strikes every role and server of a whole run in every way. Each other script of this folder that takes --kills
kills one role under a load that is the worst for it. One JSON line on stdout for each (id, kills, lost, twice, skipped,
identical, ok, detail), everything else on stderr. Status 1 when one failed or printed no such line. `--record` replaces
their lines in docs/results/chaos.jsonl (../results.py).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # results is found by whatever is imported after this

from results import record

HERE = Path(__file__).resolve().parent
SHARED = frozenset(
    {
        "run",
        "servers",
        "sandbox_load",
        "sandbox_left",
        "scripted_engine",
        "scripted_receiver",
        "deployed",
        "loop",
        "previous",
        "dying",
        "dying_loader",
        "kept",
        "noting",
        "noting_server",
        "stepping",
        "scripted_loop",
        "soak",
        "soak_looks",
        "soak_page",
        "trends",
    }
)
LOOP = "loop"
TRL_LOOP = "trainer_trl_loop"
"""The whole loop with TRL as its trainer, which is killed: books and replay, which trainer_trl.py cannot show."""
TRL_ARGUMENTS = (
    "--only",
    "trainer",
    "--strikes",
    "kill",
    "--trainer",
    str(HERE.parents[1] / "examples/trl_trainer.py"),
)
TIMEOUT_S = 12 * 3600.0


def scripts(only: list[str]) -> dict[str, tuple[Path, list[str]]]:
    """Name -> script and its arguments; `only` picks some (`upgrades` means upgrades_trainer, too). What has no script
    of its own is struck in the loop."""
    found = {path.stem: path for path in sorted(HERE.glob("*.py")) if path.stem not in SHARED}
    known = {name: (path, list[str]()) for name, path in found.items()}
    known[TRL_LOOP] = HERE / "loop.py", list(TRL_ARGUMENTS)
    chosen = {name: how for name, how in known.items() if {name, name.partition("_")[0]} & {*only} or not only}
    in_loop = [name for name in only if name not in known]
    if in_loop or not only:
        chosen[LOOP] = HERE / "loop.py", ["--only", ",".join(in_loop)] if in_loop else []
    return chosen


def suffered(name: str, script: Path, arguments: list[str], kills: int) -> list[dict[str, Any]]:
    """The script's lines; of a broken one, a line that says so."""
    print(f"== {name}: {kills} kills", file=sys.stderr, flush=True)
    try:
        ran = subprocess.run(
            [sys.executable, str(script), "--kills", str(kills), *arguments],
            stdout=subprocess.PIPE, text=True, check=False, timeout=TIMEOUT_S,
        )  # fmt: skip
        lines: list[dict[str, Any]] = [json.loads(line) for line in ran.stdout.splitlines()]
        return lines or [{"id": name, "ok": False, "detail": {"error": f"no line; status {ran.returncode}"}}]
    except (subprocess.TimeoutExpired, json.JSONDecodeError) as error:
        return [{"id": name, "ok": False, "detail": {"error": f"{type(error).__name__}: {error}"}}]


def main() -> int:
    """Print every line as it comes."""
    parser = argparse.ArgumentParser(description="Strike roles and servers again and again.")
    parser.add_argument("--only", default="", metavar="ROLES", help="for example assembler,loader,broker")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--record", action="store_true", help="replace their lines in docs/results/chaos.jsonl")
    arguments = parser.parse_args()
    only = [name.strip() for name in arguments.only.split(",") if name.strip()]
    passed = True
    for name, (script, more) in scripts(only).items():
        for line in suffered(name, script, more, arguments.kills):
            passed = passed and bool(line.get("ok"))
            print(json.dumps(line), flush=True)
            if arguments.record:
                record("chaos", line)
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
