"""A run over wall time: what its lanes say is what the records say, and its picture is of one size."""

from __future__ import annotations

import asyncio
import re
from itertools import pairwise
from pathlib import Path

import pytest

from tests.fakes.told_run import ToldRun
from tests.unit.consumers.test_dashboard import check_harmless, hostile, site
from turnlog.consumers.index import BadQuestion
from turnlog.consumers.index.reader import Index, Row
from turnlog.plugins.dashboard.swimlanes import (
    COLUMNS,
    PARTS,
    LaneSpan,
    TimeWindow,
    busiest,
    merge_spans,
    running_by,
    swimlanes,
)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> ToldRun:
    """A run of six groups, and of one hostile session."""
    found = ToldRun(tmp_path_factory.mktemp("told"))
    asyncio.run(found.tell(6, more=lambda story: hostile(story, found.folder / "model")))
    return found


def mean_running(rows: list[Row], seconds: str, first: float, last: float) -> float:
    """Of one stretch: what of each lies in it, over its length."""
    ends = ((max(row["time_ms"] - 1000 * row[seconds], first), min(row["time_ms"], last)) for row in rows)
    return sum(max(0.0, end - start) for start, end in ends) / (last - first)


@pytest.mark.parametrize("part", [None, 0, 5, 11])
async def test_a_column_has_the_mean_of_what_was_running_in_it(told: ToldRun, part: int | None) -> None:
    with Index.open(told.index) as index:
        whole = swimlanes(index)
        assert whole is not None
        window = whole.window if part is None else whole.window.part(part)
        turns = index.rows("SELECT time_ms, total_s - queue_s AS s FROM turns WHERE engine_id = 'engine-0'")
        calls = index.rows("SELECT time_ms, duration_s AS s FROM tool_results WHERE worker = 'sandbox-0'")
        engines = running_by(window, index, "turns_records", "engine_id", "total_s - queue_s")
        workers = running_by(window, index, "tool_results_records", "worker", "duration_s")
    width = window.ms / COLUMNS
    for rows, columns in ((turns, engines.get("engine-0")), (calls, workers.get("sandbox-0"))):
        wanted = [
            mean_running(rows, "s", window.first + at * width, window.first + (at + 1) * width) for at in range(COLUMNS)
        ]
        assert (columns or [0.0] * COLUMNS) == pytest.approx(wanted, abs=1e-4)
    if part is None:
        assert sum(engines["engine-0"]) > 0
        assert sum(workers["sandbox-0"]) > 0


async def test_steps_swaps_and_versions_stand_where_their_records_say(told: ToldRun) -> None:
    with Index.open(told.index) as index:
        (steps,) = index.rows(
            "SELECT count(*) AS n, min(time_ms) - 2000 AS first, max(time_ms) + 2000 AS last FROM steps"
        )
        found = swimlanes(index, steps["first"], steps["last"])
        (spent,) = index.rows("SELECT sum((SELECT sum(value) FROM json_each(seconds))) AS s FROM steps")
        (swaps,) = index.rows("SELECT count(*) AS n FROM engine_events WHERE kind = 'EngineWeightsLoaded'")
    assert found is not None
    assert found.steps == steps["n"] > 1
    assert sum(seconds for _, _, seconds in found.phases) == pytest.approx(spent["s"])
    assert [phase for _, phase, _ in found.phases] == ["wait", "read", "step", "export"]
    assert f"{swaps['n']} swaps" in found.picture
    assert f"serves version {steps['n']}" in found.picture
    assert len(re.findall(r'class="span swap"', found.picture)) == swaps["n"]
    assert re.search(r"step 1, batch 0: step \d", found.picture)
    check_harmless(found.picture, "timeline")


def test_neighbours_that_a_column_holds_are_one_span_so_that_a_lane_has_no_more_than_its_columns() -> None:
    window = TimeWindow(0, COLUMNS * 1000)
    many = [LaneSpan(at * 10, at * 10 + 10, "v0", f"number {at}") for at in range(COLUMNS * 100)]
    found = list(merge_spans(window, many))
    assert COLUMNS / 2 < len(found) <= 2 * COLUMNS
    assert found[0].says == "99 events, the last: number 98"
    assert sum(one.end - one.start for one in found) == pytest.approx(COLUMNS * 1000)
    few = [LaneSpan(0, 5000, "v0", "a"), LaneSpan(5000, 9000, "v1", "b"), LaneSpan(4990, 5000, "swap", "c")]
    assert [one.says for one in merge_spans(window, few)] == ["a", "b", "c"]


def test_the_busiest_have_lanes_of_their_own_and_the_others_one() -> None:
    running = {f"worker-{at:02}": [float(at)] * COLUMNS for at in range(20)}
    found = dict(busiest(running, ()))
    assert [*found][:2] == ["worker-04", "worker-05"]
    assert found["4 others"] == [6.0] * COLUMNS


async def test_a_window_is_asked_for_and_leads_to_those_beside_and_inside_it(told: ToldRun, tmp_path: Path) -> None:
    async with site(told) as (client, _):
        page = (await client.get("/timeline")).text
        inside = re.findall(r'href="/timeline\?from=(\d+)&amp;to=(\d+)" aria-label="[\d:.]+ UTC', page)
        assert len(inside) == PARTS
        assert all(one[1] == other[0] for one, other in pairwise(inside))
        first, last = inside[3]
        closer = (await client.get(f"/timeline?from={first}&to={last}")).text
        assert {"earlier", "later", "wider", "whole run", "closer"} <= set(re.findall(r">([a-z ]+)</a>", closer))
        for query in ("from=x", "from=9&to=3", f"from=0&to={1 << 60}"):
            answer = await client.get(f"/timeline?{query}")
            assert (answer.status_code, "BadQuestion" in answer.text) == (400, True), query
    empty = ToldRun(tmp_path)
    await empty.run.configure()
    await empty.indexed()
    async with site(empty) as (client, _):
        assert "nothing has happened yet" in (await client.get("/timeline")).text
    with Index.open(told.index) as index, pytest.raises(BadQuestion, match="is not a period"):
        swimlanes(index, 5, 5)
