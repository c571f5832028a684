"""The examples as people run them: against a real Kafka, registry and store, with figures that are known."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from turnlog.consumers.archive.archiver import flush
from turnlog.infra.event_log import EventLog
from turnlog.infra.role import opened
from turnlog.processors.core.assembler import GroupFold
from turnlog.processors.core.rules import fold_rules
from turnlog.processors.shells.examples import GroupName, Shape, whole_group
from turnlog.schemas.events import Event, RewardAssigned, SessionStarted
from turnlog.schemas.topics import TOPIC_OF
from turnlog.settings import FoldSettings, Settings

pytestmark = pytest.mark.kafka
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def group(run_id: str, name: str, recipe: str, rewards: list[float]) -> Iterator[Event]:
    """The records of a group and what the fold makes of them."""
    told = iter(rewards)
    named = GroupName(run_id, name, 0, len(rewards))
    fold = GroupFold(name, 0, fold_rules(FoldSettings(), run_id=run_id, settings_sha256=""))
    offsets: dict[str, int] = {}
    for event in whole_group(named, np.random.default_rng(len(name)), turns=2, shape=Shape()):
        if isinstance(event, SessionStarted):
            event = dataclasses.replace(event, recipe=recipe)
        if isinstance(event, RewardAssigned):
            event = dataclasses.replace(event, value=next(told))
        topic = TOPIC_OF[type(event).__name__].name
        offsets[topic] = offsets.get(topic, -1) + 1
        yield event
        yield from fold.apply(topic, offsets[topic], event)


async def append(events: EventLog, run_id: str, name: str, recipe: str, rewards: list[float]) -> None:
    await asyncio.gather(*[await events.submit(event) for event in group(run_id, name, recipe, rewards)])


async def told(settings: Settings, *groups: tuple[str, str, list[float]]) -> None:
    """Put groups on the log."""
    async with opened("test", settings) as tool:
        for name, recipe, rewards in groups:
            await append(tool.events, settings.run.id, name, recipe, rewards)


def environment(settings: Settings) -> dict[str, str]:
    return {
        **os.environ,
        "TURNLOG_KAFKA_BOOTSTRAP": settings.kafka.bootstrap,
        "TURNLOG_KAFKA_PREFIX": settings.kafka.prefix,
        "TURNLOG_REGISTRY_URL": settings.registry.url,
        "TURNLOG_STORE_ENDPOINT": settings.store.endpoint,
    }


def run(settings: Settings, folder: Path, script: str, *arguments: str) -> list[str]:
    """Lines that an example prints."""
    ran = subprocess.run(
        [sys.executable, str(EXAMPLES / script), *arguments],
        cwd=folder, env=environment(settings), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


FIRST = (("a", "calc", [1.0, 0.0, 0.0, 1.0]), ("bb", "search", [0.25, 0.5]))
LATER = ("ccc", "calc", [1.0, 1.0])


async def test_a_consumer_of_ten_lines_goes_on_where_it_was(live_settings: Settings, tmp_path: Path) -> None:
    await told(live_settings, *FIRST)
    example = "reward_per_recipe.py", "--once"
    assert await asyncio.to_thread(run, live_settings, tmp_path, *example) == ["calc 4 0.5", "search 2 0.375"]
    await told(live_settings, LATER)
    with closing(sqlite3.connect(tmp_path / "rewards.db")) as db:
        db.execute("UPDATE rewards SET recipe = 'kept' WHERE recipe = 'search'")
        db.commit()
    lines = await asyncio.to_thread(run, live_settings, tmp_path, *example)
    assert lines == ["calc 6 0.6667", "kept 2 0.375"], "the group's commits were not taken up"


async def test_a_consumer_without_turnlog_finds_the_same(live_settings: Settings, tmp_path: Path) -> None:
    await told(live_settings, *FIRST)
    places = live_settings.kafka.bootstrap, live_settings.registry.url, live_settings.kafka.prefix
    example = "reward_per_recipe_confluent.py", *places
    assert await asyncio.to_thread(run, live_settings, tmp_path, *example) == ["calc 4 0.5", "search 2 0.375"]
    await told(live_settings, LATER)
    assert await asyncio.to_thread(run, live_settings, tmp_path, *example) == ["calc 6 0.6667", "search 2 0.375"]


async def test_sql_over_the_archive_finds_the_same_when_the_topics_are_gone(
    live_settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await told(live_settings, *FIRST, LATER)
    async with opened("archive", live_settings) as role:
        assert await flush(role)
    store = live_settings.store
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", store.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", store.secret_key)
    example = "reward_per_recipe_duckdb.py", store.endpoint, store.bucket, live_settings.run.id
    nowhere = dataclasses.replace(live_settings, kafka=dataclasses.replace(live_settings.kafka, bootstrap="nowhere:1"))
    assert await asyncio.to_thread(run, nowhere, tmp_path, *example) == ["calc 6 0.6667", "search 2 0.375"]


def test_the_guide_shows_the_example_as_it_is() -> None:
    guide = (EXAMPLES.parent / "docs" / "attach.md").read_text()
    (shown,) = re.findall(r"^```py\n(.*?)^```", guide, re.MULTILINE | re.DOTALL)
    assert shown in (EXAMPLES / "reward_per_recipe.py").read_text()
    assert len(shown.splitlines()) == 10
    for path in EXAMPLES.glob("*.py"):
        assert f"(../examples/{path.name})" in guide
