"""`turnlog erase` over the log in memory: the order of its steps, its question, and what it says."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.fakes.memory_log import MemoryLog
from tests.unit.consumers.test_erasure import PLANTED, Planted, erased_of, open_group, rows_of
from turnlog.access_settings import AccessSettings
from turnlog.consumers.datasets.manifest import NotADataset
from turnlog.consumers.erasure import NotErasable
from turnlog.consumers.index.indexer import build, main
from turnlog.infra.access.audit import os_user
from turnlog.infra.roles.role import Role
from turnlog.schemas import topics
from turnlog.schemas.events import AccessAudited, SessionErased, SessionFinished, SessionKeyErased
from turnlog.settings import IndexSettings
from turnlog.verbs.erase import erase_session


def arguments(session: str, **named: object) -> argparse.Namespace:
    given: dict[str, object] = {"dry_run": False, "yes": True, "by": "", "dataset": [], "json": False}
    return argparse.Namespace(session=session, **(given | named))


@pytest.fixture
async def told(tmp_path: Path) -> Planted:
    """A run in which a session said what must not be found later, with its index and a dataset."""
    found = await Planted.tell(tmp_path)
    made = found.made
    made.settings = dataclasses.replace(
        made.settings, access=AccessSettings(audit=True), index=IndexSettings(path=str(found.index))
    )
    made.wait()
    return found


@contextlib.asynccontextmanager
async def command(told: Planted) -> AsyncIterator[Role]:
    """The role of the command, which writes."""
    log = MemoryLog(told.made.broker)
    async with log.appender() as appender:
        yield told.made.role("erase", log, appender)


async def audited(told: Planted) -> list[str]:
    return [event.form for event in await told.made.read(topics.AUDIT) if isinstance(event, AccessAudited)]


async def erasures(told: Planted) -> list[SessionErased]:
    return [event for event in await told.made.read(topics.SESSIONS) if isinstance(event, SessionErased)]


async def test_it_removes_rows_and_index_and_says_who_did_it(
    told: Planted, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOGNAME", "somebody else")
    async with command(told) as role:
        found = await erase_session(role, arguments(told.session, dataset=[told.dataset]), None)
    assert found[f"rows of {told.dataset}"] == 1
    assert found["waiting"] == []
    assert told.files() == set()
    assert told.objects() == []
    assert [event.by for event in await erasures(told)] == [os_user()]
    assert await audited(told) == ["erase"]
    assert PLANTED.decode() not in capsys.readouterr().out


async def test_the_audit_record_is_written_before_anything_is_erased(told: Planted) -> None:
    async with command(told) as role:
        await erase_session(role, arguments(told.session, dataset=[told.dataset]), None)
    times: dict[str, int] = {}
    for entry in (entry for log in told.made.broker.logs.values() for entry in log.entries):
        if entry.record is not None:
            name = dict(entry.record.headers).get("record", b"").decode()
            times.setdefault(name, entry.record.timestamp_ms)
    written = [AccessAudited.__name__, SessionErased.__name__, SessionKeyErased.__name__]
    assert sorted(written, key=lambda name: times[name]) == written


async def test_nothing_is_changed_by_a_dry_run_a_refusal_or_a_wrong_dataset(told: Planted, tmp_path: Path) -> None:
    before, files = rows_of(told.dataset), told.files()
    await told.made.append([event for event in open_group(told.made, "open") if not isinstance(event, SessionFinished)])
    unfinished = open_group(told.made, "open")[0].session_id
    async with command(told) as role:
        named = await erase_session(role, arguments(told.session, dry_run=True, dataset=[told.dataset]), None)
        with pytest.raises(NotErasable, match="has not finished"):
            await erase_session(role, arguments(unfinished, dataset=[told.dataset]), None)
        with pytest.raises(NotErasable, match="no terminal"):
            await erase_session(role, arguments(told.session, yes=False, dataset=[told.dataset]), None)
        with pytest.raises(NotADataset):
            await erase_session(role, arguments(told.session, dataset=[told.dataset, tmp_path / "none"]), None)
    assert named["objects"]
    assert rows_of(told.dataset) == before
    assert told.files() == files
    assert await audited(told) == []
    assert await erasures(told) == []


async def test_it_erases_only_if_the_id_of_the_session_is_typed(told: Planted) -> None:
    async with command(told) as role:
        with pytest.raises(NotErasable, match="'yes' is not"):
            await erase_session(role, arguments(told.session, yes=False), lambda _: "yes")
        assert await erasures(told) == []
        await erase_session(role, arguments(told.session, yes=False), lambda question: f" {question.split()[1]}\n")
    assert len(await erasures(told)) == 1


async def test_it_waits_until_a_running_indexer_has_noticed(told: Planted) -> None:
    role = told.made.role("index")
    running = asyncio.create_task(main(role))
    try:
        async with asyncio.timeout(60):
            while not role.health.works:  # noqa: ASYNC110 - it offers a flag, no event
                await asyncio.sleep(0.01)
        async with command(told) as erasing:
            await erase_session(erasing, arguments(told.session), None)
        assert told.session in erased_of(told.index)
    finally:
        role.stopping.set()
        await running
    await build(told.made.role("index"), told.index)
    assert told.files() <= {"data"}, "but for the dataset"
