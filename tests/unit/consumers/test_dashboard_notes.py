"""Notes and tags of a run and of its sessions, and how many sessions a filter lets pass."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import httpx
import pytest

from tests.fakes.told_run import ToldRun
from tests.unit.consumers.test_dashboard import check_harmless, site
from turnlog.consumers.index import BadQuestion, DamagedIndex
from turnlog.consumers.index.reader import Index
from turnlog.consumers.index.search import Effort, SessionFilter
from turnlog.plugins.dashboard.notes import MOST_CHARACTERS, MOST_TAGS, TAG_CHARACTERS, Note, Notes


async def say(client: httpx.AsyncClient, page: str, **fields: str) -> httpx.Response:
    """Send the form for notes that a page holds."""
    (form,) = re.findall(r'<form method="post" action="/notes">(.*?)</form>', (await client.get(page)).text, re.S)
    hidden = dict(re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)">', form))
    origin = {"origin": str(client.base_url).rstrip("/")}
    return await client.post("/notes", data=hidden | fields, headers=origin, follow_redirects=True)


def named(page: str) -> set[str]:
    return set(re.findall(r'<a class="id" href="/sessions/([^"]+)">', page))


async def test_who_logged_in_writes_notes_and_tags_and_others_read_and_filter_by_them(tmp_path: Path) -> None:
    told = ToldRun(tmp_path)
    await told.tell(2)
    with Index.open(told.index) as index:
        first, second = (row.session_id for row in index.sessions(limit=2).rows)
    async with site(told) as (client, link):
        for page in ("/", f"/sessions/{first}"):
            assert 'action="/notes"' not in (await client.get(page)).text
        assert (await client.post("/notes", data={"text": "x"})).status_code == 403
        assert not (tmp_path / "notes.sqlite").exists()
        await client.get(link)
        done = await say(client, f"/sessions/{first}", text="loops <script>\nover", tags="reward hack, odd,, odd ")
        assert done.url.path == f"/sessions/{first}"
        check_harmless(done.text, "note")
        assert "loops &lt;script&gt;\nover" in done.text
        await say(client, "/", text="the baseline", tags="paper")
    async with site(told) as (client, link):
        assert "the baseline" in (await client.get("/")).text
        assert named((await client.get("/sessions", params={"tag": "reward hack"})).text) == {first}
        assert named((await client.get("/sessions", params={"tag": "paper"})).text) == set(), "of the run alone"
        assert ">odd</a>" in (await client.get("/sessions")).text
        assert (await client.get("/sessions/total", params={"tag": "odd"})).text == "1"
        await client.get(link)
        emptied = await say(client, f"/sessions/{first}", text=" ", tags=",")
        assert "loops" not in emptied.text
        form = {"subject": "nobody's", "text": "x"}
        assert (await say(client, f"/sessions/{second}", **form)).status_code == 404
        assert (await say(client, "/", text="x" * (MOST_CHARACTERS + 1))).status_code == 400
        assert "the baseline" in (await client.get("/")).text


async def test_an_index_that_is_built_again_keeps_them(tmp_path: Path) -> None:
    told = ToldRun(tmp_path)
    await told.tell(1)
    with Index.open(told.index) as index:
        (row,) = index.sessions(limit=1).rows
    Notes(told.index).write(row.session_id, "kept", ["a"], at_ms=5)
    told.index.unlink()
    await told.indexed()
    assert Notes(told.index).about([row.session_id, "x"]) == {row.session_id: Note("kept", ("a",), 5)}


@pytest.mark.parametrize(
    ("text", "tags"),
    [
        ("x" * (MOST_CHARACTERS + 1), []),
        ("", [str(at) for at in range(MOST_TAGS + 1)]),
        ("", ["x" * (TAG_CHARACTERS + 1)]),
    ],
    ids=["text", "tags", "tag"],
)
def test_what_is_too_long_is_refused_and_changes_nothing(tmp_path: Path, text: str, tags: list[str]) -> None:
    notes = Notes(tmp_path / "index.sqlite")
    notes.write("s", "before", ["a"], at_ms=1)
    with pytest.raises(BadQuestion):
        notes.write("s", text, tags, at_ms=2)
    assert notes.about(["s"]) == {"s": Note("before", ("a",), 1)}


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "notes.sqlite").write_bytes(b"no database" * 100)
    with pytest.raises(DamagedIndex, match=r"notes\.sqlite.*restore it from a copy"):
        Notes(tmp_path / "index.sqlite").tags()


async def test_a_filter_says_how_many_sessions_pass(tmp_path: Path) -> None:
    told = ToldRun(tmp_path)
    await told.tell(3)
    with Index.open(told.index) as index:
        found = index.rows("SELECT fate, count(*) AS n FROM sessions GROUP BY fate")
        counts: Mapping[str, int] = {row["fate"]: row["n"] for row in found}
        for fate, count in counts.items():
            assert index.total(SessionFilter(fate=fate)) == (count, True)
        every = sum(counts.values())
    with Index.open(told.index, effort=Effort(walked=2, sorted=2, asked=1)) as index:
        assert every > 2
        assert index.total(SessionFilter(min_reward=-1e9)) == (2, False)
    async with site(told) as (client, _):
        fate, count = max(counts.items(), key=lambda each: each[1])
        page = (await client.get("/sessions", params={"fate": fate})).text
        (address,) = re.findall(r'<span data-load="([^"]+)">', page)
        assert (await client.get(address)).text == str(count)
        assert (await client.get("/sessions/total", params={"min_reward": "x"})).status_code == 400
