"""The page of tool calls: figures are those of the log, order and pages the server's, and what agents wrote is text."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.stories import Story
from tests.fakes.told_run import ToldRun
from tests.unit.consumers.test_dashboard import HOSTILE, check_harmless, hostile, site
from turnlog.consumers.index import BadQuestion
from turnlog.consumers.index.reader import Index
from turnlog.schemas import topics
from turnlog.schemas.events import Event, ToolCallCompleted, ToolCallStarted, ToolStatus
from turnlog.schemas.events.tools import UNISOLATED

MANY = 60
"""Calls of a session: more than a page of them fail."""
ROW = re.compile(r'<tr><td><a class="id" href="/sessions/.*?</tr>', re.DOTALL)
END = re.compile(
    r'<a href="/sandboxes\?status=(\w+)&amp;reason=[^"]*">\1</a></td><td>.*?<td class="n">(\d+)<', re.DOTALL
)
SECONDS = re.compile(r'<td class="n">([\d.]+) s</td><td class="n">([\d.]+) s</td>')


def calling(story: Story, folder: Path) -> Iterator[Event]:
    """A hostile session, and calls whose sandboxes went away under them."""
    *first, rewarded, finished = hostile(story, folder)
    yield from first
    for number in range(MANY):
        _, records = story.called("bash", {}, "", status=ToolStatus.infra_error, seconds=number / 10)
        for each in records:
            if isinstance(each, ToolCallStarted):
                yield each
                yield dataclasses.replace(
                    each, event_id=f"{each.event_id}-again", attempt=2, worker=f"sandbox-1{UNISOLATED}"
                )
            elif isinstance(each, ToolCallCompleted):
                queued = (MANY - number) / 10
                yield dataclasses.replace(each, reason=HOSTILE[number % len(HOSTILE)], queue_s=queued)
            else:
                yield each
    yield rewarded
    yield finished


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> ToldRun:
    """A run with such a session."""
    found = ToldRun(tmp_path_factory.mktemp("told"))
    asyncio.run(found.tell(2, more=lambda story: calling(story, found.folder / "model")))
    return found


async def test_calls_are_counted_by_status_and_reason_as_the_log_has_them(told: ToldRun) -> None:
    results = await told.run.read(topics.TOOL_RESULTS)
    answers = [event for event in results if isinstance(event, ToolCallCompleted)]
    wanted = Counter((event.status.value, event.reason) for event in answers)
    async with site(told) as (client, _):
        page = (await client.get("/sandboxes")).text
    check_harmless(page, "sandboxes")
    counted = END.findall(page)
    assert Counter({status: sum(int(n) for of, n in counted if of == status) for status, _ in counted}) == Counter(
        event.status.value for event in answers
    )
    assert len(counted) == len(wanted)
    facts = dict(re.findall(r"<dt>([^<]+)</dt><dd>(?:<a [^>]+>)?([\d,]+)", page))
    starts = [event for event in results if isinstance(event, ToolCallStarted)]
    assert facts == {
        "executions": str(len(starts)), "of workers": "2", "begun again": str(MANY), "without isolation": str(MANY),
        "infrastructure failures": str(MANY),
    }  # fmt: skip


@pytest.mark.parametrize(("sort", "column"), [("duration_s", 0), ("queue_s", 1)])
async def test_pages_of_calls_are_sorted_and_go_on_where_the_last_one_ended(
    told: ToldRun, sort: str, column: int
) -> None:
    address, found, pages = f"/sandboxes?status=infra_error&sort={sort}", [], 0
    async with site(told) as (client, _):
        while address:
            page = (await client.get(address)).text
            check_harmless(page, address)
            found += [float(SECONDS.findall(row)[0][column]) for row in ROW.findall(page)]
            following = re.search(r'rel="next" href="([^"]+)"', page)
            address, pages = following[1].replace("&amp;", "&") if following else "", pages + 1
    assert pages == 2
    assert len(found) == MANY
    assert found == sorted(found, reverse=True)


async def test_a_status_with_its_reason_chooses_its_calls(told: ToldRun) -> None:
    async with site(told) as (client, _):
        everything = (await client.get("/sandboxes")).text
        links = re.findall(r'href="(/sandboxes\?status=infra_error&amp;reason=[^"]*)"', everything)
        assert len(links) == len(HOSTILE)
        page = (await client.get(links[0].replace("&amp;", "&"))).text
        assert len(ROW.findall(page)) in (MANY // len(HOSTILE), MANY // len(HOSTILE) + 1)
        assert "no call ended so" in (await client.get("/sandboxes?status=timeout")).text
        for asked in ("sort=output", "after=x", "after=WyJkdXJhdGlvbl9zIix0cnVlLDEsIngiXQ=="):
            answer = await client.get(f"/sandboxes?{asked}")
            assert (answer.status_code, "BadQuestion" in answer.text) == (400, True), asked


def test_calls_are_found_by_their_index_and_not_by_reading_outputs(told: ToldRun) -> None:
    with Index.open(told.index) as index:
        for asked in ("duration_s", "queue_s"):
            rows, after, _ = index.calls(sort=asked, limit=3)
            assert after is not None
            assert index.calls(sort=asked, after=after, limit=3)[0][0][asked] <= rows[-1][asked]
            plan = index.rows(
                "EXPLAIN QUERY PLAN SELECT place FROM tool_results_records a WHERE a.counts "
                f"ORDER BY a.{asked} DESC, a.place DESC LIMIT 51"
            )
            assert ["USING INDEX" in step["detail"] for step in plan] == [True], plan
        with pytest.raises(BadQuestion):
            index.calls(sort="output")
