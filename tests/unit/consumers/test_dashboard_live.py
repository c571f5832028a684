"""Live pages of the dashboard: told of what is new, as many as there is room for."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from starlette.requests import ClientDisconnect
from starlette.types import Message

from tests.fakes.stories import Story, repair
from tests.fakes.told_run import ToldRun
from tests.unit.consumers.test_dashboard import site
from turnlog.consumers.index import NoIndex
from turnlog.consumers.index.reader import AsOf
from turnlog.plugins.dashboard import CachedQuery, app
from turnlog.plugins.dashboard.app import LivePageStream
from turnlog.plugins.dashboard.drawing import clock


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> ToldRun:
    """A run of one group."""
    found = ToldRun(tmp_path_factory.mktemp("told"))
    asyncio.run(found.tell(1))
    return found


async def test_a_live_page_is_told_when_there_is_something_new_and_let_go_at_the_end(tmp_path: Path) -> None:
    told = ToldRun(tmp_path)
    await told.tell(1)
    async with site(told) as (client, _), asyncio.timeout(30), client.stream("GET", "/live") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = answer.aiter_lines()
        assert await anext(lines) == "event: here"
        await told.run.append(repair(Story(told.named(9, 1), 0, np.random.default_rng(1), told.words),
                                     tmp_path / "model", reward=1.0))  # fmt: skip
        await told.indexed()
        while (line := await anext(lines)) != "event: moved":
            assert line.startswith("data: ") or not line
    async with site(told) as (client, _), asyncio.timeout(30):
        stream = await client.send(client.build_request("GET", "/live"), stream=True)
        first = await anext(stream.aiter_lines())
    assert first == "event: here"  # and the site has ended with the stream open
    await stream.aclose()


async def test_more_live_pages_than_are_kept_are_refused_and_those_that_close_make_room(told: ToldRun) -> None:
    async with site(told, streams=3) as (client, _), asyncio.timeout(30):
        asked = [client.build_request("GET", "/live") for _ in range(20)]
        answers = await asyncio.gather(*(client.send(each, stream=True) for each in asked))
        assert Counter(answer.status_code for answer in answers) == {200: 3, 503: 17}
        for answer in answers:
            if answer.status_code == 503:
                assert "close one" in json.loads(await answer.aread())["error"]
            await answer.aclose()
        while True:  # the server sees that they are gone when it looks at the index next
            async with client.stream("GET", "/live") as another:
                if another.status_code == 200:
                    assert await anext(another.aiter_lines()) == "event: here"
                    break


async def test_a_client_that_is_gone_before_the_first_event_gives_its_place_back() -> None:
    tabs: set[object] = set()
    events = LivePageStream(never(), tabs)
    assert tabs == {events}

    async def gone(_: Message) -> None:
        raise ConnectionResetError

    with pytest.raises(ClientDisconnect):
        await events({"type": "http", "asgi": {"spec_version": "2.4"}}, gone, gone)  # type: ignore[arg-type]
    assert not tabs


async def never() -> AsyncIterator[str]:
    """Events that nobody waited for."""
    raise AssertionError("it began")
    yield ""


async def test_pages_that_ask_at_once_share_a_look_also_one_that_fails() -> None:
    now, taken = 0.0, list[float]()

    def look() -> AsOf:
        taken.append(now)
        if now == 5.0:
            raise NoIndex("it is gone")
        return AsOf("run", len(taken), {})

    looks = CachedQuery(lambda: app.read_as_of(look), lambda: now)
    for now in (0.0, 4.9, 5.0, 9.9, 10.0):
        found = await asyncio.gather(*(looks.within(5.0) for _ in range(20)))
        assert len({id(each) for each in found}) == 1
        assert isinstance(found[0], NoIndex) == (now in (5.0, 9.9))
    assert taken == [0.0, 5.0, 10.0]


async def test_a_page_that_opens_between_two_looks_is_told_of_the_last_one(tmp_path: Path) -> None:
    told = ToldRun(tmp_path)
    await told.tell(1)
    async with site(told, every_s=3600.0) as (client, _), asyncio.timeout(30):
        last = ""
        with writing(told) as write:
            for moment in range(1_800_000_000_000, 1_800_000_005_000, 1000):
                async with client.stream("GET", "/live") as answer:
                    lines = answer.aiter_lines()
                    assert await anext(lines) == "event: here"
                    said = await anext(lines)
                assert said == (last or said)
                last = said
                write(moment)


@contextlib.contextmanager
def writing(told: ToldRun) -> Iterator[Callable[[int], object]]:
    """What says that the index was written at another moment."""
    with contextlib.closing(sqlite3.connect(told.index, isolation_level=None)) as writer:
        writer.execute("PRAGMA synchronous = OFF")
        yield lambda ms: writer.execute("UPDATE about SET value = ? WHERE name = 'written_ms'", (ms,))


async def test_pages_are_told_as_often_as_the_index_is_looked_at_and_not_as_often_as_it_moves(tmp_path: Path) -> None:
    told, every_s, tabs = ToldRun(tmp_path), 0.01, 8
    await told.tell(1)
    moments = range(1_800_000_000_000, 1_800_001_000_000, 1000)
    async with site(told, every_s=every_s) as (client, _), asyncio.timeout(60):
        began = time.monotonic()
        here = asyncio.Barrier(tabs + 1)
        heard = [asyncio.create_task(listen(client, here, clock(moments[-1]))) for _ in range(tabs)]
        await here.wait()
        with writing(told) as write:
            for moment in moments:
                write(moment)
                await asyncio.sleep(0)
        moved = await asyncio.gather(*heard)
        looks = (time.monotonic() - began) / every_s + 1
    assert all(len(each) == len(set(each)) for each in moved)
    assert 1 < len(set().union(*moved)) <= looks, "of all pages together"


async def listen(client: httpx.AsyncClient, here: asyncio.Barrier, until: str) -> list[str]:
    """What a live page is told, once all are here, until it is told that."""
    found: list[str] = []
    async with client.stream("GET", "/live") as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                found.append(json.loads(line.removeprefix("data: ")))
                if len(found) == 1:
                    await here.wait()
                if found[-1] == until:
                    break
    return found
