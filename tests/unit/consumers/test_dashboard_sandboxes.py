"""The page of tool calls: figures are those of the log, order and pages the server's, and what agents wrote is text."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest

from tests.fakes.memory_backend import Memory
from tests.fakes.stories import Story
from tests.fakes.told_run import ToldRun
from tests.unit.consumers.test_dashboard import HOSTILE, check_harmless, hostile, site
from turnlog.consumers.index import BadQuestion
from turnlog.consumers.index.reader import Index
from turnlog.infra.embedded.ports import free_ports
from turnlog.infra.roles.health import Health, QuietServer, application, uvicorn_config
from turnlog.infra.run_folder import Endpoints, write_endpoints
from turnlog.plugins.dashboard.sandboxes import WorkerPools as WorkersPools
from turnlog.plugins.dashboard.server import serving
from turnlog.sandbox_settings import LOCAL
from turnlog.sandbox_workers.pooling import SandboxPools
from turnlog.sandbox_workers.pooling.pool import Pool
from turnlog.sandbox_workers.protocol import Shape
from turnlog.schemas import topics
from turnlog.schemas.events import Event, ToolCallCompleted, ToolCallStarted, ToolStatus
from turnlog.schemas.events.tools import UNISOLATED
from turnlog.settings import StatusSettings

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
        "executions": str(len(starts)), "workers": "2", "retried": str(MANY), "without isolation": str(MANY),
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
        assert "no call ended this way" in (await client.get("/sandboxes?status=timeout")).text
        for asked in ("sort=output", "after=x", "after=WyJkdXJhdGlvbl9zIix0cnVlLDEsIngiXQ=="):
            answer = await client.get(f"/sandboxes?{asked}")
            assert (answer.status_code, "BadQuestion" in answer.text) == (400, True), asked


async def test_pools_are_those_that_workers_tell_of_and_who_does_not_answer_is_named(told: ToldRun) -> None:
    shape, (port, other, dead) = Shape(disk_bytes=1000), free_ports(3)
    pool = Pool(Memory(), slots=3, prewarm=1)
    await pool.prefill(shape)
    pool.count_leaks(2)
    worker = Health("sandbox")
    worker.expose("pools", SandboxPools(dict.fromkeys(LOCAL, pool), fallback=False).snapshot)
    addresses = tuple(f"http://127.0.0.1:{each}" for each in (port, other, dead))
    elsewhere = dataclasses.replace(told.settings, status=StatusSettings(health=addresses))
    async with AsyncExitStack() as stack:
        for at, health in ((port, worker), (other, Health("gateway"))):
            config = uvicorn_config(application(health), host="127.0.0.1", port=at)
            await stack.enter_async_context(QuietServer(config).running())
        url, _ = await stack.enter_async_context(serving(elsewhere, told.connect()))
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=url))
        assert 'data-load="/sandboxes/pools"' in (await client.get("/sandboxes")).text
        async with pool.lease(shape):
            page = (await client.get("/sandboxes/pools")).text
    await pool.close()
    check_harmless(page, "pools")
    cells = re.findall(r"<td[^>]*>(.*?)</td>", page)
    assert cells[:6] == [addresses[0], "memory", "3", "1", "0", "0"]
    assert cells[7:9] == ["2", "0"], "leaks, and starts that failed"
    assert (cells[10], cells[11].startswith(f"unknown: {addresses[2]}: ")) == (addresses[2], True)
    assert addresses[1] not in page, "a gateway has no pool"


async def test_workers_are_those_of_the_runs_supervisor_and_without_one_the_page_says_so(
    told: ToldRun, tmp_path: Path
) -> None:
    (dead,) = free_ports(1)
    pools = WorkersPools(tmp_path, (), lambda: 0.0)
    assert await pools.look() == []
    health = {"sandbox-0": f"http://127.0.0.1:{dead}", "runner-0": "http://127.0.0.1:1"}
    write_endpoints(tmp_path, Endpoints(kafka="", registry="", store="", health=health))
    assert await pools.look() == [], "one look serves all who ask within its time"
    (worker,) = await WorkersPools(tmp_path, ("http://127.0.0.1:1",)).look()
    assert (worker.name, worker.pools) == ("sandbox-0", ())
    assert worker.why
    async with site(told) as (client, _):
        assert "no worker addresses are known here" in (await client.get("/sandboxes/pools")).text


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
