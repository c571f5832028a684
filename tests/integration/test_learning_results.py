"""What docs/results says of learning is what its records say, and can be taken again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs/results"


def asked(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks/learning.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def record(folder: Path, mode: str, finals: list[float]) -> None:
    """A run of seven steps for each seed."""
    path = folder / "runs.json"
    runs = json.loads(path.read_text()) if path.exists() else []
    for seed, final in enumerate(finals, 1):
        runs.append(
            {"recipe": "calc", "mode": mode, "seed": seed, "commit": "abc", "seconds": 60.0, "passed": True,
             "rewards": [0.5, 0.5, *[final] * 5]}
        )  # fmt: skip
    path.write_text(json.dumps(runs))


def test_the_page_is_what_the_records_say(tmp_path: Path) -> None:
    (tmp_path / "runs.json").write_bytes((RESULTS / "runs.json").read_bytes())
    done = asked("page", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "README.md").read_text() == (RESULTS / "README.md").read_text(), "run `make learning`"
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_every_recipe_rose_with_every_seed_and_modes_learn_alike() -> None:
    runs = json.loads((RESULTS / "runs.json").read_text())
    assert all(run["passed"] for run in runs)
    done = {(run["recipe"], run["mode"], run["seed"]) for run in runs}
    recipes, modes = (
        ("calc", "household", "question", "reasoning", "reasoning-tool", "repair", "my-game"),
        ("sync", "partial-async", "fully-async"),
    )
    each = {*((recipe, "sync") for recipe in recipes), *(("calc", mode) for mode in modes)}
    assert done == {(*one, seed) for one in each for seed in (1, 2, 3)}
    assert "| no |" not in (RESULTS / "README.md").read_text()


@pytest.mark.parametrize(
    ("others", "said"),
    [([0.86, 0.87, 0.88], "yes"), ([0.70, 0.71, 0.72], "no"), ([0.5, 0.8, 1.1], "yes")],
    ids=["near", "apart", "intervals-overlap"],
)
def test_a_mode_is_as_sync_within_a_distance_or_an_interval(tmp_path: Path, others: list[float], said: str) -> None:
    record(tmp_path, "sync", [0.89, 0.90, 0.91])
    record(tmp_path, "fully-async", others)
    assert asked("page", "--out", str(tmp_path)).returncode == 0
    rows = (tmp_path / "README.md").read_text().splitlines()
    sync, async_ = (next(row for row in rows if f"| {mode} |" in row) for mode in ("sync", "fully-async"))
    assert "0.500 | 0.900 ± 0.025 |" in sync, "Student's interval of three values a hundredth apart"
    assert async_.split("|")[-3].strip() == said


def test_an_unknown_run_is_refused_by_name() -> None:
    done = asked("run", "--only", "calc:sometimes")
    assert done.returncode == 2
    assert "no run calc:sometimes; there are calc:sync" in done.stderr


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_written_recipe_is_run_and_recorded_once(tmp_path: Path) -> None:
    command = ("run", "--only", "my-game:sync", "--seeds", "7", "--draws", "2", "--out", str(tmp_path))
    done = asked(*command)
    assert done.returncode == 0, done.stderr
    (run,) = json.loads((tmp_path / "runs.json").read_text())
    assert (run["recipe"], run["mode"], run["seed"], run["passed"]) == ("my-game", "sync", 7, True)
    assert len(run["rewards"]) == 2
    assert "done already" in asked(*command).stderr
