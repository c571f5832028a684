"""The examples as people run them: against a real Kafka, registry and store, with figures that are known."""

from __future__ import annotations

import asyncio
import dataclasses
import json
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

from tests.addresses import variables
from tests.fakes.batches import append_batches
from tests.fakes.sessions import GroupName, SessionStory, Shape, whole_group
from turnlog.consumers.archiver import flush
from turnlog.infra.event_log import EventLog
from turnlog.infra.roles.role import open_role
from turnlog.processors.core.fold.group import GroupFold
from turnlog.processors.core.methods.rules import fold_rules
from turnlog.sandbox_workers import calls
from turnlog.schemas.events import Event, RewardAssigned, SandboxSpec, SessionStarted, ToolCallRequested, ToolStatus
from turnlog.schemas.ids import call_id, digest, turn_event_id
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
    async with open_role("test", settings) as tool:
        for name, recipe, rewards in groups:
            await append(tool.events, settings.run.id, name, recipe, rewards)


def environment(settings: Settings) -> dict[str, str]:
    return {
        **os.environ,
        **variables(settings),
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


async def test_a_short_consumer_goes_on_where_it_was(live_settings: Settings, tmp_path: Path) -> None:
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
    async with open_role("archive", live_settings) as role:
        assert await flush(role)
    store = live_settings.store
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", store.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", store.secret_key)
    example = "reward_per_recipe_duckdb.py", store.endpoint, store.bucket, live_settings.run.id
    nowhere = dataclasses.replace(live_settings, kafka=dataclasses.replace(live_settings.kafka, bootstrap="nowhere:1"))
    assert await asyncio.to_thread(run, nowhere, tmp_path, *example) == ["calc 6 0.6667", "search 2 0.375"]


async def test_a_stranger_finds_every_hash_and_id_where_the_guide_says(
    live_settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = live_settings.store
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", store.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", store.secret_key)
    async with open_role("test", live_settings) as tool:
        await append_batches(tool.events, tool.blobs, live_settings.run.id, 2)
        for event in turn_with_a_call(live_settings.run.id):
            await tool.events.append(event)
    places = live_settings.kafka.bootstrap, live_settings.registry.url, store.endpoint, store.bucket
    example = "check_without_turnlog.py", *places, live_settings.kafka.prefix
    assert await asyncio.to_thread(run, live_settings, tmp_path, *example) == [
        "2 batch files hash to what their manifests say",
        "1 turns have the ids that they should",
        "1 answered calls belong to a turn",
    ]


def turn_with_a_call(run_id: str) -> Iterator[Event]:
    """A turn whose response is large enough for the store, its call, the answer and that answer again."""
    story = SessionStory(GroupName(run_id, "g", 0, 1), 0, np.random.default_rng(0))
    completed, _ = story.turn(Shape())
    session, turn = completed.session_id, completed.turn
    call = call_id(session, turn.epoch, turn.index, 0, "agent")
    response = {"role": "assistant", "content": "x" * (1 << 20), "tool_calls": [{"id": call, "type": "function"}]}
    event_id = turn_event_id("TurnCompleted", session, turn.epoch, turn.index)
    yield dataclasses.replace(completed, event_id=event_id, response=json.dumps(response).encode())
    request = ToolCallRequested(
        event_id=digest("ToolCallRequested", call), run_id=run_id, group_id="g", session_id=session, floor=0,
        rollout_id="r", call_id=call, call_seq=0, tool="python", arguments=b"{}", sandbox=SandboxSpec(),
        workspace=None, deadline_s=9.0,
    )  # fmt: skip
    yield request
    done = calls.make_completed_event(
        request,
        calls.CallOutcome(execution=calls.unrun(ToolStatus.refused, "tool"), workspace=None),
        attempt=0,
        queue_s=0.0,
        worker="w",
    )
    yield done
    yield dataclasses.replace(done, cached=True)


def test_the_guide_shows_the_example_as_it_is() -> None:
    guide = (EXAMPLES.parent / "docs" / "attach.md").read_text()
    (shown,) = re.findall(r"^```py\n(.*?)^```", guide, re.MULTILINE | re.DOTALL)
    assert shown in (EXAMPLES / "reward_per_recipe.py").read_text()
    assert len(shown.splitlines()) < 20
    (hashing,) = re.findall(r"^```python\n.*?\n\n(.*?)^```", guide, re.MULTILINE | re.DOTALL)
    assert hashing in (EXAMPLES / "check_without_turnlog.py").read_text()
    pages = guide + (EXAMPLES.parent / "docs" / "trainers.md").read_text()
    for path in EXAMPLES.glob("*.py"):
        assert f"(../examples/{path.name})" in pages


@pytest.mark.parametrize(
    "example",
    ["reward_per_recipe_confluent.py", "reward_per_recipe_duckdb.py", "ten_questions.py", "check_without_turnlog.py"],
)
def test_an_example_without_arguments_says_how_it_is_called(example: str) -> None:
    done = subprocess.run([sys.executable, str(EXAMPLES / example)], capture_output=True, text=True)
    assert done.returncode == 1
    assert f"python examples/{example} " in done.stderr
    assert "Traceback" not in done.stderr
