"""Live pages of the dashboard: told of what is new, as many as there is room for."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from starlette.requests import ClientDisconnect
from starlette.types import Message

from tests.fakes.stories import Story, repair
from tests.fakes.told_run import ToldRun
from tests.unit.consumers.test_dashboard import site
from turnlog.consumers.dashboard.app import Stream


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
    events = Stream(never(), tabs)
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
