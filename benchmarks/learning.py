"""Learning: every recipe with a tiny policy of its own, several seeds each, and one of them in every mode.

    python benchmarks/learning.py run [--only calc:sync,household:sync] [--seeds 1,2,3] [--draws N] [--out FOLDER]
    python benchmarks/learning.py page [--out FOLDER]

`run` is `turnlog demo` under the settings of the mode and those of the recipe, in draws of half its size, each seed
another policy, other demonstrations and another order of tasks. What a run came to is added to runs.json as it ends,
and a run that stands there is not done again. `page` draws the curves of it and writes README.md beside them.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from row import say
from scipy import stats

from turnlog.names import ExitStatus

ROOT = Path(__file__).resolve().parents[1]
GAME = "my-game"
"""What `turnlog recipe new` writes."""
SETTINGS = {
    "calc": "",
    "household": "configs/household.toml",
    "question": "configs/question.toml",
    "reasoning": "configs/reasoning.toml",
    "reasoning-tool": "configs/reasoning-tool.toml",
    "repair": "configs/repair.toml",
    GAME: f"{GAME}/settings.toml",
}
"""Recipe -> the file that it is trained with, beside that of the mode; the game's is written first."""
MODES = ("sync", "partial-async", "fully-async")
EVERYTHING = (*(f"{recipe}:sync" for recipe in SETTINGS), *(f"calc:{mode}" for mode in MODES[1:]))
LAST = 5
"""Steps whose mean reward a run is judged by."""
SHORTER = {
    "TURNLOG_BATCHER_PROMPTS_PER_DRAW": "8",
    "TURNLOG_VIEWS_ENABLED": "false",
    "TURNLOG_DASHBOARD_ENABLED": "false",
}
"""128 sessions a draw, and nothing that only looks on."""
OWN = {
    "calc": {"TURNLOG_FEEDER_DRAWS": "20"},
    "household": {"TURNLOG_FEEDER_DRAWS": "60"},
    "question": {"TURNLOG_FEEDER_DRAWS": "45"},
    "reasoning": {"TURNLOG_FEEDER_DRAWS": "30"},
    "reasoning-tool": {"TURNLOG_FEEDER_DRAWS": "30"},
    "repair": {"TURNLOG_FEEDER_DRAWS": "32", "TURNLOG_FEEDER_GROUP_SIZE": "8"},
}
"""Where draws of half the size take other numbers of them than the demo has. `repair` has three sandboxes a session: 64
sessions a draw."""
ALIKE = 0.05
"""Final means of modes that are no further apart do not differ."""


@dataclasses.dataclass(frozen=True)
class Run:
    """One run, and the mean reward of each of its steps."""

    recipe: str
    mode: str
    seed: int
    commit: str
    seconds: float
    passed: bool
    """Whether `turnlog demo` was content: the reward rose by what the recipe requires, the books balance, replay is
    identical."""
    rewards: list[float]

    @property
    def named(self) -> str:
        return f"{self.recipe}:{self.mode}"

    @property
    def final(self) -> float:
        return float(np.mean(self.rewards[-LAST:]))


def known(folder: Path) -> list[Run]:
    """The runs that are done."""
    path = folder / "runs.json"
    return [Run(**one) for one in json.loads(path.read_text())] if path.exists() else []


def keep(folder: Path, run: Run) -> None:
    """Add it, a line a run."""
    found = sorted([*known(folder), run], key=lambda one: (EVERYTHING.index(one.named), one.seed))
    lines = ",\n".join(json.dumps(dataclasses.asdict(one)) for one in found)
    (folder / "runs.json").write_text(f"[\n{lines}\n]\n")


def installed(directory: Path) -> Path:
    """The game as a package in a folder of its own, for PYTHONPATH."""
    site = directory / "site"
    subprocess.run([sys.executable, "-m", "turnlog.cli", "recipe", "new", GAME], cwd=directory, check=True)
    install = [ROOT / ".cache/bootstrap/bin/uv", "pip", "install", "--quiet", "--offline", "--no-deps"]
    where = ["--no-build-isolation", "--python", sys.executable, "--target", site]
    subprocess.run([*install, *where, directory / GAME], check=True)
    return site


def environment(recipe: str, seed: int, draws: int | None, directory: Path) -> dict[str, str]:
    """What a run is given beside its mode's file."""
    own = {"TURNLOG_FEEDER_SEED": str(seed), "TURNLOG_FEEDER_RECIPE": recipe}
    if recipe == GAME:
        own["PYTHONPATH"] = str(installed(directory))
    if SETTINGS[recipe]:
        root = directory if recipe == GAME else ROOT
        for section, values in tomllib.loads((root / SETTINGS[recipe]).read_text()).items():
            own |= {f"TURNLOG_{section}_{key}".upper(): str(value) for key, value in values.items()}
    own |= SHORTER | OWN.get(recipe, {})
    if draws is not None:
        own["TURNLOG_FEEDER_DRAWS"] = str(draws)
    return own | {"TURNLOG_TRAINER_WARM_START_SEED": str(seed), "TURNLOG_TRAINER_SEED": str(seed)}


def run(named: str, seed: int, draws: int | None, commit: str) -> Run:
    """From nothing to the report, of a demo that was not content, too. Raises CalledProcessError where it broke."""
    recipe, mode = named.split(":")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="turnlog-learning-") as kept:
        directory = Path(kept)
        own = environment(recipe, seed, draws, directory)
        own |= {"TURNLOG_RUN_ID": f"{recipe}-{mode}-{seed}", "TURNLOG_RUN_DIRECTORY": str(directory / "run")}
        command = [sys.executable, "-m", "turnlog.cli", "--settings", str(ROOT / "configs" / f"{mode}.toml"), "demo"]
        done = subprocess.run(command, env=os.environ | own, cwd=directory, stdout=sys.stderr, check=False)
        if done.returncode not in {ExitStatus.DONE, ExitStatus.DIFFERS}:
            done.check_returncode()
        report: dict[str, Any] = json.loads((directory / "run" / "report.json").read_text())
    seconds = round(time.monotonic() - began, 1)
    return Run(recipe, mode, seed, commit, seconds, done.returncode == ExitStatus.DONE, report["rewards"])


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and half the 95 % interval around it (Student 1908) over seeds."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return mean, float("inf")
    return mean, float(stats.t.ppf(0.975, len(values) - 1) * stats.sem(values))


def alike(some: Sequence[float], others: Sequence[float]) -> bool:
    """Whether final means differ by no more than ALIKE, or their intervals overlap."""
    (one, half), (other, half_other) = interval(some), interval(others)
    return abs(one - other) <= max(ALIKE, half + half_other)


def table(found: Sequence[Run]) -> Iterator[str]:
    """Of the page."""
    yield "| recipe | mode | seeds | first two steps | last five, mean over seeds | of each seed | as sync | passed |"
    yield "|---|---|---|---|---|---|---|---|"
    finals = {name: [one.final for one in group] for name, group in by_name(found)}
    for name, group in by_name(found):
        recipe, mode = name.split(":")
        mean, half = interval(finals[name])
        first = np.mean([one.rewards[:2] for one in group])
        enough = mode != "sync" and len(group) > 1
        same = "" if not enough else "yes" if alike(finals[name], finals[f"{recipe}:sync"]) else "no"
        each = ", ".join(f"{final:.3f}" for final in finals[name])
        means = f"{first:.3f} | {mean:.3f}{f' ± {half:.3f}' if len(group) > 1 else ''} | {each}"
        yield f"| `{recipe}` | {mode} | {len(group)} | {means} | {same} | {sum(one.passed for one in group)} |"


def by_name(found: Sequence[Run]) -> list[tuple[str, list[Run]]]:
    """In order of EVERYTHING."""
    return [(name, list(group)) for name, group in itertools.groupby(found, key=lambda one: one.named)]


def draw(found: Sequence[Run], path: Path) -> None:
    """A plot a recipe: each seed thin, the mean over seeds of each mode thick."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    recipes = list(dict.fromkeys(one.recipe for one in found))
    figure, plots = pyplot.subplots(1, len(recipes), figsize=(4.2 * len(recipes), 3.4), dpi=120, squeeze=False)
    for axes, recipe in zip(plots[0], recipes, strict=True):
        for color, (name, group) in enumerate(by_name([one for one in found if one.recipe == recipe])):
            curves = np.array([one.rewards for one in group])
            steps = np.arange(1, curves.shape[1] + 1)
            axes.plot(steps, curves.T, color=f"C{color}", linewidth=0.6, alpha=0.5)
            axes.plot(steps, curves.mean(0), color=f"C{color}", label=name.partition(":")[2])
        axes.set(title=recipe, xlabel="optimizer step", ylabel="mean reward", ylim=(0, 1.02))
        axes.grid(visible=True, alpha=0.3)
        axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


PAGE = """# What recipes learn

Written by `python benchmarks/learning.py page` from [runs.json](runs.json), which holds the mean reward of every step.

{table}

± is Student's 95 % interval over seeds. A mode is as `sync` is where their means are within {alike} of each other, or
their intervals overlap. Passed: the demo found that the reward rose by what the recipe requires (`calc` 0.25, sources
of reasoning-gym 0.15), that the books balance and that replay is identical.
A draw has 128 sessions, of `repair` 64. Of a seed are the policy's random weights, its demonstrations, and the order of
tasks; what is sampled differs in every run.

Steps: {steps}. Taken at {commits} on two shared cores, {minutes:.0f} minutes in all.

![mean reward by optimizer step](curves.png)

```console
make learning
make learning ONLY=calc:sync SEEDS=1
```

Runs that runs.json has are not done again: take its lines out, or give another folder, `OUT=runs/learning`.
"""


def page(folder: Path) -> str:
    """README.md, from what runs.json says."""
    found = known(folder)
    steps = ", ".join(f"{recipe} {len(one.rewards)}" for recipe, one in {one.recipe: one for one in found}.items())
    return PAGE.format(
        table="\n".join(table(found)),
        alike=ALIKE,
        steps=steps,
        commits=", ".join(sorted({one.commit for one in found})),
        minutes=sum(one.seconds for one in found) / 60,
    )


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description="Train recipes with several seeds, and state what they came to.")
    parser.add_argument("verb", choices=("run", "page"))
    parser.add_argument("--only", default=",".join(EVERYTHING), help="RECIPE:MODE,...")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--draws", type=int, help="in place of the recipe's")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    if asked.verb == "page":
        draw(known(asked.out), asked.out / "curves.png")
        (asked.out / "README.md").write_text(page(asked.out))
        return 0
    wanted = [name for name in asked.only.split(",") if name]
    if unknown := [name for name in wanted if name not in EVERYTHING]:
        parser.error(f"no run {', '.join(unknown)}; there are {', '.join(EVERYTHING)}")
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True).strip()
    for seed, named in itertools.product([int(seed) for seed in asked.seeds.split(",")], wanted):
        if (named, seed) in {(one.named, one.seed) for one in known(asked.out)}:
            say(f"{named}, seed {seed}: done already")
            continue
        done = run(named, seed, asked.draws, commit)
        keep(asked.out, done)
        say(f"{named}, seed {seed}: {done.rewards[0]:.3f} to {done.final:.3f} in {done.seconds:.0f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
