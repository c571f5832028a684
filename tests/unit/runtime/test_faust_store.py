"""The tables of the live views on the worker's disk: what a restart finds again, and what it must not."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import faust
import pytest
from aiohttp.test_utils import TestClient, TestServer
from faust.events import Event
from faust.tables.recovery import Recovery
from faust.types import TP
from faust.types.tuples import Message

from turnlog.plugins.faust_views import MOVING, Offsets, is_alive, make_app
from turnlog.schemas.codec import Codec
from turnlog.schemas.events import ALL
from turnlog.settings import KafkaSettings, RunSettings, Settings

Opens = Callable[[Path], tuple[faust.App, Any]]


@pytest.fixture
async def sessions_of() -> AsyncIterator[Opens]:
    """A worker's app of a folder and its table of sessions; nothing is connected."""
    apps: list[faust.App] = []

    def opened(directory: Path) -> tuple[faust.App, Any]:
        run, kafka = RunSettings(id="r", directory=str(directory)), KafkaSettings(bootstrap="127.0.0.1:1")
        codec = Codec({name: number for number, name in enumerate(ALL)})
        apps.append(make_app(Settings(run=run, kafka=kafka), codec, directory))
        return apps[-1], apps[-1].tables["sessions"]

    yield opened
    for app in apps:
        for table in app.tables.values():
            await table.data.on_stop()


def changed(app: faust.App, table: Any, key: str, outcome: str | None, *, partition: int, offset: int) -> Event:
    """A record of the table's changelog; without an outcome the key is deleted."""
    place = table.changelog_topic.get_topic_name(), partition
    value = None if outcome is None else json.dumps({"rank": 0, "outcome": outcome}).encode()
    message = Message(*place, offset, 0.0, 0, {}, json.dumps(key).encode(), value, None, tp=TP(*place))
    return Event(app, key, value, {}, message)


def place(table: Any, partition: int) -> TP:
    return TP(table.changelog_topic.get_topic_name(), partition)


def test_a_restart_finds_rows_and_where_the_changelog_goes_on(tmp_path: Path, sessions_of: Opens) -> None:
    app, table = sessions_of(tmp_path)
    table.apply_changelog_batch([
        changed(app, table, "a", "open", partition=0, offset=3),
        changed(app, table, "b", "open", partition=1, offset=0),
        changed(app, table, "c", "open", partition=1, offset=1),
        changed(app, table, "a", "completed", partition=0, offset=4),
        changed(app, table, "c", None, partition=1, offset=2),
    ])  # fmt: skip
    _, again = sessions_of(tmp_path)
    assert [again.persisted_offset(place(again, number)) for number in range(3)] == [4, 2, None]
    assert dict(again.items()) == {"a": {"rank": 0, "outcome": "completed"}, "b": {"rank": 0, "outcome": "open"}}
    assert ("a" in again, "c" in again, len(again)) == (True, False, 2)
    assert again.data.outcomes() == {"completed": 1, "open": 1}


def test_the_store_is_made_known_once(tmp_path: Path, sessions_of: Opens) -> None:
    sessions_of(tmp_path / "one")
    build_offsets = Recovery._build_offsets
    sessions_of(tmp_path / "two")
    assert Recovery._build_offsets is build_offsets


async def test_what_an_agent_keeps_stands_under_the_partition_of_its_record(tmp_path: Path, sessions_of: Opens) -> None:
    app, table = sessions_of(tmp_path)
    stream = app.stream(app.channel())
    for number, key in enumerate(("a", "b")):
        record = changed(app, table, key, "open", partition=number, offset=0)
        stream._set_current_event(record)
        table.data[key] = json.loads(record.value)
    assert dict(table.items()) == {key: {"rank": 0, "outcome": "open"} for key in ("a", "b")}
    await table.on_recovery_completed({place(table, 1)}, set())
    assert list(table.keys()) == ["b"]


async def test_what_another_worker_has_now_is_forgotten(tmp_path: Path, sessions_of: Opens) -> None:
    app, table = sessions_of(tmp_path)
    table.apply_changelog_batch([
        changed(app, table, "a", "open", partition=0, offset=0), changed(app, table, "b", "open", partition=1, offset=0)
    ])  # fmt: skip
    await table.on_recovery_completed({place(table, 1)}, set())
    assert list(table.keys()) == ["b"]
    assert table.persisted_offset(place(table, 0)) is None
    assert table.persisted_offset(place(table, 1)) == 0


async def test_a_table_that_is_reset_reads_its_changelog_from_the_beginning(tmp_path: Path, sessions_of: Opens) -> None:
    app, table = sessions_of(tmp_path)
    table.apply_changelog_batch([changed(app, table, "a", "open", partition=0, offset=7)])
    table.reset_state()
    assert len(table) == 0
    assert table.persisted_offset(place(table, 0)) is None


async def test_tables_are_not_shown_while_they_are_read_again(tmp_path: Path, sessions_of: Opens) -> None:
    app, table = sessions_of(tmp_path)
    table.apply_changelog_batch([changed(app, table, "a", "open", partition=0, offset=0)])
    app.web.init_server()
    async with TestClient(TestServer(app.web.web_app)) as http:
        answer = await http.get("/views")
        assert (answer.status, await answer.json()) == (503, {"unavailable": MOVING})
        app.tables.recovery.completed.set()
        answer = await http.get("/views")
        assert (answer.status, (await answer.json())["sessions"]) == (200, {"open": 1})


def test_views_whose_tables_are_never_restored_are_not_alive() -> None:
    before = Offsets({"changelog": 3, "source": 5}, {"changelog": 9, "source": 5})
    advanced = Offsets({"changelog": 4, "source": 5}, before.ends)
    more = Offsets(before.positions, {"changelog": 9, "source": 6})
    assert is_alive(before, before, whole=True), "nothing more came"
    assert is_alive(before, advanced, whole=False)
    assert not is_alive(before, before, whole=False)
    assert not is_alive(before, more, whole=True)
    assert not is_alive(before, Offsets({}, {}), whole=True), "no partition is assigned"
