"""The calls in which a chaos run kills a process exist: a renamed one would show only after minutes of the long run."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

CHAOS = Path(__file__).parents[3] / "benchmarks/chaos"
sys.path += [str(CHAOS), str(CHAOS.parent)]  # its scripts import each other by their names


def test_the_calls_in_which_trainers_and_loaders_are_killed_exist() -> None:
    trainer, loader = (runpy.run_path(str(CHAOS / name)) for name in ("trainer.py", "dying_loader.py"))
    kinds = [kind for kind in trainer["all_kinds"](stored=True) if kind != trainer["START"]]
    calls = [call for kind in kinds for call in trainer["places"](kind)]
    calls += [loader["places"](kind) for kind in (*loader["FETCH"], *loader["SWAP"])]
    assert [f"{owner.__name__}.{name}" for owner, name in calls if not callable(getattr(owner, name, None))] == []
