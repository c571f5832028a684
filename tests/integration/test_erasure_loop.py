"""One session of a whole run is erased: what was planted in it is found nowhere afterwards; everything else replays.

Servers, roles and commands are real. Files of Kafka are searched right after the key was dropped, before the broker
compacts it away: content on topics is never in the clear.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pytest

import turnlog.client
from tests.integration.test_closed_loop import SETTINGS, Loop
from turnlog.infra.embedded.up import down, status_processes
from turnlog.schemas import topics
from turnlog.schemas.events import SampleBatchFormed, SegmentSample, SessionErased

PLANTED = "planted-7d1f0c"
INDEXED = SETTINGS + "[index]\nenabled = true\n"

pytestmark = [pytest.mark.kafka, pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(900)]


@pytest.fixture
def loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Loop]:
    """A run that encrypts, trained to its end and still up."""
    master = tmp_path / "master-key"
    master.write_text("0123456789abcdef" * 4)
    monkeypatch.setenv("TURNLOG_ERASURE_MASTER_KEYS_FILE", str(master))
    loop = Loop(tmp_path, INDEXED)
    started = loop.turnlog("up")
    assert started.returncode == 0, started.stderr
    try:
        done(loop, "run")
        yield loop
    finally:
        if status_processes(loop.settings):
            down(loop.settings)


def done(loop: Loop, *verb: str) -> str:
    """Run a command that must succeed, and return what it prints."""
    ended = loop.turnlog(*verb, file=loop.kept)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def plant(loop: Loop) -> str:
    """Play a group of four sessions, and return the id of the one in which the text was said."""
    run, planted = turnlog.client.connect(loop.directory), ""
    for number in range(4):
        said = PLANTED if number == 0 else "another text"
        with run.session(group_id="planted", group_size=4, rollout_index=number) as session:
            asked = httpx.post(
                f"{session.base_url}/chat/completions",
                headers={"Authorization": f"Bearer {session.agent_token}"},
                json={"model": "policy", "messages": [{"role": "user", "content": said}], "max_tokens": 8},
                timeout=60,
            )
            assert asked.status_code == 200, asked.text
            session.finish("completed", reward=float(number % 2))
            planted = planted or session.session_id
    return planted


def files_with(text: str, folder: Path) -> list[str]:
    return [str(path) for path in folder.rglob("*") if path.is_file() and text.encode() in path.read_bytes()]


def texts_of(dataset: Path) -> str:
    return str([pa.ipc.open_file(path).read_all().to_pylist() for path in dataset.glob("data/*.arrow")])


def records_with(loop: Loop, text: str) -> list[Any]:
    """Return the events of all topics that a reader with the keys finds it in."""
    kinds = (topics.SESSIONS, topics.TURNS, topics.SNAPSHOTS, topics.SAMPLES)
    return [event for topic in kinds for event in loop.events(topic) if text in str(event)]


def indexed(loop: Loop) -> list[dict[str, Any]]:
    query = f"SELECT session_id FROM turns_records WHERE messages LIKE '%{PLANTED}%'"
    found: list[dict[str, Any]] = json.loads(done(loop, "log", "query", "--json", query))["rows"]
    return found


def wait_for(loop: Loop, topic: topics.Topic, session: str) -> None:
    """Wait until a sample of a session is on the log."""
    for _ in range(100):
        if any(isinstance(event, SegmentSample) and event.session_id == session for event in loop.events(topic)):
            return
    pytest.fail(f"no sample of {session} was written")


def wait_for_index(loop: Loop) -> None:
    """Wait until the running indexer has the planted text."""
    for _ in range(100):
        if indexed(loop):
            return
    pytest.fail("the planted text was not indexed")


def test_a_planted_text_is_found_nowhere_after_its_session_was_erased(loop: Loop, tmp_path: Path) -> None:
    session, dataset = plant(loop), tmp_path / "dataset"
    wait_for(loop, topics.SAMPLES, session)
    done(loop, "log", "archive", "flush")
    done(loop, "dataset", "build", str(dataset), "--view", "sft", "--format", "arrow", "--purpose", "any")
    assert records_with(loop, PLANTED)
    assert PLANTED in texts_of(dataset)
    wait_for_index(loop)
    assert not [name for name in files_with(PLANTED, loop.directory) if "index" not in Path(name).name]
    done(loop, "erase", session, "--yes", "--dataset", str(dataset))
    assert records_with(loop, PLANTED) == []
    assert files_with(PLANTED, loop.directory) == files_with(PLANTED, dataset) == []
    assert PLANTED not in texts_of(dataset)
    assert indexed(loop) == []
    assert "identical" in done(loop, "replay", "--verify")
    assert "identical" in done(loop, "replay", "--verify", "--from", "archive")
    done(loop, "log", "books")
    page = tmp_path / "session.html"
    done(loop, "log", "session", "export", session, "--html", str(page))
    assert PLANTED not in page.read_text()
    assert "[erased]" in page.read_text()


def test_a_trained_session_is_erased_and_its_batches_are_named(loop: Loop) -> None:
    batches = [event for event in loop.events(topics.BATCHES) if isinstance(event, SampleBatchFormed)]
    session = batches[-1].samples[0].session_id
    held = [batch.batch_index for batch in batches if any(row.session_id == session for row in batch.samples)]
    done(loop, "erase", session, "--yes")
    (erased,) = [event for event in loop.events(topics.SESSIONS) if isinstance(event, SessionErased)]
    assert list(erased.batches) == held
    assert "identical" in done(loop, "replay", "--verify")
    done(loop, "log", "books")
