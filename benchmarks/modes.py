"""MODES: the closed loop under configs/sync.toml, partial-async.toml and fully-async.toml, a few steps of each.

For each mode the largest lag in its manifests, steps per second, samples dropped by reason and the share of time that
the trainer waited; value is the last mode. Engine, trainer and tools share the machine's cores and the
model is tiny, so the rates say little about other machines, and nothing about how fast the policy learns per step.

    python benchmarks/modes.py [SETTINGS]       # SETTINGS: only this run, which is up and trained, under its one mode
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from row import say, told

from turnlog.consumers import figures
from turnlog.infra.history import all_events, events
from turnlog.infra.roles.role import open_role
from turnlog.schemas import topics
from turnlog.settings import Settings, load

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
MODES = ("sync", "partial-async", "fully-async")
DRAWS = 8
SMALL = {
    "TURNLOG_FEEDER_DRAWS": str(DRAWS),
    "TURNLOG_FEEDER_GROUP_SIZE": "4",
    "TURNLOG_BATCHER_PROMPTS_PER_DRAW": "4",
    "TURNLOG_TRAINER_WARM_START_STEPS": "120",
    "TURNLOG_TRAINER_THREADS": "1",
    "TURNLOG_VIEWS_ENABLED": "false",
}
"""What makes a run short; the modes differ in nothing else than their files."""
TIMEOUT_S = 560.0


def looped(mode: str, directory: Path) -> dict[str, Any]:
    """One run from `turnlog up` to `turnlog down`. Raises CalledProcessError with what a verb said."""
    environment = os.environ | SMALL | {"TURNLOG_RUN_ID": mode, "TURNLOG_RUN_DIRECTORY": str(directory / mode)}
    kept = directory / mode / "settings.toml"
    turnlog(CONFIGS / f"{mode}.toml", "up", environment)
    try:
        turnlog(kept, "run", dict(os.environ))
        return asyncio.run(measured(load(kept, {})))
    finally:
        turnlog(kept, "down", dict(os.environ))


def turnlog(settings: Path, verb: str, environment: dict[str, str]) -> None:
    """Run a verb; its output goes to stderr. Raises CalledProcessError, TimeoutExpired."""
    command = [sys.executable, "-m", "turnlog.cli", "--settings", str(settings), verb]
    subprocess.run(command, env=environment, stdout=sys.stderr, check=True, timeout=TIMEOUT_S)


async def measured(settings: Settings) -> dict[str, Any]:
    """What the topics of the run say."""
    async with open_role("bench", settings) as role:
        manifests = await all_events(role, topics.BATCHES)
        steps = [(record.timestamp_ms, event) async for record, event in events(role, topics.STEPS)]
        total = await figures.read_levels(role)
    formed = [manifest for manifest in manifests if hasattr(manifest, "max_lag")]
    stamps = [stamp for stamp, _ in steps]
    waited = [event.seconds.get("wait", 0.0) for _, event in steps[1:]]
    return {
        "max_lag_allowed": settings.batcher.max_lag,
        "max_lag_seen": max(manifest.max_lag for manifest in formed),
        "lags": [manifest.max_lag for manifest in formed],
        "steps": len(steps),
        "steps_per_s": (len(steps) - 1) / (stamps[-1] - stamps[0]) * 1000,
        "trainer_waited_share": sum(waited) / (stamps[-1] - stamps[0]) * 1000,
        "batches_skipped": len(manifests) - len(formed),
        "samples_dropped": dict(Counter(row.reason for manifest in manifests for row in manifest.dropped)),
        "books_balance": total.balance,
    }


def fine(found: dict[str, Any]) -> bool:
    """The lag is within the setting, was really there where it is allowed, and no token was lost."""
    seen, allowed = found["max_lag_seen"], found["max_lag_allowed"]
    return seen <= allowed and (seen > 0) is (allowed > 0) and bool(found["books_balance"])


def every_mode() -> dict[str, dict[str, Any]]:
    """Mode -> what one run of it measured."""
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="turnlog-modes-") as directory:
        for mode in MODES:
            start = time.monotonic()
            found[mode] = looped(mode, Path(directory))
            say(f"{mode}: {found[mode]} ({time.monotonic() - start:.0f} s)")
    return found


def main() -> int:
    """Print one JSON line."""
    given = [load(Path(name), {}) for name in sys.argv[1:]]
    found = {run.run.id: asyncio.run(measured(run)) for run in given} or every_mode()
    last = list(found)[-1]
    return told(
        id="MODES", value=found[last]["steps_per_s"], unit=f"steps/s {last}", goal=None, rate=True,
        met=all(fine(each) for each in found.values()), detail={"draws": DRAWS, **found},
    )  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
