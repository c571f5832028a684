"""Logins at the dashboard through an OpenID Connect provider: a real one, and one that misbehaves."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

import httpx
import pytest

from tests.fakes.oidc_provider import CLIENT, PEOPLE, ROLES, SECRET, FakeOidcProvider
from tests.fakes.told_run import ToldRun
from turnlog.infra.roles.http_clients import direct
from turnlog.plugins.dashboard.provider_login import own_page
from turnlog.plugins.dashboard.server import serving
from turnlog.schemas import topics
from turnlog.schemas.events import AccessAudited
from turnlog.settings import AccessSettings, DashboardSettings

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the real provider
HTML = {"accept": "text/html"}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> ToldRun:
    """A run without an index: its pages say so, to those who may see that."""
    return ToldRun(tmp_path_factory.mktemp("told"))


@asynccontextmanager
async def site(
    told: ToldRun, issuer: str, *, own: dict[str, Any] | None = None, **access: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """A browser's connection to a dashboard with a provider."""
    settings = dataclasses.replace(
        told.settings,
        dashboard=DashboardSettings(**own or {}),
        access=AccessSettings(**{
            "oidc_issuer": issuer, "oidc_client_id": CLIENT, "oidc_client_secret": SECRET, "roles": ROLES, **access,
        }),
    )  # fmt: skip
    async with serving(settings, told.connect()) as (url, _), direct(base_url=url, headers=HTML) as client:
        yield client


@pytest.fixture
async def fake() -> AsyncIterator[FakeOidcProvider]:
    """The provider that misbehaves where it is told to."""
    provider = FakeOidcProvider()
    async with provider.serving():
        yield provider


async def begin(client: httpx.AsyncClient, page: str = "/login/provider") -> str:
    """Go to the provider; its address."""
    answer = await client.get(page)
    while answer.status_code == 303 and answer.headers["location"].startswith("/"):
        answer = await client.get(answer.headers["location"])
    assert answer.status_code == 303, answer.text
    return answer.headers["location"]


async def approve(client: httpx.AsyncClient, url: str, subject: str) -> str:
    """Log in at the provider as its page does; the path and query to which it sends the browser back."""
    answer = await client.post(url, data={"sub": subject})
    assert answer.status_code == 302, answer.text
    back = urlsplit(answer.headers["location"])
    assert back.path == "/login/callback"
    return f"{back.path}?{back.query}"


async def log_in(client: httpx.AsyncClient, subject: str, page: str = "/login/provider") -> httpx.Response:
    """The whole way; the answer to the return."""
    return await client.get(await approve(client, await begin(client, page), subject))


def cookie_of(client: httpx.AsyncClient) -> str:
    """The name of the login cookie, or nothing."""
    return next((name for name in client.cookies if "-login" not in name), "")


@pytest.fixture(params=["real", "fake"])
async def issuer(request: pytest.FixtureRequest) -> AsyncIterator[str]:
    """A provider of authlib's classes (oidc-provider-mock), and the fake, which must do the same."""
    if request.param == "fake":
        async with FakeOidcProvider().serving() as issuer:
            yield issuer
        return
    from oidc_provider_mock import User, run_server_in_thread

    people = [User(sub=name, claims=claims) for name, claims in PEOPLE.items()]
    life = timedelta(hours=1)
    with run_server_in_thread(user_claims=people, access_token_max_age=life) as server:
        yield f"http://localhost:{server.server_port}"


async def test_somebody_logs_in_at_the_provider_and_sees_the_page_that_was_asked_for(
    told: ToldRun, issuer: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with site(told, issuer) as client:
        url = await begin(client, "/weights?x=1")
        query = {name: values[0] for name, values in parse_qs(urlsplit(url).query).items()}
        assert (query["response_type"], query["code_challenge_method"], query["client_id"]) == ("code", "S256", CLIENT)
        answer = await client.get(await approve(client, url, "rob"))
        assert answer.status_code == 200, answer.text
        assert 'content="0;url=/weights?x=1"' in answer.text
        said = next(each for each in answer.headers.get_list("set-cookie") if not each.startswith("turnlog-x"))
        assert all(word in said for word in ("HttpOnly", "SameSite=strict", "Path=/"))
        assert re.search(r"Max-Age=3[56]\d\d;", said), "as long as the id token"
        page = await client.get("/weights")
        assert page.status_code == 503, "NoIndex, which only a reader is told"
        assert "rob@example.org (rob), reader" in page.text
        assert (await client.get("/audit")).status_code == 403
        token = re.search(r'name="form_token" value="([0-9a-f]+)"', page.text)
        assert token is not None
        origin = {"origin": str(client.base_url).rstrip("/")}
        left = await client.post("/logout", data={"form_token": token[1]}, headers=origin)
        assert f'href="{issuer}' in left.text
        assert "id_token_hint" not in left.text, "no token in an address"
        assert (await client.get("/weights")).status_code == 303
    assert not re.search(r"eyJ[\w-]+\.", caplog.text), "no token in a log line"
    assert SECRET not in caplog.text


@pytest.mark.parametrize(("subject", "statuses"), [("ann", (200, 404)), ("oli", (403, 403)), ("rob", (403, 403))])
async def test_the_role_of_the_claims_is_that_of_the_login(
    told: ToldRun, fake: FakeOidcProvider, subject: str, statuses: tuple[int, int]
) -> None:
    async with site(told, fake.issuer) as client:
        await log_in(client, subject)
        found = [(await client.get(path)).status_code for path in ("/audit", "/sessions/x/export/y")]
        assert tuple(found) == statuses


async def test_somebody_without_a_role_is_told_so_and_recorded(tmp_path: Path, fake: FakeOidcProvider) -> None:
    told = ToldRun(tmp_path)
    async with site(told, fake.issuer, audit=True) as client:
        answer = await log_in(client, "eve")
        assert answer.status_code == 403
        assert "ann@example.org (eve) is logged in, but no rule of [access] roles gives a role" in answer.text
        assert not cookie_of(client)
        await log_in(client, "rob")
        header = {"authorization": f"Bearer {fake.token('eve')}"}
        for _ in range(2):
            assert (await client.get("/sessions/s", headers=header)).status_code == 403
    found = [each for each in await told.run.read(topics.AUDIT) if isinstance(each, AccessAudited)]
    assert [(each.subject, each.login, each.role, each.action, each.allowed) for each in found] == [
        ("eve", "oidc", "", "login", False), ("rob", "oidc", "reader", "login", True),
        ("eve", "oidc", "", "look", False),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "fault", ["nonce", "audience", "azp", "expired", "early", "none", "hmac", "unsigned_by_us", "no_sub", "logout"]
)
async def test_a_bad_id_token_is_no_login(told: ToldRun, fake: FakeOidcProvider, fault: str) -> None:
    async with site(told, fake.issuer) as client:
        fake.faults.add(fault)
        answer = await log_in(client, "ann")
        assert (answer.status_code, cookie_of(client)) == (401, "")
        fake.faults.clear()
        assert (await log_in(client, "ann")).status_code == 200


async def test_keys_may_change_between_two_logins(told: ToldRun, fake: FakeOidcProvider) -> None:
    async with site(told, fake.issuer) as client:
        fake.rotate()
        assert (await log_in(client, "ann")).status_code == 200


async def test_a_provider_that_is_down_is_named_and_links_still_log_in(told: ToldRun, fake: FakeOidcProvider) -> None:
    async with site(told, fake.issuer) as client:
        back = await approve(client, await begin(client), "ann")
        fake.faults.add("down")
        answer = await client.get(back)
        assert (answer.status_code, "ProviderUnavailable" in answer.text) == (503, True)
        assert not cookie_of(client)
    async with site(told, fake.issuer) as client:
        answer = await client.get("/login/provider")
        assert (answer.status_code, fake.issuer in answer.text) == (503, True)
        assert (await client.get("/login")).status_code == 200


async def test_logins_of_several_tabs_end_in_any_order_and_at_another_dashboard_of_the_run(
    told: ToldRun, fake: FakeOidcProvider
) -> None:
    async with site(told, fake.issuer) as client:
        backs = [await approve(client, await begin(client, f"/weights?x={number}"), "rob") for number in range(3)]
        pages = [(await client.get(back)).text for back in backs[1:]]
        assert [f"url=/weights?x={number}" in page for number, page in enumerate(pages, 1)] == [True, True]
        kept = dict(client.cookies)
    async with site(told, fake.issuer) as later:
        later.cookies.update(kept)
        assert "url=/weights?x=0" in (await later.get(backs[0])).text, "the dashboard was started again meanwhile"


async def test_a_return_counts_once_in_the_browser_that_began_it_and_with_its_own_state(
    told: ToldRun, fake: FakeOidcProvider
) -> None:
    async with site(told, fake.issuer) as client, direct(base_url=client.base_url, headers=HTML) as another:
        back = await approve(client, await begin(client), "ann")
        stolen = await another.get(back)
        assert (stolen.status_code, cookie_of(another)) == (401, ""), "another browser"
        assert (await client.get(back)).status_code == 200, "and that has used up nothing"
        assert (await client.get(back)).status_code == 401, "replayed"
        own = urlsplit(await approve(client, await begin(client), "rob"))
        assert (await client.get(f"{own.path}?code=x&state=y")).status_code == 401
        assert (await client.get(own.path)).status_code == 401
        state = parse_qs(own.query)["state"][0]
        answer = await client.get(f"{own.path}?code=of-another&state={state}")
        assert (answer.status_code, "invalid_grant" in answer.text) == (401, True), "a code of another login"
        refused = await client.post(await begin(client), data={})
        answer = await client.get(refused.headers["location"])
        assert (answer.status_code, "access_denied" in answer.text) == (401, True)


@pytest.mark.parametrize(
    "text",
    ["", "https://evil.example/", "//evil.example", "/\\evil.example", "\\/evil", "/a\\b", "/x\ny", "/é",
     "/login/provider", "javascript:alert(1)", "x", "/" + "x" * 3000],
)  # fmt: skip
async def test_a_login_leads_to_a_page_of_this_dashboard_alone(text: str) -> None:
    assert own_page(text) == "/"
    assert own_page("/sessions?reward=1&sort=a") == "/sessions?reward=1&sort=a"


async def test_an_address_of_another_site_is_not_followed_after_a_login(told: ToldRun, fake: FakeOidcProvider) -> None:
    async with site(told, fake.issuer) as client:
        answer = await log_in(client, "ann", "/login/provider?next=" + quote("//evil.example/x", safe=""))
        assert ("evil.example" in answer.text, 'url=/"' in answer.text) == (False, True)
        answer = await log_in(client, "ann", "/login/provider?next=" + quote('/x?"><script>alert(1)</script>', safe=""))
        assert "<script" not in answer.text


async def test_a_login_ends_with_the_id_token_unless_settings_say_otherwise(
    told: ToldRun, fake: FakeOidcProvider
) -> None:
    fake.lasts_s = -30  # within the tolerance for clocks
    async with site(told, fake.issuer) as client:
        answer = await log_in(client, "ann")
        assert "Max-Age=1;" in answer.headers["set-cookie"]
    async with site(told, fake.issuer, login_s=7200.0) as client:
        answer = await log_in(client, "ann")
        assert "Max-Age=7200;" in answer.headers["set-cookie"]


async def test_behind_a_proxy_the_provider_returns_to_the_address_of_the_settings(
    told: ToldRun, fake: FakeOidcProvider
) -> None:
    async with site(told, fake.issuer, own={"url": "https://runs.example.org"}) as client:
        answer = await client.get("/login/provider", headers={"host": "runs.example.org"})
        assert parse_qs(urlsplit(answer.headers["location"]).query)["redirect_uri"] == [
            "https://runs.example.org/login/callback"
        ]
        assert "Secure" in answer.headers["set-cookie"]


async def test_a_page_that_a_script_asks_for_is_refused_and_not_led_to_the_provider(
    told: ToldRun, fake: FakeOidcProvider
) -> None:
    async with site(told, fake.issuer) as client:
        for headers in ({"accept": "application/json"}, {"sec-fetch-mode": "cors"}):
            assert (await client.get("/sessions/x/tokens", headers=headers)).status_code == 401
        page = (await client.get("/login")).text
        assert f"Log in at {fake.issuer}" in page
        assert (await client.get("/static/dashboard.css")).status_code == 200


async def test_a_person_sends_a_token_of_the_provider_instead_of_a_cookie(
    told: ToldRun, fake: FakeOidcProvider
) -> None:
    async with site(told, fake.issuer) as client:
        statuses = {}
        for name in ("ann", "rob", "eve"):
            header = {"authorization": f"Bearer {fake.token(name)}"}
            statuses[name] = (await client.get("/audit", headers=header)).status_code
        assert statuses == {"ann": 200, "rob": 403, "eve": 403}
