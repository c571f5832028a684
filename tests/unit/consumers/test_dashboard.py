"""The dashboard over a run of stories: what its pages and answers say, and what becomes of what agents wrote."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import hashlib
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from html.parser import HTMLParser
from pathlib import Path

import httpx
import orjson
import pytest
from markupsafe import escape

from tests.fakes.stories import END, Story, spoken
from tests.fakes.told_run import ToldRun
from turnlog.consumers.index.fate import tally
from turnlog.consumers.index.reader import Index, SessionView
from turnlog.infra.batch_files import read_rows
from turnlog.infra.log import Partition
from turnlog.infra.roles.http_clients import direct
from turnlog.infra.run_folder import lock_run, write_state
from turnlog.plugins.alarms import alarms
from turnlog.plugins.dashboard import drawing, export, harmless
from turnlog.plugins.dashboard.app import EVERY_S, STREAMS, WITHIN_S
from turnlog.plugins.dashboard.conversation import align_turns, conversation, prompts, said_alike
from turnlog.plugins.dashboard.guard import FORM_BYTES
from turnlog.plugins.dashboard.overview import is_supervised, overview
from turnlog.plugins.dashboard.records import Vocabulary, runs, session_tokens
from turnlog.plugins.dashboard.server import serving
from turnlog.plugins.dashboard.timeline import timeline
from turnlog.schemas import UndecodableRecord, topics
from turnlog.schemas.events import Event, SampleBatchFormed, SkipRequested
from turnlog.settings import DashboardSettings, IndexSettings

HOSTILE = (
    "<script>alert(1)</script><img src=x onerror=alert(2)>", "</script><svg onload=alert(3)>",
    "[a](javascript:alert(4)) ![b](https://elsewhere.example/c.png) <javascript:alert(5)>",
    "&#x202e;evil \u202eevil\u2066 \x1b[31mred\x07 \x9b2J", "[x]: javascript:alert(6)\n[x]", '" onmouseover="alert(7)',
    "```\"><script>alert(8)</script>\n</pre>```", "| <b onclick=alert(9)> | b |\n|---|---|\n| <iframe src=//x> | d |",
    "{{ 7 * 7 }} {% raw %} ${7*7}",
)  # fmt: skip
SVG = (
    "data:image/svg+xml;base64,"
    + base64.b64encode(b"<svg xmlns='http://www.w3.org/2000/svg' onload='alert(1)'/>").decode()
)
PIXEL = base64.b64encode(
    base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==")
).decode()


def hostile(story: Story, folder: Path) -> Iterator[Event]:
    """An agent whose every text tries to run a script: task, message, arguments, output, a file's name, images."""
    everything = "\n\n".join(HOSTILE)
    yield story.begun(folder, task="<script>alert('task')</script>\u202e", recipe="<img src=x onerror=alert('recipe')>")
    call, records = story.called(
        "<b>bash\u202e\x9b31m", {"path": "\"><script>alert('name')</script>.py", "code": everything}, everything
    )
    pictures = [SVG, f"data:image/svg+xml;base64,{PIXEL}", "https://elsewhere.example/d.png", "javascript:alert(1)"]
    content = [{"type": "text", "text": everything}]
    content += [{"type": "image_url", "image_url": {"url": each}} for each in pictures]
    response = {"role": "assistant", "content": everything, "reasoning_content": everything, "tool_calls": [call]}
    yield from story.said([{"role": "user", "name": everything, "content": content}], response, agent_path=everything)
    yield from records
    strange = {"role": "<script>", "content": [{"type": everything, "x": everything}]}
    told = [{"role": "tool", "tool_call_id": "x", "content": everything}]
    yield from story.said(told, strange, base=story.turns[-1])
    yield story.rewarded(0.5)
    yield story.finished()


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> ToldRun:
    """A run of six groups, and of one hostile session."""
    found = ToldRun(tmp_path_factory.mktemp("told"))
    asyncio.run(found.tell(6, more=lambda story: hostile(story, found.folder / "model")))
    return found


@asynccontextmanager
async def site(
    told: ToldRun, *, streams: int = STREAMS, every_s: float = EVERY_S, within_s: float = WITHIN_S,
    against: Sequence[str] = (), index: Path | None = None, **own: object,
) -> AsyncIterator[tuple[httpx.AsyncClient, str]]:  # fmt: skip
    """A browser's connection to a dashboard that serves, and a login link to it."""
    settings = dataclasses.replace(
        told.settings, dashboard=DashboardSettings(**own), index=IndexSettings(path=str(index or told.index))  # type: ignore[arg-type]
    )  # fmt: skip
    serves = serving(settings, told.connect(), streams=streams, every_s=every_s, within_s=within_s, against=against)
    async with serves as (url, keys), direct(base_url=url) as client:
        yield client, f"/login?token={keys.link_token(url)}"


def view_of(told: ToldRun, where: str = "fate = 'trained' AND turns = 7") -> SessionView:
    """A session."""
    with Index.open(told.index) as index:
        row = index.row(f"SELECT session_id FROM sessions WHERE {where} ORDER BY started_ms, session_id")
        assert row is not None
        view = index.session(row["session_id"])
        assert view is not None
        return view


def sessions_of(told: ToldRun, version: int) -> list[str]:
    """The sessions that a weight version was trained on."""
    with Index.open(told.index) as index:
        rows = index.rows(
            "SELECT DISTINCT session_id FROM batch_rows WHERE batch_index <= "
            "(SELECT batch_index FROM versions WHERE version = ?)", version,
        )  # fmt: skip
    return [row["session_id"] for row in rows]


class Elements(HTMLParser):
    """What a browser would make elements and attributes of."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


async def test_every_page_answers_and_says_as_of_when(told: ToldRun) -> None:
    view = view_of(told)
    session, group = view.row.session_id, view.row.group_id
    other = view_of(told, f"session_id != '{session}'").row.session_id
    pages = ["/", "/?all", "/sessions", "/batches", "/batches/0", "/weights", "/dead-letters", f"/sessions/{session}",
             "/lineage", "/lineage?weights=2&since=1", f"/lineage?session={session}",
             f"/groups/{group}", f"/compare?left={session}&right={other}", "/records/agent.turns/0/0"]  # fmt: skip
    async with site(told) as (client, _):
        for page in pages:
            answer = await client.get(page)
            assert answer.status_code == 200, (page, answer.text)
            assert "as of <time>" in answer.text, page
        asker = view.turns[0]["traceparent"].split("-")
        page = (await client.get(f"/sessions/{session}")).text
        assert f'asked by span <code>{asker[2]}</code> of trace <code class="id">{asker[1]}</code>' in page
        assert page.count("asked by span") == 1
        table = (await client.get("/sessions?fate=trained&sort=reward&order=asc")).text
        rewards = [float(found) for found in re.findall(r'<td class="n">(0\.\d+)</td><td class="n">-?\d', table)]
        assert rewards == sorted(rewards)
        assert len(rewards) > 10
        for page in (
            "/sessions/nobody",
            "/lineage?session=nobody",
            "/groups/nobody",
            "/batches/999",
            "/nowhere",
            "/records/agent.turns/0/99999999",
        ):
            assert (await client.get(page)).status_code in (404, 410), page
        made = (await client.get("/lineage?weights=2")).text
        assert f"{len(sessions_of(told, 2)):,} sessions of 1 task" in made
        assert '<a href="/lineage?weights=2" title="what made it">' in (await client.get("/weights")).text
        assert '<a href="/lineage?weights=1">' in (await client.get("/batches/0")).text
        assert f"/lineage?session={session}" in (await client.get(f"/sessions/{session}")).text
        for page in (
            "/lineage?weights=x",
            "/lineage?weights=999",
            "/lineage?weights=1&since=2",
            "/sessions?min_reward=x",
            "/sessions?sort=x",
            "/sessions?after=x",
            "/batches?before=x",
        ):
            answer = await client.get(page)
            assert (answer.status_code, "BadQuestion" in answer.text) == (400, True), page


async def test_a_batch_is_drawn_over_time_a_lane_for_each_of_its_sessions(told: ToldRun) -> None:
    with Index.open(told.index) as index:
        batch = index.batch(0)
        assert batch is not None
        names = {row["session_id"] for row in batch.rows}
        marks = ",".join("?" * len(names))
        (turns,) = index.rows(f"SELECT count(*) AS n FROM turns WHERE session_id IN ({marks})", *names)
        (calls,) = index.rows(f"SELECT count(*) AS n FROM tool_calls WHERE session_id IN ({marks})", *names)
        drawn = timeline(index, batch)
        empty = timeline(index, dataclasses.replace(batch, rows=[], step=None))
    assert all(f'href="/sessions/{name}"' in drawn.picture for name in names)
    spans = re.findall(r'class="span (\w+)" x="([\d.]+)" y="\d+" width="([\d.]+)"', drawn.picture)
    assert sum(style.startswith("v") for style, _, _ in spans) == turns["n"]
    assert sum(style in ("called", "failed") for style, _, _ in spans) == calls["n"]
    assert all(0 <= float(x) <= float(x) + float(wide) <= 1105 for _, x, wide in spans)
    assert {phase for _, phase, _ in drawn.phases} == {"wait", "read", "step", "export"}
    assert "none of its sessions has a turn" in empty.picture
    assert not empty.phases


async def test_sessions_are_filtered_and_paged_on_the_server(told: ToldRun) -> None:
    with Index.open(told.index) as index:
        (count,) = index.rows("SELECT count(*) AS n FROM sessions WHERE reward >= 0.7")
    async with site(told) as (client, _):
        found = (await client.get("/sessions?min_reward=0.7")).text
        assert found.count('<tr><td><a class="id" href="/sessions/') == count["n"] > 0
        bars = await client.get("/sessions/histogram?min_reward=0.7")
        assert bars.text.count("<a href=") > 2  # of all rewards, so that another range can be chosen
        assert "min_reward=" in bars.text
        assert "sample of the matching" not in bars.text
        assert "sample of the matching" in drawing.histogram(
            [{"least": 0, "most": 1, "sessions": 2}], "{}-{}".format, False, sample=True
        )
        assert "no session matches" in (await client.get("/sessions?recipe=nothing")).text
        unreadable = await client.get("/sessions", params={"text": '"'})
        assert (unreadable.status_code, "BadQuestion" in unreadable.text) == (400, True)


async def test_an_answer_that_would_take_too_long_is_given_up_and_says_so(told: ToldRun, tmp_path: Path) -> None:
    path = tmp_path / "index.sqlite"
    with contextlib.closing(sqlite3.connect(told.index)) as file:
        file.execute("VACUUM INTO ?", (str(path),))
    with contextlib.closing(sqlite3.connect(path)) as file:
        file.execute("DROP TABLE groups")
        file.execute(
            "CREATE VIEW groups AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) "
            "SELECT i AS group_id FROM n"
        )
    async with site(told, within_s=0.1, index=path) as (client, _), asyncio.timeout(30):
        answer = await client.get("/groups/nobody")
        assert (answer.status_code, "takes more than 0.1 s: ask for less" in answer.text) == (400, True)
        assert (await client.get("/sessions")).status_code == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:1", 200), ("localhost", 200), ("[::1]:80", 200), ("box.internal:8080", 200), ("evil.example", 421),
        ("127.0.0.1.evil.example", 421), ("localhost.evil.example", 421), ("[::1", 421), ("", 421), ("a@b:c", 421),
        ("127.0.0.1/login?", 421), ("127.0.0.1/static/x?", 421), ("localhost#", 421), ("localhost\\@evil.example", 421),
        ("evil@127.0.0.1", 421), ("127.0.0.1 x", 421), ("127.0.0.1:80x", 421), ("LOCALHOST:80", 200),
    ],
)  # fmt: skip
async def test_a_name_of_somebody_elses_that_leads_here_is_refused(told: ToldRun, host: str, status: int) -> None:
    async with site(told, hosts=("box.internal",)) as (client, _):
        assert (await client.get("/weights", headers={"host": host})).status_code == status


@pytest.mark.parametrize("own", [{"login": "always"}, {"host": "0.0.0.0"}])
async def test_beyond_the_loopback_or_where_it_is_asked_for_every_page_demands_a_login(
    told: ToldRun, own: dict[str, str]
) -> None:
    session = view_of(told).row.session_id
    async with site(told, **own) as (client, link):
        closed = ["/", "/sessions", f"/sessions/{session}", f"/sessions/{session}/tokens", "/live", "/nowhere",
                  "/sessions/histogram", "/records/agent.turns/0/0"]  # fmt: skip
        for page in closed:
            assert (await client.get(page)).status_code == 401, page
        assert (await client.get("/static/dashboard.css")).status_code == 200
        answer = await client.get(link)
        assert answer.status_code == 303
        said = answer.headers["set-cookie"]
        assert all(word in said for word in ("HttpOnly", "SameSite=strict", "Path=/"))
        assert (await client.get("/sessions")).status_code == 200
        async with httpx.AsyncClient(base_url=client.base_url) as another:
            assert (await another.get(link)).status_code == 403, "a link counts once"
            assert (await another.get(forged(link))).status_code == 403
            cookie = {"cookie": forged(said.partition(";")[0])}
            assert (await another.get("/", headers=cookie)).status_code == 401


def forged(text: str) -> str:
    """With another last digit."""
    return text[:-1] + ("0" if text[-1] != "0" else "1")


async def test_a_link_of_another_dashboard_and_an_old_one_are_refused(told: ToldRun, tmp_path: Path) -> None:
    from turnlog.plugins.dashboard import Refused
    from turnlog.plugins.dashboard.guard import LINK_S, LOGIN_S, Keys

    now = 1_000_000.0
    keys = Keys("secret", tmp_path, lambda: now)
    token, cookie = keys.link_token("http://127.0.0.1:1"), keys.login()
    with pytest.raises(Refused, match="link"):
        keys.take_link(token, "http://127.0.0.1:2")
    now += LINK_S + 1
    with pytest.raises(Refused, match="has expired"):
        keys.take_link(token, "http://127.0.0.1:1")
    assert keys.is_login(cookie)
    now += LOGIN_S
    assert not keys.is_login(cookie)
    early = keys.link_token("http://127.0.0.1:1")
    now += 1
    with pytest.raises(Refused):  # another process has forgotten which links were used
        Keys("secret", tmp_path, lambda: now).take_link(early, "http://127.0.0.1:1")
    for text in ("", "~", "1~2~3", "nan~x~y", "é~x~y"):
        assert not keys.is_login(text)


def test_a_login_that_was_ended_is_over_for_every_dashboard_of_the_run(tmp_path: Path) -> None:
    from turnlog.plugins.dashboard.guard import ENDED, LOGIN_S, Keys

    now = 1_000_000.0
    keys, beside = (Keys("secret", tmp_path, lambda: now) for _ in range(2))
    first, second, third = (keys.login() for _ in range(3))
    keys.end(first)
    beside.end(second)
    later = Keys("secret", tmp_path, lambda: now)
    for each in (keys, beside, later):
        assert [each.is_login(cookie) for cookie in (first, second, third)] == [False, False, True]
    file = tmp_path / ENDED
    assert file.stat().st_mode & 0o777 == 0o600
    assert not any(cookie in file.read_text() for cookie in (first, second))
    now += LOGIN_S + 1
    later.end(later.login())
    assert len(json.loads(file.read_text())) == 1, "what would be over anyway is forgotten"
    assert not keys.is_login(first)


async def test_a_form_counts_with_origin_login_and_form_token_alone(told: ToldRun) -> None:
    async with site(told) as (client, link):
        origin = {"origin": str(client.base_url).rstrip("/")}
        assert (await client.post("/logout", headers=origin)).status_code == 403
        await client.get(link)
        page = (await client.get("/")).text
        token = re.search(r'name="form_token" value="([0-9a-f]+)"', page)
        assert token is not None
        form = {"form_token": token[1]}
        secure = {"origin": origin["origin"].replace("http:", "https:")}
        for headers in ({}, secure, {"origin": "https://evil.example"}, {"origin": "null"}, {"origin": "http://["},
                        origin | {"sec-fetch-site": "cross-site"}):  # fmt: skip
            answer = await client.post("/logout", data=form, headers=headers)
            assert (answer.status_code, "content-security-policy" in answer.headers) == (403, True), headers
        for body in ({}, {"form_token": "0" * 64}, {"form_token": "é"}):
            assert (await client.post("/logout", data=body, headers=origin)).status_code == 403
        assert (await client.post("/logout", content=b"x" * (FORM_BYTES + 1), headers=origin)).status_code == 400
        assert "Log out" in (await client.get("/")).text
        kept = dict(client.cookies)
        assert (await client.post("/logout", data=form, headers=origin)).status_code == 303
        client.cookies.update(kept)
        assert "Log out" not in (await client.get("/")).text, "a copy of the cookie is worth nothing"
        assert (await client.request("DELETE", "/")).status_code == 405


async def test_a_refused_record_is_put_back_or_passed_over_by_who_logged_in(tmp_path: Path) -> None:
    told = ToldRun(tmp_path)
    await told.tell(1)
    place = Partition(topics.TURNS.name, 0)
    offset = told.run.broker.write(place, b"group-0", b"\x00poison", ())
    async with told.connect()() as role:
        (record,), _ = told.run.broker.read(place, offset, 1)
        await role.park(record, UndecodableRecord("no record of ours <script>"))
    await told.indexed()
    async with site(told) as (client, link):
        origin = {"origin": str(client.base_url).rstrip("/")}
        assert "Put back" not in (await client.get("/dead-letters")).text
        await client.get(link)
        page = (await client.get("/dead-letters")).text
        check_harmless(page, "letters")
        form = dict(re.findall(r'<input type="hidden" name="(\w+)" value="([^"]+)">', page))
        for path in ("/dead-letters/requeue", "/dead-letters/skip"):
            assert (await client.post(path, data=form)).status_code == 403, "no Origin"
            assert (await client.post(path, data=form | {"form_token": "x"}, headers=origin)).status_code == 403
        done = await client.post("/dead-letters/requeue", data=form, headers=origin, follow_redirects=True)
        assert f"agent.turns[0]@{offset + 1}: put back" in done.text
        (again,), _ = told.run.broker.read(place, offset + 1, 1)
        assert (again.value, dict(again.headers)["requeued"]) == (b"\x00poison", form["letter"].encode())
        assert (await client.post("/dead-letters/requeue", data=form, headers=origin)).status_code == 409
        skipped = form | {"reason": "poison"}
        assert (await client.post("/dead-letters/skip", data=skipped, headers=origin)).status_code == 303
        assert [
            (await client.post("/dead-letters/skip", data=skipped | {"place": place}, headers=origin)).status_code
            for place in ("x", f"agent.turns[0]@{'9' * 5000}")
        ] == [409, 409]
        assert (await client.get(f"/records/agent.turns/0/{offset}")).status_code == 422
        spoofed = await client.get("/dead-letters", params={"done": "put back", "at": "call this number"})
        assert "call this number" not in spoofed.text
    orders = [each for each in await told.run.read(topics.SESSIONS) if isinstance(each, SkipRequested)]
    assert [(each.topic, each.offset, each.reason) for each in orders] == [("agent.turns", offset, "poison")]


async def test_every_answer_says_what_it_may_load(told: ToldRun) -> None:
    session = view_of(told).row.session_id
    async with site(told) as (client, _):
        for page in ("/", "/nowhere", "/login", f"/sessions/{session}/tokens", "/static/dashboard.js", "/static/none"):
            headers = (await client.get(page)).headers
            assert "default-src 'none'" in headers["content-security-policy"], page
            assert "frame-ancestors 'none'" in headers["content-security-policy"]
            assert "unsafe" not in headers["content-security-policy"]
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["referrer-policy"] == "same-origin"
        refused = await client.get("/", headers={"host": "evil.example"})
        assert "default-src 'none'" in refused.headers["content-security-policy"]


async def test_numbers_and_places_in_pages_that_nothing_has_are_refused(told: ToldRun) -> None:
    def after(*place: object) -> str:
        return base64.urlsafe_b64encode(orjson.dumps(place[0] if len(place) == 1 else place)).decode()

    big, session, call = "9" * 30, ("started_ms", True), ("duration_s", True)
    pages = [
        *(f"/sessions?{name}={big}" for name in ("batch_index", "min_version", "max_version")),
        *(f"/batches?before={text}" for text in ("--5", "-", "1_0", "9" * 19)),
        *(f"/dead-letters?after={text}" for text in ("--1", "9" * 19)),
        *(f"/batches/{text}" for text in (big, "9" * 5000, "x")),
        *(f"/records/agent.turns/{text}" for text in (f"0/{big}", f"{big}/0", "x/0")),
        *("/timeline?from=--1", f"/timeline?from=0&to={'9' * 19}"),
        *(f"/sessions?after={after(each)}" for each in (5, None, {}, [])),
        *(f"/sessions?after={after(*session, each, 'x')}" for each in ({}, [], "x", 2**63)),
        *(f"/sandboxes?after={after(each)}" for each in (5, None)),
        *(f"/sandboxes?after={after(*call, *each)}" for each in ((1.0, "9" * 40), ({}, "9"), (1.0, "-"))),
    ]  # fmt: skip
    async with site(told) as (client, _):
        for page in pages:
            answer = await client.get(page)
            assert (answer.status_code, "BadQuestion" in answer.text) == (400, True), page
            assert "default-src 'none'" in answer.headers["content-security-policy"], page
        for page in ("/records/agent.turns/0/-1", "/records/agent.turns/-1/0", "/batches/-1"):
            assert (await client.get(page)).status_code == 404, page


async def test_what_agents_wrote_becomes_no_element_no_attribute_and_no_request(told: ToldRun) -> None:
    view = view_of(told, "turns = 2 AND recipe LIKE '<img%'")
    session = view.row.session_id
    async with site(told) as (client, _):
        texts = {
            page: (await client.get(page)).text
            for page in (f"/sessions/{session}", "/sessions", f"/groups/{view.row.group_id}", "/", "/batches/0",
                         f"/compare?left={session}&right={session}")
        }  # fmt: skip
        with Index.open(told.index) as index:
            tokens = await session_tokens(told.run.role(), index, view, Vocabulary(told.settings.model.path))
            batch = index.batch(0)
            assert batch is not None
            texts["timeline"] = timeline(index, dataclasses.replace(batch, rows=[{"session_id": session}])).picture
        texts["export"] = export.as_html(view, tokens)
        file = export.json_file(view, tokens)
        assert all(char.isprintable() or char == "\n" for char in file)
        assert json.loads(file) == json.loads(orjson.dumps(export.as_json(view, tokens)))
        for page, text in texts.items():
            check_harmless(text, page)
        images = re.findall(rf"/sessions/{session}/images/[0-9a-f]+", texts[f"/sessions/{session}"])
        assert len(set(images)) == 1, "one of the images is a picture of pixels, whatever it calls itself"
        answer = await client.get(images[0])
        assert answer.headers["content-type"] == "image/png"
    assert "alert(1)" in texts[f"/sessions/{session}"], "it is shown, as text"
    assert "\\u202e" in texts[f"/sessions/{session}"]


def check_harmless(text: str, page: str) -> None:
    """Elements and attributes are ours, and no character hides."""
    ours = {"script": {"src", "defer", "type", "id"}, "img": {"src", "alt", "class", "loading"}}
    for tag, attributes in Elements(text).found:
        assert tag not in ("iframe", "object", "embed", "b onclick"), page
        assert not any(name.startswith("on") or name == "style" for name in attributes), (page, tag, attributes)
        assert set(attributes) <= ours.get(tag, set(attributes)), (page, tag, attributes)
        for name in ("href", "src", "action"):
            value = attributes.get(name) or ""
            inlined = page == "export" and value.startswith("data:image/png;base64,")
            assert inlined or not re.match(r"\s*(javascript|data|vbscript|//)", value, re.I), (page, tag, value)
            if (tag, name) == ("img", "src"):
                assert inlined or value.startswith("/sessions/"), (page, value)
    assert "<script>alert" not in text
    assert not set(text) & set("\u202e\u2066\x1b\x07\x9b"), page
    assert "49" not in re.findall(r"\{\{ 7 \* 7 \}\}|\b49\b(?= \{%)", text)


@pytest.mark.parametrize("text", HOSTILE)
def test_markdown_of_theirs_is_never_html(text: str) -> None:
    check_harmless(str(harmless.markdown(text)), "markdown")


def test_markdown_keeps_what_people_write() -> None:
    shown = harmless.markdown("# A\n\n*b* **c** `d` [e](https://f.example/g)\n\n| h |\n|---|\n| i |\n\n1. j\n")
    tags = [tag for tag, _ in Elements(shown).found]
    assert {"em", "strong", "code", "a", "table", "ol", "li"} <= set(tags)
    assert not {"h1", "h2"} & set(tags), "headings are the page's own"
    assert 'href="https://f.example/g" rel="noopener noreferrer nofollow"' in shown
    assert "not fetched: b (https://c.example/d.png)" in harmless.markdown("![b](https://c.example/d.png)")
    assert "<pre" in harmless.markdown("a" * 70_000)
    assert harmless.markdown("[" * 5000 + "]" * 5000)


async def test_tokens_are_told_with_their_fate_their_words_and_what_the_step_made_of_them(told: ToldRun) -> None:
    view = view_of(told)
    async with site(told) as (client, _):
        body = (await client.get(f"/sessions/{view.row.session_id}/tokens")).json()
    with Index.open(told.index) as index:
        own = await session_tokens(told.run.role(), index, view, Vocabulary(told.settings.model.path))
    counted: dict[str, int] = {}
    for turn in body["turns"]:
        for reason, often in turn["fate"]:
            counted[body["reasons"][reason]] = counted.get(body["reasons"][reason], 0) + often
    assert counted == dict(tally(own.turns))
    assert {"", "length_cut"} <= set(counted)
    talk = conversation(view)
    for turn, said in zip(body["turns"], talk.turns, strict=True):
        text = "".join(body["texts"][str(each)] for each in turn["ids"])
        assert text == spoken(json.loads(said.row["response"]))
        assert turn["at"] == export.where_of(said.snapshot["place"])  # type: ignore[index]
        assert len(turn["ids"]) == len(turn["logprobs"]) == sum(often for _, often in turn["versions"])
    assert body["as_of"]["run"] == "run"
    await check_figures(told, body)


async def check_figures(told: ToldRun, body: dict[str, object]) -> None:
    """Gap and engine's log-prob of each trained token make the trainer's, as the token file has it."""
    import pyarrow.parquet as parquet

    rows = {}
    for step in await told.run.read(topics.STEPS):
        content = await told.run.objects.get(step.token_file)
        table = parquet.read_table(__import__("pyarrow").BufferReader(content)).to_pylist()
        rows |= {(row["sample_id"], row["position"]): row for row in table}
    checked = 0
    for batch in await told.run.read(topics.BATCHES):
        if not isinstance(batch, SampleBatchFormed):
            continue
        held = read_rows(await told.run.objects.get(batch.file))
        for number, sample in enumerate(held.sample_ids):
            for turn in (each for each in body["turns"] if each["sample"] == sample):  # type: ignore[attr-defined]
                ids = held.token_ids[held.starts[number] : held.starts[number] + held.lengths[number]].tolist()
                start = next(at for at in range(len(ids)) if ids[at : at + len(turn["ids"])] == turn["ids"]
                             or ids[at:] == turn["ids"][: len(ids) - at])  # fmt: skip
                for at, entropy in enumerate(turn["figures"]["entropy"]):
                    row = rows.get((sample, start + at))
                    assert (entropy is None) == (row is None)
                    if row is not None:
                        assert entropy == pytest.approx(row["entropy"], abs=1e-4)
                        trainer = turn["logprobs"][at] + turn["figures"]["gap"][at]
                        assert trainer == pytest.approx(row["logprob"], abs=2e-4)
                        checked += 1
    assert checked > 100


async def test_tokens_whose_records_are_gone_and_a_log_that_is_away_are_said(tmp_path: Path) -> None:
    told = ToldRun(tmp_path)
    await told.tell(2)
    session = view_of(told, "turns > 1").row.session_id
    for number in range(2):
        place = Partition(topics.SNAPSHOTS.name, number)
        told.run.broker.truncate(place, told.run.broker.log_of(place).end)
    async with site(told) as (client, _):
        answer = await client.get(f"/sessions/{session}/tokens")
        assert (answer.status_code, "RecordGone" in answer.json()["error"]) == (410, True)
        assert (await client.get(f"/sessions/{session}")).status_code == 200
        await told.run.archive()
    (tmp_path / "model" / "tokenizer.json").unlink()
    settings = dataclasses.replace(told.settings, model=dataclasses.replace(told.settings.model, path=""))
    assert Vocabulary(settings.model.path).lacks("") != ""
    assert Vocabulary(str(tmp_path / "model")).lacks("") != ""


async def test_tokens_of_another_tokenizer_are_shown_by_id(told: ToldRun, tmp_path: Path) -> None:
    from tests.fakes.stories import tokenizer

    tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text((tmp_path / "tokenizer.json").read_text() + "\n")
    view = view_of(told)
    with Index.open(told.index) as index:
        found = (await session_tokens(told.run.role(), index, view, Vocabulary(str(tmp_path)))).body()
    assert found["texts"] == {}
    assert "not the one" in found["notes"][0]


async def test_no_index_gives_a_page_that_says_how_to_build_one_and_then_the_run(tmp_path: Path) -> None:
    told = ToldRun(tmp_path)
    async with site(told) as (client, _):
        for page in ("/", "/sessions", "/sessions/x", "/batches"):
            answer = await client.get(page)
            assert answer.status_code == 503
            assert "turnlog --run run log index build" in answer.text
        await told.tell(1)
        assert (await client.get("/")).status_code == 200
        told.index.write_bytes(b"no database" * 500)
        broken = await client.get("/")
        assert (broken.status_code, "DamagedIndex" in broken.text) == (503, True)


async def test_an_export_is_one_file_that_loads_nothing_and_a_json_of_all_of_it(told: ToldRun) -> None:
    view = view_of(told)
    with Index.open(told.index) as index:
        tokens = await session_tokens(told.run.role(), index, view, Vocabulary(told.settings.model.path))
    page = export.as_html(view, tokens)
    assert not re.search(r'(href|src)="(?!#|data:image/png)', page)
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', page)
    assert policy is not None
    for element in ("style", "script"):
        inside = re.findall(rf"<{element}>(.*?)</{element}>", page, re.S)
        assert len(inside) == 1
        wanted = base64.b64encode(hashlib.sha256(inside[0].encode()).digest()).decode()
        assert f"{element}-src &#39;sha256-{wanted}&#39;" in policy[1]
    data = re.search(r'<script type="application/json" id="tokens">(.*?)</script>', page, re.S)
    assert data is not None
    assert json.loads(data[1]) == json.loads(orjson.dumps(tokens.body()))
    body = json.loads(orjson.dumps(export.as_json(view, tokens)))
    assert body["schema"] == "turnlog.session/1"
    assert body["session"]["session_id"] == view.row.session_id
    assert len(body["turns"]) == 7
    assert {"at", "kind", "says"} == set(body["chain"][0])


def test_a_conversation_is_read_from_every_api_and_hangs_together(told: ToldRun) -> None:
    talk = conversation(view_of(told))
    assert [turn.kind for turn in talk.turns] == ["root", "append", "append", "append", "sub_agent", "branch", "append"]
    assert [turn.base for turn in talk.turns] == [None, 0, 1, 2, None, 3, 5]
    assert [turn.lane for turn in talk.turns] == [0, 0, 0, 0, 1, 0, 0]
    assert [call.row["exit_code"] for turn in talk.turns for call in turn.calls if call.row] == [0, 1, 0, 0, 0]
    assert talk.turns[-1].response is not None
    assert talk.turns[-1].response.plain == END


def test_turns_of_two_sessions_are_aligned_by_line_and_number(told: ToldRun) -> None:
    whole, cut = conversation(view_of(told)).turns, conversation(view_of(told, "turns = 2 AND recipe = 'repair'")).turns
    numbers = [tuple(one and one.number for one in pair) for pair in align_turns(whole, cut)]
    assert numbers == [(0, 0), (1, 1), *((number, None) for number in range(2, 7))]
    without = [turn for turn in whole if turn.kind != "sub_agent"]
    numbers = [tuple(one and one.number for one in pair) for pair in align_turns(whole, without)]
    assert numbers == [(at, None if at == 4 else at) for at in range(7)]
    assert said_alike(whole[0], cut[0]), "each has its own id of the same call"
    assert not said_alike(whole[0], whole[1])
    assert not said_alike(whole[0], None)


@pytest.mark.parametrize(
    ("raw", "role", "kinds"),
    [
        ({"role": "user", "content": "a"}, "user", ["text"]),
        ({"role": "developer", "content": [{"type": "input_text", "text": "a"}]}, "system", ["text"]),
        ({"type": "function_call_output", "call_id": "c", "output": "a"}, "tool", ["result"]),
        ({"type": "function_call", "call_id": "c", "name": "n", "arguments": "{}"}, "assistant", ["call"]),
        ({"content": [{"type": "tool_result", "tool_use_id": "c", "content": "a"}]}, "user", ["result"]),
        ({"role": "assistant", "content": [{"type": "thinking", "thinking": "a"}, {"type": "tool_use", "id": "c"}]},
         "assistant", ["thought", "call"]),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}, 7]}, "user",
         ["image", "other"]),
        ("no object", "user", ["other"]),
        ({"content": None}, "user", []),
    ],
)  # fmt: skip
def test_messages_of_every_api_come_down_to_a_few_kinds(raw: object, role: str, kinds: list[str]) -> None:
    from turnlog.plugins.dashboard.conversation import MessageReader

    said = MessageReader().message(raw)
    assert (said.role, [part.kind for part in said.parts]) == (role, kinds)


def test_runs_are_short_for_what_seldom_changes() -> None:
    assert runs([1, 1, 2, 1]) == [[1, 2], [2, 1], [1, 1]]
    assert runs([]) == []


def started(told: ToldRun, *arguments: str, **more: str) -> subprocess.Popen[str]:
    """A `turnlog dashboard` of the run's folder, that knows no log."""
    env = {**os.environ, "TURNLOG_RUN_ID": "run", "TURNLOG_RUN_DIRECTORY": str(told.folder), **more}
    return subprocess.Popen(
        [sys.executable, "-m", "turnlog.cli", "dashboard", *arguments], env=env, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip


def test_the_command_says_where_it_is_serves_without_a_log_and_ends_clean(told: ToldRun) -> None:
    serving_ = started(told)
    try:
        assert serving_.stdout is not None
        where, link = serving_.stdout.readline(), serving_.stdout.readline()
        url = where.split()[-1]
        assert link.startswith(f"log in once: {url}/login?token=")
        assert httpx.get(url).status_code == 200
        session = view_of(told).row.session_id
        answer = httpx.get(f"{url}/sessions/{session}/tokens")
        assert answer.status_code in (500, 503)
        assert "endpoints.json" in answer.json()["error"]
        another = started(told, "link")
        told_link, _ = another.communicate(timeout=60)
        assert httpx.get(told_link.strip()).status_code == 303
        taken = started(told, "--port", url.rpartition(":")[2])
        assert "CannotListen" in taken.communicate(timeout=60)[1]
        assert taken.returncode == 2
    finally:
        serving_.send_signal(signal.SIGINT)
        _, complaints = serving_.communicate(timeout=60)
    assert (serving_.returncode, complaints) == (0, "")
    assert not (told.folder / "dashboard.json").exists()
    gone = started(told, "link")
    assert "NotRunning" in gone.communicate(timeout=60)[1]
    assert gone.returncode == 2


async def test_a_form_comes_by_https_where_a_proxy_is_before_the_dashboard(told: ToldRun) -> None:
    async with site(told, hosts=("runs.example",)) as (client, link):
        await client.get(link)
        token = re.search(r'name="form_token" value="([0-9a-f]+)"', (await client.get("/")).text)
        assert token is not None
        client.cookies = httpx.Cookies(dict(client.cookies))
        for origin, status in (("https://other.example", 403), ("https://runs.example", 303)):
            named = {"host": "runs.example", "origin": origin}
            answer = await client.post("/logout", data={"form_token": token[1]}, headers=named)
            assert answer.status_code == status, answer.text


def test_no_login_link_goes_into_a_log(told: ToldRun, tmp_path: Path) -> None:
    env = {**os.environ, "TURNLOG_RUN_ID": "run", "TURNLOG_RUN_DIRECTORY": str(told.folder)}
    log, command = tmp_path / "dashboard.log", [sys.executable, "-m", "turnlog.cli", "dashboard"]
    with log.open("wb") as out, subprocess.Popen(command, env=env, stdout=out, stderr=out) as serving_:
        try:
            while not log.read_bytes().count(b"\n") >= 2 and serving_.poll() is None:
                os.sched_yield()
        finally:
            serving_.send_signal(signal.SIGINT)
            serving_.wait(60)
    assert "log in: `turnlog --run run dashboard link` prints a single-use link" in log.read_text()
    assert "token" not in log.read_text()


def test_a_bind_beyond_the_loopback_warns_that_it_is_not_encrypted(told: ToldRun) -> None:
    open_ = started(told, "--host", "0.0.0.0")
    assert open_.stdout is not None
    url = open_.stdout.readline().split()[-1]
    assert httpx.get(url).status_code == 401
    open_.send_signal(signal.SIGTERM)
    assert "without encryption" in open_.communicate(timeout=60)[1]
    assert open_.returncode == 0


async def test_a_run_is_called_running_only_while_it_is_known_to_run(told: ToldRun) -> None:
    with Index.open(told.index) as index:
        (newest,) = index.rows("SELECT max(time_ms) / 1000.0 AS s FROM engine_events")
        now_s, later_s = newest["s"] + 1, newest["s"] + 86_400

        def seen(alive: bool | None, at_s: float) -> tuple[str, str]:
            found = overview(index, alive=alive, now_s=at_s)
            return found.facts[0][1], found.engines[0]["state"]

        assert seen(True, later_s) == ("running", "serving")
        assert seen(False, now_s) == ("down", "unknown, serving before")
        assert seen(None, now_s) == ("running", "serving")
        assert seen(None, later_s) == ("unknown: no record for a while", "unknown, serving before")


async def test_a_run_whose_draws_are_all_trained_is_finished_whoever_serves_its_page(tmp_path: Path) -> None:
    finished = ToldRun(tmp_path)
    await finished.tell(2)
    with Index.open(finished.index) as index:
        draws = len({row["draw_index"] for row in index.series()[0]})
        plan = index.row("SELECT draws FROM runs WHERE kind = 'RunPlanned'")
    assert plan is not None
    with contextlib.closing(sqlite3.connect(finished.index)) as file:
        file.execute("UPDATE runs_records SET draws = ? WHERE kind = 'RunPlanned'", (draws,))
        file.commit()
    with Index.open(finished.index) as index:
        assert [overview(index, alive=alive).facts[0][1] for alive in (True, False, None)] == ["finished"] * 3


def test_the_supervisor_of_a_run_folder_says_whether_it_is_alive(tmp_path: Path) -> None:
    assert is_supervised(tmp_path) is None
    write_state(tmp_path, {"pid": 1})
    assert is_supervised(tmp_path) is False
    with lock_run(tmp_path):
        assert is_supervised(tmp_path) is True


async def test_a_list_of_sessions_shows_prompts_totals_and_a_choice_to_compare(told: ToldRun) -> None:
    view = view_of(told)
    with Index.open(told.index) as index:
        (counted,) = index.rows("SELECT count(*) AS n FROM sessions")
        asked = prompts(index, [view.row.session_id])[view.row.session_id]
    assert asked
    async with site(told) as (client, _):
        page = (await client.get("/sessions")).text
        assert f"of {counted['n']}" in page
        group = (await client.get(f"/groups/{view.row.group_id}")).text
        assert str(escape(asked[:40])) in group
        left, right = (re.search(rf'name="{side}" value="(\w+)"[^>]* checked', group) for side in ("left", "right"))
        assert left
        assert right
        with Index.open(told.index) as index:
            best, worst = (index.session(found[1]) for found in (left, right))
            ends = index.row(
                "SELECT max(reward) AS best, min(reward) AS worst FROM sessions WHERE group_id = ?", view.row.group_id
            )
        assert best
        assert worst
        assert ends == {"best": best.row.reward, "worst": worst.row.reward}
        compared = await client.get("/compare", params={"left": left[1], "right": right[1]})
        assert compared.status_code == 200


async def test_gaps_of_a_mixed_fleet_are_drawn_and_named_by_kind_of_engine(told: ToldRun) -> None:
    async with site(told) as (client, _):
        overview, batch = (await client.get("/")).text, (await client.get("/batches/0")).text
    for kind in ("sglang", "vllm"):
        assert f"</i>largest, {kind}</li>" in overview
    assert "at most, sglang 0.0002, vllm 0.5, " in batch
    with Index.open(told.index) as index:
        row = dict(index.rows("SELECT * FROM steps ORDER BY step")[0]) | {"lag_max": 0, "logprob_gap_max": 0.5}
        (found,) = [one for one in alarms(index, [row], [], []) if one.name == "gap"]
    assert found.said.endswith("with the same weights; sglang engines by 0.0002; vllm engines by 0.5")


async def test_curves_are_smoothed_and_cut_to_the_steps_that_are_asked_for(told: ToldRun) -> None:
    async with site(told) as (client, _):
        whole = (await client.get("/")).text
        for title in ("Response length", "Turns", "Clipped tokens", "Step time", "Training throughput"):
            assert f"<b>{title}</b>" in whole
        second = (await client.get("/?from=2&to=2&smooth=0.9")).text
        assert "step 2: mean" in second
        assert "step 1: mean" not in second
        for query in ("smooth=1", "smooth=x", "smooth=nan", "from=x"):
            answer = await client.get(f"/?{query}")
            assert (answer.status_code, "BadQuestion" in answer.text) == (400, True), query


def test_a_moving_average_begins_at_its_first_value_and_keeps_gaps() -> None:
    first, gap, second, third = drawing.smooth([1.0, None, 1.0, 3.0], 0.5)
    assert (first, gap, second) == (1.0, None, 1.0)
    assert third == pytest.approx((0.125 * 1 + 0.25 * 1 + 0.5 * 3) / 0.875)
    assert drawing.smooth([1.0, 3.0], 0.0) == [1.0, 3.0]


@pytest.mark.parametrize(
    ("low", "high", "whole", "lines"),
    [
        (0.0, 1.0, False, [0.0, 0.5, 1.0]), (0, 0, True, [0, 1]), (0, 2, True, [0, 1, 2]), (0.31, 0.92, False, None),
        (5.0, 5.0, False, None), (0.0, 1234.0, False, [0, 500, 1000, 1500]), (-3.0, 4.0, False, None),
    ],
)  # fmt: skip
def test_an_axis_has_round_lines_around_its_values(
    low: float, high: float, whole: bool, lines: list[float] | None
) -> None:
    found = drawing.axis(low, high, whole=whole)
    assert found[0] <= low
    assert found[-1] >= high
    assert 2 <= len(found) <= 7
    assert found == sorted(found)
    if lines is not None:
        assert found == pytest.approx(lines)
