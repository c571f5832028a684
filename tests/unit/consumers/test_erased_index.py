"""An indexer that is busy, or whose topics are pruned, rids its file of an erased session like any other."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest

from tests.fakes.sessions import Shape
from tests.unit.consumers.test_erased_folds import group_of
from tests.unit.consumers.test_erasure import SealedRun, erased_of, trained_session
from tests.unit.consumers.test_index import content
from turnlog.consumers.index import BusyIndex, IndexBehind
from turnlog.consumers.index.indexer import build, main, opened_writer
from turnlog.consumers.index.reader import Index
from turnlog.infra.log import Partition
from turnlog.infra.session_keys import REFRESH_S
from turnlog.processors.core.fold_versions import FOLD_VERSION
from turnlog.schemas import topics
from turnlog.settings import IndexSettings


async def test_an_indexer_that_reads_new_sessions_all_the_time_notices_an_erasure(tmp_path: Path) -> None:
    """Each of them makes it read the keys, so that they are never due."""
    made, path = await SealedRun.begin(), tmp_path / "index.sqlite"
    await made.good_days(groups=2)
    session = await trained_session(made)
    await build(made.role("index"), path)
    role = made.role("index")
    settings = dataclasses.replace(role.settings, index=IndexSettings(path=str(path)))
    role = dataclasses.replace(role, settings=settings)
    running = asyncio.create_task(main(role))
    try:
        async with asyncio.timeout(30):
            while not role.health.works:
                await made.broker.changed(0.02)
        await made.erase(session)
        async with asyncio.timeout(REFRESH_S - 2):
            number = 50
            while session not in erased_of(path):
                await made.append(group_of(Shape(), number := number + 1))
                with (
                    pytest.raises(BusyIndex),
                    opened_writer(path, "run", FOLD_VERSION, role.events.codec),
                ):
                    pytest.fail("another indexer got the file")
                await made.broker.changed(0.1)
    finally:
        role.stopping.set()
        await running
    with Index.open(path) as index:
        view = index.session(session)
        assert view is not None


async def test_the_index_of_a_pruned_run_is_built_anew_from_the_archive(tmp_path: Path) -> None:
    made, path, other = await SealedRun.begin(), tmp_path / "index.sqlite", tmp_path / "other.sqlite"
    await made.good_days(groups=3)
    session = await trained_session(made)
    await build(made.role("index"), path)
    await made.archive()
    await made.erase(session)
    await build(made.role("index"), other)
    for number in range(made.settings.kafka.groups):
        made.broker.truncate(Partition(topics.TURNS.name, number), 1)
    await build(made.role("index"), path)
    assert session in erased_of(path)
    assert content(path) == content(other)
    with Index.open(path) as index:
        view = index.session(session)
        assert view is not None
        assert view.row.erased_by == "an operator"


async def test_without_an_archive_the_index_of_a_pruned_run_says_what_is_missing(tmp_path: Path) -> None:
    made = await SealedRun.begin()
    await made.good_days(groups=2)
    for number in range(made.settings.kafka.groups):
        made.broker.truncate(Partition(topics.TURNS.name, number), 1)
    with pytest.raises(IndexBehind, match="--from archive"):
        await build(made.role("index"), tmp_path / "index.sqlite")
