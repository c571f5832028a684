"""What `turnlog status` says of each recipe, by the run's index."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import io
import json
import os
import signal
import sys
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest

from tests.fakes.sessions import GroupName, Shape, whole_group
from tests.unit.consumers.conftest import SETTINGS, TrainedRun
from turnlog.consumers.index.indexer import build
from turnlog.consumers.index.reader import path_of
from turnlog.infra.log import Partition, partition_of
from turnlog.infra.roles.terminal import Terminal
from turnlog.names import ExitStatus
from turnlog.schemas import topics
from turnlog.schemas.events import SegmentSample, SessionStarted, TurnTreeAssembled, WeightVersionPublished
from turnlog.settings import RunSettings, Settings
from turnlog.verbs import status_page

RECIPES = ("calc", "maze")


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return dataclasses.replace(SETTINGS, run=RunSettings(id="run", directory=str(tmp_path)))


async def trained(settings: Settings, recipes: tuple[str, ...]) -> TrainedRun:
    """A run of four groups, of which each recipe has every other one, trained by weights that are newer."""
    run, rng = TrainedRun(settings), np.random.default_rng(0)
    await run.configure()
    [first] = [event for event in await run.read(topics.WEIGHTS) if isinstance(event, WeightVersionPublished)]
    for version in range(1, 6):
        checksums = {"w": f"{version}"}
        await run.append(
            [dataclasses.replace(first, event_id=f"v{version}", version=version, step=version, checksums=checksums)]
        )
    for number in range(4):
        unit = partition_of(f"group-{number}".encode(), settings.kafka.groups)
        floor = run.broker.log_of(Partition(topics.SESSIONS.name, unit)).end
        told = whole_group(GroupName("run", f"group-{number}", floor, 2), rng, turns=1 + number % 2, shape=Shape())
        recipe = recipes[number % len(recipes)]
        await run.append(
            dataclasses.replace(event, recipe=recipe) if isinstance(event, SessionStarted) else event for event in told
        )
    await run.fold()
    await run.draw()
    await build(run.role("index"), path_of(settings))
    return run


async def expected(run: TrainedRun) -> dict[str, dict[str, float]]:
    """The figures, from the trees, rows and manifests themselves."""
    recipes = {one.session_id: one.recipe for one in await run.read(topics.SESSIONS) if isinstance(one, SessionStarted)}
    trees = [one for one in await run.read(topics.TREES) if isinstance(one, TurnTreeAssembled)]
    samples = {one.sample_id: one for one in await run.read(topics.SAMPLES) if isinstance(one, SegmentSample)}
    seen: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for tree in trees:
        of = seen[recipes[tree.session_id]]
        assert tree.reward is not None
        of["reward"].append(tree.reward)
        of["pass_rate"].append(tree.reward >= 1)
        of["output_tokens"].append(tree.books.sampled)
        of["turns"].append(len(tree.nodes))
    for manifest in await run.read(topics.BATCHES):
        for row in manifest.samples:
            oldest = samples[row.sample_id].weight_version_min
            seen[recipes[row.session_id]]["lag"].append(manifest.lags[str(oldest)])
    return {recipe: {name: fmean(values) for name, values in of.items()} for recipe, of in seen.items()}


def shown(settings: Settings) -> str:
    """What is printed below a process of ours."""
    console = Terminal(file=io.StringIO(), width=400)
    found: dict[str, Any] = {"run": "run", "processes": [], "lag": {}, "warnings": {}, "views": {"unavailable": "none"}}
    status_page.tell(found | {"recipes": status_page.recipes(settings)}, settings, console)
    return str(console.file.getvalue())


async def test_each_recipe_has_a_row_of_what_its_sessions_came_to(settings: Settings) -> None:
    run = await trained(settings, RECIPES)
    found, figures = status_page.recipes(settings), await expected(run)
    assert {row["recipe"]: row["sessions"] for row in found["of"]} == dict.fromkeys(RECIPES, 4)
    for row in found["of"]:
        assert {name: row[name] for name in figures[row["recipe"]]} == pytest.approx(figures[row["recipe"]])
        assert row["lag"] > 0
    assert figures["calc"] != figures["maze"]
    lines = [line for line in shown(settings).splitlines() if any(recipe in line for recipe in RECIPES)]
    assert [line.split("│")[1].strip() for line in lines] == list(RECIPES)
    assert f"{figures['maze']['reward']:.3f}" in lines[1]


async def test_the_only_recipe_has_a_line(settings: Settings) -> None:
    run = await trained(settings, RECIPES[:1])
    of = (await expected(run))["calc"]
    assert (
        f"recipe calc, sessions 8, reward {of['reward']:.3f}, pass rate {of['pass_rate']:.2f}, "
        f"output tokens {of['output_tokens']:.0f}, turns {of['turns']:.1f}, lag {of['lag']:.2f}\n"
    ) in shown(settings)


def test_a_run_without_an_index_says_how_it_gets_one(settings: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    assert "`turnlog log index build` makes it" in shown(settings)
    assert status_page.once(settings, as_json=True) == 3
    assert "is not there" in json.loads(capsys.readouterr().out)["recipes"]["unavailable"]


async def test_status_is_shown_again_until_ctrl_c_each_time_as_it_is_then(settings: Settings, tmp_path: Path) -> None:
    env = {**os.environ, "TURNLOG_RUN_ID": "run", "TURNLOG_RUN_DIRECTORY": str(tmp_path)}
    heard = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell's background ignores it
    watching = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "turnlog.cli", "status", "--json", "--watch", "0.05", env=env,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, limit=1 << 20, preexec_fn=heard,
    )  # fmt: skip
    assert watching.stdout is not None
    try:
        async with asyncio.timeout(120):
            for _ in range(2):
                found = json.loads(await watching.stdout.readline())["recipes"]
                assert "turnlog log index build" in found["unavailable"]
            await trained(settings, RECIPES)
            while [row["recipe"] for row in found.get("of", ())] != list(RECIPES):
                found = json.loads(await watching.stdout.readline())["recipes"]
    finally:
        watching.send_signal(signal.SIGINT)
        _, complaints = await watching.communicate()
    assert complaints == b"", "no traceback"
    assert watching.returncode == ExitStatus.INTERRUPTED
