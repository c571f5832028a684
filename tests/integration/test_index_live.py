"""The index of a real Kafka: built, asked and explained by commands, and the same again from the archive."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import random
import subprocess
import sys
from pathlib import Path

import httpx
import orjson
import pytest
from atif import Trajectory

from tests.addresses import variables
from tests.fakes.otlp_collector import collecting
from tests.fakes.sessions import bad_days
from turnlog.consumers.archiver import flush
from turnlog.consumers.index.indexer import build
from turnlog.consumers.index.reader import Index
from turnlog.consumers.index.search import SessionFilter
from turnlog.infra.archive import live_cut
from turnlog.infra.log import Partition
from turnlog.infra.roles.role import open_role
from turnlog.infra.roles.runs import configure
from turnlog.plugins.dashboard.server import serving
from turnlog.processors.core.fold_versions import INPUTS
from turnlog.processors.runtime import assembler
from turnlog.settings import IndexSettings, Settings

PLACE = str.maketrans({"[": "/", "]": None, "@": "/"})
pytestmark = [pytest.mark.kafka]


async def history(settings: Settings) -> None:
    """Groups of unlucky sessions, folded."""
    async with open_role("test", settings) as role:
        await configure(role)
        ends = [0] * settings.kafka.groups
        for event in bad_days(
            random.Random(5), groups=12, partitions=len(ends), run_id=settings.run.id, name="g", ends=ends
        ):
            await role.events.append(event)
    async with open_role("assembler", settings) as role:
        running = asyncio.create_task(assembler.main(role))
        inputs = [Partition(topic, unit) for topic in INPUTS for unit in range(settings.kafka.groups)]
        async with asyncio.timeout(60):
            target = await role.log.end_offsets(inputs)
            folded = False
            while not folded:
                assert not running.done(), running.exception()
                cuts = [await live_cut(role.log, settings.run.id, unit) for unit in range(settings.kafka.groups)]
                folded = all(cut and all(cut.high[t] >= target[Partition(t, cut.unit)] for t in INPUTS) for cut in cuts)
                await asyncio.sleep(0.05)  # the assembler's commits are not ours to await
        role.stopping.set()
        await running


def told(settings: Settings, *arguments: str) -> str:
    """What a command prints."""
    done = subprocess.run(
        [sys.executable, "-m", "turnlog.cli", *arguments],
        env={**os.environ, **variables(settings)}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


async def shown(settings: Settings, session: str, folder: Path) -> None:
    """The session as files and in the dashboard: its tokens are read from their topics."""
    told(settings, "log", "session", "export", session, "--json", str(folder / "session.json"))
    exported = orjson.loads((folder / "session.json").read_bytes())
    assert exported["session"]["session_id"] == session
    told(settings, "log", "session", "export", session[:16], "--html", str(folder / "session.html"))
    assert session in (folder / "session.html").read_text()
    every = ("log", "session", "export", "--all", "--purpose", "train")
    assert " sessions, " in told(settings, *every, "--atif", str(folder / "atif"))
    assert Trajectory.model_validate_json((folder / "atif" / f"{session}.json").read_bytes()).session_id == session
    told(settings, *every, "--trace", str(folder / "traces"))
    assert (folder / "traces" / f"{session}.jsonl").read_text().startswith('{"type":"session"')
    async with serving(settings, lambda: open_role("dashboard", settings)) as (url, _), httpx.AsyncClient() as client:
        tokens = (await client.get(f"{url}/sessions/{session}/tokens")).json()
        record = await client.get(f"{url}/records/{exported['turns'][0]['at'].translate(PLACE)}")
    assert tokens == exported["tokens"]
    assert "TurnCompleted" in record.text


@pytest.mark.long  # the suite does so in memory (test_index.py, test_index_answers.py, test_track.py, test_trace.py)
async def test_an_index_is_built_asked_and_explained_and_the_archive_gives_the_same(
    live_settings: Settings, tmp_path: Path
) -> None:
    path = tmp_path / "index.sqlite"
    settings = dataclasses.replace(live_settings, index=IndexSettings(path=str(path)))
    await history(settings)
    assert "records in" in told(settings, "log", "index", "build")
    answer = orjson.loads(told(settings, "log", "query", "--json", "SELECT fate, count(*) FROM sessions GROUP BY fate"))
    assert answer["as_of"]["run"] == settings.run.id
    with Index.open(path) as index:
        page = index.sessions(limit=1000)
        waiting = index.sessions(SessionFilter(fate="waiting")).rows[0]
    assert sum(count for _, count in answer["rows"]) == len(page.rows) > 12
    assert "GroupScored" in told(settings, "log", "why", waiting.session_id)
    assert "masked: unused" in told(settings, "log", "why", f"{waiting.session_id}:0:0")
    assert waiting.session_id in told(settings, "log", "session", "show", waiting.session_id, "--tokens")
    await shown(settings, waiting.session_id, tmp_path)
    assert "steps: tensorboard" in told(
        settings, "role", "track", "--to", f"tensorboard={tmp_path / 'curves'}", "--until-end"
    )
    with collecting() as collector:
        assert " spans; " in told(settings, "role", "trace", "--to", collector.url, "--until-end")
        finished = {span.trace_id for span in collector.spans if span.name.startswith("invoke_agent")}
        assert len(finished) > 3
        again = len(collector.spans)
        assert "0 spans; " in told(settings, "role", "trace", "--to", collector.url, "--until-end")
        assert len(collector.spans) == again
    tail = told(
        settings, "log", "tail", "--all", "--until-end", "--kind", "SessionStarted", "--session", waiting.session_id
    )
    assert tail.count("SessionStarted") == len(tail.splitlines()) > 0
    async with open_role("test", settings) as role:
        await flush(role)
    async with open_role("test", settings, archive=True) as role:
        await build(role, tmp_path / "archived.sqlite")
    with Index.open(tmp_path / "archived.sqlite") as index:
        assert index.sessions(limit=1000).rows == page.rows
