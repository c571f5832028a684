"""What waits for each role on the page of the run, and what the page calls wrong."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import numpy as np

from tests.fakes.stories import Story, repair
from tests.fakes.told_run import ToldRun
from tests.unit.consumers.test_dashboard import check_harmless, site
from turnlog.consumers.lag import STANDS_S, ConsumerStallTimes, Lag, by_role, lag_of
from turnlog.infra.log import LogUnavailable, Partition
from turnlog.infra.roles.role import Role
from turnlog.plugins.alarms import LINES, STANDS
from turnlog.plugins.dashboard import harmless
from turnlog.plugins.dashboard.app import filters
from turnlog.plugins.dashboard.queues import Queue, Queues
from turnlog.plugins.dashboard.records import Records, Vocabulary
from turnlog.plugins.dashboard.server import serving

OPERATIONS = Path(__file__).parents[3] / "docs/operations.md"
PLACE = Partition("tasks", 0)


def lag(taken: int, end: int) -> Lag:
    return Lag("runner", "run.runner", PLACE, taken, end, end - taken)


def test_a_role_stands_for_as_long_as_what_waits_is_the_same_and_an_empty_queue_begins_anew() -> None:
    standing = ConsumerStallTimes()
    assert standing.look([lag(3, 3)], 0.0) == {}
    assert standing.look([lag(3, 5)], 100.0)["runner"][0] == 0.0, "the record came behind the look before"
    assert standing.look([lag(3, 9)], 160.0)["runner"][0] == 60.0
    assert standing.look([lag(4, 9)], 170.0)["runner"][0] == 0.0, "it took one"
    assert standing.look([lag(9, 9)], 180.0) == {}


async def waiting(told: ToldRun) -> None:
    """A session that nobody has folded."""
    story = Story(told.named(50, 1), 0, np.random.default_rng(1), told.words)
    await told.run.append(repair(story, told.folder / "model", reward=1.0))


async def test_queues_are_those_of_turnlog_lag_and_unknown_where_a_role_tells_none(tmp_path: Path) -> None:
    told = ToldRun(tmp_path)
    await told.tell(1)
    await waiting(told)
    role = told.run.role()
    wanted = by_role(await lag_of(role.log, role.settings))
    async with site(told) as (client, _):
        page = (await client.get("/queues")).text
    check_harmless(page, "queues")
    told_of = dict(re.findall(r'<tr><td>(\w+)</td><td class="n">([\d,]+|unknown)</td>', page))
    assert told_of["assembler"] == str(wanted["assembler"])
    assert wanted["assembler"] > 0
    assert told_of["batcher"] == str(wanted["batcher"])
    assert told_of["gateway"] == "unknown", "it has no queue on the log"
    assert told_of["trainer"] == "unknown", "no trainer of this run has committed anything"
    assert "without progress" not in page


async def test_a_role_that_stands_still_is_named_with_the_record_that_waits_and_the_line_of_operations(
    tmp_path: Path,
) -> None:
    told = ToldRun(tmp_path)
    await told.tell(1)
    await waiting(told)
    now = 0.0
    records = Records(told.index, Vocabulary(""), told.connect())
    queues = Queues(records, lambda: now)
    assert not any(one.stands for one in await queues.look())
    now = STANDS_S + 1
    stands = {one.role: one for one in await queues.look() if one.stands}["assembler"]
    assert stands.first is not None
    await records.close()
    pages = harmless.environment()
    pages.filters.update(filters())
    page = pages.get_template("queues.html").render(of=[stands], line=STANDS)
    where = stands.first[0]
    assert f'<a href="/records/{where.topic}/{where.number}/{stands.first[1]}">assembler has taken nothing' in page
    assert f"docs/operations.md: {', '.join(STANDS)}" in page


async def test_a_look_serves_all_who_ask_within_its_time(tmp_path: Path) -> None:
    told = ToldRun(tmp_path)
    await told.tell(1)
    now = 0.0
    records = Records(told.index, Vocabulary(""), told.connect())
    queues = Queues(records, lambda: now)
    first, second = await asyncio.gather(queues.look(), queues.look())
    assert first is second
    await waiting(told)
    assert await queues.look() is first
    now = told.settings.lag.every_s
    assert _of(await queues.look(), "assembler") > _of(first, "assembler")
    await records.close()


def _of(found: object, role: str) -> int:
    assert isinstance(found, list)
    (records,) = (one.records for one in found if isinstance(one, Queue) and one.role == role)
    assert records is not None
    return records


async def test_a_log_that_is_away_leaves_queues_unknown_and_the_page_whole(tmp_path: Path) -> None:
    told = ToldRun(tmp_path)
    await told.tell(1)

    @asynccontextmanager
    async def away() -> AsyncIterator[Role]:
        raise LogUnavailable("nobody answers at <kafka>")
        yield told.run.role()

    async with serving(told.settings, away) as (url, _), httpx.AsyncClient(base_url=url) as client:
        answer = await client.get("/queues")
        assert (answer.status_code, answer.json()["error"]) == (
            503,
            "unknown: LogUnavailable: nobody answers at <kafka>",
        )
        assert (await client.get("/")).status_code == 200
    await told.run.archive()
    async with serving(told.settings, lambda: _archived(told)) as (url, _), httpx.AsyncClient(base_url=url) as client:
        assert (await client.get("/queues")).json()["error"].startswith("unknown: ReadOnlyArchive")


@asynccontextmanager
async def _archived(told: ToldRun) -> AsyncIterator[Role]:
    yield await told.run.archived()


def test_what_the_page_calls_wrong_has_its_line_in_operations() -> None:
    sections = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", OPERATIONS.read_text(), re.MULTILINE | re.DOTALL))
    for section, fault in (*LINES.values(), STANDS):
        assert f"\n| {fault} |" in sections[section], (section, fault)
