"""Versions that training ranks send to engines have two records, and some never get the second: what the index, the
dashboard, the spans and `turnlog status` say of them."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from pathlib import Path

import httpx
import pytest

from tests.fakes.told_run import LOADED_S, ToldRun
from turnlog.consumers.index.reader import Index, Row
from turnlog.infra.log import Partition
from turnlog.infra.roles.http_clients import direct
from turnlog.plugins.dashboard.server import serving
from turnlog.plugins.dashboard.swimlanes import swimlanes
from turnlog.plugins.exporters.spans import Traces, TraceSpan, span_of
from turnlog.schemas import topics
from turnlog.schemas.events import EngineWeightsLoaded, WeightVersionPublished
from turnlog.schemas.ids import digest
from turnlog.settings import DashboardSettings
from turnlog.verbs.status_page import read_progress


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> ToldRun:
    run = ToldRun(tmp_path_factory.mktemp("told"), direct=True)
    asyncio.run(run.tell(10))
    return run


async def published(told: ToldRun) -> list[WeightVersionPublished]:
    return [each for each in await told.run.read(topics.WEIGHTS) if isinstance(each, WeightVersionPublished)]


def versions(path: Path) -> list[Row]:
    with Index.open(path) as index:
        return list(index.versions()[0])


async def test_the_index_has_one_row_per_version_with_the_files_of_its_second_record(told: ToldRun) -> None:
    found = versions(told.index)
    records = await published(told)
    assert [row["version"] for row in found] == sorted({event.version for event in records})
    stored = {event.version: event for event in records if event.transport == "direct" and event.state == "durable"}
    assert len(stored) > 1
    for row in found[1:]:
        event = stored.get(row["version"])
        assert (row["state"], row["transport"]) == ("announced" if event is None else "durable", "direct")
        assert row["files"] == (0 if event is None else 1)
        assert row["bytes"] == (0 if event is None else event.files[0].blob.size)
        assert (row["stored_ms"] is None) == (event is None)
        assert event is None or row["stored_ms"] > row["time_ms"], "the row stands at the first record"
        assert row["load_s"] == pytest.approx(sum(LOADED_S.values()))
    first = found[0]
    assert (first["state"], first["transport"], first["stored_ms"]) == ("durable", "store", None)


async def test_an_index_that_meets_the_second_record_later_has_the_same_rows(tmp_path: Path) -> None:
    told = ToldRun(tmp_path, direct=True)
    await told.tell(2)
    (one,) = [event for event in await published(told) if event.state == "announced"]
    assert [row["state"] for row in versions(told.index)] == ["durable", "announced"]
    later = dataclasses.replace(one, event_id="later", state="durable", digests={}, checksums={"w": "0"})
    await told.run.append([later, dataclasses.replace(later, checkpoint="again")])
    await told.indexed()
    after = versions(told.index)
    assert [(row["version"], row["state"]) for row in after] == [(0, "durable"), (1, "durable")]
    assert after[1]["checkpoint"] == ""
    told.index.unlink()
    await told.indexed()
    assert versions(told.index) == after


async def test_the_dashboard_shows_state_transport_and_the_seconds_of_the_load(told: ToldRun) -> None:
    settings = dataclasses.replace(told.settings, dashboard=DashboardSettings())
    async with serving(settings, told.connect()) as (url, keys), direct(base_url=url) as client:
        assert isinstance(client, httpx.AsyncClient)
        await client.get(f"/login?token={keys.link_token(url)}")
        page = (await client.get("/weights")).text
    said = Counter(word for word in ("announced", "durable") for _ in range(page.count(f"<td>{word}</td>")))
    found = versions(told.index)
    assert said == Counter(row["state"] for row in found)
    assert page.count("<td>direct</td>") == len(found) - 1
    assert page.count("0.40 s") == len(found) - 1
    stored = next(row for row in found[1:] if row["state"] == "durable")
    with Index.open(told.index) as index:
        drawn = swimlanes(index, stored["time_ms"] - 100, stored["stored_ms"] + 100)
    assert drawn is not None
    assert f"version {stored['version']} announced" in drawn.picture
    assert f"version {stored['version']} stored: full" in drawn.picture


async def test_a_version_has_one_publication_span_with_its_copy_and_its_loads_below_it(told: ToldRun) -> None:
    traces, spans, records = Traces(1.0), list[TraceSpan](), await published(told)
    loads = [each for each in await told.run.read(topics.ENGINES) if isinstance(each, EngineWeightsLoaded)]
    for topic, events in ((topics.WEIGHTS, records), (topics.ENGINES, loads)):
        for offset, event in enumerate(events):
            spans += traces.take(Partition(topic.name, 0), offset, 1_000_000, event)
    names = Counter(span.name for span in spans)
    sent = {event.version for event in records if event.state == "announced"}
    assert names == {
        "publish weights": len({event.version for event in records}),
        "store weights": sum(event.version in sent and event.state == "durable" for event in records),
        "swap weights": len(loads),
    }
    for span in spans:
        version = span.attributes["turnlog.weight_version"]
        if span.name != "publish weights":
            assert span.parent_id == span_of(digest("WeightVersionPublished", "run", version))
        if span.name == "swap weights":
            assert {name: span.attributes[f"turnlog.seconds.{name}"] for name in LOADED_S} == LOADED_S
            assert span.end_ns - span.start_ns == round(sum(LOADED_S.values()) * 1e9)


async def test_status_says_how_many_engines_have_a_version_that_is_announced(told: ToldRun) -> None:
    newest = max(event.version for event in await published(told))
    progress = await read_progress(told.run.role("status"))
    state = "durable" if newest % 2 == 0 else "announced"
    assert (progress["newest_version"], progress["newest_state"]) == (newest, state)
    assert (progress["newest_loaded"], progress["engines"]) == (1, 1)
