"""Who may use which address of the dashboard, and what the audit trail says of it."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes.told_run import ToldRun
from turnlog.consumers.audit import AuditFilter, entries, newest_entries
from turnlog.consumers.index.reader import Index, where_of
from turnlog.infra.access import AuditUnavailable, Person
from turnlog.infra.access.audit import LOOK_S, AccessAttempt, AuditTrail, audit_command, os_user
from turnlog.infra.log import LogUnavailable, Partition
from turnlog.infra.roles.http_clients import direct
from turnlog.infra.roles.role import Role
from turnlog.plugins.dashboard.guard import Keys
from turnlog.plugins.dashboard.rights import RIGHTS
from turnlog.plugins.dashboard.server import serving
from turnlog.schemas import topics
from turnlog.schemas.events import AccessAudited
from turnlog.settings import AccessRole, AccessSettings, DashboardSettings
from turnlog.verbs.audit import body_of_entry

TOKENS = "\n".join(f"program-{role} {role} {role.value * 8}" for role in AccessRole)
ROLES = (None, *AccessRole)
GONE = "gone"


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> ToldRun:
    """A run of two groups."""
    found = ToldRun(tmp_path_factory.mktemp("told"))
    asyncio.run(found.tell(2))
    return found


@asynccontextmanager
async def site(
    told: ToldRun, *, own: Mapping[str, Any] | None = None, connect: Any = None, **access: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, Keys]]:
    """A browser's connection to a dashboard, and the keys that make links to it."""
    settings = dataclasses.replace(
        told.settings, dashboard=DashboardSettings(**own or {}), access=AccessSettings(**access)
    )
    opened = connect or told.connect()
    async with serving(settings, with_settings(opened, access)) as (url, keys), direct(base_url=url) as client:
        yield client, keys


def with_settings(connect: Any, access: Mapping[str, Any]) -> Any:
    """The same log, for a role with these settings."""

    @asynccontextmanager
    async def opened() -> AsyncIterator[Role]:
        async with connect() as role:
            role.settings = dataclasses.replace(role.settings, access=AccessSettings(**access))
            yield role

    return opened


async def log_in(client: httpx.AsyncClient, keys: Keys, role: AccessRole, by: str = "ann") -> dict[str, str]:
    """Follow a link of that role; what a form of the pages carries."""
    token = keys.link_token(str(client.base_url).rstrip("/"), role=role, printed_by=by)
    assert (await client.get(f"/login?token={token}")).status_code == 303
    found = re.search(r'name="form_token" value="([0-9a-f]+)"', (await client.get("/weights")).text)
    assert found is not None
    return {"form_token": found[1]}


def addresses(told: ToldRun) -> dict[tuple[str, str], str]:
    """Each (method, path) of the table -> an address that is there."""
    with Index.open(told.index) as index:
        rows = index.rows("SELECT session_id, group_id FROM sessions WHERE turns > 0 ORDER BY session_id LIMIT 2")
        place = index.rows("SELECT place FROM turns ORDER BY place LIMIT 1")[0]["place"]
    session, other = (row["session_id"] for row in rows)
    topic, partition, offset = re.split(r"\[|\]@", where_of(place))
    values = {"topic": topic, "partition": partition, "offset": offset, "number": "0", "form": "json", "name": GONE}
    found = {}
    for method, path in RIGHTS:
        own = values | {"id": rows[0]["group_id"] if path.startswith("/groups") else session}
        address = re.sub(r"\{(\w+)\}", lambda match, own=own: own[match[1]], path)
        found[method, path] = f"{address}?left={session}&right={other}" if path == "/compare" else address
    return found


async def ask(client: httpx.AsyncClient, method: str, url: str, **more: Any) -> int:
    """The status of an answer, of which a live one never ends."""
    async with client.stream(method, url, **more) as answer:
        if url != "/live":
            await answer.aread()
        return answer.status_code


def expected(method: str, path: str, role: AccessRole | None) -> Sequence[int]:
    """The statuses that are right for a role."""
    right = RIGHTS[method, path]
    if right.role is None:  # without a provider there is no such page
        return (200,) if path == "/login" else (404,)
    if role is None:
        return (401,)
    if not role.includes(right.role):
        return (403,)
    by_path = {"/sessions/{id}/images/{name}": (404,), "/dead-letters/requeue": (409,), "/dead-letters/skip": (409,),
               "/against/{name}": (404,), "/against/{name}/samples": (404,), "/logins/end": (400,), "/notes": (303,),
               "/logout": (303,)}  # fmt: skip
    return by_path.get(path, (200,))


@pytest.mark.parametrize("role", ROLES)
async def test_each_role_in_a_browser_has_each_right_and_each_denial_of_the_table(
    told: ToldRun, role: AccessRole | None
) -> None:
    async with site(told, tokens=TOKENS) as (client, keys):
        form = {} if role is None else await log_in(client, keys, role)
        origin = {"origin": str(client.base_url).rstrip("/")}
        for (method, path), url in sorted(addresses(told).items(), key=lambda one: one[0][1] == "/logout"):
            more = {"data": form, "headers": origin} if method == "POST" else {}
            status = await ask(client, method, url, **more)
            assert status in expected(method, path, role), (method, path, role, status)
            if method == "GET" and path not in ("/live", "/login"):
                assert await ask(client, "HEAD", url) == status, "HEAD tells no more than GET"


@pytest.mark.parametrize("role", AccessRole)
async def test_a_program_reads_by_its_token_and_changes_nothing(told: ToldRun, role: AccessRole) -> None:
    header = {"authorization": f"Bearer {role.value * 8}"}
    async with site(told, tokens=TOKENS) as (client, _):
        origin = {"origin": str(client.base_url).rstrip("/")}
        for (method, path), url in addresses(told).items():
            status = await ask(client, method, url, headers=header | origin)
            wanted = (403,) if method == "POST" else expected(method, path, role)
            assert status in wanted, (method, path, role, status)
        for bad in ("Bearer x", f"Bearer {role.value * 8}x"):
            answer = await client.get("/sessions", headers={"authorization": bad})
            assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
        assert await ask(client, "GET", "/sessions", headers={"authorization": "Basic eDp5"}) == 401


async def test_without_roles_everybody_of_the_machine_reads_as_before_and_a_link_makes_an_owner(told: ToldRun) -> None:
    async with site(told) as (client, keys):
        for (method, path), url in addresses(told).items():
            right = RIGHTS[method, path].role
            if method == "GET" and right is AccessRole.READER:
                assert await ask(client, "GET", url) in expected(method, path, AccessRole.READER), path
            elif method == "GET" and right is not None:
                assert await ask(client, "GET", url) == 403, path
        assert await ask(client, "GET", "/weights", headers={"authorization": "Bearer of-a-proxy"}) == 200
        token = keys.link_token(str(client.base_url).rstrip("/"))
        await client.get(f"/login?token={token}")
        assert await ask(client, "GET", "/audit") == 200


async def test_a_page_shows_the_forms_that_its_reader_may_send(told: ToldRun) -> None:
    forms = {}
    for role in AccessRole:
        async with site(told, tokens=TOKENS) as (client, keys):
            await log_in(client, keys, role)
            page = (await client.get("/")).text
            forms[role] = ('action="/notes"' in page, 'href="/audit"' in page)
    assert forms == {AccessRole.READER: (False, False), AccessRole.OPERATOR: (True, False),
                     AccessRole.OWNER: (True, True)}  # fmt: skip


async def test_a_cookie_whose_role_was_changed_is_no_login(told: ToldRun) -> None:
    async with site(told, tokens=TOKENS) as (client, keys):
        await log_in(client, keys, AccessRole.READER)
        ((name, cookie),) = client.cookies.items()
        text, *rest = cookie.split("~")
        body = json.loads(base64.urlsafe_b64decode(text + "=="))
        assert body["role"] == "reader"
        forged = base64.urlsafe_b64encode(json.dumps(body | {"role": "owner"}).encode()).rstrip(b"=").decode()
        client.cookies.clear()
        for value in (
            "~".join((forged, *rest)), "~".join((text, *rest[:2], "0" * 64)), forged, "~~~", "a~b~c~d",
            keys.link_token(str(client.base_url).rstrip("/"), role=AccessRole.OWNER),
            keys.form_token(cookie),
        ):  # fmt: skip
            assert await ask(client, "GET", "/weights", headers={"cookie": f"{name}={value}"}) == 401, value
        assert await ask(client, "GET", "/weights", headers={"cookie": f"{name}={cookie}"}) == 200


async def test_an_owner_ends_the_logins_of_a_subject_that_are_there_now(tmp_path: Path) -> None:
    now = 1_000_000.0
    keys, beside = (Keys("secret", tmp_path, lambda: now) for _ in range(2))
    ann, bob = Person("ann", "oidc", AccessRole.OWNER), Person("bob", "oidc", AccessRole.READER)
    cookies = [keys.login(ann), keys.login(ann), keys.login(bob)]
    assert [keys.find_login(each) is not None for each in cookies] == [True] * 3
    keys.end_all("ann")
    now += 1
    again = keys.login(ann)
    for each in (keys, beside, Keys("secret", tmp_path, lambda: now)):
        assert [each.is_login(cookie) for cookie in (*cookies, again)] == [False, False, True, True]


async def test_a_login_lasts_no_longer_than_it_was_given_for(tmp_path: Path) -> None:
    now = 1_000_000.0
    keys = Keys("secret", tmp_path, lambda: now)
    cookie = keys.login(Person("ann", "oidc", AccessRole.READER), lasts_s=300)
    now += 299
    assert keys.is_login(cookie)
    now += 2
    assert not keys.is_login(cookie)


def test_two_dashboards_that_end_logins_at_once_lose_none(tmp_path: Path) -> None:
    beside = [Keys("secret", tmp_path) for _ in range(2)]
    cookies = [[keys.login(Person("ann", "oidc", AccessRole.READER)) for _ in range(30)] for keys in beside]
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda keys, own: list(map(keys.end, own)), beside, cookies))
    assert not any(beside[0].is_login(cookie) for own in cookies for cookie in own)


async def test_a_login_from_the_future_is_none(tmp_path: Path) -> None:
    """Its clock was wrong; it would last too long, and an owner could not end it."""
    now = 1_000_000.0
    keys = Keys("secret", tmp_path, lambda: now)
    cookie = keys.login(Person("ann", "oidc", AccessRole.READER))
    now -= 3600
    assert not keys.is_login(cookie)


async def audited(told: ToldRun) -> list[AccessAudited]:
    """The records of the trail."""
    return [each for each in await told.run.read(topics.AUDIT) if isinstance(each, AccessAudited)]


@pytest.fixture
async def fresh(tmp_path: Path) -> ToldRun:
    """A run of its own."""
    found = ToldRun(tmp_path)
    await found.tell(1)
    return found


async def test_a_look_is_recorded_once_and_denials_exports_actions_and_logins_each_time(fresh: ToldRun) -> None:
    urls = addresses(fresh)
    session = urls["GET", "/sessions/{id}"].rpartition("/")[2]
    async with site(fresh, tokens=TOKENS, audit=True) as (client, keys):
        form = await log_in(client, keys, AccessRole.OPERATOR)
        for _ in range(3):
            for path in ("/sessions/{id}", "/sessions/{id}/tokens"):
                assert await ask(client, "GET", urls["GET", path]) == 200
        assert await ask(client, "GET", urls["GET", "/compare"]) == 200
        assert await ask(client, "GET", urls["GET", "/sessions/{id}/export/{form}"]) == 403
        origin = {"origin": str(client.base_url).rstrip("/")}
        for _ in range(2):
            answer = await client.post("/notes", data=form | {"text": "a secret note"}, headers=origin)
            assert answer.status_code == 303
        client.cookies.clear()
        owner = {"authorization": f"Bearer {'owner' * 8}"}
        for _ in range(2):
            answer = await client.get(urls["GET", "/sessions/{id}/export/{form}"], headers=owner)
            assert answer.json()["session"]["session_id"] == session
        page = (await client.get("/audit", headers=owner)).text
    found = [(each.subject, each.login, each.role, each.action, each.kind, each.form, each.allowed)
             for each in await audited(fresh)]  # fmt: skip
    link = ("link:ann", "link", "operator")
    assert found == [
        (*link, "login", "login", "", True), (*link, "look", "weights", "", True), (*link, "look", "session", "", True),
        (*link, "look", "session", "", True), (*link, "export", "session", "json", False),
        (*link, "act", "note", "", True), (*link, "act", "note", "", True),
        *[("program-owner", "token", "owner", "export", "session", "json", True)] * 2,
        ("program-owner", "token", "owner", "look", "audit", "", True),
    ]  # fmt: skip
    records = await audited(fresh)
    assert records[2].about == (session,)
    assert len(records[3].about) == 2, "both sides of a comparison"
    assert {each.address for each in records} == {"127.0.0.1"}
    assert "a secret note" not in repr(records)
    assert "owner" * 8 not in repr(records)
    assert page.count("<tr><td>") == len(records)
    assert 'class="bad">denied' in page


class LogAway:
    """A log that cannot be written."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.writable = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def append(self, event: Any) -> tuple[int, int]:
        """Fail as a broker that is away."""
        raise LogUnavailable("no broker answers")


def log_is_away(told: ToldRun) -> Any:
    """What opens a log that can be read and not written."""

    @asynccontextmanager
    async def opened() -> AsyncIterator[Role]:
        async with told.connect()() as role:
            role.events = LogAway(role.events)  # type: ignore[assignment]
            yield role

    return opened


async def test_what_cannot_be_recorded_is_not_shown_and_without_auditing_it_is(told: ToldRun) -> None:
    urls = addresses(told)
    header = {"authorization": f"Bearer {'owner' * 8}"}
    async with site(told, connect=log_is_away(told), tokens=TOKENS, audit=True) as (client, keys):
        for (method, path), url in urls.items():
            right = RIGHTS[method, path]
            if method == "GET" and right.kind:
                answer = await client.get(url, headers=header)
                assert answer.status_code == 503, path
                assert "AuditUnavailable" in answer.text, path
                assert "[access] audit" in answer.text
        token = keys.link_token(str(client.base_url).rstrip("/"))
        answer = await client.get(f"/login?token={token}")
        assert (answer.status_code, "set-cookie" in answer.headers) == (503, False)
    async with site(told, connect=log_is_away(told), tokens=TOKENS) as (client, _):
        assert await ask(client, "GET", urls["GET", "/sessions/{id}"], headers=header) == 200


async def test_an_archive_and_a_log_that_never_answers_fail_closed(told: ToldRun) -> None:
    person, attempt = Person("ann", "oidc", AccessRole.READER), AccessAttempt("look", "session", ("s",))
    async with told.connect()() as role:
        role.events = LogAway(role.events)  # type: ignore[assignment]
        role.events.writable = False  # type: ignore[misc]

        async def opened() -> Role:
            return role

        with pytest.raises(AuditUnavailable, match="an archive cannot be written"):
            await AuditTrail(opened, audited=True).record(person, attempt)


async def test_a_record_stands_for_an_hour_of_looks_and_one_that_failed_for_none(fresh: ToldRun) -> None:
    now = 0.0
    person, attempt = Person("ann", "oidc", AccessRole.READER), AccessAttempt("look", "session", ("s",))
    async with fresh.connect()() as role:
        whole = role.events

        async def opened() -> Role:
            return role

        trail = AuditTrail(opened, audited=True, clock=lambda: now)
        role.events = LogAway(whole)  # type: ignore[assignment]
        with pytest.raises(AuditUnavailable):
            await trail.record(person, attempt)
        role.events = whole
        await asyncio.gather(*(trail.record(person, attempt) for _ in range(5)))
        assert len(await audited(fresh)) == 1
        now += LOOK_S - 1
        await trail.record(person, attempt)
        assert len(await audited(fresh)) == 1
        now += 1
        await trail.record(person, attempt)
        await trail.record(dataclasses.replace(person, subject="bob"), attempt)
        assert len(await audited(fresh)) == 3
        await AuditTrail(opened, audited=False).record(person, dataclasses.replace(attempt, action="export"))
        assert len(await audited(fresh)) == 3


async def test_ids_that_anybody_can_type_are_cut(fresh: ToldRun) -> None:
    async with site(fresh, tokens=TOKENS, audit=True) as (client, _):
        answer = await client.get("/sessions/" + "x" * 5000, headers={"authorization": f"Bearer {'reader' * 8}"})
        assert answer.status_code == 404
        for name in "yz":
            url = "/sessions/" + "x" * 300 + f"{name}/export/" + "f" * 5000
            assert await ask(client, "GET", url, headers={"authorization": f"Bearer {'owner' * 8}"}) == 404
    record, *exports = await audited(fresh)
    assert [len(each) for each in record.about] == [200]
    assert [len(each.form) for each in exports] == [200, 200]
    assert exports[0].about != exports[1].about, "what was cut is still told apart"


async def test_an_action_is_recorded_with_what_it_acted_on(fresh: ToldRun) -> None:
    async with site(fresh, tokens=TOKENS, audit=True) as (client, keys):
        form = await log_in(client, keys, AccessRole.OWNER)
        origin = {"origin": str(client.base_url).rstrip("/")}
        fields = {"/dead-letters/requeue": "letter", "/dead-letters/skip": "place", "/notes": "subject",
                  "/logins/end": "subject"}  # fmt: skip
        for path, name in fields.items():
            await client.post(path, data=form | {name: path}, headers=origin)
        answer = await client.post("/logins/end", data={"subject": "bob"}, headers=origin)
        assert answer.status_code == 403, "a form without its token is no action"
        header = origin | {"authorization": f"Bearer {'owner' * 8}"}
        answer = await client.post("/logins/end", data=form | {"subject": "bob"}, headers=header)
        assert answer.status_code == 403, "a token of a program opens no form"
    acts = [each for each in await audited(fresh) if each.action == "act"]
    assert [(each.kind, each.allowed) for each in acts[len(fields) :]] == [("logins", False)]
    assert [each.about for each in acts[: len(fields)]] == [(path,) for path in fields]


async def test_a_command_is_recorded_with_the_user_of_the_machine_and_the_trail_is_filtered(fresh: ToldRun) -> None:
    async with with_settings(fresh.connect(), {"audit": True})() as role:
        await audit_command(role, "export", "dataset", ("best",), "sft")
        await audit_command(role, "look", "session", ("s-1",))
        found = [entry async for entry in entries(role, AuditFilter())]
        assert [(each.access.subject, each.access.login, each.access.kind, each.access.form) for each in found] == [
            (os_user(), "os_user", "dataset", "sft"), (os_user(), "os_user", "session", ""),
        ]  # fmt: skip
        (one,) = [entry async for entry in entries(role, AuditFilter(about="s-1"))]
        body = body_of_entry(one)
        assert (body["kind"], body["about"], body["time_ms"]) == ("session", ("s-1",), one.time_ms)
        assert await newest_entries(role, AuditFilter(denied=True), most=5) == []
        (newest,) = await newest_entries(role, AuditFilter(), most=1)
        assert newest.access.kind == "session"
    async with with_settings(fresh.connect(), {})() as role:
        await audit_command(role, "look", "session", ("s-1",))
    assert len(await audited(fresh)) == 2, "[access] audit is off"
    assert fresh.run.broker.log_of(Partition(topics.AUDIT.name, 0)).end == 2
